"""What becomes of nodes: they join, fall silent, stop and are gone for good, and their replicas with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from omni_actors.config.placement import node_devices
from omni_actors.coordinator.core.instructions import ERROR, Announce, Instructions, Log, TellNode
from omni_actors.coordinator.core.nodes import Node, find_seat
from omni_actors.coordinator.core.replicas import (
    Evidence,
    LaunchState,
    NodeState,
    Replica,
    ReplicaState,
    ReplicaTable,
    Seat,
    evidence_of,
)
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import (
    KillReplica,
    Launched,
    NodeBeat,
    NodeHello,
    NodeLeaving,
    NodeToCoordinator,
    NodeWelcome,
    ReplicaEnded,
    Reregister,
    Shutdown,
)

if TYPE_CHECKING:
    from omni_actors.coordinator.core.fleet import Fleet

ABSENT_SECONDS = 10.0  # for a node to come back to a coordinator that was restarted
MOVE_SECONDS = 2.0  # between two looks for replicas that have to move
NO_ROOM = "lost with its node; no other has room"


def from_node(fleet: Fleet, rank: int, body: NodeToCoordinator, now: float) -> Instructions:
    """Take a message of a node's agent."""
    node = fleet.nodes.get(rank) or Node(rank)
    node.heard = now
    if isinstance(body, NodeHello):
        fleet.nodes[rank] = node
    elif not node.present:
        return [TellNode(rank, Reregister())]
    match body:
        case NodeHello():
            return _node_hello(fleet, node, body, now)
        case NodeBeat():
            return [TellNode(rank, NodeBeat())]
        case NodeLeaving(drains=True):
            return _drain_node(fleet, node)
        case NodeLeaving(reason=reason):
            return lose_node(fleet, node, f"it leaves: {reason}", now)
        case ReplicaEnded():
            return _replica_ended(fleet, body, now)


def _replica_ended(fleet: Fleet, body: ReplicaEnded, now: float) -> Instructions:
    replica = fleet.replicas.current(body.process.stage, body.process.replica)
    if replica is None or replica.process != body.process or not replica.alive:
        return []
    return fleet.died(replica, body.how, body.log, now, evidence_of(body.exit_code))


def _node_hello(fleet: Fleet, node: Node, hello: NodeHello, now: float) -> Instructions:
    difference = fleet.difference(hello)
    if difference:
        text = f"Node {node.rank} is refused: {difference}."
        refused: Instructions = [Announce(text), TellNode(node.rank, Shutdown(reason=text, failed=True))]
        if _is_needed(fleet, node):
            refused += fleet.fail(text)
        _forget_node(fleet, node)
        return refused
    done: Instructions = []
    if not node.present and not _is_needed(fleet, node) and fleet.launch.serving:
        done.append(Announce(f"node {node.rank} has joined with {node_devices(hello.devices)}"))
    node.on("hello")
    node.devices = hello.devices
    if hello.launched and node.rank == 0 and fleet.launch.starting:
        fleet.launch.on("all_ready")  # under a coordinator before this one
    done.append(TellNode(node.rank, NodeWelcome()))
    if fleet.launch.serving:
        done.append(TellNode(node.rank, Launched()))
    return done + _take_over(fleet, node, hello.processes, now) + fleet.restored(now)


def _take_over(fleet: Fleet, node: Node, running: Sequence[ReplicaId], now: float) -> Instructions:
    """Go on with the processes that run on a node that has come or come back, and start what is missing there."""
    listed = {process.name: process for process in running}
    adopted: dict[ReplicaId, Seat] = {}
    missing, ended = [], []
    for replica in fleet.replicas.on(node.rank):
        process = listed.pop(replica.name, None)
        if process is not None and not (process == replica.process and replica.alive):
            # It counted as lost, or is older than this coordinator.
            adopted[process] = replica.seat
        elif process is None and (replica.spawn_epoch == 0 or replica.left_with_node):
            missing.append(replica)
        elif process is None and replica.alive:
            ended.append(replica)
    done: Instructions = [TellNode(node.rank, KillReplica(process)) for process in listed.values()]  # not needed
    for process, seat in adopted.items():
        done += fleet.adopt(process, seat, now)
    where = f" on node {node.rank}" if len(fleet.nodes) > 1 else ""
    if adopted:
        done.append(Announce(f"{', '.join(process.name for process in adopted)} still running{where}"))
    if missing and not fleet.launch.ending:
        done.append(Announce(f"starting {', '.join(replica.name for replica in missing)}{where}"))
        for replica in missing:
            done += fleet.start_replica(replica.stage, replica.index, replica.seat, now)
    for replica in ended:  # last: a death restarts all that is due
        done += fleet.died(replica, "its node knows nothing of it", "", now, Evidence.KILLED)
    return done


def give_up_nodes(fleet: Fleet, now: float) -> Instructions:
    """Count as away who is silent, or has not come back to a coordinator that was restarted."""
    done: Instructions = []
    for node in silent(fleet.nodes.values(), fleet.replicas, now, fleet.settings.heartbeat_timeout):
        done += lose_node(fleet, node, f"silent for {now - node.heard:.1f} s", now)
    if fleet.launch.serving and now > fleet.created + ABSENT_SECONDS:
        for node in list(fleet.nodes.values()):
            if not node.present and any(replica.alive for replica in fleet.replicas.on(node.rank)):
                done += lose_node(fleet, node, "it has not come back to the restarted coordinator", now)
    return done


def _drain_node(fleet: Fleet, node: Node) -> Instructions:
    """Have the replicas of a node that stops finish what they hold. Others take new requests.

    While the whole pipeline drains they go on: what is in flight may still come to them.
    """
    if not node.stays:
        return []
    node.on("drain")
    if not fleet.launch.wanted:
        return []
    replicas = fleet.replicas.on(node.rank)
    held = {request for replica in replicas for request in replica.requests}
    done: Instructions = [Announce(f"node {node.rank} stops; requests on its replicas: {len(held)}")]
    for replica in replicas:
        replica.orders.drain = True
        if replica.ready:
            done += fleet.drain(replica)
    return done


def release_drained(fleet: Fleet) -> Instructions:
    """Let nodes end whose replicas have finished. If the whole pipeline drains, they end with it."""
    done: Instructions = []
    for node in fleet.nodes.values() if fleet.launch.wanted else ():
        empty = not any(replica.requests for replica in fleet.replicas.on(node.rank))
        if node.state is NodeState.DRAINING and empty:
            node.on("released")
            done.append(TellNode(node.rank, Shutdown(reason="its requests are finished")))
    return done


def lose_node(fleet: Fleet, node: Node, why: str, now: float) -> Instructions:
    """Count the replicas of a node as dead until it is back or they have moved."""
    node.on("lost")
    node.away_since = now
    away = f"node {node.rank} is away: {why}"
    done: Instructions = [Announce(away)]
    for replica in fleet.replicas.on(node.rank):
        if replica.alive or replica.state is ReplicaState.WAITING:
            replica.orders.clear_kill()
            replica.left_with_node = True
            done.append(Log(ERROR, f"lost: {away}", replica.name))
            done += fleet.lose(replica, away, restart=False)
            if replica.leaving:
                done += fleet.forget(replica)
    if _is_needed(fleet, node):
        done += fleet.fail(f"Node {node.rank} was lost while the pipeline started: {why}")
    _forget_node(fleet, node)
    return done


def _is_needed(fleet: Fleet, node: Node) -> bool:
    """Whether anything is placed on a node; node 0 runs the coordinator."""
    return node.rank == 0 or bool(fleet.replicas.on(node.rank))


def _forget_node(fleet: Fleet, node: Node) -> None:
    """Forget a node on which nothing is placed; it may join again."""
    if not _is_needed(fleet, node):
        del fleet.nodes[node.rank]


def move_lost(fleet: Fleet, now: float) -> Instructions:
    """Move the replicas of nodes that are gone for good to nodes that have room; look for it every few seconds."""
    if fleet.launch.state is not LaunchState.LAUNCHED or now < fleet.next_move:
        return []
    fleet.next_move = now + MOVE_SECONDS
    done: Instructions = []
    for node in list(fleet.nodes.values()):
        if node.state is not NodeState.AWAY or now <= node.away_since + fleet.settings.move_after:
            continue
        for replica in fleet.replicas.on(node.rank):
            if replica.left_with_node:
                done += _move(fleet, replica, now)
        _forget_node(fleet, node)
    return done


def _move(fleet: Fleet, replica: Replica, now: float) -> Instructions:
    try:
        staying = [node for node in fleet.nodes.values() if node.stays]
        others = {(other.stage, other.index): other.seat for other in fleet.replicas if other is not replica}
        seat = find_seat(fleet.pipeline, others, replica.stage, staying)
    except InvalidRequest as error:
        if replica.phase == NO_ROOM:
            return []
        replica.phase = NO_ROOM
        return [Announce(f"degraded: {replica.name} cannot move from node {replica.node}: {error}")]
    moves = Announce(f"{replica.name} moves from node {replica.node} to node {seat.node}")
    replica.history = None
    return [moves, *fleet.start_replica(replica.stage, replica.index, seat, now), *fleet.remember()]


def silent(nodes: Iterable[Node], replicas: ReplicaTable, now: float, seconds: float) -> list[Node]:
    """Nodes that were silent for `seconds`, neither of their agents nor of any process on them.

    An agent that was stopped for a while does not take along the stages that work. Node 0 is never silent: if its
    launcher ends, the coordinator ends too, and no network link is between them.
    """

    def heard(node: Node) -> float:
        return max([node.heard, *(replica.heard for replica in replicas.on(node.rank) if replica.alive)])

    return [node for node in nodes if node.present and node.rank > 0 and heard(node) + seconds < now]
