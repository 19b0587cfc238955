"""A stage's process, from its first line to its last: environment, hello, load, ready, loop, shutdown."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import setproctitle

import omni_actors
from omni_actors import logs
from omni_actors.config import PipelineConfig, StageConfig, StageKind, resolve_class
from omni_actors.errors import OmniError, ProtocolError, StartupError
from omni_actors.messages import (
    PROTOCOL_VERSION,
    Credit,
    Fatal,
    Hello,
    Hop,
    Loading,
    Peers,
    Ready,
    Shutdown,
    Welcome,
)
from omni_actors.stage.actor import Outgoing, Stage
from omni_actors.stage.interface import StageEngine
from omni_actors.stage.io_threads import Control, Event, Inbound, Outbound, Received, Rejected, Stop, sender_of
from omni_actors.stage.processors import PROCESSORS, InputProcessor
from omni_actors.stage.record import Recorder
from omni_actors.stage.turns import POLL_SECONDS, GiveWay, Sign
from omni_actors.transport.arena import Arena, ArenaReader
from omni_actors.transport.credit import Tally
from omni_actors.transport.run_directory import clear_abandoned
from omni_actors.transport.sockets import Sockets

logger = logs.get_logger(__name__)

WELCOME_SECONDS = 30.0
TICK_SECONDS = 0.1
CONGESTED_SECONDS = 0.005  # until a stage that waits for its receivers looks again
EXIT_GRACE_SECONDS = 4.0
PR_SET_PDEATHSIG = 1


class ReplicaSpec(NamedTuple):
    """What a stage process is told at birth: strings and numbers only."""

    pipeline_json: bytes
    stage: str
    replica: int
    epoch: int
    control_endpoint: str
    inbox_endpoint: str
    devices: tuple[int, ...]
    threads: int  # CPU threads for torch, 0 to leave it alone
    launcher_pid: int
    log_file: str
    run_dir: str
    run_dir_is_temporary: bool
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.replica}"


def main(spec: ReplicaSpec) -> None:
    """Entry of the child process. Ends the process: exit code 0 after a shutdown, 1 after a failure."""
    _prepare_process(spec)
    code = 1
    try:
        code = StageProcess(spec).run()
    except BaseException:
        logger.exception("the stage process failed")
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if code == 0:
            logger.info("stopped")
        _leave_no_files(spec)
    raise SystemExit(code)


def _prepare_process(spec: ReplicaSpec) -> None:
    # Ctrl-C reaches the whole process group; the launcher decides in which order the stages end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    setproctitle.setproctitle(f"omni:{spec.name}")
    log = os.open(spec.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.update(spec.environment)
    if spec.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in spec.devices)
    if spec.threads:
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    logs.configure(f"{spec.name} epoch={spec.epoch}")


def _leave_no_files(spec: ReplicaSpec) -> None:
    """The last thing before the end: if the launcher was killed, its run directory is ours to clear."""
    clear_abandoned(Path(spec.run_dir), spec.run_dir_is_temporary)


class StageProcess:
    """Lifecycle of one replica. All of it runs on the main thread, except the sockets (`io_threads`)."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._pipeline = msgspec.json.decode(spec.pipeline_json, type=PipelineConfig)
        self._stage = self._pipeline.stage(spec.stage)
        self._identity = Hop(spec.stage, spec.replica, spec.epoch)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._sockets = Sockets(max_message_bytes=self._pipeline.limits.message_bytes)
        flow = self._pipeline.flow
        sends = bool(self._pipeline.downstream(spec.stage)) and flow.arena_bytes > 0
        self._arena = Arena(flow.arena_bytes) if sends else None
        self._arenas = ArenaReader(self._on_release_due)
        self._tally: Tally[Hop | None] = Tally(flow.edge_messages, flow.edge_bytes)
        self._inbound = Inbound(
            self._sockets,
            self._identity,
            spec.control_endpoint,
            spec.inbox_endpoint,
            self._hello,
            self._events,
            self._pipeline.limits,
            self._pipeline.coordinator.heartbeat_interval,
            spec.launcher_pid,
            on_orphaned=lambda: _leave_no_files(spec),
            arenas=self._arenas,
            on_credit=self._on_credit,
        )
        run_dir = Path(spec.run_dir)
        self._sign = Sign(run_dir, spec.stage, spec.replica)
        first = [self._pipeline.stage(name) for name in self._stage.gives_way_to]
        self._give_way = GiveWay(run_dir, [(stage.name, number) for stage in first for number in range(stage.replicas)])
        self._outbound: Outbound | None = None
        self._stopping: Stop | None = None
        self._loading = False
        self._grants_due = False
        self._recorder: Recorder | None = None
        folder = self._pipeline.coordinator.record_dir
        if folder is not None:
            self._recorder = Recorder(folder, self._pipeline, self._identity)
        signal.signal(signal.SIGTERM, self._on_signal)

    def run(self) -> int:
        """Start, serve until told to stop, shut down; the exit code."""
        began = time.monotonic()
        self._inbound.start()
        engine: StageEngine | None = None
        try:
            self._outbound = self._await_welcome()
            processor = processor_class(self._stage)  # first: a wrong name need not wait for a model to load
            engine = self._load()
            actor = Stage(self._pipeline, self._stage, self._identity, engine, processor, time.time)
            facts = engine.facts
            self._inbound.tell(
                Ready(
                    seconds=time.monotonic() - began,
                    voices=facts.voices,
                    sample_rate=facts.sample_rate,
                    max_input_tokens=facts.max_input_tokens,
                )
            )
            logger.info("ready after %.1f s", time.monotonic() - began)
            self._serve(actor)
        except Exception as error:
            logger.exception("fatal")
            self._inbound.tell(Fatal(message=_describe(error)))
            self._stopping = Stop(str(error), failed=True)
        finally:
            self._close(engine)
        return 1 if self._stopping is not None and self._stopping.failed else 0

    # -- start --------------------------------------------------------------------------------------------------------

    def _hello(self, inbox: str) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            package=omni_actors.__version__,
            config=self._pipeline.digest(),
            pid=os.getpid(),
            inbox=inbox,
            arena=self._arena.address if self._arena is not None else None,
        )

    def _on_credit(self, receiver: Hop | None, credit: Credit) -> None:
        """On the inbound thread."""
        if self._outbound is not None:
            self._outbound.granted(receiver, credit)

    def _on_release_due(self) -> None:
        """On any thread."""
        if self._outbound is not None:
            self._outbound.wake()

    def _await_welcome(self) -> Outbound:
        deadline = time.monotonic() + WELCOME_SECONDS
        while time.monotonic() < deadline:
            try:
                event = self._events.get(timeout=TICK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, Stop):
                raise StartupError(f"Stopped before the coordinator answered: {event.reason}.")
            if isinstance(event, Control) and isinstance(event.body, Shutdown):
                raise StartupError(f"The coordinator refused this stage: {event.body.reason}.")
            if isinstance(event, Control) and isinstance(event.body, Welcome):
                outbound = Outbound(
                    self._sockets,
                    self._identity,
                    event.body.results,
                    self._pipeline.limits,
                    self._pipeline.flow,
                    self._events,
                    self._arena,
                    self._arenas,
                )
                outbound.start()
                return outbound
        raise StartupError(f"The coordinator did not answer within {WELCOME_SECONDS:g} s.")

    def _load(self) -> StageEngine:
        def report(phase: str) -> None:
            self._inbound.tell(Loading(phase=phase[:256]))
            logger.info("%s", phase)

        report("loading")
        self._loading = True
        try:
            return build_engine(self._pipeline, self._stage, report)
        finally:
            self._loading = False

    # -- loop ---------------------------------------------------------------------------------------------------------

    def _serve(self, actor: Stage) -> None:
        outbound = self._outbound
        if outbound is None:
            raise ProtocolError("The stage serves before it was welcomed.")
        next_tick = 0.0
        while self._stopping is None:
            waits = self._give_way.now()
            self._take_events(actor, outbound, waits)
            self._sign.show(actor.urgent())
            if not (waits or outbound.congested):  # when congested, the stages after this one set the pace
                self._emit(outbound, actor.step())
                self._sign.show(actor.urgent())  # before the next wait for events, which may be long
            self._inbound.pulse.progress += 1
            tick = time.monotonic() >= next_tick
            if tick:
                next_tick = time.monotonic() + TICK_SECONDS
                self._emit(outbound, actor.tick())
                dropped = {f"dropped_{reason}": count for reason, count in actor.dropped.items()}
                self._inbound.pulse.counts = {**actor.counts(), **outbound.counts(), **dropped}
            if (tick or self._grants_due) and not actor.saturated:
                self._grants_due = False
                for sender, messages, size in self._tally.collect(everything=tick):
                    outbound.grant(sender, messages, size)

    def _take_events(self, actor: Stage, outbound: Outbound, gives_way: bool) -> None:
        """All events that are there; waits for the first one when the engine has nothing to do or others go first."""
        timeout = 0.0
        if outbound.congested:
            timeout = CONGESTED_SECONDS
        elif not actor.runnable():
            timeout = TICK_SECONDS
        elif gives_way:
            timeout = POLL_SECONDS
        while self._stopping is None:
            try:
                event = self._events.get(timeout=timeout) if timeout else self._events.get_nowait()
            except queue.Empty:
                return
            timeout = 0.0
            if isinstance(event, Received):
                self._grants_due |= self._tally.take(sender_of(event.envelope.header), event.size)
                if self._recorder is not None:
                    self._recorder.received(event.envelope)
                self._emit(outbound, actor.receive(event.envelope))
            elif isinstance(event, Rejected):
                if event.size:
                    self._grants_due |= self._tally.take(sender_of(event.header), event.size)
                self._emit(outbound, actor.reject(event.header, event.error))
            elif isinstance(event, Stop):
                self._stopping = event
            elif isinstance(event.body, Peers):
                outbound.set_peers(event.body)
            elif isinstance(event.body, Shutdown):
                self._stopping = Stop(event.body.reason)

    def _emit(self, outbound: Outbound, messages: Sequence[Outgoing]) -> None:
        if self._recorder is not None:
            self._recorder.sent(messages)
        outbound.send(messages)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: object) -> None:
        if self._loading:  # nothing is held yet that the system does not take back, and loading cannot be interrupted
            _leave_no_files(self._spec)
            os._exit(128 + number)
        self._events.put(Stop(f"signal {signal.Signals(number).name}"))

    def _close(self, engine: StageEngine | None) -> None:
        """Engine first (it frees devices), then the threads that own sockets, then the context."""
        signal.signal(signal.SIGALRM, self._exit_now)
        signal.setitimer(signal.ITIMER_REAL, EXIT_GRACE_SECONDS)
        logger.info("stopping: %s", self._stopping.reason if self._stopping else "failed")
        if engine is not None:
            engine.shutdown()
        if self._outbound is not None:
            self._outbound.finish()
            self._outbound.join(EXIT_GRACE_SECONDS)
        self._inbound.finish()
        self._inbound.join(EXIT_GRACE_SECONDS)
        self._sockets.context.destroy(linger=0)
        if self._recorder is not None:
            self._recorder.close()
        if self._arena is not None:
            self._arena.close()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _exit_now(self, number: int, frame: object) -> None:
        """The orderly end took too long: a process that hangs in its shutdown helps nobody."""
        _leave_no_files(self._spec)
        os._exit(1)


def _describe(error: BaseException) -> str:
    """What the launcher shows: a typed error's own text, or the last lines of the traceback."""
    if isinstance(error, OmniError):
        return str(error)[-16000:]
    return "".join(traceback.format_exception(error)[-6:])[-16000:]


def processor_class(stage: StageConfig) -> type[InputProcessor] | None:
    """What makes a stage's input of the output of its sources; `None` for the entry stage."""
    if stage.inputs is None:
        return None
    where = f"stages.{stage.name}.inputs.processor"
    return resolve_class(stage.inputs.processor, PROCESSORS, InputProcessor, where)


def build_engine(pipeline: PipelineConfig, stage: StageConfig, report: Callable[[str], None]) -> StageEngine:
    """The engine of a stage. Only the model kinds import torch and vLLM."""
    if stage.kind is StageKind.ECHO:
        from omni_actors.stage.echo import EchoEngine

        return EchoEngine(stage)
    report("importing vLLM")
    from omni_actors.engine.factory import build_stage_engine

    engine: StageEngine = build_stage_engine(pipeline, stage, report)
    return engine
