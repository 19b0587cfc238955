"""What a killed stage leaves is removed without a word, also when the launcher ends by Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.waiting import until

ENGINE = """
import multiprocessing

from omni_actors.stage.echo import EchoEngine


class LockingEngine(EchoEngine):
    def __init__(self, pipeline, stage):
        super().__init__(stage)
        self.lock = multiprocessing.get_context("spawn").Lock()
"""


@pytest.mark.nightly
def test_nothing_is_said_of_semaphores_that_a_killed_stage_held(
    launch: Callable[..., EchoLauncher], short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (short_path / "path").mkdir()
    (short_path / "path" / "locking_engine.py").write_text(ENGINE)
    monkeypatch.setenv("OMNI_ACTORS_ALLOW_IMPORTS", "locking_engine")
    data = chain()
    data["stages"][2] |= {"kind": "custom", "engine_class": "locking_engine.LockingEngine"}
    launcher = launch(data, path=str(short_path / "path")).wait_ready()
    before = launcher.pid_of("talker")
    psutil.Process(before).kill()
    until(lambda: "starting talker/0 again" in launcher.output, 10, "a restart")
    until(lambda: launcher.describe().healthy and launcher.pid_of("talker") != before, 20, "a new talker")
    assert launcher.end(signal.SIGINT) == 0
    assert "resource_tracker" not in launcher.output
    assert "Traceback" not in launcher.output
