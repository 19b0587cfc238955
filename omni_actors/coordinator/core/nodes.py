"""Nodes, the processes on them and the places of replicas; the launch as a whole, and which replicas restart.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.config.placement import devices_by_slot, memory_share, node_devices, slot_devices, stage_devices
from omni_actors.coordinator.core.instructions import RememberedReplica, ShowProgress
from omni_actors.coordinator.core.replicas import (
    LAUNCH_TRANSITIONS,
    NODE_TRANSITIONS,
    LaunchEvent,
    LaunchState,
    NodeEvent,
    NodeState,
    Replica,
    ReplicaState,
    ReplicaTable,
)
from omni_actors.errors import InvalidRequest, counted
from omni_actors.host.processes import Backoff
from omni_actors.protocol.fields import ReplicaId
from omni_actors.transitions import advance


@dataclass
class Node:
    """A host with an agent. `heard` is when its agent was last heard of, `devices` the number of its GPUs."""

    rank: int
    state: NodeState = NodeState.EXPECTED
    heard: float = 0.0
    away_since: float = 0.0
    devices: int = 0

    @property
    def present(self) -> bool:
        """Whether its agent is connected."""
        return self.state in (NodeState.PRESENT, NodeState.DRAINING, NodeState.LEAVING)

    @property
    def stays(self) -> bool:
        """Whether its agent is connected and not about to end, so that replicas may start there."""
        return self.state is NodeState.PRESENT

    def on(self, event: NodeEvent) -> None:
        """Enter the state that follows."""
        self.state = advance(NODE_TRANSITIONS, self.state, event)


@dataclass(frozen=True)
class Takeover:
    """Consequences of a node's hello."""

    adopt: list[ReplicaId]  # they run, and will register
    start: list[Replica]
    ended: list[Replica]  # believed to run, and do not
    kill: list[ReplicaId]  # they run, and the pipeline does not need them


def silent(nodes: Iterable[Node], replicas: ReplicaTable, now: float, seconds: float) -> list[Node]:
    """Nodes that were silent for `seconds`, neither of their agents nor of any process on them.

    An agent that was stopped for a while does not take along the stages that work. Node 0 is never silent: if its
    launcher ends, the coordinator ends too, and no network link is between them.
    """
    found = []
    for node in nodes:
        heard = [replica.heard for replica in replicas.on(node.rank) if replica.alive]
        if node.present and node.rank > 0 and max([node.heard, *heard]) + seconds < now:
            found.append(node)
    return found


def take_over(replicas: Iterable[Replica], running: Iterable[ReplicaId]) -> Takeover:
    """Decide about the `running` processes of a node that has come or come back; `replicas` are placed there."""
    listed = {process.name: process for process in running}
    adopt, start, ended = [], [], []
    for replica in replicas:
        process = listed.pop(replica.name, None)
        if process is not None and not (process == replica.process and replica.alive):
            # It counted as lost, or is older than this coordinator.
            adopt.append(process)
        elif process is None and (replica.spawn_epoch == 0 or replica.left_with_node):
            start.append(replica)
        elif process is None and replica.alive:
            ended.append(replica)
    return Takeover(adopt, start, ended, list(listed.values()))


MAXIMUM_BACKOFF = 30.0  # seconds
FRUITLESS = 10  # times `restarts`: losses in a row of a replica that becomes ready and finishes no request


class RestartHistory:
    """Decides whether one replica restarts, and after how long. Losses of healthy processes are no reason to stop.

    A series of restarts ends when the replica becomes ready: at most `restarts` of them start a process that does not.
    A replica that becomes ready, but is lost again and again before it has finished a request, is given up as well,
    after `FRUITLESS` times as many losses: that many are possible if something else kills it.
    """

    def __init__(self, first: float, restarts: int, window: float) -> None:
        self._starts = Backoff(first, MAXIMUM_BACKOFF, restarts, window)
        self._fruitless = Backoff(first, first, FRUITLESS * restarts, FRUITLESS * window)

    def next(self, now: float, was_ready: bool, productive: bool) -> float | None:
        """Count a loss and return the seconds until the restart; `None` for no restart."""
        delay: float | None = 0.0
        if was_ready:
            self._starts.reset()
            if productive:
                self._fruitless.reset()
            delay = self._fruitless.next(now)
        after = self._starts.next(now)
        return None if delay is None or after is None else max(delay, after)

    @property
    def restarts(self) -> int:
        """Restarts that count towards one of the limits."""
        return max(self._starts.restarts, self._fruitless.restarts)


class HealthPolicy:
    """Keeps the restart history and the signs of life of all replicas."""

    def __init__(self, pipeline: PipelineConfig, replicas: ReplicaTable) -> None:
        self._pipeline = pipeline
        self._replicas = replicas
        self._histories: dict[tuple[str, int], RestartHistory] = {}

    def spawned(self, replica: Replica, now: float) -> None:
        """Start all clocks of a process that was started now."""
        replica.spawned = replica.heard = replica.moved = now

    def beat(self, replica: Replica, progress: int, now: float) -> None:
        """Take a heartbeat with the progress of the engine loop."""
        replica.heard = now
        if progress != replica.progress:
            replica.progress, replica.moved = progress, now

    def plan(self, replica: Replica, now: float) -> bool:
        """Decide whether a lost replica restarts, at `replica.restart_at`. Call it before the replica leaves its state.

        A restart that an operator asked for does not count.
        """
        delay: float | None = 0.0
        if not replica.orders.restart:
            stage, window = self._pipeline.stage(replica.stage), self._pipeline.coordinator.restart_window
            history = self._histories.setdefault(
                (replica.stage, replica.index), RestartHistory(stage.restart_backoff, stage.restarts, window)
            )
            was_ready = replica.state in (ReplicaState.READY, ReplicaState.DRAINING)
            delay = history.next(now, was_ready, replica.productive)
        replica.restart_at = now + (delay or 0.0)
        return delay is not None

    def forget(self, replica: Replica) -> None:
        """Forget the restarts of a replica."""
        self._histories.pop((replica.stage, replica.index), None)

    def restarts(self, replica: Replica) -> int:
        """Restarts of a replica that count towards its limit."""
        history = self._histories.get((replica.stage, replica.index))
        return history.restarts if history is not None else 0

    def due(self, now: float) -> list[Replica]:
        """Replicas whose restart is due."""
        return [
            replica for replica in self._replicas if replica.state is ReplicaState.WAITING and replica.restart_at <= now
        ]

    def drained(self, now: float) -> list[Replica]:
        """Replicas that drain for a restart or to leave, and are empty or have drained for too long."""
        return [
            replica
            for replica in self._replicas
            if replica.state is ReplicaState.DRAINING
            and (replica.orders.restart or replica.leaving)
            and not replica.stopping
            and (not replica.requests or replica.orders.drain_until <= now)
        ]

    def stuck(self, now: float) -> list[tuple[Replica, str]]:
        """Replicas whose process lives but does nothing, each with the reason."""
        return [(replica, why) for replica in self._replicas if (why := self._why_stuck(replica, now))]

    def _why_stuck(self, replica: Replica, now: float) -> str:
        stage, coordinator = self._pipeline.stage(replica.stage), self._pipeline.coordinator
        if replica.state in (ReplicaState.STARTING, ReplicaState.LOADING):
            limit = self.startup_timeout(replica)
            return f"not ready after {limit:g} s" if now > replica.spawned + limit else ""
        if replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            return ""
        if now > replica.heard + coordinator.heartbeat_timeout:
            return f"no sign of life for {now - replica.heard:.1f} s"
        if replica.requests and now > replica.moved + stage.stall_timeout:
            return f"no progress for {now - replica.moved:.1f} s with {counted(len(replica.requests), 'request')}"
        return ""

    def startup_timeout(self, replica: Replica) -> float:
        """Seconds that a replica may take from its start until it is ready."""
        own = self._pipeline.stage(replica.stage).startup_timeout
        return own if own is not None else self._pipeline.coordinator.startup_timeout


REDRAW_SECONDS = 0.5  # between two progress reports on a terminal
PROGRESS_SECONDS = 5.0  # until the first one elsewhere; each further one takes twice as long
STILL_SECONDS = 60.0  # after which the same is said again


@dataclass(frozen=True)
class Culprit:
    """A replica that fails the launch. Its log is awaited until `until`."""

    replica: Replica
    what: str
    until: float


def explain_end(replica: Replica, what: str, log: str) -> str:
    """Say what happened to a replica, with its last words and the end of its log if there are any."""
    words = f" {replica.last_words.strip()}" if replica.last_words else ""
    tail = f"\n--- last lines of its log\n{log}\n---" if log else ""
    return f"{replica.name} {what} while {replica.phase}.{words}{tail}"


class Launch:
    """The launch of a pipeline. Timeouts count from when it `began`, the times that are shown from `started`."""

    def __init__(
        self,
        replicas: ReplicaTable,
        nodes: Mapping[int, Node],
        health: HealthPolicy,
        began: float,
        now: float,
        started: float | None = None,
    ) -> None:
        self._replicas = replicas
        self._nodes = nodes
        self._health = health
        self.began = began
        self._started = began if started is None else started
        self._next_redraw = now + REDRAW_SECONDS
        self._next_line = now + PROGRESS_SECONDS
        self._line_seconds = PROGRESS_SECONDS
        self._told = ""  # as missing, by the last line
        self.state = LaunchState.STARTING
        self.culprit: Culprit | None = None
        self.failure = ""  # why the launch failed

    @property
    def starting(self) -> bool:
        """Whether the first start is still going on."""
        return self.state is LaunchState.STARTING

    @property
    def serving(self) -> bool:
        """Whether every replica has been ready, and requests are still answered."""
        return self.state in (LaunchState.LAUNCHED, LaunchState.DRAINING)

    @property
    def ending(self) -> bool:
        """Whether requests are no longer answered and processes shut down."""
        return self.state in (LaunchState.STOPPING, LaunchState.FAILED)

    @property
    def wanted(self) -> bool:
        """Whether the pipeline is meant to go on."""
        return self.state in (LaunchState.STARTING, LaunchState.LAUNCHED)

    def on(self, event: LaunchEvent) -> None:
        """Enter the state that follows."""
        self.state = advance(LAUNCH_TRANSITIONS, self.state, event)

    def missing(self) -> list[Replica]:
        """Replicas that the launch waits for: those that are not ready and may still become so."""
        return [replica for replica in self._replicas.missing() if replica.state is not ReplicaState.DEAD]

    def overdue(self, now: float) -> Replica | None:
        """The first replica that is not ready within its startup timeout."""
        for replica in self.missing():
            if now > self.began + self._health.startup_timeout(replica):
                return replica
        return None

    def reports(self, now: float) -> list[ShowProgress]:
        """What to show of the progress now, if anything; counts as shown."""
        late = now - self._next_line
        is_line = late >= 0 and (late >= STILL_SECONDS or self._missing() != self._told)
        if is_line:
            self._told = self._missing()
            self._line_seconds *= 2
            self._next_line = now + self._line_seconds
        elif now < self._next_redraw:
            return []
        self._next_redraw = now + REDRAW_SECONDS
        return [ShowProgress(self.progress(now), is_line)]

    def after(self, now: float) -> float:
        """Seconds since the launcher's process started."""
        return now - self._started

    def progress(self, now: float) -> str:
        """Say how many replicas are ready, how long that took, and what is missing."""
        ready = sum(replica.ready for replica in self._replicas)
        count = ready + len(self._replicas.missing())
        return f"{ready} of {count} ready after {self.after(now):.0f} s; missing: {self._missing() or 'none'}"

    def _missing(self) -> str:
        away = [f"node {rank}" for rank, node in self._nodes.items() if not node.present]
        return ", ".join([*away, *(f"{replica.name} ({replica.phase})" for replica in self._replicas.missing())])


ROUNDING = 1e-9  # of sums of shares


class Seat(NamedTuple):
    """A node, and which of the stage's GPUs a replica takes there (`config.devices.slot_devices`)."""

    node: int
    slot: int


class Seats:
    """The seats of all replicas and spares, by stage and number."""

    def __init__(self, pipeline: PipelineConfig, replicas: Iterable[RememberedReplica]) -> None:
        self._pipeline = pipeline
        self._seats = {(item.stage, item.index): Seat(item.node, item.slot) for item in replicas}

    def __getitem__(self, place: tuple[str, int]) -> Seat:
        return self._seats[place]

    def nodes(self) -> set[int]:
        """Ranks of the nodes on which replicas are placed."""
        return {seat.node for seat in self._seats.values()}

    def take(self, stage: str, nodes: Iterable[Node]) -> int:
        """Seat one more replica of a stage on one of these nodes, which are present, and return its number.

        Raises:
            InvalidRequest: none of them has room; says why, for each.
        """
        seat = self._choose(stage, nodes)
        index = next(number for number in itertools.count() if (stage, number) not in self._seats)
        self._seats[(stage, index)] = seat
        return index

    def move(self, stage: str, index: int, nodes: Iterable[Node]) -> Seat:
        """Seat a replica on one of these nodes instead of its own. Raises `InvalidRequest` as `take`."""
        former = self._seats.pop((stage, index))
        try:
            former = self._choose(stage, nodes)
        finally:
            self._seats[(stage, index)] = former
        return former

    def _choose(self, stage: str, nodes: Iterable[Node]) -> Seat:
        """A free seat. The stage's own nodes come first, of those the one with the fewest of its replicas."""
        config, reasons = self._pipeline.stage(stage), []
        counts = collections.Counter(seat.node for (name, _), seat in self._seats.items() if name == stage)
        for node in sorted(nodes, key=lambda node: (node.rank not in config.nodes, counts[node.rank], node.rank)):
            seat = self._find(config, node)
            if isinstance(seat, Seat):
                return seat
            reasons.append(seat)
        raise InvalidRequest(
            f"No node has room for one more replica of {stage}: {'; '.join(reasons) or 'none is present'}.",
            hint="Scale another stage down, let a node with free GPUs join, or lower engine.gpu_memory_utilization "
            "and start the pipeline again.",
            stage=stage,
        )

    def leave(self, stage: str, index: int) -> None:
        """Free the seat of a replica that is gone for good."""
        del self._seats[(stage, index)]

    def _find(self, stage: StageConfig, node: Node) -> Seat | str:
        """The emptiest slot of a node with room for a replica, or why there is none."""
        highest = max(stage_devices(stage, node.devices), default=-1)
        if highest >= node.devices:
            has = node_devices(node.devices)
            return f"stages.{stage.name}.devices names GPU {highest}, and node {node.rank} has {has}"
        count, reasons = len(devices_by_slot(stage, node.devices)), []
        taken = collections.Counter(
            seat.slot % count for (name, _), seat in self._seats.items() if (name, seat.node) == (stage.name, node.rank)
        )
        for slot in sorted(range(count), key=lambda slot: (taken[slot], slot)):
            reason = self._full(stage, slot, node)
            if not reason:
                return Seat(node.rank, slot)
            reasons.append(reason)
        return "; ".join(reasons)

    def _full(self, stage: StageConfig, slot: int, node: Node) -> str:
        """Why a slot has no room for one more replica, by the shares that vLLM takes of its GPUs; "" if it has."""
        share = memory_share(stage)
        if share is None:
            return ""
        for device in slot_devices(stage, slot, node.devices):
            users = self._users(node, device)
            if sum(users.values()) + share > 1 + ROUNDING:
                listed = ", ".join(f"{name} {taken:g}" for name, taken in users.items())
                where = f"GPU {device} of node {node.rank}"
                return f"{where} is promised to {listed or 'nothing'}, and a {stage.name} takes {share:g} of its memory"
        return ""

    def _users(self, node: Node, device: int) -> dict[str, float]:
        """The shares that the replicas on a GPU take, by their names."""
        users = {}
        for (name, index), seat in self._seats.items():
            stage = self._pipeline.stage(name)
            share = memory_share(stage)
            here = node.rank == seat.node and device in slot_devices(stage, seat.slot, node.devices)
            if here and share is not None:
                users[f"{name}/{index}"] = share
        return users
