"""A fleet under test: events in, instructions out, invariants checked after every event."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

import omni_actors
from omni_actors.config import PipelineConfig, placement
from omni_actors.coordinator.core.fleet import TICK_SECONDS, Fleet
from omni_actors.coordinator.core.hosts import from_node
from omni_actors.coordinator.core.instructions import (
    Announce,
    FleetInstruction,
    GiveUp,
    Remember,
    RememberedReplica,
    ReplicaLost,
    ShowProgress,
    TellNode,
    TellReplica,
)
from omni_actors.coordinator.core.operations import operate
from omni_actors.coordinator.core.replicas import LaunchState, NodeState, Replica, ReplicaState, ReplicaTable
from omni_actors.protocol.fields import PROTOCOL_VERSION, Body, ReplicaId
from omni_actors.protocol.messages import (
    Heartbeat,
    Hello,
    KillReplica,
    NodeBeat,
    NodeHello,
    NodeToCoordinator,
    Operate,
    Operation,
    Peers,
    Ready,
    ReplicaEnded,
    StageToCoordinator,
    StartReplica,
)
from tests.support.builders import chain

STAGES = ("prompt", "thinker", "talker", "code2wav")
T = 100.0
FIRST_EPOCH = 1000


def one_host(**stages: Any) -> dict[str, Any]:
    """The echo chain; `stages` change its stages by name."""
    data = chain()
    for stage in data["stages"]:
        stage.update(stages.get(stage["name"], {}))
    return data


def two_hosts(**talker: Any) -> dict[str, Any]:
    """The echo chain with a second talker on node 1."""
    return {**one_host(talker={"replicas": 2, "node": [0, 1], **talker}), "cluster": {"nnodes": 2}}


class World:
    """A fleet and what it has asked for. Checks after every event what must hold in every test."""

    def __init__(self, data: dict[str, Any] | None = None, **coordinator: Any) -> None:
        self.pipeline = msgspec.convert({**(data or one_host()), "coordinator": coordinator}, PipelineConfig)
        self.now = T
        self.epochs = itertools.count(FIRST_EPOCH)
        self.memory: list[RememberedReplica] = []  # what a restarted coordinator finds
        self.fleet = self.new_fleet()
        self.in_flight = 0
        self.wanted = {stage.name: stage.replicas for stage in self.pipeline.stages}  # as configured, then as scaled
        self.was_ending = False
        self.started: dict[tuple[str, int], int] = {}  # the newest epoch that a node was asked to start
        self.killed: set[tuple[str, int, int]] = set()
        self.dead: list[Replica] = []  # before the present event
        self.peers: dict[ReplicaId, Peers] = {}
        self.seen: list[FleetInstruction] = []
        self.take(self.fleet.start(self.now))

    def new_fleet(self) -> Fleet:
        new_epoch = lambda: next(self.epochs)  # noqa: E731
        endpoints = ("ipc:///client", "ipc:///results")
        return Fleet(self.pipeline, ReplicaTable(), *endpoints, new_epoch, T - 1, self.now, T - 1, self.memory)

    def restart_coordinator(self) -> None:
        """Another coordinator takes over what runs on the nodes; the stages have not registered with it yet."""
        ranks = {rank for rank, node in self.fleet.nodes.items() if node.present} | {
            replica.node for replica in self.fleet.replicas
        }
        running = {rank: self.running(rank) for rank in sorted(ranks | {0})}
        self.fleet, self.dead, self.peers, self.killed = self.new_fleet(), [], {}, set()
        self.take(self.fleet.start(self.now))
        for rank, listed in running.items():
            self.node_hello(*listed, rank=rank, launched=True)

    def running(self, rank: int) -> list[ReplicaId]:
        """What the agent of a node lists."""
        there = [replica for replica in self.fleet.replicas if replica.node == rank and replica.alive]
        return [one.process for one in there if one.spawn_epoch]

    # -- events -------------------------------------------------------------------------------------------------------

    def take(self, instructions: list[FleetInstruction]) -> list[FleetInstruction]:
        for instruction in instructions:
            self.check_instruction(instruction)
        self.seen += instructions
        self.check()
        self.was_ending = self.fleet.launch.ending
        self.dead = [replica for replica in self.fleet.replicas if replica.state is ReplicaState.DEAD]
        return instructions

    def node(self, body: NodeToCoordinator, rank: int = 0) -> list[FleetInstruction]:
        return self.take(from_node(self.fleet, rank, body, self.now))

    def node_hello(
        self, *running: ReplicaId, rank: int = 0, launched: bool = False, devices: int = 0
    ) -> list[FleetInstruction]:
        version, digest = omni_actors.__version__, self.pipeline.digest()
        return self.node(NodeHello(PROTOCOL_VERSION, version, digest, running, launched, devices), rank)

    def stage(self, replica_id: ReplicaId, body: StageToCoordinator) -> list[FleetInstruction]:
        return self.take(self.fleet.from_stage(replica_id, body, self.now))

    def hello(
        self, stage: str, index: int = 0, epoch: int = 0, spawn_epoch: int = 0, again: bool = False
    ) -> list[FleetInstruction]:
        """The hello of the process that was started last, unless the epochs say otherwise."""
        epoch = epoch or self.replica(stage, index).spawn_epoch
        body = Hello(
            protocol=PROTOCOL_VERSION,
            package=omni_actors.__version__,
            config=self.pipeline.digest(),
            pid=7,
            inbox=f"ipc:///{stage}/{index}/{epoch}",
            spawn_epoch=spawn_epoch,
            remote=f"tcp://10.0.0.{self.replica(stage, index).node}:{1 + index}",
            again=again,
        )
        return self.stage(ReplicaId(stage, index, epoch), body)

    def says(self, stage: str, body: StageToCoordinator, index: int = 0) -> list[FleetInstruction]:
        return self.stage(self.replica(stage, index).replica_id, body)

    def ready(self, stage: str, index: int = 0) -> list[FleetInstruction]:
        return self.hello(stage, index) + self.says(stage, Ready(seconds=0.5), index)

    def ended(
        self, stage: str, index: int = 0, how: str = "exit code 1", log: str = "", exit_code: int | None = 1
    ) -> list[FleetInstruction]:
        replica = self.replica(stage, index)
        return self.node(ReplicaEnded(replica.process, how, log, exit_code), replica.node)

    def tick(self, seconds: float = TICK_SECONDS) -> list[FleetInstruction]:
        self.now += seconds
        return self.take(self.fleet.tick(self.now, self.in_flight))

    def wait(self, seconds: float, *silent: str) -> list[FleetInstruction]:
        """Time passes; all nodes and replicas beat twice a second, but for the `silent` ones ("talker/0", "node 1")."""
        instructions: list[FleetInstruction] = []
        for tick in range(round(seconds / TICK_SECONDS)):
            if tick % 10 == 0:
                instructions += self.beat(silent)
            instructions += self.tick()
        return instructions

    def beat(self, silent: tuple[str, ...]) -> list[FleetInstruction]:
        instructions: list[FleetInstruction] = []
        for node in list(self.fleet.nodes.values()):
            if node.present and f"node {node.rank}" not in silent:
                instructions += self.node(NodeBeat(), node.rank)
        for replica in list(self.fleet.replicas):
            if replica.registered and replica.name not in silent:
                beat = Heartbeat(progress=int(self.now * 1000))
                instructions += self.stage(replica.replica_id, beat)
        return instructions

    def operate(self, operation: Operation, stage: str, index: int = 0) -> str:
        text, instructions = operate(self.fleet, Operate(operation, stage, index), self.now)
        self.take(instructions)
        return text

    def scale(self, stage: str, count: int, node: int | None = None) -> str:
        order = Operate(Operation.SCALE, stage, count=count, node=node)
        text, instructions = operate(self.fleet, order, self.now)
        self.wanted[stage] = count
        self.take(instructions)
        return text

    def launch(self, devices: int = 0) -> World:
        """Until every replica is ready."""
        for rank in placement.ranks(self.pipeline):
            self.node_hello(rank=rank, devices=devices)
        for replica in list(self.fleet.replicas):
            self.ready(replica.stage, replica.index)
        assert self.fleet.launch.state is LaunchState.LAUNCHED
        return self

    # -- what is known ------------------------------------------------------------------------------------------------

    def has(self, stage: str, index: int) -> bool:
        return self.fleet.replicas.current(stage, index) is not None

    def replica(self, stage: str, index: int = 0) -> Replica:
        replica = self.fleet.replicas.current(stage, index)
        assert replica is not None
        return replica

    def state(self, stage: str, index: int = 0) -> ReplicaState:
        return self.replica(stage, index).state

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check_instruction(self, instruction: FleetInstruction) -> None:
        match instruction:
            case TellNode(rank, StartReplica() as start):
                place = start.process.stage, start.process.replica
                replica = self.replica(*place)
                assert (replica.node, replica.slot) == (rank, start.slot)
                assert not replica.leaving, "what leaves does not start again"
                assert replica.process == start.process, "the process that is expected"
                assert start.process.epoch > self.started.get(place, 0), "no epoch occurs twice"
                assert self.fleet.nodes[replica.node].state is NodeState.PRESENT
                assert not self.fleet.launch.ending, "nothing starts at the end"
                self.started[place] = start.process.epoch
            case TellNode(_, KillReplica() as kill):
                assert kill.process not in self.killed, "killed once"
                self.killed.add(kill.process)
            case Remember(replicas):
                self.memory = list(replicas)
            case TellReplica(replica_id, Peers() as peers):
                assert not self.was_ending
                self.peers[replica_id] = peers
            case ReplicaLost(replica):
                assert all(replica is not item for item in self.dead), "lost once"
                assert replica.state in (ReplicaState.WAITING, ReplicaState.DEAD)

    def check(self) -> None:
        fleet, launch = self.fleet, self.fleet.launch
        assert bool(launch.failure) == (launch.state is LaunchState.FAILED)
        for replica in fleet.replicas:
            assert replica.registered == (bool(replica.inbox) and replica.alive)
            assert replica.alive or not replica.orders.killed, "orders to end go with their process"
            if replica.registered and not (launch.ending or fleet.restoring):
                told = self.peers[replica.replica_id]
                assert told.peers == fleet.replicas.peers(self.pipeline.downstream(replica.stage), replica.node)
        for stage in self.pipeline.stages:
            replicas = fleet.replicas.of(stage.name)
            places = fleet.replicas.places(stage.name)
            assert len(places) == self.wanted[stage.name], "a spare for each place it takes"
            assert all(replica.alive for replica in replicas if replica.leaving), "what has left is forgotten"
            if launch.serving:
                idle = any(replica.spare and replica.ready for replica in replicas)
                assert not idle or all(replica.serves for replica in places), "no spare idles"


def announced(instructions: list[FleetInstruction]) -> list[str]:
    return [item.text for item in instructions if isinstance(item, Announce)]


def progress(instructions: list[FleetInstruction]) -> list[ShowProgress]:
    return [item for item in instructions if isinstance(item, ShowProgress)]


def to_node(instructions: list[FleetInstruction], kind: type[Body], rank: int = 0) -> list[Any]:
    tells = [item for item in instructions if isinstance(item, TellNode)]
    return [item.body for item in tells if item.rank == rank and isinstance(item.body, kind)]


def starts(instructions: list[FleetInstruction], rank: int = 0) -> list[str]:
    return [start.process.name for start in to_node(instructions, StartReplica, rank)]


def to_stage(instructions: list[FleetInstruction], kind: type[Body]) -> list[str]:
    tells = [item for item in instructions if isinstance(item, TellReplica)]
    return [item.replica_id.name for item in tells if isinstance(item.body, kind)]


def losses(instructions: list[FleetInstruction]) -> dict[str, str]:
    return {item.replica.name: item.why for item in instructions if isinstance(item, ReplicaLost)}


def gives_up(instructions: list[FleetInstruction]) -> list[str]:
    return [item.reason for item in instructions if isinstance(item, GiveUp)]
