"""The commands of operators: drains, restarts, and other numbers of replicas.

Each is refused with an error before anything has changed, or carried out whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from omni_actors.coordinator.core.fleet import Fleet
from omni_actors.coordinator.core.instructions import Announce, Instructions
from omni_actors.coordinator.core.nodes import Node, find_seat
from omni_actors.coordinator.core.replicas import LaunchState, Replica, ReplicaState
from omni_actors.errors import InvalidRequest, StageUnavailable, counted, suggest
from omni_actors.protocol.messages import Operate, Operation

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


def operate(fleet: Fleet, order: Operate, now: float) -> tuple[str, Instructions]:
    """Drain or restart a replica, or scale a stage. Returns the answer for the operator, and what is to be done.

    Raises:
        InvalidRequest: there is no such stage, replica or node, its state does not permit that, or there is no room.
        StageUnavailable: the pipeline still starts, or stops.
    """
    if order.operation is Operation.SCALE and order.count is not None:
        text, done = _scale(fleet, order.stage, order.count, order.node, now)
    else:
        text, done = _drain_or_restart(fleet, order, now)
    return text, done + fleet.remember()


def _drain_or_restart(fleet: Fleet, order: Operate, now: float) -> tuple[str, Instructions]:
    replica = fleet.replicas.current(order.stage, order.replica)
    if replica is None:
        known = ", ".join(replica.name for replica in fleet.replicas)
        raise InvalidRequest(f"There is no replica {order.stage}/{order.replica}; there are {known}.")
    if replica.leaving:
        text = f"{replica.name} leaves the pipeline, as {replica.stage} was scaled."
        raise InvalidRequest(text, hint="Scale the stage again to have more replicas.")
    if order.operation is Operation.RESTART and replica.state is ReplicaState.DEAD:
        replica.history = None
        replica.on("revived")
        replica.restart_at = now
        return f"{replica.name} restarts.", fleet.restart_due(now) if fleet.launch.wanted else []
    if replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
        text = f"{replica.name} is {replica.state}; only a ready one drains."
        raise InvalidRequest(text, hint="Try again later.")
    replica.orders.drain = True
    if order.operation is Operation.RESTART:
        replica.orders.restart = True
        replica.orders.drain_until = now + fleet.pipeline.coordinator.default_timeout
    done = fleet.drain(replica) + fleet.stop_drained(now)
    return f"{replica.name} drains; it holds {counted(len(replica.requests), 'request')}.", done


def _scale(fleet: Fleet, stage: str, count: int, rank: int | None, now: float) -> tuple[str, Instructions]:
    """Give a stage `count` replicas besides its spares, more or fewer on the node `rank` if it is given."""
    known = [config.name for config in fleet.pipeline.stages]
    if stage not in known:
        raise InvalidRequest(f"There is no stage {stage!r}.{suggest(stage, known)}", hint="", field="stage")
    if not 1 <= count <= MOST_REPLICAS:
        raise InvalidRequest(
            f"{stage} cannot have {count} replicas; a stage has 1 to {MOST_REPLICAS}.",
            hint="To stop the pipeline, use `omni-actors ctl shutdown`.",
            field="count",
        )
    if fleet.launch.state is not LaunchState.LAUNCHED:
        starts = fleet.launch.starting
        text = f"The pipeline {'still starts' if starts else 'stops'}, and is not scaled."
        raise StageUnavailable(text, hint="Try again when it is ready." if starts else "")
    nodes = _nodes_for(fleet, rank)
    places = fleet.replicas.places(stage)
    if count > len(places):
        changes, done = _grow(fleet, stage, count - len(places), nodes, now)
    else:
        changes, done = _shrink(fleet, stage, len(places) - count, places, rank, now)
    now_there = counted(len(fleet.replicas.places(stage)), "replica")
    return f"{stage} has {now_there}: {', '.join(changes) or 'nothing to do'}.", done


def _nodes_for(fleet: Fleet, rank: int | None) -> list[Node]:
    """The nodes on which replicas may be added. Raises `InvalidRequest` if the one asked for is not there."""
    present = [node for node in fleet.nodes.values() if node.stays]
    if rank is None:
        return present
    chosen = [node for node in present if node.rank == rank]
    if not chosen:
        there = ", ".join(str(node.rank) for node in present)
        known = fleet.nodes.get(rank)
        what = "does not belong to this pipeline" if known is None else "stops" if known.present else "is not there"
        raise InvalidRequest(
            f"Node {rank} {what}; present are: {there or 'none'}.",
            hint="Name one of these, or leave --node out.",
            field="node",
        )
    return chosen


def _grow(fleet: Fleet, stage: str, more: int, nodes: Sequence[Node], now: float) -> tuple[list[str], Instructions]:
    """Keep replicas that were about to leave, and start others."""
    ranks = {node.rank for node in nodes}
    kept = [item for item in fleet.replicas.of(stage) if _may_stay(item) and item.node in ranks][:more]
    seats = {(item.stage, item.index): item.seat for item in fleet.replicas}
    taken: list[int] = []
    while len(taken) < more - len(kept):
        index = next(number for number in itertools.count() if (stage, number) not in seats)
        seats[(stage, index)] = find_seat(fleet.pipeline, seats, stage, nodes)
        taken.append(index)
    done: Instructions = []
    for replica in kept:
        replica.orders.stay()
        if replica.state is ReplicaState.DRAINING:
            replica.on("stay")
            done += fleet.ready_again(replica)
    for index in taken:
        done += fleet.start_replica(stage, index, seats[(stage, index)], now)
        added = fleet.replicas.current(stage, index)
        if added is not None:
            added.joining = True
    done += fleet.fill_places(stage)
    changes = [f"{replica.name} stays" for replica in kept]
    changes += [f"{stage}/{index} starts on node {seats[(stage, index)].node}" for index in taken]
    return changes, [*done, Announce(f"{stage} is scaled: {', '.join(changes)}")]


def _may_stay(replica: Replica) -> bool:
    """Whether a replica leaves that was not yet asked to end."""
    return replica.leaving and replica.alive and not replica.stopping and not replica.orders.killed


def _shrink(
    fleet: Fleet, stage: str, fewer: int, places: Sequence[Replica], rank: int | None, now: float
) -> tuple[list[str], Instructions]:
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
    changes, done = [], Instructions()
    for replica in there[:fewer]:
        changes.append(f"{replica.name} leaves")
        done += _retire(fleet, replica, now)
    if changes:
        done.append(Announce(f"{stage} is scaled: {', '.join(changes)}"))
    return changes, done + fleet.stop_drained(now)


def _retire(fleet: Fleet, replica: Replica, now: float) -> Instructions:
    """Have a replica end for good, after what it holds."""
    orders = replica.orders
    orders.leave = orders.drain = True
    orders.restart = False
    orders.drain_until = now + fleet.pipeline.coordinator.default_timeout
    why = "its stage was scaled"
    if not replica.alive or not replica.spawn_epoch:  # if its process is found later, its node has to kill it
        lost = fleet.lose(replica, why, restart=False) if replica.alive else []
        return lost + fleet.forget(replica)
    if replica.state in (ReplicaState.STARTING, ReplicaState.LOADING):  # it holds nothing
        return fleet.kill(replica, why, now) if not orders.killed else []
    return fleet.drain(replica)
