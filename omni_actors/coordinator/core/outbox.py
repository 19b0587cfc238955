"""Collects the instructions of an event, for pure machines that decide about processes."""

from __future__ import annotations

from omni_actors.coordinator.core.instructions import Announce, FleetInstruction, Level, Log, TellNode, TellReplica
from omni_actors.coordinator.core.nodes import Node
from omni_actors.coordinator.core.replicas import Replica
from omni_actors.protocol.control import CoordinatorToStage
from omni_actors.protocol.nodes import CoordinatorToNode


class Outbox:
    """Instructions in the order in which they were given, until they are taken."""

    def __init__(self) -> None:
        self._instructions: list[FleetInstruction] = []

    def _taken(self) -> list[FleetInstruction]:
        taken, self._instructions = self._instructions, []
        return taken

    def _announce(self, text: str) -> None:
        self._instructions.append(Announce(text))

    def _log(self, level: Level, text: str, replica: Replica) -> None:
        self._instructions.append(Log(level, text, replica.name))

    def _tell(self, replica: Replica, body: CoordinatorToStage) -> None:
        self._instructions.append(TellReplica(replica.replica_id, body))

    def _tell_node(self, node: Node, body: CoordinatorToNode) -> None:
        self._instructions.append(TellNode(node.rank, body))
