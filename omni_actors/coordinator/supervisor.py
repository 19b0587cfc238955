"""Keeps the pipeline's processes: which node starts, kills and starts again what, from the first hello to the end.

Runs beside the `Coordinator` in the coordinator's process. It starts nothing itself: node agents do, and report.
What it has to know after a restart of its own process comes from the nodes: each says what runs there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from omni_actors import logs
from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.nodes import Node, NodeTable
from omni_actors.coordinator.core.replicas import Replica
from omni_actors.coordinator.core.states import ReplicaState
from omni_actors.coordinator.shell import Coordinator, Endpoints
from omni_actors.logs import say
from omni_actors.protocol.control import Reregister, Shutdown
from omni_actors.protocol.nodes import (
    KillReplica,
    Launched,
    NodeBeat,
    NodeHello,
    NodeLeaving,
    NodeToCoordinator,
    NodeWelcome,
    ReplicaEnded,
    StartReplica,
)
from omni_actors.telemetry.collector import Exporter

logger = logs.get_logger(__name__)

PROGRESS_SECONDS = 5.0
LOOK_SECONDS = 0.05
STOP_SECONDS = 4.0  # that one stage may take to stop before it is killed
KILL_SECONDS = 2.0  # for a node to report the end of a process that it was told to kill
ABSENT_SECONDS = 10.0  # for a node to come back to a coordinator that was started again
LATE_LOOK_SECONDS = 1.0  # between two looks; after more, it is this process that had stopped
LAST_LOG_SECONDS = 1.0  # for a node to report the log of what fails the launch

Process = tuple[str, int, int]  # stage, replica, spawn_epoch


@dataclass
class Kill:
    """A process that its node was told to kill, and why."""

    why: str
    until: float


class Supervisor:
    """Binds the coordinator's sockets when made; needs a running event loop.

    Args:
        began: when the launch began, on the monotonic clock.
        exporter: gets the timelines of requests that have ended.
    """

    def __init__(
        self, pipeline: PipelineConfig, endpoints: Endpoints, began: float, exporter: Exporter | None = None
    ) -> None:
        self._pipeline = pipeline
        self._began = began
        self._launched = False
        self._stop = asyncio.Event()
        self._closing = False
        self._changed = asyncio.Event()
        self.failure = ""  # why the launch has failed
        self._killed: dict[Process, Kill] = {}
        self._kill_at: dict[Process, float] = {}
        self._next_report = time.monotonic() + PROGRESS_SECONDS
        self._looked = self._looking_since = time.monotonic()
        self._culprit: tuple[Replica, str, float] | None = None  # fails the launch once its log is here
        self.coordinator = Coordinator(pipeline, endpoints, self._on_change, self._on_node, self._on_shutdown, exporter)
        self._replicas = self.coordinator.state.replicas
        self._supervision = self.coordinator.supervision
        self._nodes = NodeTable(pipeline, self._replicas, time.monotonic())
        for stage in pipeline.stages:
            for index in range(stage.replicas):
                replica = self.coordinator.expect_replica(stage.name, index, 0)
                replica.phase = f"waiting for node {self._nodes.of(replica).rank}"

    # -- life ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the pipeline in order: `run` returns when that is done."""
        self._stop.set()
        self._changed.set()

    def _on_shutdown(self) -> None:
        say("stopping: an operator asked for it")
        self.stop()

    async def run(self) -> None:
        """Supervise until `stop` or a launch that fails; then let requests end, tell everybody and close."""
        looking = asyncio.create_task(self._keep_looking(), name="supervisor")
        try:
            await self._stop.wait()
            await self._drain()
        finally:
            self._closing = True
            self._changed.set()
            await looking
            self._tell_end()
            await self.coordinator.close()

    async def _drain(self) -> None:
        """Admit nothing, and wait for what is in flight until the deadline for it."""
        self.coordinator.refuse_new()
        if self._launched:
            say(f"no request is taken any more; {self.coordinator.state.in_flight} are in flight")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.coordinator.idle.wait(), self._pipeline.coordinator.drain_timeout)

    def _tell_end(self) -> None:
        reason = self.failure or "the launcher stops"
        self.coordinator.tell_shutdown(reason[:8000])
        for node in self._nodes.present():
            self.coordinator.tell_node(node.rank, Shutdown(reason=reason, failed=bool(self.failure)))

    def abandon(self) -> None:
        """The launcher is dead: answer every client at once. Other nodes wait for the next coordinator."""
        self.coordinator.end_requests()

    async def _keep_looking(self) -> None:
        """Kill what is stuck, stop what has drained, start again what is due."""
        while not self._closing:  # never cancelled: `wait_for` may swallow that
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_SECONDS)
            self._changed.clear()
            try:
                self._look(time.monotonic())
            except Exception:  # nobody else would start anything again
                logger.exception("a turn of the supervisor failed")

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _on_node(self, rank: int, body: NodeToCoordinator) -> None:
        node = self._nodes.find(rank)
        if node is None:
            text = f"no stage is placed on node {rank}"
            self.coordinator.tell_node(rank, Shutdown(reason=text, failed=True))
            return
        node.heard = time.monotonic()
        if isinstance(body, NodeHello):
            self._on_hello(node, body)
        elif not node.present:
            self.coordinator.tell_node(rank, Reregister())
        elif isinstance(body, NodeBeat):
            self.coordinator.tell_node(rank, NodeBeat())
        elif isinstance(body, NodeLeaving):
            self._lose_node(node, f"it leaves: {body.reason}")
        else:
            self._on_end(body)

    def _on_hello(self, node: Node, hello: NodeHello) -> None:
        difference = self.coordinator.difference(hello)
        if difference:
            text = f"Node {node.rank} is refused: {difference}."
            say(text)
            self.coordinator.tell_node(node.rank, Shutdown(reason=text, failed=True))
            if not self._launched:
                self._fail(text)
            return
        node.present = True
        self._launched |= hello.launched and node.rank == 0  # the launch is that of the coordinator's own host
        self.coordinator.tell_node(node.rank, NodeWelcome())
        if self._launched:
            self.coordinator.tell_node(node.rank, Launched())
        takeover = self._nodes.take_over(node, hello.replicas)
        for item in takeover.kill:
            self.coordinator.tell_node(node.rank, KillReplica(item.stage, item.replica, item.spawn_epoch))
        for item in takeover.adopt:
            replica = self.coordinator.expect_replica(item.stage, item.replica, item.spawn_epoch)
            if replica.state is ReplicaState.STARTING:  # it may have waited for this
                replica.phase = "registering again"
        if takeover.adopt:
            names = ", ".join(f"{item.stage}/{item.replica}" for item in takeover.adopt)
            say(f"{names} still run{self._on_which(node)}")
        for replica in takeover.ended:
            self._died(replica, "its node knows nothing of it", "")
        if takeover.start:
            names = ", ".join(f"{stage}/{index}" for stage, index in takeover.start)
            say(f"starting {names}{self._on_which(node)}")
        # No epoch occurs twice in a run directory: a stage that outlives a killed launcher for a moment must not be
        # taken for one of the next launcher's.
        spawn_epoch = time.time_ns() // 1_000_000
        for stage, index in takeover.start:
            self._start(stage, index, spawn_epoch)

    def _start(self, stage: str, index: int, spawn_epoch: int) -> None:
        replica = self.coordinator.expect_replica(stage, index, spawn_epoch)
        self.coordinator.tell_node(
            self._nodes.of(replica).rank, StartReplica(stage=stage, replica=index, spawn_epoch=spawn_epoch)
        )

    def _on_which(self, node: Node) -> str:
        return f" on node {node.rank}" if len(self._nodes.present() + self._nodes.absent()) > 1 else ""

    def _lose_node(self, node: Node, why: str) -> None:
        node.present = False
        say(f"node {node.rank} is away: {why}")
        for replica in self._nodes.on(node):
            if replica.alive or replica.state is ReplicaState.WAITING:
                self._forget(replica)
                self.coordinator.replica_away(replica, f"node {node.rank} is away: {why}")
        if not self._launched:
            self._fail(f"Node {node.rank} was lost while the pipeline started: {why}")

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _on_change(self, replica: Replica) -> None:
        if replica.state is ReplicaState.READY:
            say(f"{replica.name} ready in {replica.seconds:.1f} s; {self._progress()}")
        elif replica.state is ReplicaState.DRAINING:
            say(f"{replica.name} drains")
        self._changed.set()

    def _on_end(self, ended: ReplicaEnded) -> None:
        """A process ended."""
        replica = self._replicas.current(ended.stage, ended.replica)
        if replica is not None and replica.spawn_epoch == ended.spawn_epoch and replica.alive:
            self._died(replica, ended.how, ended.log)

    def _forget(self, replica: Replica) -> str:
        """Its process is gone; why it was killed, "" if it was not."""
        process = (replica.stage, replica.index, replica.spawn_epoch)
        self._kill_at.pop(process, None)
        kill = self._killed.pop(process, None)
        return kill.why if kill is not None else ""

    def _died(self, replica: Replica, how: str, log: str) -> None:
        """A replica was lost. If that leaves a stage without any while all start, it ends the launch."""
        why = self._forget(replica)
        wanted = replica.restart_wanted
        self.coordinator.replica_died(replica, f"{why}; {how}" if why else how)
        self._changed.set()
        if self._stop.is_set():
            return
        if wanted:
            say(f"{replica.name} has stopped and is started again")
            return
        if self._culprit is not None and self._culprit[0] is replica:
            self._fail(self._explain(replica, self._culprit[1], log))
            return
        text = self._explain(replica, f"died ({why}; {how})" if why else f"died ({how})", log)
        peers = [other for other in self._replicas if other.stage == replica.stage]
        if not self._launched and not any(other.alive for other in peers):
            self._fail(text)
        elif replica.state is ReplicaState.WAITING:
            delay = max(0.0, replica.restart_at - time.monotonic())
            say(f"{text}\n{replica.name} is started again in {delay:.1f} s")
        else:
            say(f"degraded: {text}")

    def _explain(self, replica: Replica, what: str, log: str) -> str:
        words = self.coordinator.fatal.get(replica.replica_id, "").strip()
        reason = f" {words}" if words else ""
        tail = f"\n--- last lines of its log\n{log}\n---" if log else ""
        return f"{replica.name} {what} while {replica.phase}.{reason}{tail}"

    def _kill(self, replica: Replica, why: str, now: float) -> None:
        process = (replica.stage, replica.index, replica.spawn_epoch)
        self._kill_at.pop(process, None)
        self._killed[process] = Kill(why, now + KILL_SECONDS)
        self.coordinator.tell_node(self._nodes.of(replica).rank, KillReplica(*process))

    def _look(self, now: float) -> None:
        if now > self._looked + LATE_LOOK_SECONDS:
            for node in self._nodes.present():
                node.heard = now
        self._looked = now
        beat = self._pipeline.coordinator.heartbeat_interval
        for node in self._nodes.silent(now, self._pipeline.coordinator.heartbeat_timeout):
            self._lose_node(node, f"silent for {now - node.heard:.1f} s")
        if self._launched and now > self._looking_since + ABSENT_SECONDS:
            for node in self._nodes.absent():
                if any(replica.alive for replica in self._nodes.on(node)):
                    self._lose_node(node, "it has not come back to the new coordinator")
        for replica, why in self._supervision.stuck(now):
            wanted = self._pipeline.coordinator.heartbeat_timeout + KILL_SECONDS
            if self._nodes.of(replica).heard + 3 * beat < now < replica.heard + wanted:
                continue  # maybe it is the link: an order to kill would reach a healthy process once the link is back
            # While all start, the launch ends with a better text.
            if self._launched and (replica.stage, replica.index, replica.spawn_epoch) not in self._killed:
                logger.error("killing %s: %s", replica.name, why)
                self._kill(replica, why, now)
        for replica in self._supervision.drained(now):
            self.coordinator.tell_stop(replica)
            self._kill_at[(replica.stage, replica.index, replica.spawn_epoch)] = now + STOP_SECONDS
        for replica in list(self._replicas):
            process = (replica.stage, replica.index, replica.spawn_epoch)
            if self._kill_at.get(process, now + 1) <= now:
                self._kill(replica, "it did not stop", now)
            kill = self._killed.get(process)
            if kill is not None and kill.until <= now and replica.alive:
                self._died(replica, "its node does not answer", "")
        for replica in self._supervision.due(now):
            if self._nodes.of(replica).present and (not self._stop.is_set() or self.coordinator.state.in_flight):
                self._restart(replica)
        if not (self._launched or self._stop.is_set()):
            self._look_at_launch(now)

    def _restart(self, dead: Replica) -> None:
        say(f"starting {dead.name} again")
        self._start(dead.stage, dead.index, max(dead.epoch + 1, time.time_ns() // 1_000_000))

    # -- launch -------------------------------------------------------------------------------------------------------

    def _look_at_launch(self, now: float) -> None:
        if self._culprit is not None:
            replica, what, until = self._culprit
            if now > until:
                self._fail(self._explain(replica, what, ""))
            return
        missing = [replica for replica in self._replicas.missing() if replica.state is not ReplicaState.DEAD]
        for replica in missing:
            if now > self._began + self._supervision.startup_timeout(replica):
                say(self._progress())
                self._culprit = replica, "is not ready in time", now + LAST_LOG_SECONDS
                self._kill(replica, "", now)
                return
        if not missing:
            self._launched = True
            for node in self._nodes.present():
                self.coordinator.tell_node(node.rank, Launched())
            say(f"ready after {now - self._began:.1f} s, clients connect to {self.coordinator.client_endpoint}")
        elif now >= self._next_report:
            self._next_report = now + PROGRESS_SECONDS
            say(self._progress())

    def _progress(self) -> str:
        replicas = list(self._replicas)
        ready = [replica.name for replica in replicas if replica.state is ReplicaState.READY]
        missing = [f"{replica.name} ({replica.phase})" for replica in replicas if replica.name not in ready]
        away = [f"node {node.rank}" for node in self._nodes.absent()]
        return f"ready: {', '.join(ready) or 'none'}; missing: {', '.join(away + missing) or 'none'}"

    def _fail(self, text: str) -> None:
        self.failure = self.failure or text
        self.stop()
