"""The database of voices, in a folder that is not only the server's."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from omni_actors.errors import ConfigError
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.settings import ServerSettings, check_listening
from omni_actors.http_server.state import Voice, VoiceStore

SAMPLES = numpy.linspace(-1, 1, 100, dtype=numpy.float32)


def voice(name: str) -> Voice:
    return Voice(name, created=1, rate=16_000, samples=len(SAMPLES))


def test_servers_with_one_folder_have_the_same_voices_and_nobody_else_reads_them(tmp_path: Path) -> None:
    one, other = (VoiceStore(str(tmp_path / "voices"), 10) for _ in range(2))
    assert other.all() == []
    one.add(voice("Mara"), SAMPLES)
    assert other.all() == [voice("Mara")]
    assert numpy.array_equal(other.samples(voice("Mara")), SAMPLES)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "voices").iterdir()} == {0o600}
    assert other.remove("mara") == voice("Mara")
    with pytest.raises(HttpError, match="There is no voice 'Mara'"):
        one.samples(voice("Mara"))


def test_a_voice_follows_no_link_that_lies_where_it_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever could once write to the folder may have left one."""
    (tmp_path / "voices.db").symlink_to(tmp_path / "victim")
    with pytest.raises(HttpError, match="cannot write the voice") as refused:
        VoiceStore(str(tmp_path), 10).add(voice("Mara"), SAMPLES)
    assert refused.value.status == 507
    assert "Too many levels of symbolic links" in caplog.text
    assert not (tmp_path / "victim").exists()


def test_a_damaged_database_costs_its_voices_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "voices.db").write_bytes(bytes(range(256)) * 32)
    store = VoiceStore(str(tmp_path), 10)
    assert store.all() == []
    with pytest.raises(HttpError, match="cannot write the voice"):
        store.add(voice("Mara"), SAMPLES)
    assert f"move {tmp_path / 'voices.db'} away: file is not a database" in caplog.text
    (tmp_path / "voices.db").unlink()
    store.add(voice("Mara"), SAMPLES)
    assert store.all() == [voice("Mara")]


def test_a_folder_of_others_keeps_no_voices(tmp_path: Path) -> None:
    """Neither at the start, nor if it was opened to others later."""
    folder = tmp_path / "voices"
    store = VoiceStore(str(folder), 10)
    store.add(voice("Mara"), SAMPLES)
    folder.chmod(0o777)
    settings = ServerSettings(endpoint="ipc:///nowhere", voices_dir=str(folder))
    with pytest.raises(ConfigError, match=r"The folder http.voices_dir .* can be written to by others"):
        check_listening("127.0.0.1:0", settings, None, insecure=False)
    with pytest.raises(HttpError, match="must give it another folder") as refused:
        store.add(voice("Ben"), SAMPLES)
    assert refused.value.status == 500
    folder.chmod(0o755)
    check_listening("127.0.0.1:0", settings, None, insecure=False)
    store.add(voice("Ben"), SAMPLES)
