"""Where each replica runs: first as configured, then as operators scale a stage. Finds room for one more."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.config.devices import memory_share, node_devices, slot_devices, slot_of, slots, stage_devices
from omni_actors.coordinator.core.memory import FleetMemory
from omni_actors.coordinator.core.nodes import Node
from omni_actors.errors import InvalidRequest

ROUNDING = 1e-9  # of sums of shares


class Seat(NamedTuple):
    """A node, and which of the stage's GPUs a replica takes there (`config.devices.slot_devices`)."""

    node: int
    slot: int


class Seats:
    """The seats of all replicas and spares, by stage and number: as remembered, else as configured."""

    def __init__(self, pipeline: PipelineConfig, memory: FleetMemory | None = None) -> None:
        self._pipeline = pipeline
        self._seats = (
            {(item.stage, item.index): Seat(item.node, item.slot) for item in memory.replicas}
            if memory is not None
            else {
                (stage.name, index): Seat(stage.node_of(index), slot_of(stage, index))
                for stage in pipeline.stages
                for index in range(stage.processes)
            }
        )

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
        count, reasons = slots(stage, node.devices), []
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
