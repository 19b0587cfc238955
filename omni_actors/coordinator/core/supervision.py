"""Starts, kills, loses and restarts the replicas of a pipeline. Node agents carry it out and report.

Part of the pure machine in `core/fleet.py`: no sockets, no clocks; every decision is an instruction in the outbox.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from omni_actors.config import PipelineConfig, placement
from omni_actors.coordinator.core.evidence import Evidence
from omni_actors.coordinator.core.health import HealthPolicy
from omni_actors.coordinator.core.instructions import (
    GiveUp,
    Level,
    Remember,
    ReplicaLost,
    ReplicaReady,
    ReplicaRemoved,
    ReplicaSpawned,
)
from omni_actors.coordinator.core.launch import Launch, StartHistory, explain_end
from omni_actors.coordinator.core.memory import VERSION, FleetMemory, RememberedReplica
from omni_actors.coordinator.core.nodes import Node, NodeTable
from omni_actors.coordinator.core.outbox import Outbox
from omni_actors.coordinator.core.ranks import RankTable
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.restart_scope import StageGraph
from omni_actors.coordinator.core.seats import Seats
from omni_actors.coordinator.core.states import LaunchState, ReplicaEvent, ReplicaState
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.control import Peers, Shutdown
from omni_actors.protocol.nodes import KillReplica, StartReplica

STOP_SECONDS = 4.0  # that one stage may take to stop before it is killed
MOVE_SECONDS = 2.0  # between two looks for replicas that have to move
NO_ROOM = "lost with its node; no other has room"
KILL_SECONDS = 2.0  # for a node to report the end of a process that it had to kill


class Supervision(Outbox):
    """The processes of replicas, from their start to the end of their last restart.

    Args:
        replicas: filled and changed here; the request machine reads it.
        new_epoch: gives the epoch of a new process. No epoch may occur twice in a run directory: a stage that outlives
            a killed launcher for a moment must not be taken for one of the next launcher's.
        began: when the launch began.
        now: as of all events, in seconds of one monotonic clock.
        history: of starts, for what is shown.
        memory: what the coordinator before this one has left, if there was one and it had changed anything.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        replicas: ReplicaTable,
        new_epoch: Callable[[], int],
        began: float,
        now: float,
        history: StartHistory | None = None,
        memory: FleetMemory | None = None,
    ) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._settings = pipeline.coordinator
        self._graph = StageGraph(pipeline)
        self._new_epoch = new_epoch
        self.replicas = replicas
        self.health = HealthPolicy(pipeline, replicas)
        self._memory = memory
        self._next_move = now
        self._ordered = {(item.stage, item.index): item for item in memory.replicas} if memory is not None else {}
        self.seats = Seats(pipeline, memory)
        self.nodes = NodeTable(replicas, self.seats.nodes() | {*placement.ranks(pipeline)}, now)
        self.ranks = RankTable(pipeline)
        self.launch = Launch(replicas, self.nodes, self.health, began, now, history)

    # -- over a restart of the coordinator ----------------------------------------------------------------------------

    def _remember(self) -> None:
        """Have the next coordinator know of scale, seats and orders. Those that leave it does not need."""
        kept = [
            RememberedReplica(
                replica.stage,
                replica.index,
                replica.node,
                replica.slot,
                replica.spawn_epoch,
                replica.spare,
                replica.joining,
                replica.orders.drain,
                replica.orders.restart,
            )
            for replica in self.replicas
            if not replica.leaving
        ]
        self._instructions.append(Remember(FleetMemory(VERSION, self._pipeline.digest(), tuple(kept))))

    def _expect_all(self, now: float) -> None:
        """Expect all replicas, as remembered or else as configured."""
        if self._memory is not None:
            parts = [(item.stage, item.index, item.spare, item.joining) for item in self._memory.replicas]
        else:
            stages = self._pipeline.stages
            parts = [(stage.name, i, i >= stage.replicas, False) for stage in stages for i in range(stage.processes)]
        for stage, index, spare, joining in parts:
            replica = self._expect(stage, index, 0, now)
            replica.spare, replica.joining = spare, joining
            replica.phase = f"waiting for node {', '.join(str(node.rank) for node in self._hosts(replica))}"

    def _adopt(self, stage: str, index: int, spawn_epoch: int, now: float) -> None:
        """Expect the registration of a process that runs. What was ordered of it holds."""
        replica = self._expect(stage, index, spawn_epoch, now)
        if replica.state is ReplicaState.STARTING:  # its hello may have been here before its node's
            replica.phase = "registering again"
        item = self._ordered.pop((stage, index), None)
        if item is not None and item.spawn_epoch == spawn_epoch:
            replica.orders.drain, replica.orders.restart = item.drain, item.restart
            if item.restart:
                replica.orders.drain_until = now + self._settings.default_timeout

    # -- ends and restarts --------------------------------------------------------------------------------------------

    def _died(self, replica: Replica, how: str, log: str, now: float, evidence: Evidence) -> None:
        """Plan a restart. While the pipeline starts, a stage that is left without any replica ends the launch."""
        killed = replica.orders.clear_kill()
        cause, evidence = (f"{killed}; {how}", Evidence.CRASHED) if killed else (how, evidence)
        asked = replica.orders.restart or replica.leaving
        restart = not self.launch.ending and not replica.leaving and self.health.plan(replica, now)
        self._log(Level.DEBUG if asked or self.launch.ending else Level.ERROR, f"ended: {cause}", replica)
        self._lose(replica, cause, restart, Evidence.NONE if asked else evidence)
        self._kill_ranks(replica)
        if replica.leaving:
            self._forget(replica)
        if not self.launch.wanted or replica.leaving:
            return
        text, culprit = explain_end(replica, f"died ({cause})", log), self.launch.culprit
        if asked:
            self._announce(f"{replica.name} has stopped and restarts")
        elif culprit is not None and culprit.replica is replica:
            self._fail(explain_end(replica, culprit.what, log))
        elif self.launch.starting and not any(peer.alive for peer in self.replicas.of(replica.stage)):
            self._fail(text)
        elif restart:
            self._announce(f"{text}\n{replica.name} restarts in {replica.restart_at - now:.1f} s")
        else:
            self._announce(f"degraded: {text}")
        if self.launch.wanted:
            self._restart_due(now)

    def _lose(self, replica: Replica, why: str, restart: bool, evidence: Evidence = Evidence.NONE) -> None:
        replica.on(ReplicaEvent.LOST if restart else ReplicaEvent.GIVEN_UP)
        self._instructions.append(ReplicaLost(replica, why, evidence))
        self._fill_places(replica.stage)
        if not self.launch.ending:
            self._announce_peers()

    def _forget(self, replica: Replica) -> None:
        """Take a replica that has left out of the pipeline. What it held was replayed before."""
        self.replicas.remove(replica)
        self.health.forget(replica)
        self.seats.leave(replica.stage, replica.index)
        self._instructions.append(ReplicaRemoved(replica.stage, replica.index))
        self._announce(f"{replica.name} has left")

    def _drain(self, replica: Replica) -> None:
        replica.on(ReplicaEvent.DRAIN)
        self._announce(f"{replica.name} drains")
        self._fill_places(replica.stage)

    def _ready_again(self, replica: Replica) -> None:
        """Let a replica take requests."""
        self._fill_places(replica.stage)
        self._instructions.append(ReplicaReady(replica))

    def _fill_places(self, stage: str) -> None:
        """Let spares take the places of replicas that take no requests; during the launch each has its own place."""
        for spare, replaced in self.replicas.fill_places(stage) if self.launch.serving else ():
            self._announce(f"{spare.name} takes the place of {replaced.name}")
            self._instructions.append(ReplicaReady(spare))

    def _restart_due(self, now: float) -> None:
        for dead in self.health.due(now):
            if self._may_start(dead):
                self._announce(f"starting {dead.name} again")
                self._start(dead.stage, dead.index, now)

    def _may_start(self, replica: Replica) -> bool:
        """Whether its hosts are there and, if it is spread over several, run nothing of it any more."""
        return all(node.stays for node in self._hosts(replica)) and not (
            self.ranks.hosts(replica.stage) and self.ranks.running(replica.stage, replica.index)
        )

    def _hosts(self, replica: Replica) -> list[Node]:
        """The nodes that run processes of a replica, the first host first."""
        found = [self.nodes.find(rank) for rank in self.ranks.hosts(replica.stage)]
        return [node for node in found if node is not None] or [self.nodes.of(replica)]

    def _start(self, stage: str, index: int, now: float) -> Replica:
        former = self.replicas.current(stage, index)
        spawn_epoch = max(former.epoch + 1 if former is not None else 1, self._new_epoch())
        replica = self._expect(stage, index, spawn_epoch, now)
        start = StartReplica(stage=stage, replica=index, spawn_epoch=spawn_epoch, slot=replica.slot)
        hosts = self._hosts(replica)
        if self.ranks.hosts(stage):
            self.ranks.started(stage, index, spawn_epoch)
            start = msgspec.structs.replace(start, leader=hosts[0].ranks_addr)
        for node in hosts:
            self._tell_node(node, start)
        return replica

    def _expect(self, stage: str, index: int, spawn_epoch: int, now: float) -> Replica:
        """Expect the hello of a process; `spawn_epoch` 0: none is known yet."""
        node, slot = self.seats[(stage, index)]
        replica = self.replicas.add(stage, index, spawn_epoch, node=node, slot=slot)
        self._instructions.append(ReplicaSpawned(stage, index, spawn_epoch))
        self.health.spawned(replica, now)
        return replica

    def _move_lost(self, now: float) -> None:
        """Move the replicas of nodes that are gone for good to nodes that have room; look for it every few seconds."""
        if self.launch.state is not LaunchState.LAUNCHED or now < self._next_move:
            return
        self._next_move = now + MOVE_SECONDS
        for node in self.nodes.gone(now, self._settings.move_after):
            for replica in self.nodes.on(node):
                if replica.left_with_node and self._pipeline.stage(replica.stage).spread is None:
                    self._move(replica, now)
            self._forget_node(node)

    def _is_needed(self, node: Node) -> bool:
        """Whether anything is placed on a node; node 0 runs the coordinator."""
        ranks = any(node.rank in self.ranks.hosts(stage) for stage in self.ranks.stages)
        return node.rank == 0 or ranks or bool(self.nodes.on(node))

    def _forget_node(self, node: Node) -> None:
        """Forget a node on which nothing is placed; it may join again."""
        if not self._is_needed(node):
            self.nodes.forget(node)

    def _move(self, replica: Replica, now: float) -> None:
        try:
            seat = self.seats.move(replica.stage, replica.index, self.nodes.staying())
        except InvalidRequest as error:
            if replica.phase != NO_ROOM:
                replica.phase = NO_ROOM
                self._announce(f"degraded: {replica.name} cannot move from node {replica.node}: {error}")
            return
        self._announce(f"{replica.name} moves from node {replica.node} to node {seat.node}")
        self.health.forget(replica)
        self._start(replica.stage, replica.index, now)
        self._remember()

    def _kill_stuck(self, now: float) -> None:
        """Kill what is stuck. While the pipeline starts, the startup timeout ends the launch instead."""
        if not self.launch.serving:
            return
        for replica, why in self.health.stuck(now):
            heard = min(node.heard for node in self._hosts(replica))
            node_silent = heard + 3 * self._settings.heartbeat_interval < now
            if node_silent and now < replica.heard + self._settings.heartbeat_timeout + KILL_SECONDS:
                continue  # it may be the link: the order would reach a healthy process once the link is back
            if not replica.orders.killed:
                self._log(Level.ERROR, f"killing {replica.name}: {why}", replica)
                self._kill(replica, why, now)

    def _kill(self, replica: Replica, why: str, now: float) -> None:
        replica.orders.kill(why, until=now + KILL_SECONDS)
        if self.ranks.hosts(replica.stage):
            self._kill_ranks(replica)
        else:
            kill = KillReplica(replica.stage, replica.index, replica.spawn_epoch)
            self._tell_node(self.nodes.of(replica), kill)

    def _kill_ranks(self, replica: Replica) -> None:
        """Kill what still runs of a replica that is spread over several hosts: without each other its ranks hang."""
        for rank, epoch in self.ranks.to_kill(replica.stage, replica.index):
            node = self.nodes.find(rank)
            if node is not None:
                self._tell_node(node, KillReplica(replica.stage, replica.index, epoch))

    def _stop_drained(self, now: float) -> None:
        for replica in self.health.drained(now):
            replica.stopping = True
            replica.orders.stop_until = now + STOP_SECONDS
            self._tell(replica, Shutdown(reason="it leaves" if replica.leaving else "it is restarted"))

    def _enforce_ends(self, now: float) -> None:
        """Kill what did not stop, and count as dead what did not end when killed."""
        for replica in list(self.replicas):
            if replica.orders.stop_until <= now:
                self._kill(replica, "it did not stop", now)
            if replica.orders.kill_until <= now and replica.alive:
                self._died(replica, "its node does not answer", "", now, Evidence.NONE)

    def _announce_peers(self) -> None:
        """Tell every stage the addresses of the stages after and before it."""
        find = self.replicas.peers
        for replica in self.replicas:
            if replica.registered:
                after, before = self._graph.downstream[replica.stage], self._graph.sources[replica.stage]
                self._tell(replica, Peers(peers=find(after, replica.node), sources=find(before, replica.node)))

    def _fail(self, reason: str) -> None:
        """Give up a pipeline that has not been launched; one that has been goes on degraded."""
        if self.launch.starting:
            self.launch.fail(reason)
            self._instructions.append(GiveUp(reason))
