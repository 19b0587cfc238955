"""A stage's process, from its first line to its last: environment, hello, load, ready, loop, shutdown."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import setproctitle

from omni_actors import logs
from omni_actors.config import PipelineConfig, StageConfig, StageKind, check_parameters, resolve_class
from omni_actors.config.checkpoint import MODEL_KINDS
from omni_actors.config.placement import gpus_of_replica
from omni_actors.errors import ConfigError, InvalidRequest, OmniError, StartupError
from omni_actors.host.processes import die_with_parent
from omni_actors.host.run_directory import scratch_folder
from omni_actors.protocol.messages import Fatal, Loading
from omni_actors.stage.engine_interface import EngineFacts, EngineLost, StageEngine
from omni_actors.stage.inbound import Stop
from omni_actors.stage.processors import PROCESSORS, StreamProcessor
from omni_actors.stage.session import ReplicaSpec, Session

logger = logs.get_logger(__name__)

# Imports that failed in the fork server, a sentence each. `multiprocessing` would skip such a module, or end silently.
PRELOAD_FAILURES: list[str] = []
WELCOME_SECONDS = 30.0
EXIT_GRACE_SECONDS = 4.0


def main(spec: ReplicaSpec) -> None:
    """Entry of the child process. Ends the process: exit code 0 after a shutdown, 1 after a failure."""
    _prepare_process(spec)
    code = 1
    try:
        code = StageProcess(spec).run()
    except BaseException:  # logged before the process ends with it, whatever it is
        logger.exception("the stage process failed")
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if code == 0:
            logger.info("stopped")
        spec.leave_no_files()
    raise SystemExit(code)


def _prepare_process(spec: ReplicaSpec) -> None:
    # Ctrl-C reaches the whole process group; the launcher decides in which order the stages end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by the fork server until here
    die_with_parent()
    setproctitle.setproctitle(f"omni:{spec.name}")
    logs.redirect_output(spec.log_file)
    # vLLM's sockets, which it leaves if it is killed, go where they are swept.
    os.environ["VLLM_RPC_BASE_PATH"] = spec.run_dir
    os.environ.update(spec.environment)
    if spec.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.devices)
    if spec.threads and "OMP_NUM_THREADS" not in dict(spec.environment):
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    logs.configure(f"{spec.name} epoch={spec.epoch}", spec.log_file)


class StageProcess:
    """Lifecycle of one replica: an engine for all of its life, and one session after the other (`session.py`)."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._pipeline = msgspec.json.decode(spec.pipeline_json, type=PipelineConfig)
        self._stage = self._pipeline.stage(spec.stage)
        _prepare_for_workers(spec, self._stage)
        self._engine: StageEngine | None = None
        self._processor: type[StreamProcessor] | None = None
        self._load_seconds = 0.0  # from the order to start this process
        self._loading = False
        self._stopping = ""  # why, once a signal has come
        self._session = Session(self._pipeline, spec, spec.epoch)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by the fork server until here

    def run(self) -> int:
        """Start, serve until asked to stop, shut down; return the exit code."""
        end = Stop("failed", failed=True)
        try:
            end = self._live()
        except Exception as error:  # whatever it is, the coordinator gets to know it
            logger.exception("fatal")
            self._session.tell(Fatal(message=_describe(error), device=isinstance(error, EngineLost)))
        finally:
            self._close(end.reason)
        return 1 if end.failed else 0

    def _live(self) -> Stop:
        """Run one session after the other until one ends the process."""
        epoch = self._spec.epoch
        patience = WELCOME_SECONDS
        while True:
            session = self._session
            end = session.open(patience)
            if end is None:
                if self._engine is None:
                    self._engine = self._load(session)
                    self._load_seconds = time.monotonic() - self._spec.ordered
                    logger.info("ready after %.1f s", self._load_seconds)
                end = session.serve(self._engine, self._processor, self._load_seconds)
            if isinstance(end, Stop):
                return end
            logger.warning("%s; registering again", end.reason)
            session.abandon()
            epoch = max(epoch + 1, time.time_ns() // 1_000_000)
            patience = self._pipeline.coordinator.reconnect_timeout
            self._session = Session(self._pipeline, self._spec, epoch)
            if self._stopping:
                self._session.stop(self._stopping)

    def _load(self, session: Session) -> StageEngine:
        def report(phase: str) -> None:
            session.tell(Loading(phase=phase[:256]))
            logger.info("%s", phase)

        self._processor = processor_class(self._stage)  # first: a wrong name should not wait for a model to load
        report("loading")
        self._loading = True
        try:
            engine = build_engine(self._pipeline, self._stage, report)
            check_defaults(self._stage, engine.facts)
        finally:
            self._loading = False
        return engine

    def _on_signal(self, number: int, frame: object) -> None:
        if self._loading:  # loading cannot be interrupted, and the system frees all it holds
            self._spec.leave_no_files()
            os._exit(128 + number)
        self._stopping = f"signal {signal.Signals(number).name}"
        self._session.stop(self._stopping)  # `_live` stops a session that replaces it

    def _close(self, reason: str) -> None:
        """Shut down what the engine has outside of this process first, because it frees devices, then the session."""
        signal.signal(signal.SIGALRM, self._exit_now)
        signal.setitimer(signal.ITIMER_REAL, EXIT_GRACE_SECONDS)
        logger.info("stopping: %s", reason)
        try:
            if self._engine is not None and not self._engine.ends_with_process:
                self._engine.shutdown()
        except Exception:  # the last messages still have to be sent and the sockets closed
            logger.exception("the engine failed in its shutdown")
        self._session.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        logger.info("stopped")

    def _exit_now(self, number: int, frame: object) -> None:
        """End now: the orderly shutdown took too long."""
        self._spec.leave_no_files()
        os._exit(1)


def _prepare_for_workers(spec: ReplicaSpec, stage: StageConfig) -> None:
    """Prepare the process of a stage whose workers have processes of their own."""
    if gpus_of_replica(stage) == 1:
        return
    # They meet through a temporary file that this process names and none of them removes. Their own files, such as
    # kernel caches, stay where they are.
    tempfile.tempdir = str(scratch_folder(Path(spec.run_dir), spec.name))
    if stage.kind in MODEL_KINDS:
        # A new process begins with the main module of the one that started it; a stage has none.
        sys.modules["__main__"] = importlib.import_module("omni_actors.engine.workers.main")


def _describe(error: BaseException) -> str:
    """Return a typed error's own text, or the last lines of the traceback; the launcher shows it."""
    if isinstance(error, OmniError):
        return str(error)[-16000:]
    return "".join(traceback.format_exception(error)[-6:])[-16000:]


def processor_class(stage: StageConfig) -> type[StreamProcessor] | None:
    """Find the class that makes a stage's input from the output of its sources; `None` for the entry stage."""
    if stage.inputs is None:
        return None
    where = f"stages.{stage.name}.inputs.processor"
    return resolve_class(stage.inputs.processor, PROCESSORS, StreamProcessor, where)


def check_defaults(stage: StageConfig, facts: EngineFacts) -> None:
    """Raise `ConfigError` if the YAML's `sampling` of a stage is not what its model takes."""
    try:
        check_parameters(stage.name, facts.parameters, stage.sampling)
    except InvalidRequest as error:
        raise ConfigError(f"stages.{stage.name}.sampling.{error.field}: {error.message}") from error


def build_engine(pipeline: PipelineConfig, stage: StageConfig, report: Callable[[str], None]) -> StageEngine:
    """Make the engine of a stage. Only the model kinds import torch and vLLM.

    Raises:
        ConfigError: `engine_class` is not an importable `StageEngine`, or the engine's options are wrong.
        StartupError: the model does not load.
    """
    if stage.kind is StageKind.ECHO:
        from omni_actors.stage.echo import EchoEngine

        return EchoEngine(stage)
    if stage.kind is StageKind.CUSTOM:
        report(f"importing {stage.engine_class}")
        where = f"stages.{stage.name}.engine_class"
        engine_class = resolve_class(stage.engine_class or "", {}, StageEngine, where)
        return cast(StageEngine, engine_class(pipeline, stage))
    report("importing vLLM")
    if PRELOAD_FAILURES:
        raise StartupError(f"The fork server could not import what stages need: {'; '.join(PRELOAD_FAILURES)}.")
    from omni_actors.engine.arguments import build_stage_engine

    engine: StageEngine = build_stage_engine(pipeline, stage, report)
    return engine
