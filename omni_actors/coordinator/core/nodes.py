"""Nodes and the processes on them. Times are seconds of the caller's monotonic clock."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import NODE_TRANSITIONS, NodeEvent, NodeState, ReplicaState
from omni_actors.protocol.nodes import RunningReplica
from omni_actors.transitions import advance


class HelloKind(enum.Enum):
    """Meaning of a stage process's hello."""

    EXPECTED = "expected"  # the first of a process, or of one that this coordinator adopted
    RENEWED = "renewed"  # a known process registers again
    EARLY = "early"  # its node has not said hello yet, so it is unknown whether the process belongs here
    REPEATED = "repeated"  # it would reset a replica that works
    FOREIGN = "foreign"  # a process that the pipeline does not need


def classify_hello(current: Replica | None, epoch: int, spawn_epoch: int) -> HelloKind:
    """Classify the hello of a process that was started as `spawn_epoch` and registers as `epoch`."""
    if current is None:
        return HelloKind.FOREIGN
    if current.spawn_epoch == 0:
        return HelloKind.EARLY
    if current.spawn_epoch != spawn_epoch:
        return HelloKind.FOREIGN
    if epoch > current.epoch:
        return HelloKind.RENEWED
    if epoch == current.epoch and current.state is ReplicaState.STARTING:
        return HelloKind.EXPECTED
    return HelloKind.REPEATED


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
        """Whether its agent is there."""
        return self.state in (NodeState.PRESENT, NodeState.DRAINING, NodeState.LEAVING)

    @property
    def stays(self) -> bool:
        """Whether its agent is there and is not about to end, so that replicas may start there."""
        return self.state is NodeState.PRESENT

    def on(self, event: NodeEvent) -> None:
        """Enter the state that follows."""
        self.state = advance(NODE_TRANSITIONS, self.state, event)


@dataclass(frozen=True)
class Takeover:
    """Consequences of a node's hello."""

    adopt: tuple[RunningReplica, ...] = ()  # they run, and will register
    start: tuple[tuple[str, int], ...] = ()  # (stage, replica) to start
    ended: tuple[Replica, ...] = ()  # believed to run, and do not
    kill: tuple[RunningReplica, ...] = ()  # they run, and the pipeline does not need them


class NodeTable:
    """All nodes of a pipeline."""

    def __init__(self, replicas: ReplicaTable, ranks: Iterable[int], now: float) -> None:
        self._replicas = replicas
        self._nodes = {rank: Node(rank, heard=now) for rank in sorted(ranks)}

    def find(self, rank: int) -> Node | None:
        """The node of this rank; None if the pipeline has none."""
        return self._nodes.get(rank)

    def join(self, rank: int, now: float) -> Node:
        """Add a node that the pipeline has not had before."""
        return self._nodes.setdefault(rank, Node(rank, heard=now))

    def forget(self, node: Node) -> None:
        """Forget a node that runs nothing."""
        del self._nodes[node.rank]

    def gone(self, now: float, seconds: float) -> list[Node]:
        """Nodes that have been away for more than `seconds`."""
        away = [node for node in self._nodes.values() if node.state is NodeState.AWAY]
        return [node for node in away if node.away_since + seconds < now]

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, replica: Replica) -> Node:
        """The node on which a replica runs."""
        return self._nodes[replica.node]

    def present(self) -> list[Node]:
        """Nodes whose agents are there."""
        return [node for node in self._nodes.values() if node.present]

    def staying(self) -> list[Node]:
        """Nodes on which replicas may start."""
        return [node for node in self._nodes.values() if node.stays]

    def draining(self) -> list[Node]:
        """Nodes that end once their replicas hold nothing."""
        return [node for node in self._nodes.values() if node.state is NodeState.DRAINING]

    def absent(self) -> list[Node]:
        """Nodes that have not come yet or are away."""
        return [node for node in self._nodes.values() if not node.present]

    def on(self, node: Node) -> list[Replica]:
        """The replicas that are placed on a node."""
        return [replica for replica in self._replicas if self.of(replica) is node]

    def excuse_all(self, now: float) -> None:
        """Count present nodes as heard of now: this process itself was stopped, and what came meanwhile is unread."""
        for node in self.present():
            node.heard = now

    def silent(self, now: float, seconds: float) -> list[Node]:
        """Nodes of which nothing was heard for `seconds`, neither of their agents nor of any process on them.

        An agent that was stopped for a while does not take along the stages that work. Node 0 is never silent: if its
        launcher ends, the coordinator ends too, and no network link is between them.
        """
        found = []
        for node in self.present():
            if node.rank == 0:
                continue
            heard = [replica.heard for replica in self.on(node) if replica.alive]
            if max([node.heard, *heard]) + seconds < now:
                found.append(node)
        return found

    def take_over(self, node: Node, running: Iterable[RunningReplica]) -> Takeover:
        """Decide about the processes of a node that has come or come back with `running`."""
        listed = {(item.stage, item.replica): item for item in running}
        adopt, start, ended = [], [], []
        for replica in self.on(node):
            item = listed.pop((replica.stage, replica.index), None)
            known = item is not None and item.spawn_epoch == replica.spawn_epoch
            if item is not None and not (known and replica.alive):
                # It counted as lost, or is older than this coordinator.
                adopt.append(item)
            elif item is None and (replica.spawn_epoch == 0 or replica.left_with_node):
                start.append((replica.stage, replica.index))
            elif item is None and replica.alive:
                ended.append(replica)
        return Takeover(tuple(adopt), tuple(start), tuple(ended), tuple(listed.values()))
