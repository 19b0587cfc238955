"""The replicas of a pipeline: their state, and the choice of the one that takes the next request.

With the transition tables of replicas, nodes, the launch and requests: what is not in them cannot happen.

`scripts/state_diagrams.py` draws them into `docs/architecture.md`.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from omni_actors.errors import advance
from omni_actors.host.processes import Backoff
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import ArenaAddress, Peer, Ready, StageStatus
from omni_actors.protocol.payloads import EngineFacts


class ReplicaState(enum.StrEnum):
    """Where a replica is between the start of its process and the end of its last restart."""

    STARTING = "starting"  # spawned, has not said hello
    LOADING = "loading"  # said hello, loads its model
    READY = "ready"
    DRAINING = "draining"  # finishes what it holds, accepts nothing new
    WAITING = "waiting"  # its process is gone; another one starts after the back-off
    DEAD = "dead"  # its process is gone, and no restart is planned


# What can happen to a replica. After "lost" a restart follows, after "given_up" none; an operator has it "stay" after
# all, or has one "revived" that was given up; "spawned" is a new process, with a new epoch.
ReplicaEvent = Literal["hello", "ready", "drain", "stay", "lost", "given_up", "revived", "spawned"]


_ALIVE = (ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.READY, ReplicaState.DRAINING)

REPLICA_TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (ReplicaState.STARTING, "hello"): ReplicaState.LOADING,
    (ReplicaState.LOADING, "ready"): ReplicaState.READY,
    (ReplicaState.READY, "drain"): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, "drain"): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, "stay"): ReplicaState.READY,
    **{(state, "lost"): ReplicaState.WAITING for state in _ALIVE},
    **{(state, "given_up"): ReplicaState.DEAD for state in (*_ALIVE, ReplicaState.WAITING)},
    (ReplicaState.WAITING, "spawned"): ReplicaState.STARTING,
    (ReplicaState.DEAD, "revived"): ReplicaState.WAITING,
}


class NodeState(enum.StrEnum):
    """Whether a node's agent is there."""

    EXPECTED = "expected"  # the pipeline needs it; it has not said hello to this coordinator
    PRESENT = "present"
    DRAINING = "draining"  # it stops: its replicas finish what they hold, and none starts there
    LEAVING = "leaving"  # that is done, and it was told to end
    AWAY = "away"  # it left or fell silent; its replicas count as dead until it is back


# What can happen to a node: "released" once nothing is left to finish.
NodeEvent = Literal["hello", "drain", "released", "lost"]


NODE_TRANSITIONS: dict[tuple[NodeState, NodeEvent], NodeState] = {
    **{(state, "hello"): NodeState.PRESENT for state in NodeState},
    (NodeState.PRESENT, "drain"): NodeState.DRAINING,
    (NodeState.DRAINING, "released"): NodeState.LEAVING,
    **{(state, "lost"): NodeState.AWAY for state in NodeState},
}


class LaunchState(enum.StrEnum):
    """Where the whole pipeline is between its start and its end."""

    STARTING = "starting"
    LAUNCHED = "launched"  # every replica has been ready, under this coordinator or one before it
    DRAINING = "draining"  # no new requests; those in flight may finish
    STOPPING = "stopping"  # requests are answered, processes are shut down, nothing starts again
    FAILED = "failed"  # as stopping, and the launcher exits with an error


# What can happen to the pipeline: a signal or an operator's shutdown is a "stop"; it has come to its "end" when nothing
# is in flight, or the drain timeout has passed.
LaunchEvent = Literal["all_ready", "stop", "fail", "end"]


LAUNCH_TRANSITIONS: dict[tuple[LaunchState, LaunchEvent], LaunchState] = {
    (LaunchState.STARTING, "all_ready"): LaunchState.LAUNCHED,
    (LaunchState.STARTING, "fail"): LaunchState.FAILED,
    (LaunchState.STARTING, "stop"): LaunchState.STOPPING,
    (LaunchState.LAUNCHED, "stop"): LaunchState.DRAINING,
    (LaunchState.STARTING, "end"): LaunchState.STOPPING,
    (LaunchState.LAUNCHED, "end"): LaunchState.STOPPING,
    (LaunchState.DRAINING, "end"): LaunchState.STOPPING,
}


class RequestState(enum.StrEnum):
    """Where a request is between its admission and its terminal message."""

    QUEUED = "queued"  # admitted; waits for a slot
    WAITING = "waiting"  # has a slot; a stage that it needs is not ready
    RUNNING = "running"  # bound to one replica of every stage of its route
    DONE = "done"
    FAILED = "failed"


# What can happen to a request: a slot is "granted"; a replica of its route was lost, and it is "replayed" by a new
# attempt.
RequestEvent = Literal["granted", "opened", "replayed", "completed", "failed"]


REQUEST_TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.QUEUED, "granted"): RequestState.WAITING,
    (RequestState.WAITING, "opened"): RequestState.RUNNING,
    (RequestState.RUNNING, "replayed"): RequestState.WAITING,
    (RequestState.RUNNING, "completed"): RequestState.DONE,
    (RequestState.RUNNING, "failed"): RequestState.FAILED,
    (RequestState.WAITING, "failed"): RequestState.FAILED,
    (RequestState.QUEUED, "failed"): RequestState.FAILED,
}


# A stage that is ended by SIGTERM while it loads exits with 128 + its number.
_FROM_OUTSIDE = {0, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT, -signal.SIGHUP}


class Evidence(enum.IntEnum):
    """How much one loss counts. Two kills count as much as one crash."""

    NONE = 0  # its node was lost, it registered again, or its restart was asked for
    KILLED = 1  # by an operator, or by the kernel because memory ran out, which a request may have caused
    CRASHED = 2  # it failed by itself, or hung


def evidence_of(exit_code: int | None) -> Evidence:
    """Judge the end of a process. The code is that of `multiprocessing`; `None` if it is not known."""
    return Evidence.KILLED if exit_code is None or exit_code in _FROM_OUTSIDE else Evidence.CRASHED


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


NO_FACTS = EngineFacts()  # until a replica has reported them


class Seat(NamedTuple):
    """A node, and which of the stage's GPUs a replica takes there (`config.placement.slot_devices`)."""

    node: int
    slot: int


class ProcessOrders(Struct):
    """What was ordered of a process. Holds however often the process registers."""

    drain: bool = False
    restart: bool = False
    leave: bool = False  # its stage is to have fewer replicas: it ends once it is empty, and no other process follows
    drain_until: float = math.inf
    stop_until: float = math.inf  # it was asked to stop, and is killed if it has not ended by then
    kill_until: float = math.inf  # it was killed, and its node should have reported its end by then
    kill_reason: str = ""

    def stay(self) -> None:
        """Take back that it is to leave."""
        self.leave = self.drain = False
        self.drain_until = math.inf

    @property
    def killed(self) -> bool:
        """Whether the process was killed and its end has not been reported."""
        return self.kill_until < math.inf

    def kill(self, reason: str, until: float) -> None:
        """Note that the process was killed and should be gone by `until`."""
        self.stop_until, self.kill_until, self.kill_reason = math.inf, until, reason

    def clear_kill(self) -> str:
        """Forget the orders to end, as the process is gone. Returns the reason for a kill, "" if there was none."""
        reason, self.kill_reason = self.kill_reason, ""
        self.stop_until = self.kill_until = math.inf
        return reason


class Replica(Struct):
    """One process of a stage. Each registration of it with the coordinator has an epoch.

    A new process gets the next epoch, and so does a process that registers again. `spawn_epoch` is the epoch with which
    the process was started, by which its node knows it; 0 while no process is known.
    """

    stage: str
    index: int
    epoch: int
    spawn_epoch: int = 0
    node: int = 0  # rank of the node that runs it
    slot: int = 0  # which of its stage's GPUs it takes there
    spare: bool = False  # takes no requests until it is given the place of another
    joining: bool = False  # its stage was given one more replica, and this one has not been ready yet
    state: ReplicaState = ReplicaState.STARTING
    inbox: str = ""
    remote: str = ""  # its inbox for other nodes
    arena: ArenaAddress | None = None
    pid: int = 0
    phase: str = "starting process"
    facts: EngineFacts = NO_FACTS
    start_seconds: float = 0.0  # that it took to be ready
    progress: int = -1
    counts: dict[str, int] = {}
    requests: set[str] = set()  # bound to it; change it with `hold` and `release`
    computing: set[str] = set()  # those of them that this stage has not finished
    productive: bool = False  # this process has finished a request
    congested: bool = False  # it has granted no credit for more input
    reserved: bool = False  # kept for suspects
    restarted: int = 0  # how often it was given another process, for whatever reason
    history: RestartHistory | None = None  # of its losses, from the first one on
    # Times of one monotonic clock: the process was started, was last heard of, its engine loop last advanced.
    spawned: float = 0.0
    heard: float = 0.0
    moved: float = 0.0
    restart_at: float = 0.0
    orders: ProcessOrders = msgspec.field(default_factory=ProcessOrders)
    stopping: bool = False  # this registration was asked to end
    left_with_node: bool = False  # it is dead because its node is away
    last_words: str = ""  # why it ends, in its own words
    device_failed: bool = False  # it ends because its GPU or one of its workers failed

    @property
    def replica_id(self) -> ReplicaId:
        """Its identity in its present epoch."""
        return ReplicaId(self.stage, self.index, self.epoch)

    @property
    def process(self) -> ReplicaId:
        """Its identity in the epoch with which its process was started."""
        return ReplicaId(self.stage, self.index, self.spawn_epoch)

    @property
    def name(self) -> str:
        """Its name in logs and commands, as talker/0."""
        return f"{self.stage}/{self.index}"

    @property
    def seat(self) -> Seat:
        """Where it runs."""
        return Seat(self.node, self.slot)

    def inbox_for(self, node: int) -> str:
        """Where senders on `node` reach its inbox: over the network only from another one."""
        return self.inbox if node == self.node or not self.remote else self.remote

    @property
    def alive(self) -> bool:
        """Whether its process runs, as far as is known."""
        return self.state not in (ReplicaState.WAITING, ReplicaState.DEAD)

    @property
    def registered(self) -> bool:
        """Whether its process has said hello and runs."""
        return self.alive and self.state is not ReplicaState.STARTING

    @property
    def ready(self) -> bool:
        """Whether its model is loaded and it is not draining."""
        return self.state is ReplicaState.READY

    @property
    def serves(self) -> bool:
        """Whether it is ready and no spare."""
        return self.state is ReplicaState.READY and not self.spare

    @property
    def takes_requests(self) -> bool:
        """Whether any request may be bound to it."""
        return self.state is ReplicaState.READY and not self.spare and not self.reserved

    @property
    def leaving(self) -> bool:
        """Whether it ends for good as soon as it is empty."""
        return self.orders.leave

    def on(self, event: ReplicaEvent) -> None:
        """Enter the state that follows."""
        self.state = advance(REPLICA_TRANSITIONS, self.state, event)

    def beat(self, progress: int, now: float) -> None:
        """Take a heartbeat with the progress of the engine loop."""
        self.heard = now
        if progress != self.progress:
            self.progress, self.moved = progress, now

    def should_stop(self, now: float) -> bool:
        """Whether it drains for a restart or to leave, and is empty or has drained for too long."""
        asked = self.state is ReplicaState.DRAINING and (self.orders.restart or self.leaving) and not self.stopping
        return asked and (not self.requests or self.orders.drain_until <= now)

    def become_ready(self, ready: Ready) -> None:
        """Take what a replica reports when its model is loaded."""
        self.joining, self.phase, self.facts, self.start_seconds = False, "ready", ready.facts, ready.seconds
        self.on("ready")

    def hold(self, request_id: str) -> None:
        """Bind a request to it."""
        self.requests.add(request_id)
        self.computing.add(request_id)

    def finished(self, request_id: str) -> None:
        """This stage has computed a request, which may still need it."""
        self.computing.discard(request_id)
        self.productive = True

    def release(self, request_id: str) -> None:
        """Unbind a request. Unknown ids are ignored."""
        self.requests.discard(request_id)
        self.computing.discard(request_id)

    def release_all(self) -> None:
        """Unbind all requests."""
        self.requests.clear()
        self.computing.clear()

    def status(self) -> StageStatus:
        """What operators see of it."""
        return StageStatus(
            self.stage,
            self.index,
            self.epoch,
            self.state,
            self.pid,
            len(self.requests),
            dict(self.counts),
            self.spare,
            self.start_seconds,
            self.node,
            self.joining,
            self.leaving,
        )


class ReplicaTable:
    """All replicas of a pipeline, by stage and index."""

    def __init__(self) -> None:
        self._by_stage: dict[str, dict[int, Replica]] = {}

    def __iter__(self) -> Iterator[Replica]:
        """Iterate in order of the stages, those of a stage in order of their numbers."""
        return (replica for replicas in self._by_stage.values() for replica in replicas.values())

    def add(
        self,
        stage: str,
        index: int,
        epoch: int,
        spawn_epoch: int | None = None,
        node: int = 0,
        slot: int = 0,
        now: float = 0.0,
    ) -> Replica:
        """Add a new registration of a replica, in place of the one before. `spawn_epoch`: `epoch` unless given."""
        others = self._by_stage.setdefault(stage, {})
        before = others.get(index)
        spawn_epoch = epoch if spawn_epoch is None else spawn_epoch
        replica = others[index] = Replica(stage, index, epoch, spawn_epoch, node, slot)
        replica.spawned = replica.heard = replica.moved = now
        if before is None:
            self._by_stage[stage] = dict(sorted(others.items()))
            return replica
        replica.spare, replica.joining, replica.history = before.spare, before.joining, before.history
        replica.restarted = before.restarted + (0 < before.spawn_epoch < spawn_epoch)
        if before.spawn_epoch == spawn_epoch:  # the same process
            replica.orders, replica.productive = before.orders, before.productive
        return replica

    def remove(self, replica: Replica) -> None:
        """Forget a replica that is gone for good."""
        del self._by_stage[replica.stage][replica.index]

    def of(self, stage: str) -> list[Replica]:
        """The replicas of a stage."""
        return list(self._by_stage.get(stage, {}).values())

    def on(self, rank: int) -> list[Replica]:
        """The replicas that are placed on a node."""
        return [replica for replica in self if replica.node == rank]

    def current(self, stage: str, index: int) -> Replica | None:
        """The replica in its present epoch."""
        return self._by_stage.get(stage, {}).get(index)

    def loaded(self, stage: str) -> Replica | None:
        """A replica of a stage that has reported its model's facts, which are those of all, or `None`."""
        return next(
            (replica for replica in self._by_stage.get(stage, {}).values() if replica.facts is not NO_FACTS), None
        )

    def at(self, replica_id: ReplicaId) -> Replica | None:
        """The replica in exactly this epoch; `None` for unknown ones and former epochs."""
        replica = self.current(replica_id.stage, replica_id.replica)
        return replica if replica is not None and replica.epoch == replica_id.epoch else None

    def choose(self, stage: str, beside: Collection[int] = ()) -> Replica | None:
        """The ready replica of a stage that computes, then holds, the fewest requests; `None` if none is ready.

        Those that take input come first.

        Args:
            beside: nodes; among replicas that compute as few requests, one on these is preferred.
        """
        return min(
            filter(attrgetter("takes_requests"), self._by_stage.get(stage, {}).values()),
            key=lambda one: (one.congested, len(one.computing), one.node not in beside, len(one.requests), one.index),
            default=None,
        )

    def recoverable(self, stage: str) -> bool:
        """Whether some replica of a stage is ready or will be: others are dead, drain without a restart, or leave."""
        return any(
            not replica.leaving
            and (replica.state not in (ReplicaState.DEAD, ReplicaState.DRAINING) or replica.orders.restart)
            for replica in self._by_stage.get(stage, {}).values()
        )

    def places(self, stage: str) -> list[Replica]:
        """The replicas that a stage is to have, in order of their numbers: without spares and those that leave."""
        return [replica for replica in self.of(stage) if not replica.spare and not replica.leaving]

    def fill_places(self, stage: str) -> list[tuple[Replica, Replica]]:
        """Let ready spares take the places of replicas that are not ready, which become spares. Returns these pairs.

        No replica takes its place back when it is ready again: each loss moves requests once.
        """
        replicas = self.of(stage)
        spares = [replica for replica in replicas if replica.spare and replica.ready]
        absent = [replica for replica in self.places(stage) if not replica.ready]
        pairs = list(zip(spares, absent, strict=False))
        for spare, replaced in pairs:
            spare.spare = False
            replaced.spare = True
        return pairs

    @property
    def healthy(self) -> bool:
        """Whether every replica takes requests, apart from spares and those that leave or are still to come."""
        absent = [replica for replica in self if not (replica.ready or replica.spare or replica.leaving)]
        return all(replica.joining and replica.state is not ReplicaState.DEAD for replica in absent)

    @property
    def voices(self) -> tuple[str, ...]:
        """All voices that the loaded stages know."""
        return tuple(dict.fromkeys(voice for replica in self for voice in replica.facts.voices))

    @property
    def sample_rate(self) -> int:
        """Hz of the pipeline's audio; 0 while no stage that makes sound is loaded."""
        return max((replica.facts.sample_rate for replica in self), default=0)

    def missing(self) -> list[Replica]:
        """Replicas that are not ready, in order of the pipeline."""
        return [replica for replica in self if not replica.ready]

    def peers(self, stages: tuple[str, ...], node: int = 0) -> tuple[Peer, ...]:
        """Addresses of all live replicas of these stages that have said hello, for a reader on `node`.

        Arenas are named to replicas of the same node only.
        """
        return tuple(
            Peer(replica.replica_id, replica.inbox_for(node), replica.arena if replica.node == node else None)
            for replica in self
            if replica.stage in stages and replica.inbox and replica.alive
        )
