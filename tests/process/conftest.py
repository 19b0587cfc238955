"""Pipelines of echo stages and the checks that they leave nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.processes import assert_nothing_left, end_all, processes_of, shared_memory_of


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
