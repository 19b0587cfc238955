"""The launchers of launch/ with commands of a cluster (ssh, srun, scontrol) that stay on this machine."""

from __future__ import annotations

import contextlib
import signal

import psutil
import pytest

from tests.support.scripts import Started


@pytest.fixture
def start(short_path):
    """Starts launchers with `ssh`, `srun` and `scontrol` of this machine; nothing of them may be left at the end."""
    started: list[Started] = []

    def begin(script: str, *arguments: str, **environment: str) -> Started:
        started.append(Started(short_path, script, *arguments, **environment))
        return started[-1]

    try:
        yield begin
        for launcher in started:
            if launcher.process.poll() is None:
                launcher.end(signal.SIGTERM)
            launcher.assert_nothing_left()
    finally:
        for launcher in started:
            for pid in launcher.members():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    psutil.Process(pid).kill()
            launcher.process.wait()
