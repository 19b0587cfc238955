"""A replica's registration with a coordinator: its sockets, requests and credit, and the main loop.

A session goes on under the next coordinator when its own dies. The process and its engine outlive sessions: when the
coordinator counts the replica as lost, the process drops its requests and registers again with the next epoch. Sockets,
credit windows and shared memory are new, so nothing of the former epoch counts.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

import omni_actors
from omni_actors.config import PipelineConfig
from omni_actors.config.checks import with_defaults
from omni_actors.errors import StartupError
from omni_actors.host.processes import STEADY
from omni_actors.host.run_directory import clear_abandoned
from omni_actors.protocol.fields import PROTOCOL_VERSION, Body, ReplicaId
from omni_actors.protocol.messages import Hello, Peers, Ready, Reregister, Shutdown, Snapshot, Welcome
from omni_actors.stage.actor import StageActor
from omni_actors.stage.engine_interface import StageEngine
from omni_actors.stage.inbound import Detached, Event, Inbound, Inbox, Lost, Received, Rejected, Stop, Undelivered
from omni_actors.stage.meter import StageMeter
from omni_actors.stage.outbound import Outbound
from omni_actors.stage.processors import StreamProcessor
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Kind, Metric
from omni_actors.transport.arena import Arena, ArenaReader
from omni_actors.transport.curve import load_keys
from omni_actors.transport.link import ReceivedCredit
from omni_actors.transport.sockets import Sockets

ENDED_BYTES = len(msgspec.msgpack.encode("ended")) + 3  # the field, which is left out while empty, and its length


def process_values(engine: StageEngine) -> dict[Metric, float]:
    """What this process and its engine count and hold; the counters go on from session to session."""
    return {
        table.RESIDENT: psutil.Process().memory_info().rss,
        table.CPU_SECONDS: time.process_time(),
        table.DEVICE_BYTES: engine.device_bytes(),
        **engine.statistics(),
    }


def snapshot(
    meter: StageMeter,
    actor: StageActor,
    engine: StageEngine,
    before: Mapping[Metric, float],
    rejected: Mapping[str, int],
    held: Mapping[str, int],
    limit: int,
) -> Snapshot:
    """All metrics of this session, and as many timelines of ended requests as fit into the same message.

    Args:
        before: the `process_values` when the session began; the coordinator adds up sessions.
        rejected: counts of messages that did not decode, by reason.
        held: counts of the I/O threads: `arena_bytes`, `dropped_arena_full`.
        limit: maximum bytes of a message's body.
    """
    meters, labels = meter.meters, meter.labels
    counts = actor.held()  # does not ask the engine, whose workers may be gone when the last snapshot is made
    meters.set(table.STAGE_HELD, *labels, to=counts["requests"])
    meters.set(table.EARLY_CHUNKS, *labels, to=counts["early_chunk_bytes"])
    meters.set(table.ARENA, *labels, to=held.get("arena_bytes", 0))
    meters.set(table.ARENA_FULL, *labels, to=held.get("dropped_arena_full", 0))
    meters.set_all(table.DROPPED, labels, actor.dropped)
    meters.set_all(table.REJECTED, (*labels, "inbox"), rejected)
    for metric, value in process_values(engine).items():
        meters.set(metric, *labels, to=value - (before.get(metric, 0.0) if metric.kind is Kind.COUNTER else 0.0))
    metrics = meters.snapshot()
    room = limit - len(msgspec.msgpack.encode(metrics)) - ENDED_BYTES
    return msgspec.structs.replace(metrics, ended=meter.take_unreported(room))


TICK_SECONDS = 0.1
CONGESTED_SECONDS = 0.005  # until a stage that waits for its receivers looks again
CLOSE_SECONDS = 4.0


class ReplicaSpec(NamedTuple):
    """What a stage process gets from its launcher: strings and numbers only."""

    pipeline_json: bytes
    stage: str
    replica: int
    epoch: int
    ordered: float  # when the process was ordered, on the monotonic clock
    control_endpoint: str
    inbox_endpoint: str  # for this host: a path, to which the epoch is added
    devices: tuple[str, ...]  # all GPUs that it may see, as CUDA_VISIBLE_DEVICES names them
    threads: int  # CPU threads for torch, 0 to leave it alone
    launcher_pid: int
    log_file: str
    run_dir: str
    run_dir_is_temporary: bool
    environment: tuple[tuple[str, str], ...] = ()
    remote_endpoint: str = ""  # for other nodes: tcp with port 0, "" if there are none

    @property
    def name(self) -> str:
        """Its name in logs and commands, as talker/0."""
        return f"{self.stage}/{self.replica}"

    def leave_no_files(self) -> None:
        """Clear the run directory if its launcher was killed: the last thing before the end."""
        clear_abandoned(Path(self.run_dir), self.run_dir_is_temporary)


class Session:
    """One registration, from the hello to the closed sockets. Used on the main thread, with two threads of its own.

    Args:
        epoch: of this session.
    """

    # From `serve` on.
    _engine: StageEngine
    _actor: StageActor
    _ready: Ready  # what the coordinator was told, and the next one is told again
    _before: Mapping[Metric, float]  # what the process had counted before

    def __init__(self, pipeline: PipelineConfig, spec: ReplicaSpec, epoch: int) -> None:
        self._pipeline = pipeline
        self._stage = pipeline.stage(spec.stage)
        self._identity = identity = ReplicaId(spec.stage, spec.replica, epoch)
        self._spawn_epoch = spec.epoch
        self._inbox = Inbox()
        keys = load_keys(pipeline.coordinator.keys_dir)
        self._sockets = Sockets(max_message_bytes=pipeline.limits.message_bytes, keys=keys)
        flow = pipeline.flow
        sends = bool(pipeline.downstream(identity.stage)) and flow.arena_bytes > 0
        self._arena = Arena(flow.arena_bytes) if sends else None
        self._arenas = ArenaReader(lambda: self._outbound.wake())
        self._meter = StageMeter(identity)
        self._outbound = Outbound(
            self._sockets, identity, pipeline.limits, flow, self._inbox.put, self._arena, self._arenas
        )
        self._inbound = Inbound(
            self._sockets,
            identity,
            spec.control_endpoint,
            f"{spec.inbox_endpoint}-{epoch}",
            self._hello,
            self._inbox,
            pipeline.limits,
            pipeline.coordinator.heartbeat_interval,
            spec.launcher_pid,
            on_orphaned=spec.leave_no_files,
            arenas=self._arenas,
            on_credit=self._outbound.granted,
            remote_endpoint=spec.remote_endpoint,
        )
        self._received: ReceivedCredit[ReplicaId | None] = ReceivedCredit(flow.edge_messages, flow.edge_bytes)
        self._grants_due = False
        self._next_tick = self._next_snapshot = 0.0
        self._detached_at = math.inf  # since when there is no coordinator
        self._end: Stop | Lost | None = None
        self._closed = False

    def tell(self, body: Body) -> None:
        """Send `body` to the coordinator on the control connection."""
        self._inbound.tell(body)

    def stop(self, reason: str) -> None:
        """End the session and the process. May be called in a signal handler."""
        self._inbox.put(Stop(reason))

    # -- start --------------------------------------------------------------------------------------------------------

    def open(self, seconds: float) -> Stop | Lost | None:
        """Say hello and wait to be welcomed; return why the session ended if it ended meanwhile.

        Raises:
            StartupError: the coordinator refused this replica, or did not answer within `seconds`.
        """
        self._inbound.start()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            event = next(iter(self._inbox.take(TICK_SECONDS, maximum=1)), None)
            if isinstance(event, Stop | Lost):
                return event
            if isinstance(event, Shutdown):
                raise StartupError(f"The coordinator refused this stage: {event.reason}.")
            if isinstance(event, Welcome):
                self._outbound.attach(event.results)
                self._outbound.start()
                return None
        raise StartupError(f"The coordinator did not answer within {seconds:g} s.")

    def _hello(self, inbox: str, remote: str) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            package=omni_actors.__version__,
            config=self._pipeline.digest(),
            pid=os.getpid(),
            inbox=inbox,
            arena=self._arena.address if self._arena is not None else None,
            spawn_epoch=self._spawn_epoch,
            remote=remote,
        )

    # -- loop ---------------------------------------------------------------------------------------------------------

    def serve(self, engine: StageEngine, processor: type[StreamProcessor] | None, load_seconds: float) -> Stop | Lost:
        """Report that the engine is ready and serve requests until the session ends.

        Args:
            load_seconds: from the order to start the process until its engine was ready.
        """
        self._actor = StageActor(self._pipeline, self._stage, self._identity, engine, processor, STEADY, self._meter)
        facts = engine.facts
        wants = (*facts.wants_information, *(processor.wants_information if processor is not None else ()))
        parameters = with_defaults(facts.parameters, self._stage.sampling)
        facts = msgspec.structs.replace(facts, wants_information=tuple(dict.fromkeys(wants)), parameters=parameters)
        self._engine, self._ready = engine, Ready(load_seconds, facts)
        self._before = process_values(engine)
        engine.on_progress(self._inbox.wake)
        self._inbound.serving = True
        self.tell(self._ready)
        while self._end is None:
            self._take_events()
            if not self._outbound.congested:  # when it is, the stages after this one set the pace
                output = self._actor.step()
                self._outbound.send(output, idle=not self._actor.runnable())
            self._inbound.progress += 1  # the coordinator sees by the next heartbeat that the loop is alive
            self._grant(everything=self._tick())
        if isinstance(self._end, Stop):
            self._report_metrics()  # what has been counted since the last report
        return self._end

    def _take_events(self) -> None:
        """Handle pending events for a while. Wait for the first one if there is no step to do."""
        runnable, congested = self._actor.runnable(), self._outbound.congested
        timeout = CONGESTED_SECONDS if congested else 0.0 if runnable else TICK_SECONDS
        began = time.monotonic()
        while self._end is None and (events := self._inbox.take(timeout)):
            timeout = 0.0
            for event in events:
                self._on_event(event)
            if time.monotonic() > began + 2 * TICK_SECONDS:  # whoever sends without end keeps no one from a step
                break
        if runnable and congested:
            self._meter.count(table.HELD_BACK, time.monotonic() - began)

    def _on_event(self, event: Event) -> None:
        match event:
            case Received(envelope=envelope, size=size):
                self._grants_due |= self._received.take(envelope.header.sender, size)
                self._outbound.send(self._actor.receive(envelope))
            case Rejected(header=header, error=error, size=size):
                if size:
                    self._grants_due |= self._received.take(header.sender, size)
                self._outbound.send(self._actor.reject(header, error))
            case Undelivered(request_id=request_id, receiver=receiver, error=error):
                self._outbound.send(self._actor.undelivered(request_id, receiver, error))
            case Peers():
                self._outbound.set_peers(event)
            case Shutdown(reason=reason):
                self._end_with(Stop(reason))
            case Detached():
                self._detached_at = time.monotonic()
                self._actor.detach()
                self._outbound.detach()
            case Welcome(results=results):
                self._detached_at = math.inf
                self._outbound.attach(results)
                self._inbound.tell(msgspec.structs.replace(self._ready, held=self._actor.held_requests()))
            case Reregister():  # the inbound thread has seen to it
                pass
            case Stop() | Lost():
                self._end_with(event)

    def _end_with(self, end: Stop | Lost) -> None:
        """End the loop. A coordinator that shuts down says so and leaves: that it has left must not undo that."""
        if not isinstance(self._end, Stop):
            self._end = end

    def _tick(self) -> bool:
        """Do what depends on time, ten times a second; whether it was due."""
        now = time.monotonic()
        if now < self._next_tick:
            return False
        self._next_tick = now + TICK_SECONDS
        if now > self._detached_at + (patience := self._pipeline.coordinator.reconnect_timeout):
            raise StartupError(f"No coordinator has come for {patience:g} s in the place of the one that was lost.")
        self._outbound.send(self._actor.tick())
        dropped = {f"dropped_{reason}": count for reason, count in self._actor.dropped.items()}
        self._inbound.counts = {**self._actor.counts(), **self._outbound.counts(), **dropped}
        if now >= self._next_snapshot and self._detached_at == math.inf:
            self._next_snapshot = now + self._pipeline.coordinator.heartbeat_interval
            self._report_metrics()
        return True

    def _grant(self, everything: bool) -> None:
        """Give credit for what was taken, unless the engine has too much to do already."""
        if (everything or self._grants_due) and not self._actor.saturated:
            self._grants_due = False
            for sender, messages, size in self._received.collect(everything):
                self._outbound.grant(sender, messages, size)

    def _report_metrics(self) -> None:
        self._outbound.measure(self._meter.meters)
        rejected, held = self._inbound.rejected_by_reason(), self._outbound.counts()
        limit = self._pipeline.limits.body_bytes
        self._inbound.tell(snapshot(self._meter, self._actor, self._engine, self._before, rejected, held, limit))

    # -- end ----------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drop every request, in the engine too, and close: the coordinator that waited for answers is gone."""
        if self._inbound.serving:
            self._actor.drop_all()
        self.close(last_messages=False)

    def close(self, last_messages: bool = True) -> None:
        """End the threads, then close the sockets. Idempotent. `last_messages`: first send what is queued."""
        if self._closed:
            return
        self._closed = True
        # Callbacks run in reverse order, and one that fails does not prevent the others.
        with contextlib.ExitStack() as last_first:
            if self._arena is not None:
                last_first.callback(self._arena.close)
            last_first.callback(self._sockets.context.destroy, linger=0)
            if self._inbound.is_alive():
                last_first.callback(self._inbound.join, CLOSE_SECONDS)
                last_first.callback(self._inbound.finish)
            if self._outbound.is_alive():
                last_first.callback(self._outbound.join, CLOSE_SECONDS)
                last_first.callback(self._outbound.finish, last_messages)
