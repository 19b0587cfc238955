"""Which LoRA adapters a pipeline has: those of its YAML, and those that operators load while it runs.

A request carries the adapter that it was admitted with, folder and version, to every attempt. So a replica that starts
later knows it, and a request goes on with an adapter that was unloaded meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from omni_actors.config import PipelineConfig, unknown_adapter
from omni_actors.config.checks import adapted_stages
from omni_actors.coordinator.core.instructions import TellReplica
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import ReplicaState
from omni_actors.errors import InvalidRequest, OmniError, RequestTimeout, StageUnavailable
from omni_actors.protocol.adapters import MAX_ADAPTERS, Adapter, AdapterLoaded, LoadAdapter, UnloadAdapter
from omni_actors.protocol.header import ReplicaId

LOAD_SECONDS = 60.0  # for all replicas to load an adapter


@dataclass(frozen=True, slots=True)
class Settled:
    """What an operator asked for is done, or failed with `error`."""

    asker: tuple[bytes, str]
    error: OmniError | None = None


@dataclass
class _Order:
    adapter: Adapter
    asker: tuple[bytes, str]
    waiting: set[ReplicaId]
    until: float


AdapterInstruction = TellReplica | Settled


class AdapterRegistry:
    """Decides about adapters. Events in, instructions out.

    Args:
        new_version: gives a number that no adapter of this pipeline had before, also under a former coordinator.
        loaded: adapters that were loaded under a former coordinator.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        replicas: ReplicaTable,
        new_version: Callable[[], int],
        loaded: Sequence[Adapter] = (),
    ) -> None:
        self._pipeline = pipeline
        self._replicas = replicas
        self._new_version = new_version
        self._stages = adapted_stages(pipeline)
        self._loaded = {adapter.name: adapter for adapter in loaded}
        self._orders: dict[int, _Order] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request can give."""
        return (*self._pipeline.adapters, *self._loaded)

    @property
    def loaded(self) -> Mapping[str, Adapter]:
        """Those that operators have loaded, by name."""
        return self._loaded

    def load(self, name: str, folder: str, asker: tuple[bytes, str], now: float) -> list[AdapterInstruction]:
        """Have all replicas load an adapter. `asker` hears of it later. Raises `OmniError` if that cannot be."""
        if not self._pipeline.adapter_folders:
            raise InvalidRequest(
                "This pipeline loads no adapters while it runs.",
                hint="Name the folders in which they may lie as adapter_folders in its YAML.",
            )
        if name in self.names or any(order.adapter.name == name for order in self._orders.values()):
            raise InvalidRequest(f"There is an adapter {name!r} already.", hint="Unload it first.", field="name")
        if name in (self._pipeline.name, self._pipeline.model):
            raise InvalidRequest(f"{name!r} is the name of the model itself.", field="name")
        if len(self.names) + len(self._orders) >= MAX_ADAPTERS:
            raise InvalidRequest(f"A pipeline has at most {MAX_ADAPTERS} adapters.", hint="Unload another first.")
        replicas = self._ready()
        if not replicas:
            raise StageUnavailable(f"No replica of {', '.join(self._stages)} is ready to load an adapter.")
        adapter = Adapter(name, folder, self._new_version())
        waiting = {replica.replica_id for replica in replicas}
        self._orders[adapter.version] = _Order(adapter, asker, waiting, now + LOAD_SECONDS)
        return [TellReplica(replica.replica_id, LoadAdapter(adapter)) for replica in replicas]

    def unload(self, name: str) -> list[AdapterInstruction]:
        """Refuse an adapter to further requests, and have replicas drop it. Raises `InvalidRequest`."""
        if name in self._pipeline.adapters:
            raise InvalidRequest(f"The adapter {name!r} is part of the pipeline's YAML.", field="name")
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise unknown_adapter(name, self._loaded)
        return self._drop(adapter)

    def answered(self, replica_id: ReplicaId, answer: AdapterLoaded) -> list[AdapterInstruction]:
        """Take a replica's answer to an order to load an adapter."""
        order = self._orders.get(answer.version)
        if order is None or replica_id not in order.waiting:
            return []
        if answer.problem:
            text = f"{replica_id.name} cannot load the adapter {order.adapter.name!r}: {answer.problem}"
            return self._settle(order, InvalidRequest(text, hint="", field="folder"))
        order.waiting.discard(replica_id)
        return self._settle(order) if not order.waiting else []

    def ready(self, replica: Replica) -> list[AdapterInstruction]:
        """Tell a replica that has started the adapters that it does not know."""
        if replica.stage not in self._stages:
            return []
        orders = [order.adapter for order in self._orders.values()]
        return [TellReplica(replica.replica_id, LoadAdapter(one)) for one in (*self._loaded.values(), *orders)]

    def lost(self, replica: Replica) -> list[AdapterInstruction]:
        """Wait no longer for a replica: its successor gets the order when it is ready."""
        instructions: list[AdapterInstruction] = []
        for order in list(self._orders.values()):
            if replica.replica_id in order.waiting:
                order.waiting.discard(replica.replica_id)
                if not order.waiting:
                    text = "The replica that was to load the adapter is lost."
                    instructions += self._settle(order, StageUnavailable(text, stage=replica.stage))
        return instructions

    def tick(self, now: float) -> list[AdapterInstruction]:
        """Give up what takes too long."""
        late = [order for order in self._orders.values() if order.until <= now]
        instructions: list[AdapterInstruction] = []
        for order in late:
            names = ", ".join(sorted(replica_id.name for replica_id in order.waiting))
            text = f"{names} did not load the adapter within {LOAD_SECONDS:g} s."
            instructions += self._settle(order, RequestTimeout(text, hint="Try again when the stage has less to do."))
        return instructions

    def _settle(self, order: _Order, error: OmniError | None = None) -> list[AdapterInstruction]:
        del self._orders[order.adapter.version]
        if error is not None:
            return [*self._drop(order.adapter), Settled(order.asker, error)]
        self._loaded[order.adapter.name] = order.adapter
        return [Settled(order.asker)]

    def _drop(self, adapter: Adapter) -> list[AdapterInstruction]:
        return [TellReplica(replica.replica_id, UnloadAdapter(adapter.version)) for replica in self._ready()]

    def _ready(self) -> list[Replica]:
        replicas = [replica for stage in self._stages for replica in self._replicas.of(stage)]
        return [one for one in replicas if one.state in (ReplicaState.READY, ReplicaState.DRAINING)]
