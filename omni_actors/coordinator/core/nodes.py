"""Nodes and the places of replicas on them; the launch as a whole, and which replicas restart.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass

from msgspec import Struct

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.config.placement import devices_by_slot, memory_share, node_devices, slot_devices, stage_devices
from omni_actors.coordinator.core.instructions import ShowProgress
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
    RestartHistory,
    Seat,
)
from omni_actors.errors import InvalidRequest, advance, counted


class Node(Struct):
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


# -- restarts and signs of life ---------------------------------------------------------------------------------------


def plan_restart(pipeline: PipelineConfig, replica: Replica, now: float) -> bool:
    """Decide whether a lost replica restarts, at `replica.restart_at`. Call it before the replica leaves its state.

    A restart that an operator asked for does not count.
    """
    delay: float | None = 0.0
    if not replica.orders.restart:
        stage, window = pipeline.stage(replica.stage), pipeline.coordinator.restart_window
        replica.history = replica.history or RestartHistory(stage.restart_backoff, stage.restarts, window)
        was_ready = replica.state in (ReplicaState.READY, ReplicaState.DRAINING)
        delay = replica.history.next(now, was_ready, replica.productive)
    replica.restart_at = now + (delay or 0.0)
    return delay is not None


def why_stuck(pipeline: PipelineConfig, replica: Replica, now: float) -> str:
    """Say why a replica whose process lives does nothing; "" if nothing is known against it."""
    if replica.state in (ReplicaState.STARTING, ReplicaState.LOADING):
        limit = startup_timeout(pipeline, replica)
        return f"not ready after {limit:g} s" if now > replica.spawned + limit else ""
    if replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
        return ""
    if now > replica.heard + pipeline.coordinator.heartbeat_timeout:
        return f"no sign of life for {now - replica.heard:.1f} s"
    if replica.requests and now > replica.moved + pipeline.stage(replica.stage).stall_timeout:
        return f"no progress for {now - replica.moved:.1f} s with {counted(len(replica.requests), 'request')}"
    return ""


def startup_timeout(pipeline: PipelineConfig, replica: Replica) -> float:
    """Seconds that a replica may take from its start until it is ready."""
    own = pipeline.stage(replica.stage).startup_timeout
    return own if own is not None else pipeline.coordinator.startup_timeout


# -- the launch -------------------------------------------------------------------------------------------------------

REDRAW_SECONDS = 0.5  # between two progress reports on a terminal
PROGRESS_SECONDS = 5.0  # until the first one elsewhere; each further one takes twice as long
STILL_SECONDS = 60.0  # after which the same is said again


class Culprit(Struct, frozen=True):
    """A replica that fails the launch. Its log is awaited until `until`."""

    replica: Replica
    what: str
    until: float


def explain_end(replica: Replica, what: str, log: str) -> str:
    """Say what happened to a replica, with its last words and the end of its log if there are any."""
    words = f" {replica.last_words.strip()}" if replica.last_words else ""
    tail = f"\n--- last lines of its log\n{log}\n---" if log else ""
    return f"{replica.name} {what} while {replica.phase}.{words}{tail}"


@dataclass(eq=False)
class Launch:
    """The launch of a pipeline. Timeouts count from when it `began`, the times that are shown from `started`."""

    replicas: ReplicaTable
    nodes: Mapping[int, Node]
    pipeline: PipelineConfig
    began: float
    now: InitVar[float]
    started: float

    def __post_init__(self, now: float) -> None:
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
        return [replica for replica in self.replicas.missing() if replica.state is not ReplicaState.DEAD]

    def overdue(self, now: float) -> Replica | None:
        """The first replica that is not ready within its startup timeout."""
        late = (one for one in self.missing() if now > self.began + startup_timeout(self.pipeline, one))
        return next(late, None)

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
        return now - self.started

    def progress(self, now: float) -> str:
        """Say how many replicas are ready, how long that took, and what is missing."""
        ready = sum(replica.ready for replica in self.replicas)
        count = ready + len(self.replicas.missing())
        return f"{ready} of {count} ready after {self.after(now):.0f} s; missing: {self._missing() or 'none'}"

    def _missing(self) -> str:
        away = [f"node {rank}" for rank, node in self.nodes.items() if not node.present]
        return ", ".join([*away, *(f"{replica.name} ({replica.phase})" for replica in self.replicas.missing())])


# -- seats ------------------------------------------------------------------------------------------------------------

ROUNDING = 1e-9  # of sums of shares


Seats = dict[tuple[str, int], Seat]  # of all replicas and spares, by stage and number


def find_seat(pipeline: PipelineConfig, seats: Seats, stage: str, nodes: Iterable[Node]) -> Seat:
    """A free seat for one more replica of a stage on one of these nodes, which are present.

    The stage's own nodes come first, of those the one with the fewest of its replicas.

    Raises:
        InvalidRequest: none of them has room; says why, for each.
    """
    config, reasons = pipeline.stage(stage), []
    counts = collections.Counter(seat.node for (name, _), seat in seats.items() if name == stage)
    for node in sorted(nodes, key=lambda node: (node.rank not in config.nodes, counts[node.rank], node.rank)):
        seat = _seat_on(pipeline, seats, config, node)
        if isinstance(seat, Seat):
            return seat
        reasons.append(seat)
    raise InvalidRequest(
        f"No node has room for one more replica of {stage}: {'; '.join(reasons) or 'none is present'}.",
        hint="Scale another stage down, let a node with free GPUs join, or lower engine.gpu_memory_utilization "
        "and start the pipeline again.",
        stage=stage,
    )


def _seat_on(pipeline: PipelineConfig, seats: Seats, stage: StageConfig, node: Node) -> Seat | str:
    """The emptiest slot of a node with room for a replica, or why there is none."""
    highest = max(stage_devices(stage, node.devices), default=-1)
    if highest >= node.devices:
        has = node_devices(node.devices)
        return f"stages.{stage.name}.devices names GPU {highest}, and node {node.rank} has {has}"
    count, reasons = len(devices_by_slot(stage, node.devices)), []
    taken = collections.Counter(
        seat.slot % count for (name, _), seat in seats.items() if (name, seat.node) == (stage.name, node.rank)
    )
    for slot in sorted(range(count), key=lambda slot: (taken[slot], slot)):
        reason = _why_full(pipeline, seats, stage, slot, node)
        if not reason:
            return Seat(node.rank, slot)
        reasons.append(reason)
    return "; ".join(reasons)


def _why_full(pipeline: PipelineConfig, seats: Seats, stage: StageConfig, slot: int, node: Node) -> str:
    """Why a slot has no room for one more replica, by the shares that vLLM takes of its GPUs; "" if it has."""
    share = memory_share(stage)
    for device in slot_devices(stage, slot, node.devices) if share is not None else ():
        users = {}  # the shares of the replicas on this GPU, by their names
        for (name, index), seat in seats.items():
            other = pipeline.stage(name)
            taken = memory_share(other)
            here = node.rank == seat.node and device in slot_devices(other, seat.slot, node.devices)
            if here and taken is not None:
                users[f"{name}/{index}"] = taken
        if share is not None and sum(users.values()) + share > 1 + ROUNDING:
            listed = ", ".join(f"{name} {taken:g}" for name, taken in users.items())
            where = f"GPU {device} of node {node.rank}"
            return f"{where} is promised to {listed or 'nothing'}, and a {stage.name} takes {share:g} of its memory"
    return ""
