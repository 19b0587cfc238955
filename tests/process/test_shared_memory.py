"""Named shared memory and temporary files of stages that die, of whatever engine, are removed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.segments import made, written
from tests.support.waiting import until

Launch = Callable[..., EchoLauncher]


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
    """Whether the launcher knows these segments."""
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
