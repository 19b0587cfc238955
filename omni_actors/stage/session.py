"""A replica's registration with a coordinator: its sockets, its requests, its credit. All of it ends together.

The process and its engine outlive sessions. When the coordinator is gone the process drops what it held and registers
again with the next epoch: sockets, credit windows and shared memory are new, so nothing of the former epoch counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

import omni_actors
from omni_actors import logs
from omni_actors.config import PipelineConfig
from omni_actors.errors import ProtocolError, StartupError
from omni_actors.protocol.common import Credit
from omni_actors.protocol.control import Hello, Peers, Ready, Shutdown, Welcome
from omni_actors.protocol.header import PROTOCOL_VERSION, Body, ReplicaId
from omni_actors.stage.actor import StageActor
from omni_actors.stage.device_priority import POLL_SECONDS, DemandFlag, DevicePriority
from omni_actors.stage.engine_interface import StageEngine
from omni_actors.stage.events import Control, Event, Lost, Received, Rejected, Stop, Undelivered, sender_of
from omni_actors.stage.inbound import Inbound
from omni_actors.stage.inbox import Inbox
from omni_actors.stage.meter import HeldBack, StageMeter
from omni_actors.stage.outbound import Outbound
from omni_actors.stage.outgoing import Outgoing
from omni_actors.stage.processors import StreamProcessor
from omni_actors.stage.recorder import Recorder
from omni_actors.stage.snapshot import Baseline, snapshot
from omni_actors.telemetry.clocks import AnchoredClock
from omni_actors.transport.arena import Arena, ArenaReader
from omni_actors.transport.credit import ReceivedCredit
from omni_actors.transport.curve import load_keys
from omni_actors.transport.sockets import Sockets

logger = logs.get_logger(__name__)

TICK_SECONDS = 0.1
CONGESTED_SECONDS = 0.005  # until a stage that waits for its receivers looks again
CLOSE_SECONDS = 4.0


def pause(runnable: bool, congested: bool, gives_way: bool) -> tuple[float, HeldBack | None]:
    """Seconds to wait for events before the next look, and what holds a step back that could be done."""
    if congested:
        return CONGESTED_SECONDS, HeldBack.CREDIT if runnable else None
    if not runnable:
        return TICK_SECONDS, None
    if gives_way:
        return POLL_SECONDS, HeldBack.DEVICE_PRIORITY
    return 0.0, None


class Session:
    """Belongs to the main thread, except the sockets' threads (`inbound`, `outbound`).

    Args:
        identity: stage, replica and the epoch of this session.
        spawn_epoch: the epoch of the process's first session.
        inbox_endpoint: where to bind the inbox.
        on_orphaned: called before a process ends whose launcher is gone and whose main thread hangs.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        identity: ReplicaId,
        spawn_epoch: int,
        control_endpoint: str,
        inbox_endpoint: str,
        launcher_pid: int,
        on_orphaned: Callable[[], None],
    ) -> None:
        self._pipeline = pipeline
        self._stage = pipeline.stage(identity.stage)
        self._identity = identity
        self._born = spawn_epoch
        self._events = Inbox()
        keys = load_keys(pipeline.coordinator.keys_dir)
        self._sockets = Sockets(max_message_bytes=pipeline.limits.message_bytes, keys=keys)
        flow = pipeline.flow
        sends = bool(pipeline.downstream(identity.stage)) and flow.arena_bytes > 0
        self._arena = Arena(flow.arena_bytes) if sends else None
        self._arenas = ArenaReader(self._on_release_due)
        self._tally: ReceivedCredit[ReplicaId | None] = ReceivedCredit(flow.edge_messages, flow.edge_bytes)
        clock = AnchoredClock()
        self._meter = StageMeter(identity.stage, identity.replica, identity.epoch, clock)
        self._inbound = Inbound(
            self._sockets,
            identity,
            control_endpoint,
            inbox_endpoint,
            self._hello,
            self._events,
            pipeline.limits,
            pipeline.coordinator.heartbeat_interval,
            launcher_pid,
            on_orphaned=on_orphaned,
            arenas=self._arenas,
            on_credit=self._on_credit,
            clock=clock,
        )
        self._outbound: Outbound | None = None
        self._actor: StageActor | None = None
        self._end: Stop | Lost | None = None
        self._grants_due = False
        self._closed = False
        folder = pipeline.coordinator.record_dir
        self._recorder = Recorder(folder, pipeline, identity) if folder is not None else None

    def tell(self, body: Body) -> None:
        """Send `body` to the coordinator on the control connection."""
        self._inbound.tell(body)

    def stop(self, reason: str) -> None:
        """End the session and the process; may be called in a signal handler."""
        self._events.put(Stop(reason))

    # -- start --------------------------------------------------------------------------------------------------------

    def open(self, seconds: float) -> Stop | Lost | None:
        """Say hello and wait to be welcomed; not `None` if the session has ended meanwhile.

        Raises:
            StartupError: the coordinator refused this replica, or did not answer within `seconds`.
        """
        self._inbound.start()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            event = next(iter(self._events.take(TICK_SECONDS, maximum=1)), None)
            if isinstance(event, Stop | Lost):
                self._end = event
                return event
            if isinstance(event, Control) and isinstance(event.body, Shutdown):
                raise StartupError(f"The coordinator refused this stage: {event.body.reason}.")
            if isinstance(event, Control) and isinstance(event.body, Welcome):
                outbound = Outbound(
                    self._sockets,
                    self._identity,
                    event.body.results,
                    self._pipeline.limits,
                    self._pipeline.flow,
                    self._events.put,
                    self._arena,
                    self._arenas,
                )
                outbound.start()
                self._outbound = outbound
                return None
        raise StartupError(f"The coordinator did not answer within {seconds:g} s.")

    def _hello(self, inbox: str) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            package=omni_actors.__version__,
            config=self._pipeline.digest(),
            pid=os.getpid(),
            inbox=inbox,
            arena=self._arena.address if self._arena is not None else None,
            spawn_epoch=self._born,
        )

    def _on_credit(self, receiver: ReplicaId | None, credit: Credit) -> None:
        """On the inbound thread."""
        if self._outbound is not None:
            self._outbound.granted(receiver, credit)

    def _on_release_due(self) -> None:
        """On any thread."""
        if self._outbound is not None:
            self._outbound.wake()

    # -- loop ---------------------------------------------------------------------------------------------------------

    def serve(
        self,
        engine: StageEngine,
        processor: type[StreamProcessor] | None,
        sign: DemandFlag,
        give_way: DevicePriority,
        seconds: float,
    ) -> Stop | Lost:
        """Say that the engine is ready (`seconds` after its start) and serve requests until the session ends."""
        outbound = self._outbound
        if outbound is None:
            raise ProtocolError("The stage serves before it was welcomed.")
        actor = self._actor = StageActor(
            self._pipeline, self._stage, self._identity, engine, processor, time.time, self._meter
        )
        baseline = Baseline(engine)
        facts = engine.facts
        self.tell(
            Ready(
                seconds=seconds,
                voices=facts.voices,
                sample_rate=facts.sample_rate,
                max_input_tokens=facts.max_input_tokens,
            )
        )
        next_tick = next_snapshot = 0.0
        while self._end is None:
            waits = give_way.now()
            self._take_events(actor, outbound, waits)
            sign.show(actor.urgent())
            if not (waits or outbound.congested):  # when congested, the stages after this one set the pace
                output = actor.step()
                self._emit(outbound, output, idle=not actor.runnable())
                sign.show(actor.urgent())  # before the next wait for events, which may be long
            self._inbound.pulse.progress += 1
            tick = time.monotonic() >= next_tick
            if tick:
                next_tick = time.monotonic() + TICK_SECONDS
                self._emit(outbound, actor.tick())
                dropped = {f"dropped_{reason}": count for reason, count in actor.dropped.items()}
                self._inbound.pulse.counts = {**actor.counts(), **outbound.counts(), **dropped}
                if time.monotonic() >= next_snapshot:
                    next_snapshot = time.monotonic() + self._pipeline.coordinator.heartbeat_interval
                    self._report_metrics(actor, baseline, outbound)
            if (tick or self._grants_due) and not actor.saturated:
                self._grants_due = False
                for sender, messages, size in self._tally.collect(everything=tick):
                    outbound.grant(sender, messages, size)
        sign.show(False)
        if isinstance(self._end, Stop):
            self._report_metrics(actor, baseline, outbound)  # what has been counted since the last time
        return self._end

    def _report_metrics(self, actor: StageActor, baseline: Baseline, outbound: Outbound) -> None:
        rejected = self._inbound.rejected_by_reason()
        edges, held, limit = outbound.edges(), outbound.counts(), self._pipeline.limits.body_bytes
        self.tell(snapshot(self._meter, actor, baseline, rejected, edges, held, limit))

    def _take_events(self, actor: StageActor, outbound: Outbound, gives_way: bool) -> None:
        """All events that are there; waits for the first one when the engine has nothing to do or others go first."""
        timeout, held_back = pause(actor.runnable(), outbound.congested, gives_way)
        began = time.monotonic()
        while self._end is None and (events := self._events.take(timeout)):
            timeout = 0.0
            for event in events:
                self._on_event(actor, outbound, event)
        if held_back is not None:
            self._meter.held_back[held_back] += time.monotonic() - began

    def _on_event(self, actor: StageActor, outbound: Outbound, event: Event) -> None:
        if isinstance(event, Received):
            self._grants_due |= self._tally.take(sender_of(event.envelope.header), event.size)
            if self._recorder is not None:
                self._recorder.received(event.envelope)
            self._emit(outbound, actor.receive(event.envelope))
        elif isinstance(event, Rejected):
            if event.size:
                self._grants_due |= self._tally.take(sender_of(event.header), event.size)
            self._emit(outbound, actor.reject(event.header, event.error))
        elif isinstance(event, Undelivered):
            self._emit(outbound, actor.undelivered(event.request_id, event.receiver, event.error))
        elif isinstance(event, Stop | Lost):
            self._end_with(event)
        elif isinstance(event.body, Peers):
            outbound.set_peers(event.body)
        elif isinstance(event.body, Shutdown):
            self._end_with(Stop(event.body.reason))

    def _end_with(self, end: Stop | Lost) -> None:
        """A coordinator that ends says so and leaves: that it has left may not undo what it said."""
        if not isinstance(self._end, Stop):
            self._end = end

    def _emit(self, outbound: Outbound, messages: Sequence[Outgoing], idle: bool = False) -> None:
        if self._recorder is not None:
            self._recorder.sent(messages)
        outbound.send(messages, idle)

    # -- end ----------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drop every request, in the engine too, and close: nobody waits for an answer any more."""
        if self._actor is not None:
            self._actor.drop_all()
        self.close(last_words=False)

    def close(self, last_words: bool = True) -> None:
        """End the threads that own sockets, then the context. Idempotent. `last_words`: what is queued may still go."""
        if self._closed:
            return
        self._closed = True
        # In the other order: a step that fails does not keep the next ones from being done.
        with contextlib.ExitStack() as last_first:
            if self._arena is not None:
                last_first.callback(self._arena.close)
            if self._recorder is not None:
                last_first.callback(self._recorder.close)
            last_first.callback(self._sockets.context.destroy, linger=0)
            if self._inbound.is_alive():
                last_first.callback(self._inbound.join, CLOSE_SECONDS)
                last_first.callback(self._inbound.finish)
            if self._outbound is not None:
                last_first.callback(self._outbound.join, CLOSE_SECONDS)
                last_first.callback(self._outbound.finish, last_words)
