"""Keys: which opens which socket, what a refused peer learns, and their files. Real sockets, one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from omni_actors.cli.keys import main
from omni_actors.errors import ConfigError, OmniError, Unauthorized
from omni_actors.host.addresses import is_loopback, stays_on_host, tcp_host
from omni_actors.protocol.fields import ReplicaId
from omni_actors.stage.inbound import Inbox, Stop
from omni_actors.transport import guard as handshake_module
from omni_actors.transport import sockets as sockets_module
from omni_actors.transport.curve import (
    EVERYONE,
    LOCAL,
    MEMBERS,
    REVOKED_SECONDS,
    KeyOwner,
    KeyOwners,
    Keys,
    ZapAuthenticator,
    load_keys,
    make_client,
    make_cluster,
)
from omni_actors.transport.guard import HandshakeMonitor
from omni_actors.transport.sockets import Sockets, drain, try_send
from tests.support import zmtp
from tests.support.stage import inbound_of
from tests.support.waiting import PATIENCE, until
from tests.support.zmtp import closed

REFUSED_SECONDS = 5.0  # within which a peer knows that it was refused
TCP = "tcp://127.0.0.1:0"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten a wait of two seconds. Its real length is tested by test_connections.py and tests/nodes."""
    monkeypatch.setattr(handshake_module, "HANG_UP_SECONDS", 0.4)


@pytest.fixture
def contexts() -> Iterator[list[Sockets]]:
    made: list[Sockets] = []
    yield made
    for sockets in made:
        sockets.context.destroy(linger=0)


class Coordinator:
    """The bound sockets of a coordinator: for clients, for the stages' control, and for results."""

    def __init__(self, contexts: list[Sockets], keys: Path | None) -> None:
        self.sockets = Sockets(keys=load_keys(keys))
        contexts.append(self.sockets)
        self.clients, self.client_endpoint = self.sockets.router(TCP, EVERYONE)
        self.control, self.control_endpoint = self.sockets.router(TCP)
        self.results, self.results_endpoint = self.sockets.pull(TCP)


def refusal_of(contexts: list[Sockets], keys: Path | None, endpoint: str, socket: zmq.Socket) -> OmniError | None:
    """Connect to `socket` at `endpoint` and send: `None` if the message arrives, else the reason of the refusal."""
    sockets = Sockets(keys=load_keys(keys))
    contexts.append(sockets)
    if socket.type == zmq.PULL:
        mine = sockets.context.socket(zmq.PUSH)
        handshake = HandshakeMonitor(mine, endpoint, sockets.keys)
        sockets.connect(mine, endpoint)
    else:
        mine, handshake = sockets.dealer(endpoint, os.urandom(16))
    sent = False

    def outcome() -> tuple[OmniError | None] | None:
        nonlocal sent
        sent = sent or try_send(mine, [b"hello"])
        if drain(socket):
            return (None,)
        refusal = handshake.take()
        return (refusal,) if refusal is not None else None

    try:
        return until(outcome, REFUSED_SECONDS, "a message or a refusal")[0]
    finally:
        handshake.close()
        mine.close(linger=0)


# -- who may connect --------------------------------------------------------------------------------------------------


MEMBER, CLIENT, OPERATOR, FORGED, OTHER, NONE = "pipeline", "client", "operator", "forged", "other pipeline", "none"
NOT_ALLOWED, HANGS_UP, ASKS = "does not allow this key", "hangs up", "asks for keys"


@pytest.fixture(scope="module")
def holders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    """Folders of keys by who holds them. A forged one is unknown, but its holder has the pipeline's public key."""
    made = tmp_path_factory.mktemp("holders")
    assert main([str(made / "pipeline"), "--client", "alice", "--operator", "olga"]) == 0
    for name in ("forged", "other"):
        make_cluster(made / name)
    clients = made / "pipeline" / "clients"
    forged = make_client(made / "forged", "mallory")
    (forged / "cluster.key").write_bytes((made / "pipeline" / "cluster.key").read_bytes())
    return {
        MEMBER: made / "pipeline",
        CLIENT: clients / "alice",
        OPERATOR: clients / "olga",
        FORGED: forged,
        OTHER: made / "other",
        NONE: None,
    }


@pytest.fixture(scope="module")
def folder(holders: dict[str, Path | None]) -> Path:
    folder = holders[MEMBER]
    assert folder is not None
    return folder


@pytest.mark.parametrize(
    ("holder", "on_clients", "on_others"),
    [
        (MEMBER, None, None),
        (CLIENT, None, NOT_ALLOWED),
        (OPERATOR, None, NOT_ALLOWED),
        (FORGED, NOT_ALLOWED, NOT_ALLOWED),
        (OTHER, HANGS_UP, HANGS_UP),
        (NONE, ASKS, ASKS),
    ],
)
def test_each_key_opens_its_own_endpoints(
    holders: dict[str, Path | None], contexts: list[Sockets], holder: str, on_clients: str | None, on_others: str | None
) -> None:
    """A client, also an operator, is no stage: it can neither report results, nor control, nor feed a stage."""
    coordinator = Coordinator(contexts, holders[MEMBER])
    inbox, inbox_endpoint = coordinator.sockets.pull(TCP)
    for endpoint, socket, wanted in (
        (coordinator.client_endpoint, coordinator.clients, on_clients),
        (coordinator.control_endpoint, coordinator.control, on_others),
        (coordinator.results_endpoint, coordinator.results, on_others),
        (inbox_endpoint, inbox, on_others),
    ):
        refusal = refusal_of(contexts, holders[holder], endpoint, socket)
        assert (refusal is None) == (wanted is None)
        assert refusal is None or isinstance(refusal, Unauthorized)
        assert (wanted or "") in str(refusal)
        assert wanted != HANGS_UP or str(holders[holder]) in str(refusal), "whose keys are wrong"


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b""])
def test_every_endpoint_speaks_one_mechanism(folder: Path, contexts: list[Sockets], mechanism: bytes) -> None:
    """And what comes instead of its handshake is never delivered."""
    coordinator = Coordinator(contexts, folder)
    hello = {b"NULL": b"\x05READY", b"PLAIN": b"\x05HELLO\x05alice\x06secret"}.get(mechanism, b"\x05HELLO" + bytes(194))
    for endpoint in (coordinator.client_endpoint, coordinator.control_endpoint, coordinator.results_endpoint):
        with zmtp.connect(endpoint) as stranger:
            stranger.sendall(zmtp.greeting(mechanism) + zmtp.command(hello) + zmtp.frame(b"let me in"))
            assert closed(stranger)
    assert not any(map(drain, (coordinator.clients, coordinator.control, coordinator.results)))


def test_messages_come_with_the_key_of_their_connection(
    folder: Path, short_path: Path, contexts: list[Sockets]
) -> None:
    """Whatever the peer calls itself. A connection over a socket file has no key."""
    coordinator = Coordinator(contexts, folder)
    local = coordinator.sockets.bind(coordinator.clients, f"ipc://{short_path}/s")
    alice = folder / "clients" / "alice"
    for keys, endpoint in ((alice, coordinator.client_endpoint), (folder, coordinator.client_endpoint), (None, local)):
        contexts.append(Sockets(keys=load_keys(keys)))
        mine, handshake = contexts[-1].dealer(endpoint, b"cluster")
        until(lambda mine=mine: try_send(mine, [b"one", b"two"]), what="a connection")
        until(lambda: coordinator.clients.getsockopt(zmq.EVENTS) & zmq.POLLIN, what="the message")
        given = load_keys(keys)
        key, descriptor, *frames = coordinator.sockets.receive_from_client(coordinator.clients)
        assert [key, *frames] == [given.public if given else b"", b"cluster", b"one", b"two"]
        assert os.readlink(f"/proc/self/fd/{int(descriptor)}").startswith("socket:")
        handshake.close()
        mine.close(linger=0)


def test_without_an_authenticator_every_peer_is_refused(
    folder: Path, contexts: list[Sockets], monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq's default would accept everyone."""

    class Absent:
        def __init__(self, *_: object) -> None:
            """Bind nothing, so that libzmq's questions find no answer."""

        def start(self) -> None:
            """Start nothing."""

    monkeypatch.setattr(sockets_module, "ZapAuthenticator", Absent)
    coordinator = Coordinator(contexts, folder)
    refusal = refusal_of(contexts, folder, coordinator.control_endpoint, coordinator.control)
    assert isinstance(refusal, Unauthorized)
    assert "hangs up" in str(refusal)


# -- where keys are needed --------------------------------------------------------------------------------------------


def test_without_keys_only_loopback_is_used_and_a_client_binds_nothing(
    holders: dict[str, Path | None], contexts: list[Sockets]
) -> None:
    contexts += [Sockets(), Sockets(keys=load_keys(holders[CLIENT]))]
    for endpoint in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://10.1.2.3:0"):
        for bind in (contexts[0].pull, contexts[0].router):
            with pytest.raises(ConfigError, match=r"omni-actors keys DIR"):
                bind(endpoint)
    with pytest.raises(ConfigError, match="require keys"):
        contexts[0].push("tcp://node1:5555")
    with pytest.raises(ConfigError, match="client's keys"):
        contexts[1].pull(TCP)


def test_hosts_of_endpoints() -> None:
    hosts = ("localhost", "127.9.9.9", "::1", "10.0.0.1", "example.com", "")
    assert [is_loopback(host) for host in hosts] == [True, True, True, False, False, False]
    assert tcp_host("tcp://[fe80::1]:5") == "fe80::1"
    assert tcp_host("tcp://127.0.0.1@evil:5") == "127.0.0.1@evil"
    assert not stays_on_host("tcp://127.0.0.1@evil:5")
    assert not stays_on_host("tcp://127.0.0.1;1.2.3.4:5")
    assert stays_on_host("ipc:///x")


# -- stages -----------------------------------------------------------------------------------------------------------


def test_a_stage_with_wrong_keys_ends_its_start(holders: dict[str, Path | None], contexts: list[Sockets]) -> None:
    coordinator = Coordinator(contexts, holders[MEMBER])
    for keys, said in ((holders[OTHER], HANGS_UP), (None, ASKS)):
        contexts.append(Sockets(keys=load_keys(keys)))
        inbox = Inbox()
        inbound = inbound_of(contexts[-1], ReplicaId("talker", 0, 1), coordinator.control_endpoint, TCP, inbox)
        inbound.start()
        stop = next(iter(inbox.take(REFUSED_SECONDS)), None)
        assert isinstance(stop, Stop)
        assert stop.failed
        assert said in stop.reason
        inbound.finish()
        inbound.join(5 * PATIENCE)
    assert not drain(coordinator.control)


def test_the_authenticator_refuses_malformed_questions(folder: Path, contexts: list[Sockets]) -> None:
    keys = load_keys(folder)
    contexts.append(Sockets(keys=keys))
    authenticator = ZapAuthenticator(contexts[0].context, keys)
    key = z85.decode(keys.cluster)
    good = [b"1.0", b"7", MEMBERS.encode(), b"1.2.3.4", b"", b"CURVE", key]
    assert authenticator.answer(good)[1:] == [b"7", b"200", b"OK", b"", b"\x08Omni-Key\x00\x00\x00\x28" + keys.cluster]
    for position, value in ((0, b"2.0"), (5, b"NULL"), (6, b"short"), (6, bytes(32))):
        assert authenticator.answer([*good[:position], value, *good[position + 1 :]])[2] == b"400"
    # A connection over a socket file needs no keys, and no other connection may claim to be one.
    local = [b"1.0", b"7", LOCAL.encode(), b"", b"", b"NULL"]
    assert authenticator.answer(local)[2] == b"200"
    assert authenticator.answer([*local[:2], EVERYONE.encode(), *local[3:]])[2] == b"400"
    for frames in ([], [b"1.0"], good[:6], [*good, b""]):
        assert authenticator.answer(frames)[2] == b"400"
    authenticator.start()


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


def test_names_of_clients_are_plain_and_a_client_cannot_allow_others(folder: Path) -> None:
    for name in ("", "../x", "Alice", "a/b", ".x", "x" * 65, "cluster"):
        with pytest.raises(ConfigError, match="not a valid name"):
            make_client(folder, name)
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
    (tmp_path / "new").mkdir(0o700)
    (tmp_path / "new").chmod(0o700 | mode)
    with pytest.raises(ConfigError, match="Others may use the folder"):
        make_cluster(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


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
