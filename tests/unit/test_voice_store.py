"""The files of voices, in a folder that is not only the server's, or that holds what is no voice."""

from __future__ import annotations

import os
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


def test_a_voice_follows_no_link_that_lies_where_it_is_written(tmp_path: Path) -> None:
    """Whoever could once write to the folder may have left links under every name that a draft could have."""
    mara, victim = voice("Mara"), tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "voices"
    folder.mkdir(mode=0o700)
    for suffix in (".voice", f".{os.getpid()}"):
        (folder / f"{mara.id}{suffix}").symlink_to(victim)
    store = VoiceStore(str(folder), 10)
    store.add(mara, SAMPLES)
    assert victim.read_text() == "precious"
    assert store.all() == [mara]
    assert numpy.array_equal(store.samples(mara), SAMPLES)
    (path,) = folder.glob("*.voice")
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(list(folder.iterdir())) == 2, "the voice, and one of the links: no draft is left"


def test_what_is_no_regular_file_is_no_voice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe without a writer would be waited for, for ever; a link leads elsewhere."""
    store, mara, ben = VoiceStore(str(tmp_path), 10), voice("Mara"), voice("Ben")
    store.add(mara, SAMPLES)
    os.mkfifo(tmp_path / f"{ben.id}.voice")
    (tmp_path / "voice_link.voice").symlink_to(tmp_path / f"{mara.id}.voice")
    assert store.all() == [mara]
    assert store.find("Ben") is None
    assert "it is not a regular file" in caplog.text
    store.add(ben, SAMPLES)
    assert store.all() == [ben, mara]


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
