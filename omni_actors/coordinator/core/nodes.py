"""Nodes and the processes on them, as the coordinator decides about them. Times are of the caller's monotonic clock."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from omni_actors.config import PipelineConfig, placement
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import ReplicaState
from omni_actors.protocol.nodes import RunningReplica


class Greeting(enum.Enum):
    """What a stage's hello is."""

    EXPECTED = "expected"  # the first of a process, or of one that was taken over
    RENEWED = "renewed"  # a process that was here before registers again
    EARLY = "early"  # its node has not come yet, and so nobody knows whether it belongs here
    REPEATED = "repeated"  # it would reset a replica that works
    FOREIGN = "foreign"  # a process that nobody wants any more


def greeting(current: Replica | None, epoch: int, spawn_epoch: int) -> Greeting:
    """Judge the hello of a process that was started as `spawn_epoch` and registers as `epoch`."""
    if current is None:
        return Greeting.FOREIGN
    if current.spawn_epoch == 0:
        return Greeting.EARLY
    if current.spawn_epoch != spawn_epoch:
        return Greeting.FOREIGN
    if epoch > current.epoch:
        return Greeting.RENEWED
    if epoch == current.epoch and current.state is ReplicaState.STARTING:
        return Greeting.EXPECTED
    return Greeting.REPEATED


@dataclass
class Node:
    """A host with an agent. `present`: it has said hello and has not been lost since."""

    rank: int
    present: bool = False
    heard: float = 0.0


@dataclass(frozen=True)
class Takeover:
    """What follows from a node's hello, by (stage, replica)."""

    adopt: tuple[RunningReplica, ...] = ()  # they run, and are to register
    start: tuple[tuple[str, int], ...] = ()  # to be started
    ended: tuple[Replica, ...] = ()  # were thought to run, and do not
    kill: tuple[RunningReplica, ...] = ()  # run, and nobody wants them


class NodeTable:
    """All nodes of a pipeline."""

    def __init__(self, pipeline: PipelineConfig, replicas: ReplicaTable, now: float) -> None:
        self._replicas = replicas
        self._nodes = {rank: Node(rank, heard=now) for rank in placement.ranks(pipeline)}

    def find(self, rank: int) -> Node | None:
        return self._nodes.get(rank)

    def of(self, replica: Replica) -> Node:
        """The node on which a replica runs."""
        return self._nodes[replica.node]

    def present(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.present]

    def absent(self) -> list[Node]:
        return [node for node in self._nodes.values() if not node.present]

    def on(self, node: Node) -> list[Replica]:
        """The replicas that are placed on a node."""
        return [replica for replica in self._replicas if self.of(replica) is node]

    def silent(self, now: float, seconds: float) -> list[Node]:
        """Nodes of which nothing was heard for so long, neither of their agents nor of any process on them.

        An agent that was stopped for a while does not take along the stages that work. Node 0 is never silent: should
        its launcher end, so does the coordinator, and no link is between them.
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
        """A node has come or come back with these processes."""
        listed = {(item.stage, item.replica): item for item in running}
        adopt, start, ended = [], [], []
        for replica in self.on(node):
            item = listed.pop((replica.stage, replica.index), None)
            known = item is not None and item.spawn_epoch == replica.spawn_epoch
            if item is not None and not (known and replica.alive):
                # It was thought to be lost, or is of the time before this coordinator.
                adopt.append(item)
            elif item is None and (replica.spawn_epoch == 0 or replica.left_with_node):
                start.append((replica.stage, replica.index))
            elif item is None and replica.alive:
                ended.append(replica)
        return Takeover(tuple(adopt), tuple(start), tuple(ended), tuple(listed.values()))
