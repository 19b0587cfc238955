"""Carries out what operators ask for: drains, restarts, and other numbers of replicas."""

from __future__ import annotations

from collections.abc import Sequence

from omni_actors.config.dotted_keys import suggest
from omni_actors.coordinator.core.instructions import FleetInstruction
from omni_actors.coordinator.core.nodes import Node
from omni_actors.coordinator.core.replicas import Replica
from omni_actors.coordinator.core.states import LaunchState, ReplicaEvent, ReplicaState
from omni_actors.coordinator.core.supervision import Supervision
from omni_actors.errors import InvalidRequest, StageUnavailable
from omni_actors.protocol.client import Operate, Operation

MOST_REPLICAS = 1024  # of a stage, as in the configuration
# Which replicas leave first: those that serve least.
_WORTH = {
    ReplicaState.DEAD: 0,
    ReplicaState.WAITING: 0,
    ReplicaState.STARTING: 1,
    ReplicaState.LOADING: 1,
    ReplicaState.DRAINING: 2,
    ReplicaState.READY: 3,
}


class Operations(Supervision):
    """The commands of operators. Each is refused with an error or carried out whole."""

    def operate(self, order: Operate, now: float) -> tuple[str, list[FleetInstruction]]:
        """Drain or restart a replica, or scale a stage. Returns the answer for the operator.

        Raises:
            InvalidRequest: there is no such stage, replica or node, it is in no state for that, or there is no room.
            StageUnavailable: the pipeline still starts, or stops.
        """
        if order.operation is Operation.SCALE and order.count is not None:
            text = self._scale(order.stage, order.count, order.node, now)
        else:
            text = self._drain_or_restart(order, now)
        self._remember()
        return text, self._taken()

    def _drain_or_restart(self, order: Operate, now: float) -> str:
        replica = self.replicas.current(order.stage, order.replica)
        if replica is None:
            known = ", ".join(replica.name for replica in self.replicas)
            raise InvalidRequest(f"There is no replica {order.stage}/{order.replica}; there are {known}.")
        if replica.leaving:
            text = f"{replica.name} leaves the pipeline, as {replica.stage} was scaled."
            raise InvalidRequest(text, hint="Scale the stage again to have more replicas.")
        if order.operation is Operation.RESTART and replica.state is ReplicaState.DEAD:
            self.health.revive(replica, now)
            if self.launch.wanted:
                self._restart_due(now)
            return f"{replica.name} restarts."
        if replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            text = f"{replica.name} is {replica.state}; only a ready one drains."
            raise InvalidRequest(text, hint="Try again later.")
        replica.orders.drain = True
        if order.operation is Operation.RESTART:
            replica.orders.restart = True
            replica.orders.drain_until = now + self._settings.default_timeout
        self._drain(replica)
        self._stop_drained(now)
        return f"{replica.name} drains; it holds {len(replica.requests)} requests."

    # -- other numbers of replicas ------------------------------------------------------------------------------------

    def _scale(self, stage: str, count: int, rank: int | None, now: float) -> str:
        """Give a stage `count` replicas besides its spares, more or fewer on the node `rank` if it is given."""
        known = [config.name for config in self._pipeline.stages]
        if stage not in known:
            raise InvalidRequest(f"There is no stage {stage!r}.{suggest(stage, known)}", hint="", field="stage")
        if not 1 <= count <= MOST_REPLICAS:
            raise InvalidRequest(
                f"{stage} cannot have {count} replicas; a stage has 1 to {MOST_REPLICAS}.",
                hint="To stop the pipeline, use `omni-actors ctl shutdown`.",
                field="count",
            )
        if self.launch.state is not LaunchState.LAUNCHED:
            starts = self.launch.starting
            text = f"The pipeline {'still starts' if starts else 'stops'}, and is not scaled."
            raise StageUnavailable(text, hint="Try again when it is ready." if starts else "")
        if self._pipeline.stage(stage).spread is not None:
            raise InvalidRequest(
                f"A replica of {stage} is spread over several hosts, and the number of those is fixed at the start.",
                hint=f"Set stages.{stage}.replicas and start the pipeline again.",
                field="stage",
            )
        nodes = self._nodes_for(rank)
        places = self.replicas.places(stage)
        if count > len(places):
            changes = self._grow(stage, count - len(places), nodes, now)
        else:
            changes = self._shrink(stage, len(places) - count, places, rank, now)
        return f"{stage} has {len(self.replicas.places(stage))} replicas: {', '.join(changes) or 'nothing to do'}."

    def _nodes_for(self, rank: int | None) -> list[Node]:
        """The nodes on which replicas may be added. Raises `InvalidRequest` if the one asked for is not there."""
        present = self.nodes.staying()
        if rank is None:
            return present
        chosen = [node for node in present if node.rank == rank]
        if not chosen:
            there = ", ".join(str(node.rank) for node in present)
            known = self.nodes.find(rank)
            what = "does not belong to this pipeline" if known is None else "stops" if known.present else "is not there"
            raise InvalidRequest(
                f"Node {rank} {what}; present are: {there or 'none'}.",
                hint="Name one of these, or leave --node out.",
                field="node",
            )
        return chosen

    def _grow(self, stage: str, more: int, nodes: Sequence[Node], now: float) -> list[str]:
        """Keep replicas that were about to leave, and start others."""
        ranks = {node.rank for node in nodes}
        kept = [item for item in self.replicas.of(stage) if self._may_stay(item) and item.node in ranks][:more]
        taken: list[int] = []
        try:
            while len(taken) < more - len(kept):
                taken.append(self.seats.take(stage, nodes))
        except InvalidRequest:
            for index in taken:
                self.seats.leave(stage, index)
            raise
        for replica in kept:
            replica.orders.stay()
            if replica.state is ReplicaState.DRAINING:
                replica.on(ReplicaEvent.STAY)
                self._ready_again(replica)
        for index in taken:
            self._start(stage, index, now).joining = True
        self._fill_places(stage)
        changes = [f"{replica.name} stays" for replica in kept]
        changes += [f"{stage}/{index} starts on node {self.seats[(stage, index)].node}" for index in taken]
        self._announce(f"{stage} is scaled: {', '.join(changes)}")
        return changes

    @staticmethod
    def _may_stay(replica: Replica) -> bool:
        """Whether a replica leaves that was not yet asked to end."""
        return replica.leaving and replica.alive and not replica.stopping and not replica.orders.killed

    def _shrink(self, stage: str, fewer: int, places: Sequence[Replica], rank: int | None, now: float) -> list[str]:
        """Let replicas finish what they hold and end: first those that serve least, then the last ones."""
        there = [replica for replica in places if rank in (None, replica.node)]
        if fewer > len(there):
            raise InvalidRequest(
                f"Node {rank} has {len(there)} of the {len(places)} replicas of {stage}, so at least "
                f"{len(places) - len(there)} stay.",
                hint="Name a larger number, or leave --node out.",
                field="node",
            )
        there.sort(key=lambda replica: (_WORTH[replica.state], -replica.index))
        changes = []
        for replica in there[:fewer]:
            changes.append(f"{replica.name} leaves")
            self._retire(replica, now)
        if changes:
            self._announce(f"{stage} is scaled: {', '.join(changes)}")
        self._stop_drained(now)
        return changes

    def _retire(self, replica: Replica, now: float) -> None:
        """Have a replica end for good, after what it holds."""
        orders = replica.orders
        orders.leave = orders.drain = True
        orders.restart = False
        orders.drain_until = now + self._settings.default_timeout
        if not replica.alive or not replica.spawn_epoch:  # if its process is found later, its node has to kill it
            if replica.alive:
                self._lose(replica, "its stage was scaled", restart=False)
            self._forget(replica)
        elif replica.state in (ReplicaState.STARTING, ReplicaState.LOADING):  # it holds nothing
            if not orders.killed:
                self._kill(replica, "its stage was scaled", now)
        else:
            self._drain(replica)
