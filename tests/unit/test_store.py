"""What the processes of an HTTP server share, and the database of voices."""

import contextlib
import multiprocessing
import os
import sqlite3
import time
from pathlib import Path

import numpy
import pytest

from omni_actors.errors import ConfigError
from omni_actors.http_server import store as store_module
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.settings import ServerSettings, check_listening
from omni_actors.http_server.state import Voice, VoiceStore
from omni_actors.http_server.store import Journal, Journals, KeptResponse, Store, UploadedFile, secret_of
from tests.support.waiting import until


def files(folder: Path) -> Store[UploadedFile]:
    return Store(str(folder), "files", UploadedFile, 100, 1 << 20, 60.0)


def uploaded(number: int) -> UploadedFile:
    return UploadedFile(f"file-{number}", "a", "user_data", 3, 0, 0)


def write_files(folder: Path) -> None:
    """Keep files until killed."""
    store = files(folder)
    for number in range(10**9):
        store.add(f"file-{number}", uploaded(number), 3, b"abc" * 1000)


def test_a_process_that_dies_while_it_writes_leaves_what_others_can_read_and_go_on_with(tmp_path: Path) -> None:
    store = files(tmp_path)
    writer = multiprocessing.get_context("spawn").Process(target=write_files, args=(tmp_path,))
    writer.start()
    until(lambda: store.find("file-9"), what="the tenth file")
    writer.kill()
    writer.join()
    kept = store.values()
    assert 0 < len(kept) <= 100
    assert all(store.data(one.id) == b"abc" * 1000 for one in kept)
    assert store.add("mine", uploaded(-1), 3, b"mine")
    assert files(tmp_path).data("mine") == b"mine"


def test_a_conversation_comes_back_with_its_media(tmp_path: Path) -> None:
    frames = numpy.arange(24, dtype=numpy.uint8).reshape(2, 2, 2, 3)
    parts = [{"type": "audio", "audio": b"wav"}, {"type": "video", "video": (frames, 2.0, b"track")}]
    store = Store(str(tmp_path), "responses", KeptResponse, 10, 1000, 60.0)
    store.add("resp_1", KeptResponse(2, [{"role": "user", "content": parts}], 32), 34)
    other = Store(str(tmp_path), "responses", KeptResponse, 10, 1000, 60.0)
    found = other.find("resp_1")
    audio, video = found.conversation[0]["content"]
    assert audio == {"type": "audio", "audio": b"wav"}
    numpy.testing.assert_array_equal(video["video"][0], frames)
    assert video["video"][1:] == [2.0, b"track"]


def test_what_cannot_be_written_is_not_kept_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.01)
    store = files(tmp_path)
    store.add("before", uploaded(0), 3, b"abc")
    with contextlib.closing(sqlite3.connect(tmp_path / "files.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store.add("lost", uploaded(1), 3, b"abc") == 0
        assert "cannot keep lost: database is locked" in caplog.text
        assert store.data("before") == b"abc", "reading goes on"
    assert store.add("after", uploaded(2), 3, b"abc") > 0


def test_the_processes_of_a_server_have_one_secret(tmp_path: Path) -> None:
    assert secret_of(str(tmp_path)) == secret_of(str(tmp_path))
    assert secret_of(None) != secret_of(None)
    assert os.listdir(tmp_path) == ["secret"]


def age(folder: Path, key: str, seconds: float) -> None:
    os.utime(folder / key, (time.time() - seconds,) * 2)


async def followed(journal: Journal) -> list[bytes]:
    return [part async for part in journal.follow()]


async def test_who_follows_a_journal_that_says_nothing_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOST_SECONDS", 0.1)
    journals = Journals(str(tmp_path), "streams")
    writing, reading = journals.begin("resp_1", b"head\n\n"), journals.find("resp_1")
    with pytest.raises(HttpError, match="send the request again") as caught:
        await followed(reading)
    assert caught.value.status == 503
    reading.close()
    writing.close()


def test_a_journal_in_the_place_of_another_ends_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journals = Journals(None, "sessions")
    first = journals.begin("sess_1", b"one")
    second = journals.begin("sess_1", b"two")
    assert first.is_replaced
    first.remove()
    second.append(b"more")
    third = journals.find("sess_1")
    assert third is not None, "a journal removes itself only"
    assert third.read() == b"twomore"
    second.remove()
    assert not second.is_replaced, "no other one has its place"
    assert journals.find("sess_1") is None
    assert journals.find("../sess_1") is None
    large = journals.begin("sess_2", b"one")
    large.append(bytes(33 << 20))
    assert "sess_2 cannot be resumed: [Errno 27] it has more than" in caplog.text
    assert journals.find("sess_2") is None
    for journal in (first, second, third, large):
        journal.close()
    journals.close()


def test_journals_are_removed_a_minute_after_their_last_writer_and_the_oldest_beyond_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journals, folder = Journals(str(tmp_path), "streams"), tmp_path / "streams"
    opened = {key: journals.begin(key, bytes(1000)) for key in ("resp_1", "resp_2", "resp_3", "resp_4")}
    for key, journal in opened.items():
        if journal is not None and key != "resp_1":
            journal.close()
    for key, seconds in {"resp_1": 1000, "resp_2": 80, "resp_3": 50, "resp_4": 30}.items():
        age(folder, key, seconds)
    journals.sweep()
    assert sorted(os.listdir(folder)) == ["resp_1", "resp_3", "resp_4"], "the first one is still written"
    monkeypatch.setattr(store_module, "MAX_JOURNALS_BYTES", 2000)
    journals.sweep()
    assert sorted(os.listdir(folder)) == ["resp_1", "resp_4"]
    last = opened["resp_1"]
    last.close()
    journals.sweep()
    assert "resp_1" in os.listdir(folder), "its client has a minute from now on"


def test_what_has_been_removed_is_not_kept_again(tmp_path: Path) -> None:
    store = files(tmp_path)
    assert store.add("file-1", uploaded(1), 3, there=True) == 0
    store.add("file-1", uploaded(1), 3)
    assert store.add("file-1", uploaded(1), 3, b"abc", there=True) > 0
    assert store.data("file-1") == b"abc"
    store.remove("file-1")
    assert store.add("file-1", uploaded(1), 3, there=True) == 0
    assert store.find("file-1") is None


def test_what_is_kept_is_bounded_in_bytes_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Store[str] = Store(None, "texts", str, 3, 100, 60)
    kept.add("large", "too large", 101)
    assert kept.values() == []
    kept.add("a", "first", 60)
    kept.add("b", "second", 60)
    assert kept.values() == ["second"], "the oldest goes first"
    for number in range(4):
        kept.add(f"{number}", f"{number}", 1)
    assert kept.values() == ["1", "2", "3"]
    assert [kept.remove("2"), kept.remove("2"), kept.find("2")] == [True, False, None]
    usual, kept_until = time.monotonic, time.time
    monkeypatch.setattr(time, "time", lambda: kept_until() + 3600)
    assert kept.find("3") == "3", "a jump of the clock changes nothing"
    monkeypatch.setattr(time, "monotonic", lambda: usual() + 61)
    assert kept.find("3") is None
    kept.add("new", "new", 100)
    assert kept.values() == ["new"], "what has gone no longer counts"


SAMPLES = numpy.linspace(-1, 1, 100, dtype=numpy.float32)


def voice(name: str) -> Voice:
    return Voice(name, created=1, rate=16_000, samples=len(SAMPLES))


def test_servers_with_one_folder_have_the_same_voices_and_nobody_else_reads_them(tmp_path: Path) -> None:
    one, other = (VoiceStore(str(tmp_path / "voices"), 10) for _ in range(2))
    one.add(voice("Mara"), SAMPLES)
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
