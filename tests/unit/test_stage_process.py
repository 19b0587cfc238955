"""The end of a stage's process, with its real threads, sockets and shared memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from omni_actors.messages import Hop
from omni_actors.node import LocalNode
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.process import ReplicaSpec, StageProcess
from omni_actors.stage.turns import Sign
from omni_actors.transport.run_directory import RunDirectory
from tests.unit.builders import chain, load, pipeline


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


def test_a_process_is_told_what_it_needs(short_path: Path) -> None:
    data = chain()
    environment = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_SHARE": 80}
    data["stages"][2] |= {"gives_way_to": ["thinker"], "environment": environment}
    config = load(short_path, data).pipeline
    spec = LocalNode(config, RunDirectory(str(short_path)), "ipc:///control")._spec(Hop("talker", 0, 7))
    assert spec.environment == (("CUDA_MODULE_LOADING", "EAGER"), ("CUDA_SHARE", "80"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    try:
        talker = StageProcess(spec)
        assert not talker._give_way.now()
        Sign(short_path, "thinker", 0).show(wanted=True)
        talker._give_way._search_at = 0.0
        assert talker._give_way.now(), "its thinker's requests wait for their first output"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
