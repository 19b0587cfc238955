"""The end of a stage's process, with its real threads, sockets and shared memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.process import ReplicaSpec, StageProcess
from tests.unit.builders import pipeline


def test_an_engine_that_fails_to_end_keeps_nothing_open(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = pipeline()
    spec = ReplicaSpec(
        pipeline_json=msgspec.json.encode(config),
        stage="thinker",
        replica=0,
        epoch=1,
        control_endpoint=f"ipc://{short_path}/control",
        inbox_endpoint=f"ipc://{short_path}/inbox",
        devices=(),
        threads=0,
        launcher_pid=os.getpid(),
        log_file=str(short_path / "log"),
        run_dir=str(short_path),
        run_dir_is_temporary=False,
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    stage = msgspec.structs.replace(config.stage("thinker"), engine={"fail_shutdown": "it does not want to end"})
    try:
        process = StageProcess(spec)
        session = process._session
        session._inbound.start()
        process._engine = EchoEngine(stage)
        process._close("a test")
        assert "it does not want to end" in caplog.text
        assert not session._inbound.is_alive()
        assert session._sockets.context.closed
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(session._arena.address.descriptor)
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "nobody will be ended for taking too long"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
