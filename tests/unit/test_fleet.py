"""The fleet's decisions about processes: an event in, the list of instructions out. No sockets, no clocks."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

import omni_actors
from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.fleet import (
    ABSENT_SECONDS,
    KILL_SECONDS,
    LAST_LOG_SECONDS,
    STOP_SECONDS,
    TICK_SECONDS,
    Fleet,
)
from omni_actors.coordinator.core.instructions import (
    Announce,
    FleetInstruction,
    GiveUp,
    Level,
    Log,
    Measured,
    ReplicaLost,
    ReplicaReady,
    ReplicaRegistered,
    ReplicaSpawned,
    TellNode,
    TellReplica,
)
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import LaunchState, NodeState, ReplicaState
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.client import Operate, Operation
from omni_actors.protocol.control import (
    Fatal,
    Heartbeat,
    Hello,
    Loading,
    Peers,
    Ready,
    Reregister,
    Shutdown,
    StageToCoordinator,
    Welcome,
)
from omni_actors.protocol.header import PROTOCOL_VERSION, Body, ReplicaId
from omni_actors.protocol.nodes import (
    KillReplica,
    Launched,
    NodeBeat,
    NodeHello,
    NodeLeaving,
    NodeToCoordinator,
    NodeWelcome,
    ReplicaEnded,
    RunningReplica,
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
        epochs = itertools.count(FIRST_EPOCH)
        self.fleet = Fleet(
            self.pipeline, ReplicaTable(), "ipc:///client", "ipc:///results", lambda: next(epochs), T - 1, T
        )
        self.in_flight = 0
        self.was_ending = False
        self.started: dict[tuple[str, int], int] = {}  # the newest epoch that a node was asked to start
        self.killed: set[tuple[str, int, int]] = set()
        self.dead: list[Replica] = []  # before the present event
        self.peers: dict[ReplicaId, Peers] = {}
        self.seen: list[FleetInstruction] = []
        self.take(self.fleet.start(self.now))

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
        return self.take(self.fleet.from_node(rank, body, self.now))

    def node_hello(self, *running: RunningReplica, rank: int = 0, launched: bool = False) -> list[FleetInstruction]:
        hello = NodeHello(PROTOCOL_VERSION, omni_actors.__version__, self.pipeline.digest(), running, launched)
        return self.node(hello, rank)

    def stage(self, replica_id: ReplicaId, body: StageToCoordinator) -> list[FleetInstruction]:
        return self.take(self.fleet.from_stage(replica_id, body, self.now))

    def hello(self, stage: str, index: int = 0, epoch: int = 0, spawn_epoch: int = 0) -> list[FleetInstruction]:
        """The hello of the process that was started last, unless the epochs say otherwise."""
        epoch = epoch or self.replica(stage, index).spawn_epoch
        body = Hello(
            protocol=PROTOCOL_VERSION,
            package=omni_actors.__version__,
            config=self.pipeline.digest(),
            pid=7,
            inbox=f"ipc:///{stage}/{index}/{epoch}",
            spawn_epoch=spawn_epoch,
        )
        return self.stage(ReplicaId(stage, index, epoch), body)

    def says(self, stage: str, body: StageToCoordinator, index: int = 0) -> list[FleetInstruction]:
        return self.stage(self.replica(stage, index).replica_id, body)

    def ready(self, stage: str, index: int = 0) -> list[FleetInstruction]:
        return self.hello(stage, index) + self.says(stage, Ready(seconds=0.5), index)

    def ended(self, stage: str, index: int = 0, how: str = "exit code 1", log: str = "") -> list[FleetInstruction]:
        replica = self.replica(stage, index)
        return self.node(ReplicaEnded(stage, index, replica.spawn_epoch, how, log), replica.node)

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
        for node in self.fleet.nodes.present():
            if f"node {node.rank}" not in silent:
                instructions += self.node(NodeBeat(), node.rank)
        for replica in list(self.fleet.replicas):
            if replica.registered and replica.name not in silent:
                beat = Heartbeat(progress=int(self.now * 1000))
                instructions += self.stage(replica.replica_id, beat)
        return instructions

    def operate(self, operation: Operation, stage: str, index: int = 0) -> str:
        text, instructions = self.fleet.operate(Operate(operation, stage, index), self.now)
        self.take(instructions)
        return text

    def launch(self) -> World:
        """Until every replica is ready."""
        for rank in sorted({replica.node for replica in self.fleet.replicas}):
            self.node_hello(rank=rank)
        for replica in list(self.fleet.replicas):
            self.ready(replica.stage, replica.index)
        assert self.fleet.launch.state is LaunchState.LAUNCHED
        return self

    # -- what is known ------------------------------------------------------------------------------------------------

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
                place = start.stage, start.replica
                replica = self.replica(*place)
                assert replica.node == rank
                assert replica.spawn_epoch == start.spawn_epoch, "the process that is expected"
                assert start.spawn_epoch > self.started.get(place, 0), "no epoch occurs twice"
                assert self.fleet.nodes.of(replica).state is NodeState.PRESENT
                assert not self.fleet.launch.ending, "nothing starts at the end"
                self.started[place] = start.spawn_epoch
            case TellNode(_, KillReplica() as kill):
                process = kill.stage, kill.replica, kill.spawn_epoch
                assert process not in self.killed, "killed once"
                self.killed.add(process)
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
            if replica.registered and not launch.ending:
                told = self.peers[replica.replica_id]
                assert told.peers == fleet.replicas.peers(self.pipeline.downstream(replica.stage), replica.node)


# -- what instructions say --------------------------------------------------------------------------------------------


def announced(instructions: list[FleetInstruction]) -> list[str]:
    return [item.text for item in instructions if isinstance(item, Announce)]


def to_node(instructions: list[FleetInstruction], kind: type[Body], rank: int = 0) -> list[Any]:
    tells = [item for item in instructions if isinstance(item, TellNode)]
    return [item.body for item in tells if item.rank == rank and isinstance(item.body, kind)]


def starts(instructions: list[FleetInstruction], rank: int = 0) -> list[str]:
    return [f"{start.stage}/{start.replica}" for start in to_node(instructions, StartReplica, rank)]


def to_stage(instructions: list[FleetInstruction], kind: type[Body]) -> list[str]:
    tells = [item for item in instructions if isinstance(item, TellReplica)]
    return [item.replica_id.name for item in tells if isinstance(item.body, kind)]


def losses(instructions: list[FleetInstruction]) -> dict[str, str]:
    return {item.replica.name: item.why for item in instructions if isinstance(item, ReplicaLost)}


def gives_up(instructions: list[FleetInstruction]) -> list[str]:
    return [item.reason for item in instructions if isinstance(item, GiveUp)]


# -- the start --------------------------------------------------------------------------------------------------------


def test_a_first_start_from_the_hello_of_the_node_to_ready() -> None:
    world = World()
    hello = world.node_hello()
    assert to_node(hello, NodeWelcome) == [NodeWelcome()]
    assert announced(hello) == ["starting prompt/0, thinker/0, talker/0, code2wav/0"]
    assert starts(hello) == ["prompt/0", "thinker/0", "talker/0", "code2wav/0"]
    registered = world.hello("talker")
    assert registered[0] == ReplicaRegistered(world.replica("talker"))
    assert to_stage(registered, Welcome) == ["talker/0"]
    world.says("talker", Loading("loading weights"))
    ready = world.ready("prompt")
    assert ReplicaReady(world.replica("prompt")) in ready
    assert announced(ready) == [
        "prompt/0 ready in 0.5 s; ready: prompt/0; missing: "
        "thinker/0 (starting process), talker/0 (loading weights), code2wav/0 (starting process)"
    ]
    world.says("talker", Ready(seconds=1.0))
    world.ready("thinker")
    last = world.ready("code2wav")
    assert to_node(last, Launched) == [Launched()]
    assert announced(last)[-1] == "ready after 1.0 s, clients connect to ipc:///client"
    assert world.fleet.launch.state is LaunchState.LAUNCHED


def test_every_replica_is_expected_before_its_node_has_come() -> None:
    world = World(two_hosts())
    assert [item for item in world.seen if isinstance(item, ReplicaSpawned)][-1] == ReplicaSpawned("code2wav", 0, 0)
    world.node_hello()
    (report,) = announced(world.wait(5.1))
    assert "missing: node 1, " in report
    assert "talker/1 (waiting for node 1)" in report


def test_a_stage_left_without_replicas_ends_the_launch_with_its_log() -> None:
    world = World()
    world.node_hello()
    world.hello("talker")
    world.says("talker", Loading("loading weights"))
    world.says("talker", Fatal("The weights are made of cheese."))
    ended = world.ended("talker", log="Traceback")
    reason = (
        "talker/0 died (exit code 1) while loading weights. The weights are made of cheese.\n"
        "--- last lines of its log\nTraceback\n---"
    )
    assert gives_up(ended) == [reason]
    assert not starts(ended)
    assert world.fleet.launch.failure == reason
    end = world.take(world.fleet.shut_down())
    assert to_node(end, Shutdown) == [Shutdown(reason=reason, failed=True)]


def test_one_of_two_replicas_that_dies_at_the_start_restarts() -> None:
    world = World(one_host(talker={"replicas": 2}))
    world.node_hello()
    ended = world.ended("talker", 1, "killed by signal 9")
    assert announced(ended) == [
        "talker/1 died (killed by signal 9) while starting process.\ntalker/1 restarts in 0.0 s",
        "starting talker/1 again",
    ]
    assert starts(ended) == ["talker/1"]
    assert not gives_up(ended)


def test_a_pipeline_is_ready_without_a_replica_that_was_given_up_at_the_start() -> None:
    world = World(one_host(talker={"replicas": 2, "restarts": 0}))
    world.node_hello()
    assert announced(world.ended("talker", 1))[0].startswith("degraded: talker/1 died")
    for stage in STAGES:
        ready = world.ready(stage)
    assert announced(ready)[-1].startswith("ready after")


def test_a_startup_timeout_ends_the_launch_with_the_log_of_the_late_one() -> None:
    world = World(startup_timeout=3.0)
    world.node_hello()
    world.ready("prompt")
    world.hello("thinker")
    overdue = world.wait(2.1)
    assert to_node(overdue, KillReplica) == [KillReplica("thinker", 0, world.replica("thinker").spawn_epoch)]
    assert "missing: thinker/0" in announced(overdue)[-1]
    assert not gives_up(overdue), "the log comes first"
    (reason,) = gives_up(world.ended("thinker", how="killed by signal 9", log="still loading"))
    assert reason.startswith("thinker/0 is not ready in time while starting process.")
    assert "still loading" in reason


def test_a_startup_timeout_does_not_wait_for_ever_for_the_log() -> None:
    world = World(two_hosts(), startup_timeout=3.0)
    world.node_hello()
    assert not gives_up(world.wait(2.1))
    (reason,) = gives_up(world.wait(LAST_LOG_SECONDS))
    assert reason == "prompt/0 is not ready in time while starting process."


def test_a_lost_node_ends_a_launch_that_has_not_come_up() -> None:
    world = World(two_hosts())
    world.node_hello()
    world.node_hello(rank=1)
    assert gives_up(world.node(NodeLeaving("a signal"), 1)) == [
        "Node 1 was lost while the pipeline started: it leaves: a signal"
    ]


def test_a_node_with_another_configuration_is_refused() -> None:
    for launched in (False, True):
        world = World()
        if launched:
            world.launch()
        refused = world.node(NodeHello(PROTOCOL_VERSION, omni_actors.__version__, "another"))
        (told,) = to_node(refused, Shutdown)
        assert told.failed
        assert told.reason.startswith("Node 0 is refused: protocol, package and configuration are")
        assert gives_up(refused) == ([] if launched else [told.reason])


def test_a_node_that_the_configuration_does_not_name_is_refused() -> None:
    world = World()
    (told,) = to_node(world.node_hello(rank=5), Shutdown, 5)
    assert told == Shutdown(reason="The configuration places no stage on node 5.", failed=True)


def test_a_stage_process_of_another_version_is_refused_and_named() -> None:
    world = World()
    world.node_hello()
    hello = Hello(protocol=0, package="0", config="x", pid=1, inbox="ipc:///x")
    assert to_stage(world.stage(world.replica("talker").replica_id, hello), Shutdown) == ["talker/0"]
    (reason,) = gives_up(world.ended("talker"))
    assert "talker/0: protocol, package and configuration are (0, '0', 'x') there" in reason


# -- a coordinator that was restarted ---------------------------------------------------------------------------------


def running(*stages: str, spawn_epoch: int = 500) -> list[RunningReplica]:
    return [RunningReplica(stage, 0, spawn_epoch, 7) for stage in stages]


def test_a_restarted_coordinator_adopts_what_runs_and_starts_what_is_missing() -> None:
    world = World()
    hello = world.node_hello(*running("prompt", "thinker", "talker"), launched=True)
    assert announced(hello) == ["prompt/0, thinker/0, talker/0 still running", "starting code2wav/0"]
    assert starts(hello) == ["code2wav/0"]
    assert to_node(hello, Launched) == [Launched()]
    world.hello("talker", epoch=501, spawn_epoch=500)
    assert world.state("talker") is ReplicaState.LOADING
    assert world.replica("talker").phase == "registering again"
    assert announced(world.says("talker", Ready(seconds=0.1)))[0].startswith("talker/0 ready in 0.1 s")


def test_a_hello_before_that_of_its_node_waits_for_it() -> None:
    world = World()
    assert world.hello("talker", epoch=501, spawn_epoch=500) == []
    hello = world.node_hello(*running(*STAGES), launched=True)
    assert to_stage(hello, Welcome) == ["talker/0"]
    assert world.state("talker") is ReplicaState.LOADING
    assert world.state("thinker") is ReplicaState.STARTING


def test_a_process_that_the_pipeline_does_not_need_is_killed_by_its_node_and_refused() -> None:
    world = World()
    hello = world.node_hello(*running(*STAGES, "other"))
    assert to_node(hello, KillReplica) == [KillReplica("other", 0, 500)]
    foreign = ReplicaId("talker", 0, 400)
    assert to_stage(world.hello("talker", epoch=400), Shutdown) == ["talker/0"]
    assert world.fleet.dropped == {"control_of_unknown_replica": 1}
    assert world.replica("talker").replica_id != foreign


def test_a_node_that_does_not_come_back_is_given_up() -> None:
    world = World(two_hosts())
    world.node_hello(*running(*STAGES), launched=True)
    for stage in STAGES:
        world.hello(stage, epoch=501, spawn_epoch=500)
        world.says(stage, Ready(seconds=0.1))
    absent = world.wait(ABSENT_SECONDS + 0.2)
    assert announced(absent)[-1] == "node 1 is away: it has not come back to the restarted coordinator"
    assert world.state("talker", 1) is ReplicaState.DEAD
    assert starts(world.node_hello(rank=1), 1) == ["talker/1"]


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_a_silent_node_is_away_and_takes_back_what_still_runs_when_it_returns() -> None:
    world = World(two_hosts(), heartbeat_timeout=4.0).launch()
    epoch = world.replica("talker", 1).spawn_epoch
    silent = world.wait(4.2, "node 1", "talker/1")
    assert announced(silent) == ["node 1 is away: silent for 4.0 s"]
    assert losses(silent) == {"talker/1": "node 1 is away: silent for 4.0 s"}
    assert not any(item.blame for item in silent if isinstance(item, ReplicaLost))
    assert world.state("talker", 1) is ReplicaState.DEAD
    assert not world.killed
    assert to_node(world.node(NodeBeat(), 1), Reregister, 1) == [Reregister()]
    back = world.node_hello(RunningReplica("talker", 1, epoch, 7), rank=1)
    assert announced(back) == ["talker/1 still running on node 1"]
    assert not starts(back, 1)
    world.hello("talker", 1, epoch=epoch + 1, spawn_epoch=epoch)
    world.says("talker", Ready(seconds=0.0), 1)
    assert world.state("talker", 1) is ReplicaState.READY


def test_a_node_that_returns_empty_starts_its_replicas() -> None:
    world = World(two_hosts()).launch()
    world.node(NodeLeaving("a signal"), 1)
    assert world.state("talker", 1) is ReplicaState.DEAD
    assert starts(world.node_hello(rank=1), 1) == ["talker/1"]


def test_a_node_may_be_lost_while_a_replica_waits_for_its_restart() -> None:
    world = World(two_hosts(restart_backoff=20.0)).launch()
    world.ended("talker", 1)
    world.ended("talker", 1)
    assert world.state("talker", 1) is ReplicaState.WAITING
    world.node(NodeLeaving("a signal"), 1)
    assert world.state("talker", 1) is ReplicaState.DEAD
    assert starts(world.node_hello(rank=1), 1) == ["talker/1"]


def test_what_a_node_no_longer_runs_has_died() -> None:
    world = World().launch()
    others = [world.replica(stage) for stage in ("prompt", "thinker", "code2wav")]
    hello = world.node_hello(*(RunningReplica(item.stage, 0, item.spawn_epoch, 7) for item in others))
    assert losses(hello) == {"talker/0": "its node knows nothing of it"}
    assert starts(hello) == ["talker/0"]


def test_a_replica_does_not_restart_while_its_node_is_away() -> None:
    world = World(two_hosts()).launch()
    world.node(NodeLeaving("a signal"), 1)
    assert world.operate(Operation.RESTART, "talker", 1) == "talker/1 restarts."
    assert world.state("talker", 1) is ReplicaState.WAITING
    assert not starts(world.wait(1.0), 1)
    world.node_hello(rank=1)
    assert world.state("talker", 1) is ReplicaState.STARTING


# -- stuck processes --------------------------------------------------------------------------------------------------


def test_a_stuck_replica_is_killed_once_and_restarts() -> None:
    world = World(heartbeat_timeout=4.0).launch()
    silent = world.wait(5.0, "talker/0")
    assert len(to_node(silent, KillReplica)) == 1
    assert [item.level for item in silent if isinstance(item, Log)] == [Level.ERROR]
    ended = world.ended("talker", how="killed by signal 9")
    (why,) = losses(ended).values()
    assert why == "no sign of life for 4.0 s; killed by signal 9"
    assert starts(ended) == ["talker/0"]


def test_a_kill_that_is_not_answered_counts_as_done() -> None:
    world = World(heartbeat_timeout=4.0).launch()
    silent = world.wait(4.2 + KILL_SECONDS, "talker/0")
    (why,) = losses(silent).values()
    assert why.endswith("; its node does not answer")
    assert starts(silent) == ["talker/0"]


def test_a_replica_behind_a_silent_link_is_not_killed_at_once() -> None:
    """The order would reach a healthy process once the link is back."""
    world = World(two_hosts(), heartbeat_timeout=4.0, heartbeat_interval=1.0).launch()
    replica = world.replica("talker", 1)
    replica.requests.add("r")
    while world.now < T + 4.0:
        world.says("talker", Heartbeat(progress=1), 1)  # its loop does not advance, and its node is silent
        world.tick()
    assert not world.killed


def test_a_late_tick_accuses_no_one() -> None:
    world = World(two_hosts(), heartbeat_timeout=4.0).launch()
    assert world.tick(60.0) == []
    assert world.tick() == []
    assert losses(world.wait(4.2, "node 1", "talker/1")) != {}, "silence counts from then on"


def test_a_replica_that_counts_as_lost_and_beats_registers_again() -> None:
    world = World(two_hosts()).launch()
    former = world.replica("talker", 1).replica_id
    world.node(NodeLeaving("a cut"), 1)
    assert to_stage(world.stage(former, Heartbeat(progress=1)), Reregister) == ["talker/1"]
    assert to_stage(world.stage(ReplicaId("nothing", 0, 1), Heartbeat(progress=1)), Reregister) == []


def test_a_process_that_registers_again_loses_its_requests_without_blame() -> None:
    world = World().launch()
    epoch = world.replica("talker").spawn_epoch
    again = world.hello("talker", epoch=epoch + 1, spawn_epoch=epoch)
    (lost,) = [item for item in again if isinstance(item, ReplicaLost)]
    assert lost.replica.epoch == epoch
    assert not lost.blame
    assert world.replica("talker").spawn_epoch == epoch
    assert not starts(again)
    assert to_stage(world.take(world.fleet.link_cut(lost.replica.replica_id)), Reregister) == ["talker/0"]


def test_messages_out_of_order_are_dropped_and_counted() -> None:
    world = World()
    world.node_hello()
    assert to_stage(world.says("talker", Loading("x")), Reregister) == ["talker/0"], "it has not said hello"
    world.ready("talker")
    assert not to_stage(world.says("talker", Ready(seconds=1.0)), Welcome)
    world.hello("talker")
    assert world.fleet.dropped == {"control_out_of_order": 2}
    assert world.state("talker") is ReplicaState.READY


def test_heartbeats_are_passed_on_as_measured() -> None:
    world = World().launch()
    beat = Heartbeat(progress=3, counts={"requests": 2})
    assert world.says("talker", beat) == [Measured(world.replica("talker"), beat)]
    assert world.replica("talker").counts == {"requests": 2}


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_restarts_wait_longer_each_time_until_the_pipeline_is_degraded() -> None:
    world = World(one_host(talker={"restarts": 3, "restart_backoff": 0.5})).launch()
    for delay in (0.0, 0.5, 1.0):
        ended = world.ended("talker")
        assert announced(ended)[0].endswith(f"talker/0 restarts in {delay:.1f} s")
        assert (starts(ended) == ["talker/0"]) == (delay == 0.0)
        assert delay == 0.0 or not starts(world.wait(delay - 2 * TICK_SECONDS))
        world.wait(3 * TICK_SECONDS)
        world.ready("talker")
    ended = world.ended("talker", log="Traceback")
    assert announced(ended) == [
        "degraded: talker/0 died (exit code 1) while ready.\n--- last lines of its log\nTraceback\n---"
    ]
    assert world.state("talker") is ReplicaState.DEAD
    assert world.operate(Operation.RESTART, "talker") == "talker/0 restarts."
    assert world.state("talker") is ReplicaState.STARTING


def test_the_end_of_a_former_process_changes_nothing() -> None:
    world = World().launch()
    former = world.replica("talker").spawn_epoch
    world.ended("talker")
    assert world.node(ReplicaEnded("talker", 0, former, "exit code 1")) == []
    assert world.node(ReplicaEnded("nothing", 0, former, "exit code 1")) == []


# -- operators --------------------------------------------------------------------------------------------------------


def test_a_drained_replica_stays_and_takes_nothing_new_even_when_it_registers_again() -> None:
    world = World().launch()
    replica = world.replica("talker")
    replica.hold("r")
    assert world.operate(Operation.DRAIN, "talker") == "talker/0 drains; it holds 1 requests."
    replica.release("r")
    assert not to_stage(world.wait(1.0), Shutdown)
    epoch = replica.spawn_epoch
    world.hello("talker", epoch=epoch + 1, spawn_epoch=epoch)
    assert announced(world.says("talker", Ready(seconds=0.1))) == ["talker/0 drains"]
    assert world.state("talker") is ReplicaState.DRAINING


def test_a_restart_drains_first_and_blames_no_request() -> None:
    world = World().launch()
    replica = world.replica("talker")
    replica.hold("r")
    world.operate(Operation.RESTART, "talker")
    assert not to_stage(world.wait(1.0), Shutdown)
    replica.release("r")
    assert to_stage(world.wait(TICK_SECONDS), Shutdown) == ["talker/0"]
    ended = world.ended("talker", how="exit code 0")
    assert announced(ended) == ["talker/0 has stopped and restarts", "starting talker/0 again"]
    assert not any(item.blame for item in ended if isinstance(item, ReplicaLost))
    assert [item.level for item in ended if isinstance(item, Log)] == [Level.DEBUG]
    assert world.fleet.health.restarts(world.replica("talker")) == 0
    world.ready("talker")
    assert world.state("talker") is ReplicaState.READY, "the order was for the process before"


def test_a_restart_does_not_wait_for_ever_for_requests_or_for_the_process() -> None:
    world = World(default_timeout=3.0).launch()
    world.replica("talker").hold("r")
    world.operate(Operation.RESTART, "talker")
    assert to_stage(world.wait(3.1), Shutdown) == ["talker/0"]
    assert len(to_node(world.wait(STOP_SECONDS + 0.1), KillReplica)) == 1
    assert list(losses(world.ended("talker", how="killed by signal 9")).values()) == [
        "it did not stop; killed by signal 9"
    ]


def test_orders_that_make_no_sense_are_explained() -> None:
    world = World()
    world.node_hello()
    with pytest.raises(InvalidRequest, match="There is no replica talkr/0; there are prompt/0, thinker/0"):
        world.operate(Operation.DRAIN, "talkr")
    with pytest.raises(InvalidRequest, match="talker/0 is starting; only a ready one drains"):
        world.operate(Operation.RESTART, "talker")


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_shutdown_lets_requests_finish_and_then_tells_everyone() -> None:
    world = World().launch()
    world.fleet.stop()
    assert world.fleet.launch.state is LaunchState.DRAINING
    world.in_flight = 1
    world.ended("talker")
    assert starts(world.tick()) == ["talker/0"], "a request in flight may need it"
    world.in_flight = 0
    world.ready("talker")
    world.ended("talker")
    assert not starts(world.wait(1.0))
    end = world.take(world.fleet.shut_down())
    assert to_stage(end, Shutdown) == ["prompt/0", "thinker/0", "code2wav/0"]
    assert to_node(end, Shutdown) == [Shutdown(reason="the launcher stops")]
    assert world.fleet.launch.state is LaunchState.STOPPING
    assert announced(world.ended("thinker")) == []
    assert world.state("thinker") is ReplicaState.DEAD


def test_a_stop_during_the_start_ends_at_once_and_is_no_failure() -> None:
    world = World()
    world.node_hello()
    world.fleet.stop()
    assert world.fleet.launch.ending
    assert not gives_up(world.ended("talker"))
    assert not gives_up(world.node(NodeLeaving("a signal")))
    assert world.fleet.launch.failure == ""
    world.fleet.stop()
    world.fleet.end()
    assert world.fleet.launch.state is LaunchState.STOPPING


# -- any interleaving -------------------------------------------------------------------------------------------------

places = st.sampled_from([("prompt", 0), ("talker", 0), ("talker", 1)])


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, the invariants of `World` hold, and healthy nodes bring everything back."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(two_hosts(restarts=2), heartbeat_timeout=2.0, startup_timeout=60.0).launch()

    @rule(rank=st.integers(0, 1), knows=st.booleans())
    def node_hello(self, rank: int, knows: bool) -> None:
        replicas = [replica for replica in self.world.fleet.replicas if replica.node == rank and replica.spawn_epoch]
        listed = [RunningReplica(item.stage, item.index, item.spawn_epoch, 1) for item in replicas if knows]
        self.world.node_hello(*listed, rank=rank, launched=True)

    @rule(rank=st.integers(0, 1))
    def node_leaves(self, rank: int) -> None:
        self.world.node(NodeLeaving("a test"), rank)

    @rule(place=places, newer=st.integers(0, 1))
    def hello(self, place: tuple[str, int], newer: int) -> None:
        replica = self.world.replica(*place)
        self.world.hello(*place, epoch=replica.epoch + newer, spawn_epoch=replica.spawn_epoch)

    @rule(place=places, body=st.sampled_from([Ready(seconds=1.0), Loading("x"), Heartbeat(progress=1), Fatal("x")]))
    def says(self, place: tuple[str, int], body: StageToCoordinator) -> None:
        self.world.says(place[0], body, place[1])

    @rule(place=places)
    def ended(self, place: tuple[str, int]) -> None:
        self.world.ended(*place)

    @rule(place=places, operation=st.sampled_from([Operation.DRAIN, Operation.RESTART]))
    def operate(self, place: tuple[str, int], operation: Operation) -> None:
        try:
            self.world.operate(operation, *place)
        except InvalidRequest:
            assert self.world.state(*place) not in (ReplicaState.READY, ReplicaState.DRAINING)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]), silent=st.sampled_from(["", "talker/0", "talker/1", "node 1"]))
    def time_passes(self, seconds: float, silent: str) -> None:
        self.world.wait(seconds, silent)

    def teardown(self) -> None:
        world = self.world
        for rank in (0, 1):
            world.node_hello(rank=rank)
        for replica in list(world.fleet.replicas):
            if replica.state is ReplicaState.DEAD:
                world.operate(Operation.RESTART, replica.stage, replica.index)
        world.wait(5.0)
        for replica in list(world.fleet.replicas):
            if world.state(replica.stage, replica.index) is ReplicaState.STARTING:
                world.ready(replica.stage, replica.index)
        states = {replica.state for replica in world.fleet.replicas}
        assert states <= {ReplicaState.READY, ReplicaState.DRAINING}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
