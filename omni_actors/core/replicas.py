"""Which replicas there are, what state they are in, and which one takes the next request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from omni_actors.core.states import REPLICA_TRANSITIONS, ReplicaEvent, ReplicaState, advance
from omni_actors.messages import ArenaAddress, Hop, Peer, StageStatus


@dataclass
class Replica:
    """One process of a stage. An epoch is one life of it as far as others can tell: one registration.

    A restart gets the next number, and so does a process that registers again. `born` is the epoch with which the
    process was started, by which its node knows it; 0 for none that anybody knows of.
    """

    stage: str
    index: int
    epoch: int
    born: int = 0
    node: int = 0  # rank of the one that runs it
    state: ReplicaState = ReplicaState.STARTING
    inbox: str = ""
    arena: ArenaAddress | None = None
    pid: int = 0
    phase: str = "starting process"
    seconds: float = 0.0
    voices: tuple[str, ...] = ()
    sample_rate: int = 0
    max_input_tokens: int = 0
    progress: int = -1
    counts: dict[str, int] = field(default_factory=dict)
    requests: set[str] = field(default_factory=set)
    congested: bool = False  # it has granted no credit for more input
    # Times of the supervision's clock: the process was started, was last heard of, its engine loop last turned.
    spawned: float = 0.0
    heard: float = 0.0
    moved: float = 0.0
    restart_at: float = 0.0
    restart_wanted: bool = False  # somebody asked for it; it is no fault
    drain_until: float = 0.0
    stopping: bool = False  # it was told to end
    blameless: bool = False  # it was lost with its node or its link: no request did that
    left_with_node: bool = False  # it is dead because its node is away

    @property
    def hop(self) -> Hop:
        return Hop(self.stage, self.index, self.epoch)

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.index}"

    @property
    def alive(self) -> bool:
        """Whether its process is there, as far as anybody knows."""
        return self.state not in (ReplicaState.WAITING, ReplicaState.DEAD)

    def on(self, event: ReplicaEvent) -> None:
        """Enter the state that follows."""
        self.state = advance(REPLICA_TRANSITIONS, self.state, event)

    def status(self) -> StageStatus:
        return StageStatus(
            self.stage, self.index, self.epoch, self.state, self.pid, len(self.requests), dict(self.counts)
        )


class ReplicaTable:
    """All replicas of a pipeline, by stage and index."""

    def __init__(self) -> None:
        self._replicas: dict[tuple[str, int], Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def add(self, stage: str, index: int, epoch: int, born: int | None = None, node: int = 0) -> Replica:
        """Register a new life of a replica, in place of the one before. `born`: `epoch` unless given."""
        born = epoch if born is None else born
        replica = self._replicas[(stage, index)] = Replica(stage, index, epoch, born, node)
        return replica

    def current(self, stage: str, index: int) -> Replica | None:
        """The replica in whatever epoch it is."""
        return self._replicas.get((stage, index))

    def find(self, stage: str, index: int, epoch: int) -> Replica | None:
        """The replica in exactly this epoch; `None` for unknown ones and for former lives."""
        replica = self._replicas.get((stage, index))
        return replica if replica is not None and replica.epoch == epoch else None

    def choose(self, stage: str) -> Replica | None:
        """The ready replica of a stage with the fewest requests, those that take input first; `None`: none is ready."""
        ready = [replica for replica in self if replica.stage == stage and replica.state is ReplicaState.READY]
        return min(ready, key=lambda replica: (replica.congested, len(replica.requests), replica.index), default=None)

    def may_come(self, stage: str) -> bool:
        """Whether some replica of a stage is ready or will be: all others are gone for good, or take nothing new."""
        return any(
            replica.stage == stage
            and (replica.state not in (ReplicaState.DEAD, ReplicaState.DRAINING) or replica.restart_wanted)
            for replica in self
        )

    def release(self, request_id: str, route: tuple[Hop, ...]) -> None:
        """The replicas of a route no longer hold this request."""
        for hop in route:
            replica = self.find(hop.stage, hop.replica, hop.epoch)
            if replica is not None:
                replica.requests.discard(request_id)

    def missing(self) -> list[Replica]:
        """Replicas that are not ready, in order of the pipeline."""
        return [replica for replica in self if replica.state is not ReplicaState.READY]

    def unavailable_stages(self) -> list[str]:
        """Stages without any ready replica."""
        stages = dict.fromkeys(replica.stage for replica in self)
        return [stage for stage in stages if self.choose(stage) is None]

    def peers(self, stages: tuple[str, ...], node: int = 0, only_there: bool = False) -> tuple[Peer, ...]:
        """Addresses of all live replicas of these stages that have said hello, for a reader on `node`.

        Memory is shared on one host only. `only_there`: leave out those on other nodes.
        """
        return tuple(
            Peer(
                replica.stage,
                replica.index,
                replica.epoch,
                replica.inbox,
                replica.arena if replica.node == node else None,
            )
            for replica in self
            if replica.stage in stages
            and replica.inbox
            and replica.alive
            and (replica.node == node or not only_there)
        )
