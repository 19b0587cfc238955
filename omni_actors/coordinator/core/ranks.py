"""Which hosts run processes of replicas that are spread over several hosts.

All processes of such a replica have one epoch. The ranks of two epochs must never meet, as they do at one port: a new
epoch starts when every host is there and has reported the end of what it ran before.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from omni_actors.config import PipelineConfig
from omni_actors.protocol.nodes import RunningReplica

Place = tuple[str, int]  # stage, replica


class RankTable:
    """The processes of spread replicas, by the rank of their node."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._hosts = {stage.name: stage.nodes for stage in pipeline.stages if stage.spread is not None}
        self._running: collections.defaultdict[Place, dict[int, int]] = collections.defaultdict(dict)  # node -> epoch
        self._killed: set[tuple[Place, int]] = set()  # with the node

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages whose replicas are spread."""
        return tuple(self._hosts)

    def hosts(self, stage: str) -> tuple[int, ...]:
        """Ranks of the nodes over which the replicas of a stage are spread, the first host first; () for others."""
        return self._hosts.get(stage, ())

    def running(self, stage: str, index: int) -> Mapping[int, int]:
        """The processes of a replica that are not known to have ended: rank of the node -> epoch."""
        return self._running[(stage, index)]

    def started(self, stage: str, index: int, epoch: int) -> None:
        """Note that every host was asked to start its process."""
        self._running[(stage, index)] = dict.fromkeys(self.hosts(stage), epoch)

    def to_kill(self, stage: str, index: int) -> list[tuple[int, int]]:
        """The processes of a replica that are left and are to be killed now: (rank of the node, epoch), each once."""
        place = stage, index
        left = [(rank, epoch) for rank, epoch in self._running[place].items() if (place, rank) not in self._killed]
        self._killed.update((place, rank) for rank, _ in left)
        return left

    def ended(self, stage: str, index: int, epoch: int, rank: int) -> None:
        """Note that a process on the node `rank` has ended."""
        place = stage, index
        if self._running[place].get(rank) == epoch:
            del self._running[place][rank]
            self._killed.discard((place, rank))

    def listed(self, rank: int, running: Iterable[RunningReplica]) -> list[RunningReplica]:
        """Take the list of what runs on a node; return those that belong to no spread replica."""
        self.forget(rank)
        others = []
        for item in running:
            if rank in self.hosts(item.stage):
                self._running[(item.stage, item.replica)][rank] = item.spawn_epoch
            else:
                others.append(item)
        return others

    def forget(self, rank: int) -> None:
        """Forget what a node runs. It says so when it is back."""
        for place, processes in self._running.items():
            processes.pop(rank, None)
            self._killed.discard((place, rank))

    def common_epoch(self, stage: str, index: int) -> int | None:
        """The epoch of a replica's processes if every host runs one, and all of the same epoch."""
        processes = self._running[(stage, index)]
        epochs = set(processes.values())
        return epochs.pop() if len(epochs) == 1 and len(processes) == len(self.hosts(stage)) else None
