"""The run directory of a running pipeline loses files; shared memory of stages that die is removed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_actors.client import OmniClient
from tests.support.builders import chain
from tests.support.segments import made, written
from tests.support.waiting import until


def test_removed_sockets_and_logs_come_back_and_a_removed_folder_ends_the_pipeline(launch, short_path):
    run = short_path / "run"
    launcher = launch(chain() | {"coordinator": {"heartbeat_interval": 0.1}}, "--run-dir", str(run)).wait_ready()
    with OmniClient(launcher.endpoint) as connected:
        assert connected.generate("before").text == "before"
        sockets = [entry for entry in run.iterdir() if entry.is_socket()]
        assert {"client", "control", "results"} < {entry.name for entry in sockets}
        for entry in sockets:
            entry.unlink()
        until(lambda: all(entry.is_socket() for entry in sockets), 5, "sockets")
        with OmniClient(launcher.endpoint) as new:
            assert new.generate("new").text == "new"
        log = run / "logs" / "talker-0.log"
        log.unlink()
        next(entry for entry in sockets if entry.name.startswith("talker-0-")).unlink()
        until(lambda: log.exists() and "was removed; bound it again" in log.read_text(), 5, "a log")
        assert connected.generate("connected").text == "connected"
        shutil.rmtree(run)
        assert launcher.wait_end() == 1
    assert f"error (startup_error): The run directory {run} was removed while the pipeline ran." in launcher.output
    assert "Traceback" not in launcher.output
    assert not run.exists()


@pytest.mark.nightly
def test_starts_that_fail_leave_nothing(launch, short_path):
    """The fixture looks for processes, sockets and shared memory."""
    junk = str(short_path / "junk.pem")
    Path(junk).write_text("junk")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        failing = [  # arguments, exit code, the words that name what is wrong
            (["--http", "127.0.0.1:0", "--http-certificate", junk, "--http-key", junk], 2, "junk.pem"),
            (["--http", address], 2, address),
            (["--metrics", address], 2, address),
            (["--listen", f"tcp://{address}"], 1, address),
        ]
        for arguments, code, words in failing:
            launcher = launch(chain(), "--run-dir", str(short_path / "run"), *arguments)
            assert launcher.wait_end(20) == code, launcher.output
            assert words in launcher.output
            assert "Traceback" not in launcher.output
            assert {entry.name for entry in (short_path / "run").glob("*")} <= {"logs"}


@pytest.fixture
def launcher(launch, short_path, monkeypatch):
    """A pipeline whose talker, spread over two GPUs, makes two segments and a temporary file and removes none."""
    monkeypatch.setenv("OMNI_ACTORS_ALLOW_IMPORTS", "tests.support")
    data: dict[str, Any] = chain()
    data["stages"][2] |= {"kind": "custom", "engine_class": "tests.support.segments.SegmentStage"}
    data["stages"][2]["engine"] = {"tensor_parallel_size": 2}
    return launch(data, "--run-dir", str(short_path / "run")).wait_ready()


@pytest.fixture
def log(short_path):
    return short_path / "run" / "logs" / "talker-0.log"


def left(lives: list[list[str]]) -> list[list[str]]:
    return [[path for path in life if os.path.exists(path)] for life in lives]


def is_listed(folder: Path, paths: list[str]) -> bool:
    file = folder / "run" / "segments"
    return file.exists() and all(Path(path).name in file.read_text() for path in paths)


def test_a_killed_stage_and_an_ended_pipeline_leave_none(launcher, short_path, log):
    (first,) = made(log)
    assert left([first]) == [first]
    until(lambda: is_listed(short_path, first), 5, "the launcher has seen them")
    psutil.Process(launcher.pid_of("talker")).kill()
    until(lambda: len(made(log)) == 2, 10, "restart")
    until(lambda: left([first]) == [[]], 5, "those of the first life are gone")
    second = made(log)[1]
    assert left(written(log))[0] == []
    assert left(written(log))[1] == written(log)[1]
    assert left([second]) == [second]
    until(lambda: is_listed(short_path, second), 5, "the launcher has seen them")
    assert launcher.end() == 0
    assert left([first, second]) == [[], []]
    assert left(written(log)) == [[], []]


@pytest.mark.nightly
def test_a_killed_launcher_leaves_none(launcher, short_path, log):
    until(lambda: is_listed(short_path, made(log)[0]), 5, "the launcher has seen them")
    launcher.end(signal.SIGKILL)
    until(lambda: left(made(log)) == [[]], 10, "they are gone")
    until(lambda: left(written(log)) == [[]], 10, "the temporary file is gone")
