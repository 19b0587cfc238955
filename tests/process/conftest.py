"""Pipelines of echo stages and the checks that they leave nothing behind."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.launcher import EchoLauncher, assert_nothing_left, processes_of, shared_memory_of
from tests.unit.builders import chain


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.process)


def end_all(folder: Path) -> None:
    """Only processes of this folder: a failed test must not leave any to the next."""
    for pid in processes_of(folder):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def shared_launcher() -> Iterator[EchoLauncher]:
    """One pipeline for all tests that do not break it."""
    data = chain()
    for stage in data["stages"]:
        stage["engine"] = {"step_seconds": 0.002, "row_width": 8}
    data["coordinator"] = {"heartbeat_interval": 0.1}
    data["limits"] = {"body_bytes": 100_000, "buffer_bytes": 1_000_000}
    with tempfile.TemporaryDirectory(prefix="ot-", dir="/tmp") as name:
        folder = Path(name)
        try:
            launcher = EchoLauncher(folder, data).wait_ready()
            yield launcher
            shared = shared_memory_of(processes_of(folder))
            assert launcher.end() == 0
            assert_nothing_left(folder, 2.0, shared)
            assert not [entry for entry in folder.iterdir() if entry.is_dir()], "the run directory"
        finally:
            end_all(folder)


@pytest.fixture
def echo(shared_launcher: EchoLauncher) -> Iterator[EchoLauncher]:
    """The shared pipeline; idle again after each test."""
    yield shared_launcher
    shared_launcher.wait_idle()
    assert all(stage.state == "ready" for stage in shared_launcher.describe().stages)


@pytest.fixture
def launch(short_path: Path) -> Iterator[Callable[..., EchoLauncher]]:
    """Starts launchers of a test's own; at the end nothing of them may be left."""
    launchers: list[EchoLauncher] = []
    shared: set[str] = set()

    def start(data: Any, *arguments: str, **options: Any) -> EchoLauncher:
        launchers.append(EchoLauncher(options.pop("folder", short_path), data, *arguments, **options))
        return launchers[-1]

    try:
        yield start
        shared |= shared_memory_of(processes_of(short_path))
        for launcher in launchers:
            if launcher.process.poll() is None:
                launcher.end()
        assert_nothing_left(short_path, 6.0, shared)
    finally:
        end_all(short_path)
        for launcher in launchers:
            launcher.process.wait()
