"""The end of a stage's process, with its real threads, sockets and shared memory."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_actors.protocol.codec import encode
from omni_actors.protocol.fields import Header
from omni_actors.protocol.messages import Shutdown, Welcome
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.process import StageProcess, build_engine
from omni_actors.stage.session import ReplicaSpec
from omni_actors.transport.sockets import Sockets
from tests.support.builders import pipeline
from tests.support.waiting import until


@pytest.fixture
def spec(short_path: Path) -> ReplicaSpec:
    return ReplicaSpec(
        pipeline_json=msgspec.json.encode(pipeline()),
        stage="thinker",
        replica=0,
        epoch=1,
        ordered=time.monotonic(),
        control_endpoint=f"ipc://{short_path}/control",
        inbox_endpoint=f"ipc://{short_path}/inbox",
        devices=(),
        threads=0,
        launcher_pid=os.getpid(),
        log_file=str(short_path / "log"),
        run_dir=str(short_path),
        run_dir_is_temporary=False,
    )


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A stage's process sets its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Coordinator:
    """Welcomes a stage and shuts it down at once."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._results = f"ipc://{spec.run_dir}/results"
        self.sockets = Sockets()
        self._control, _ = self.sockets.router(spec.control_endpoint)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        until(lambda: self._control.poll(0))
        name = self._control.recv_multipart()[0]
        for body in (Welcome(results=self._results), Shutdown(reason="the launcher stops")):
            self._control.send_multipart([name, *encode(Header(""), body)])

    def leave(self) -> None:
        """Close the connection once everything has been said."""
        self._thread.join()
        self._control.close()


def test_an_engine_that_ends_with_its_process_is_not_shut_down_before(
    spec: ReplicaSpec, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(EchoEngine):
        ends_with_process = True

    stage = msgspec.structs.replace(pipeline().stage("thinker"), engine={"fail_shutdown": "it was shut down"})
    monkeypatch.setattr("omni_actors.stage.process.build_engine", lambda *arguments: Ending(stage))
    process = StageProcess(spec)
    coordinator = Coordinator(spec)
    assert process.run() == 0
    coordinator.leave()
    coordinator.sockets.context.destroy(linger=0)
    assert "it was shut down" not in caplog.text


def test_a_coordinator_that_ends_takes_the_stage_along(
    spec: ReplicaSpec, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so and leaves while the engine loads: the stage sees both at once, and does not register again."""
    logging.getLogger("omni_actors").propagate = True
    caplog.set_level(logging.INFO, "omni_actors")

    def build_slowly(*arguments: Any) -> EchoEngine:
        coordinator.leave()
        time.sleep(0.2)
        return build_engine(*arguments)

    process = StageProcess(spec)
    monkeypatch.setattr("omni_actors.stage.process.build_engine", build_slowly)
    coordinator = Coordinator(spec)
    assert process.run() == 0
    coordinator.sockets.context.destroy(linger=0)
    assert "stopping: the launcher stops" in caplog.text
    assert "registering again" not in caplog.text
