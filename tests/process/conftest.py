"""Pipelines of echo stages and the checks that they leave nothing behind."""

from __future__ import annotations

import pytest

from tests.support.builders import chain
from tests.support.launcher import launched


@pytest.fixture(scope="session")
def shared_launcher():
    """One pipeline for all tests that do not break it."""
    data = chain()
    for stage in data["stages"]:
        stage["engine"] = {"step_seconds": 0.002, "row_width": 8}
    data["coordinator"] = {"heartbeat_interval": 0.1}
    data["limits"] = {"body_bytes": 100_000, "buffer_bytes": 1_000_000}
    with launched(data) as launcher:
        yield launcher


@pytest.fixture
def echo(shared_launcher):
    yield shared_launcher
    shared_launcher.wait_idle()
    assert all(stage.state == "ready" for stage in shared_launcher.describe().stages)
