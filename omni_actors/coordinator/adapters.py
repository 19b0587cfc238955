"""Carries out what operators want of LoRA adapters, and remembers it for the next coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from omni_actors.coordinator.admin import check_operator
from omni_actors.coordinator.core.adapters import AdapterInstruction, AdapterRegistry, Settled
from omni_actors.coordinator.core.instructions import FleetInstruction, TellReplica, ToClient
from omni_actors.errors import OmniError
from omni_actors.logs import get_logger
from omni_actors.protocol.adapters import Adapter, AdapterAction, Adapters, ManageAdapter
from omni_actors.protocol.common import Failed
from omni_actors.transport.zap import KeyOwner

logger = get_logger(__name__)


def remembered_adapters(file: Path | None) -> list[Adapter]:
    """The adapters that a former coordinator of this pipeline has noted; none without a file."""
    if file is None or not file.exists():
        return []
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Adapter])
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read, so the adapters in it are forgotten: %s", file, error)
        return []


class AdapterOrders:
    """Between operators, the registry and the replicas.

    Args:
        tell: sends instructions to replicas.
        answer: sends a client what it waits for.
        file: where the loaded adapters are noted.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        tell: Callable[[Iterable[FleetInstruction]], None],
        answer: Callable[[list[ToClient]], None],
        file: Path | None,
    ) -> None:
        self._registry = registry
        self._tell = tell
        self._answer = answer
        self._file = file

    def order(self, client: bytes, request_id: str, owner: KeyOwner, order: ManageAdapter) -> None:
        """Load or unload an adapter; the client is answered once that is done, or at once if it cannot be."""
        asker = client, request_id
        try:
            check_operator(owner, f"{order.action} adapters")
            if order.action is AdapterAction.LOAD:
                self.carry_out(self._registry.load(order.name, order.folder, asker, time.monotonic()))
            else:
                self.carry_out([*self._registry.unload(order.name), Settled(asker)])
        except OmniError as error:
            self.carry_out([Settled(asker, error)])

    def carry_out(self, instructions: Iterable[AdapterInstruction]) -> None:
        """Do what the registry has decided."""
        for instruction in instructions:
            if isinstance(instruction, TellReplica):
                self._tell([instruction])
                continue
            error = instruction.error
            if error is None:
                self._note()
            answer = Adapters(self._registry.names) if error is None else Failed.from_error(error)
            self._answer([ToClient(*instruction.asker, 0, answer)])

    def _note(self) -> None:
        logger.info("adapters: %s", ", ".join(self._registry.names) or "none")
        if self._file is not None:
            new = self._file.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(list(self._registry.loaded.values())))
            new.replace(self._file)
