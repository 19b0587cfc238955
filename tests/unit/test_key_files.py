"""Key files: who can read them, what makes them invalid, and whose keys they allow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omni_actors.cli.keys import main
from omni_actors.errors import ConfigError
from omni_actors.transport.curve import REVOKED_SECONDS, KeyOwner, KeyOwners, Keys, load_keys, make_client, make_cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's keys with the clients alice and bob."""
    made = tmp_path_factory.mktemp("keys") / "pipeline"
    assert main([str(made), "--client", "alice", "--client", "bob"]) == 0
    return made


def test_files_are_closed_to_others(folder: Path) -> None:
    modes = {path.relative_to(folder): path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}
    assert {mode for path, mode in modes.items() if (folder / path).is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if (folder / path).is_file()} == {0o600}
    assert {str(path) for path in modes} >= {"allowed/alice.key", "clients/alice/client.key_secret", "cluster.key"}


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main([str(folder)]) == 2
    assert "already" in capsys.readouterr().err
    assert main([str(folder), "--client", "alice"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["", "../x", "Alice", "a/b", ".x", "x" * 65, "cluster"])
def test_names_of_clients_are_plain(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a valid name"):
        make_client(folder, name)


def test_a_client_cannot_allow_clients(folder: Path) -> None:
    with pytest.raises(ConfigError, match="client's folder"):
        make_client(folder / "clients" / "alice", "mallory")


@pytest.mark.parametrize("name", [".", "cluster.key_secret"])
@pytest.mark.parametrize("mode", [0o040, 0o004, 0o020])
def test_what_others_can_reach_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    make_cluster(tmp_path / "k")
    path = tmp_path / "k" / name
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(ConfigError, match=r"Others may use .* chmod"):
        load_keys(tmp_path / "k")
    with pytest.raises(ConfigError, match="Others may use"):
        make_client(tmp_path / "k", "alice")


def test_making_keys_refuses_an_open_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="Others may use the folder"):
        make_cluster(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_keys_of_another_user_are_refused(tmp_path: Path) -> None:
    make_cluster(tmp_path / "k")
    os.chown(tmp_path / "k" / "cluster.key_secret", 12345, -1)
    with pytest.raises(ConfigError, match="another user"):
        load_keys(tmp_path / "k")


def test_broken_folders_are_named_without_their_content(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file .*omni-actors keys DIR"):
        load_keys(tmp_path / "missing")
    make_cluster(tmp_path / "k")
    secret = tmp_path / "k" / "cluster.key_secret"
    good = secret.read_text()
    secret.write_text((folder / "cluster.key_secret").read_text())
    with pytest.raises(ConfigError, match="does not hold the secret"):
        load_keys(tmp_path / "k")
    short = 'metadata\ncurve\n    public-key = "tooshort"\n'
    pair = f'public-key = "{load_keys(folder).public.decode()}"'
    secret.write_text(good.replace(good[good.index("public-key") : good.index("secret-key")].strip(), pair))
    (tmp_path / "k" / "cluster.key").write_bytes((folder / "cluster.key").read_bytes())
    with pytest.raises(ConfigError, match="does not hold the secret"):
        load_keys(tmp_path / "k")
    for broken in ("", short, good.replace('public-key = "', 'public-key = "é')):
        secret.write_text(broken)
        with pytest.raises(ConfigError, match="holds no valid key") as caught:
            load_keys(tmp_path / "k")
        assert "tooshort" not in str(caught.value)
    secret.unlink()
    with pytest.raises(ConfigError, match="no secret key"):
        load_keys(tmp_path / "k")


def test_secrets_are_not_shown(folder: Path) -> None:
    keys = load_keys(folder)
    assert keys.secret.decode() not in f"{keys!r} {keys}"


def test_who_may_operate(tmp_path: Path) -> None:
    assert main([str(tmp_path / "k"), "--client", "alice", "--operator", "olga"]) == 0
    ours = load_keys(tmp_path / "k")
    handed = tmp_path / "k" / "clients"
    now = 0.0
    owners = KeyOwners(ours, lambda: now)

    def of(name: str) -> KeyOwner | None:
        keys = load_keys(handed / name)
        return owners.of(keys.public)

    assert owners.of(ours.public) == KeyOwner("cluster", may_operate=True)
    assert owners.of(b"") == KeyOwners(None).of(b"") == KeyOwner("", may_operate=True)
    assert of("alice") == KeyOwner("alice", may_operate=False)
    assert of("olga") == KeyOwner("olga", may_operate=True)
    assert owners.of(b"x" * 40) is None
    (tmp_path / "k" / "allowed" / "aaa.key").write_bytes(b"\xff\x00 public-key = nonsense")
    make_client(tmp_path / "k", "bob")
    assert of("bob") == KeyOwner("bob", may_operate=False), "at once, whatever is in the file of another"
    (tmp_path / "k" / "allowed" / "alice.key").unlink()
    assert of("alice") is not None, "the files are not read for every message"
    now += REVOKED_SECONDS
    assert of("alice") is None
    for taken in ("olga", "bob"):
        for operator in (False, True):
            with pytest.raises(ConfigError, match="exists already"):
                make_client(tmp_path / "k", taken, operator)


def test_the_files_are_read_once_a_second_for_a_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a locked-out client sends."""
    reads: list[int] = []
    read = KeyOwners.read

    def counted(owners: KeyOwners, keys: Keys) -> dict[bytes, KeyOwner]:
        reads.append(1)
        return read(owners, keys)

    monkeypatch.setattr(KeyOwners, "read", counted)
    owners = KeyOwners(load_keys(folder), lambda: 0.0)
    assert {owners.of(b"x" * 40) for _ in range(100)} == {None}
    assert len(reads) == 1
