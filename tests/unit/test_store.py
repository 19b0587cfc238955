"""What the processes of an HTTP server share."""

import contextlib
import multiprocessing
import os
import sqlite3
from pathlib import Path

import numpy
import pytest

from omni_actors.http_server import store as store_module
from omni_actors.http_server.store import KeptResponse, Store, UploadedFile, secret_of
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
    for _ in range(5):
        writer = multiprocessing.get_context("spawn").Process(target=write_files, args=(tmp_path,))
        writer.start()
        until(lambda: store.find("file-9"), what="the tenth file")
        writer.kill()
        writer.join()
        kept = store.values()
        assert 0 < len(kept) <= 100
        assert all(store.data(one.id) == b"abc" * 1000 for one in kept)
        store.remove("file-9")
    assert store.add("mine", uploaded(-1), 3, b"mine")
    assert files(tmp_path).data("mine") == b"mine"


def test_a_conversation_comes_back_with_its_media(tmp_path: Path) -> None:
    frames = numpy.arange(24, dtype=numpy.uint8).reshape(2, 2, 2, 3)
    parts = [{"type": "audio", "audio": b"wav"}, {"type": "video", "video": (frames, 2.0, b"track")}]
    store = Store(str(tmp_path), "responses", KeptResponse, 10, 1000, 60.0)
    store.add("resp_1", KeptResponse(2, [{"role": "user", "content": parts}], 32), 34)
    other = Store(str(tmp_path), "responses", KeptResponse, 10, 1000, 60.0)
    found = other.find("resp_1")
    assert found is not None
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
