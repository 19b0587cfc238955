"""The main thread's loop: takes events, steps the engine, sends what comes out, grants credit."""

from __future__ import annotations

import time

from omni_actors.config import PipelineConfig
from omni_actors.protocol.control import CoordinatorToStage, Peers, Reregister, Shutdown, Welcome
from omni_actors.protocol.header import ReplicaId
from omni_actors.stage.actor import StageActor
from omni_actors.stage.device_priority import POLL_SECONDS, DemandFlag, DevicePriority
from omni_actors.stage.engine_interface import StageEngine
from omni_actors.stage.events import Control, Event, Lost, Received, Rejected, Stop, Undelivered, sender_of
from omni_actors.stage.inbound import Inbound
from omni_actors.stage.inbox import Inbox
from omni_actors.stage.meter import HeldBack, StageMeter
from omni_actors.stage.outbound import Outbound
from omni_actors.stage.snapshot import Baseline, snapshot
from omni_actors.transport.credit import ReceivedCredit

TICK_SECONDS = 0.1
CONGESTED_SECONDS = 0.005  # until a stage that waits for its receivers looks again


def pause(runnable: bool, congested: bool, yields: bool) -> tuple[float, HeldBack | None]:
    """Return the seconds to wait for events before the next step, and what holds back a step that could be done."""
    if congested:
        return CONGESTED_SECONDS, HeldBack.CREDIT if runnable else None
    if not runnable:
        return TICK_SECONDS, None
    if yields:
        return POLL_SECONDS, HeldBack.DEVICE_PRIORITY
    return 0.0, None


class EngineLoop:
    """Serves one session's requests with its actor."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        actor: StageActor,
        engine: StageEngine,
        inbox: Inbox,
        inbound: Inbound,
        outbound: Outbound,
        meter: StageMeter,
        flag: DemandFlag,
        priority: DevicePriority,
    ) -> None:
        self._actor = actor
        self._engine = engine
        self._inbox = inbox
        self._inbound = inbound
        self._outbound = outbound
        self._meter = meter
        self._flag = flag
        self._priority = priority
        self._baseline = Baseline(engine)
        engine.on_progress(inbox.wake)
        self._heartbeat_interval = pipeline.coordinator.heartbeat_interval
        self._snapshot_bytes = pipeline.limits.body_bytes
        flow = pipeline.flow
        self._received: ReceivedCredit[ReplicaId | None] = ReceivedCredit(flow.edge_messages, flow.edge_bytes)
        self._grants_due = False
        self._next_tick = self._next_snapshot = 0.0
        self._end: Stop | Lost | None = None

    def run(self) -> Stop | Lost:
        """Serve until the session ends; return why it did."""
        while self._end is None:
            yields = self._priority.yields()
            self._take_events(yields)
            self._step(yields)
            self._beat()
            ticked = self._tick()
            self._grant(everything=ticked)
        self._flag.set(False)
        if isinstance(self._end, Stop):
            self._report_metrics()  # what has been counted since the last report
        return self._end

    def _take_events(self, yields: bool) -> None:
        """Handle all events that are there. Wait for the first one while there is no step to do."""
        timeout, held_back = pause(self._actor.runnable(), self._outbound.congested, yields)
        began = time.monotonic()
        while self._end is None and (events := self._inbox.take(timeout)):
            timeout = 0.0
            for event in events:
                self._on_event(event)
        if held_back is not None:
            self._meter.held_back[held_back] += time.monotonic() - began

    def _on_event(self, event: Event) -> None:
        match event:
            case Received(envelope=envelope, size=size):
                self._grants_due |= self._received.take(sender_of(envelope.header), size)
                self._outbound.send(self._actor.receive(envelope))
            case Rejected(header=header, error=error, size=size):
                if size:
                    self._grants_due |= self._received.take(sender_of(header), size)
                self._outbound.send(self._actor.reject(header, error))
            case Undelivered(request_id=request_id, receiver=receiver, error=error):
                self._outbound.send(self._actor.undelivered(request_id, receiver, error))
            case Control(body=body):
                self._on_control(body)
            case Stop() | Lost():
                self._end_with(event)

    def _on_control(self, body: CoordinatorToStage) -> None:
        match body:
            case Peers():
                self._outbound.set_peers(body)
            case Shutdown(reason=reason):
                self._end_with(Stop(reason))
            case Welcome() | Reregister():  # the inbound thread has seen to them
                pass

    def _end_with(self, end: Stop | Lost) -> None:
        """End the loop. A coordinator that shuts down says so and leaves: that it has left must not undo that."""
        if not isinstance(self._end, Stop):
            self._end = end

    def _step(self, yields: bool) -> None:
        self._flag.set(self._actor.urgent())
        if not (yields or self._outbound.congested):  # when congested, the stages after this one set the pace
            output = self._actor.step()
            self._outbound.send(output, idle=not self._actor.runnable())
            self._flag.set(self._actor.urgent())  # before the next wait for events, which may be long

    def _beat(self) -> None:
        """Show the coordinator, by the next heartbeat, that the loop is alive."""
        self._inbound.pulse.progress += 1

    def _tick(self) -> bool:
        """Do what depends on time, ten times a second; whether it was due."""
        now = time.monotonic()
        if now < self._next_tick:
            return False
        self._next_tick = now + TICK_SECONDS
        self._outbound.send(self._actor.tick())
        dropped = {f"dropped_{reason}": count for reason, count in self._actor.dropped.items()}
        self._inbound.pulse.counts = {**self._actor.counts(), **self._outbound.counts(), **dropped}
        listeners = self._engine.listeners
        self._inbound.pulse.listeners = self._meter.listeners if listeners is None else listeners
        if now >= self._next_snapshot:
            self._next_snapshot = now + self._heartbeat_interval
            self._report_metrics()
        return True

    def _grant(self, everything: bool) -> None:
        """Give credit for what was taken, unless the engine has too much to do already."""
        if (everything or self._grants_due) and not self._actor.saturated:
            self._grants_due = False
            for sender, messages, size in self._received.collect(everything):
                self._outbound.grant(sender, messages, size)

    def _report_metrics(self) -> None:
        rejected = self._inbound.rejected_by_reason()
        edges, held = self._outbound.edges(), self._outbound.counts()
        self._inbound.tell(
            snapshot(self._meter, self._actor, self._baseline, rejected, edges, held, self._snapshot_bytes)
        )
