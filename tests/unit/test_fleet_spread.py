"""The fleet's decisions about a replica that is spread over two hosts. No sockets, no clocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from omni_actors.coordinator.core.instructions import FleetInstruction, ReplicaLost
from omni_actors.coordinator.core.states import Evidence, LaunchState, ReplicaState
from omni_actors.protocol.client import Operation
from omni_actors.protocol.control import Heartbeat, Shutdown
from omni_actors.protocol.nodes import KillReplica, NodeLeaving, ReplicaEnded, RunningReplica, StartReplica
from tests.support.fleet import World, announced, gives_up, losses, over_two_hosts, starts, to_node, to_stage

LEADER, OTHER = 1, 0  # the nodes of the talker


def both(instructions: list[FleetInstruction]) -> tuple[list[str], list[str]]:
    """Which talkers the leader's node and the other one are told to start."""
    talkers = [[name for name in starts(instructions, rank) if name == "talker/0"] for rank in (LEADER, OTHER)]
    return talkers[0], talkers[1]


def killed(instructions: list[FleetInstruction]) -> list[int]:
    """The nodes that are told to kill a process of the talker."""
    return [rank for rank in (LEADER, OTHER) if to_node(instructions, KillReplica, rank)]


def listed(world: World, epoch: int | None = None) -> RunningReplica:
    return RunningReplica("talker", 0, world.replica("talker").spawn_epoch if epoch is None else epoch, 7)


@pytest.mark.parametrize("first", [LEADER, OTHER])
def test_it_starts_on_both_hosts_once_both_are_there(first: int) -> None:
    world = World(over_two_hosts())
    assert both(world.node_hello(rank=first)) == ([], [])
    assert world.replica("talker").phase == "waiting for node 1, 0"
    come = world.node_hello(rank=1 - first)
    assert both(come) == (["talker/0"], ["talker/0"])
    orders = [to_node(come, StartReplica, rank)[-1] for rank in (LEADER, OTHER)]
    assert orders[0] == orders[1], "of one epoch"
    assert orders[0].leader == f"10.0.0.{LEADER}"
    assert "starting talker/0 on node 1, 0" in announced(come)


@pytest.mark.parametrize("first", [LEADER, OTHER])
def test_the_end_of_a_process_on_either_host_is_the_loss_of_the_replica(first: int) -> None:
    world = World(over_two_hosts()).launch()
    ended = world.ended("talker", how="killed by signal 9", exit_code=-9, rank=first)
    (loss,) = [item for item in ended if isinstance(item, ReplicaLost)]
    assert loss.why == f"{'' if first == LEADER else 'its ranks on node 0: '}killed by signal 9"
    assert loss.evidence is Evidence.KILLED
    assert killed(ended) == [1 - first], "without the other it would hang"
    assert both(ended) == both(world.wait(1.0)) == ([], []), "its ranks would meet those of the one before"
    again = world.ended("talker", rank=1 - first) + world.tick()
    assert both(again) == (["talker/0"], ["talker/0"])
    assert not losses(again)
    world.ready("talker")
    assert world.state("talker") is ReplicaState.READY


@pytest.mark.parametrize("first", [LEADER, OTHER])
def test_a_process_that_ends_while_the_pipeline_starts_ends_the_launch_with_its_log(first: int) -> None:
    world = World(over_two_hosts())
    for rank in (0, 1):
        world.node_hello(rank=rank)
    (reason,) = gives_up(world.ended("talker", log="no weights", rank=first))
    assert "talker/0 died" in reason
    assert "no weights" in reason


def test_one_that_is_not_ready_in_time_is_killed_on_both_hosts() -> None:
    world = World(over_two_hosts(), startup_timeout=20.0)
    for rank in (0, 1):
        world.node_hello(rank=rank)
    for stage in ("prompt", "thinker", "code2wav"):
        world.ready(stage)
    late = world.wait(20.0)
    assert killed(late) == [LEADER, OTHER]
    (reason,) = gives_up(world.ended("talker", log="it waits for ranks", rank=OTHER))
    assert "is not ready in time" in reason
    assert "it waits for ranks" in reason


def test_a_stuck_one_is_killed_on_both_hosts() -> None:
    world = World(over_two_hosts(), heartbeat_timeout=4.0).launch()
    stuck = world.wait(4.5, "talker/0")
    assert killed(stuck) == [LEADER, OTHER]
    (why,) = losses(world.ended("talker", rank=OTHER)).values()
    assert why.startswith("no sign of life for 4.")


def test_a_silent_host_is_waited_for_before_the_other_is_accused() -> None:
    world = World(over_two_hosts(), heartbeat_timeout=6.0, heartbeat_interval=1.0).launch()
    world.replica("talker").hold("r")
    for _ in range(100):  # its loop waits for the other host, whose node is the one that is silent
        world.says("talker", Heartbeat(progress=1))
        world.tick()
    assert not world.killed


def test_an_operators_restart_ends_both_hosts() -> None:
    world = World(over_two_hosts()).launch()
    world.operate(Operation.RESTART, "talker")
    assert to_stage(world.seen, Shutdown) == ["talker/0"]
    ended = world.ended("talker", how="exit code 0", exit_code=0)
    (loss,) = [item for item in ended if isinstance(item, ReplicaLost)]
    assert loss.evidence is Evidence.NONE
    assert killed(ended) == [OTHER]
    assert both(world.ended("talker", rank=OTHER) + world.tick()) == (["talker/0"], ["talker/0"])


def test_a_host_that_is_away_takes_the_replica_with_it_and_brings_it_back() -> None:
    world = World(over_two_hosts(), heartbeat_timeout=4.0).launch()
    silent = world.wait(5.0, "node 1", "talker/0")
    assert losses(silent) == {"talker/0": next(iter(losses(silent).values()))}
    assert killed(silent) == [OTHER]
    assert world.state("talker") is ReplicaState.DEAD
    old = listed(world)
    world.node(ReplicaEnded("talker", 0, old.spawn_epoch, "killed by signal 9", "", -9), OTHER)
    back = world.node_hello(old, rank=LEADER, launched=True)
    assert killed(back) == [LEADER], "its ranks have lost each other"
    assert both(back) == ([], [])
    ended = world.node(ReplicaEnded("talker", 0, old.spawn_epoch, "killed by signal 9", "", -9), LEADER)
    assert both(ended + world.tick()) == (["talker/0"], ["talker/0"])


def test_a_host_that_left_takes_the_replica_with_it_until_it_joins_again() -> None:
    world = World(over_two_hosts()).launch()
    left = world.node(NodeLeaving("SIGTERM"), LEADER)
    assert killed(left) == [OTHER]
    world.node(ReplicaEnded("talker", 0, world.replica("talker").spawn_epoch, "killed", "", -9), OTHER)
    assert both(world.wait(3.0, "node 1")) == ([], [])
    assert both(world.node_hello(rank=LEADER, launched=True)) == (["talker/0"], ["talker/0"])


@pytest.mark.parametrize("first", [LEADER, OTHER])
def test_a_restarted_coordinator_keeps_one_that_runs_on_both_hosts(first: int) -> None:
    world = World(over_two_hosts())
    others = [RunningReplica(stage, 0, 40, 1) for stage in ("prompt", "thinker", "code2wav")]
    for rank in (first, 1 - first):
        come = world.node_hello(
            RunningReplica("talker", 0, 40, 7), *(others if rank == 0 else ()), rank=rank, launched=True
        )
        assert killed(come) == []
        assert both(come) == ([], [])
    assert world.replica("talker").spawn_epoch == 40
    world.hello("talker", epoch=41, spawn_epoch=40)
    assert world.state("talker") is ReplicaState.LOADING


@pytest.mark.parametrize("running", [(40, 39), (40, None), (None, 40)])
def test_a_restarted_coordinator_ends_what_does_not_belong_together(running: tuple[int | None, int | None]) -> None:
    world = World(over_two_hosts())
    seen = []
    for rank, epoch in zip((LEADER, OTHER), running, strict=True):
        processes = [RunningReplica("talker", 0, epoch, 7)] if epoch is not None else []
        seen += world.node_hello(*processes, rank=rank, launched=True)
    left = [rank for rank, epoch in zip((LEADER, OTHER), running, strict=True) if epoch is not None]
    assert killed(seen) == left
    assert both(seen) == ([], [])
    for rank, epoch in zip((LEADER, OTHER), running, strict=True):
        if epoch is not None:
            world.node(ReplicaEnded("talker", 0, epoch, "killed by signal 9", "", -9), rank)
    world.tick()
    assert both(world.seen) == (["talker/0"], ["talker/0"])


def test_a_host_that_has_lost_its_process_says_so_when_it_connects_again() -> None:
    world = World(over_two_hosts()).launch()
    again = world.node_hello(rank=OTHER, launched=True)
    assert losses(again)["talker/0"] == "node 0 knows nothing of it"
    assert killed(again) == [LEADER]


def test_an_old_coordinators_host_that_does_not_come_back_takes_the_replica_with_it() -> None:
    world = World(over_two_hosts())
    world.node_hello(RunningReplica("talker", 0, 40, 7), rank=OTHER, launched=True)
    gone = world.wait(11.0)
    assert "it has not come back" in losses(gone)["talker/0"]
    assert killed(gone) == [OTHER]


def test_one_whose_other_host_is_gone_does_not_register_again() -> None:
    world = World(over_two_hosts(), heartbeat_timeout=4.0).launch()
    epoch = world.replica("talker").spawn_epoch
    world.wait(5.0, "node 1", "talker/0")
    back = world.hello("talker", epoch=epoch + 1, spawn_epoch=epoch)
    assert to_stage(back, Shutdown) == ["talker/0"]
    assert world.state("talker") is ReplicaState.DEAD


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, epochs never meet, and healthy nodes bring the replica back."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(over_two_hosts(restarts=2), heartbeat_timeout=2.0, startup_timeout=60.0)
        self.world.launch()
        self.process: dict[int, int] = {}  # node -> epoch of the talker's process there, whose end a rule reports
        self.after()

    @rule(rank=st.sampled_from([LEADER, OTHER]))
    def ends(self, rank: int) -> None:
        epoch = self.process.pop(rank, None)
        if epoch is not None:
            self.world.node(ReplicaEnded("talker", 0, epoch, "exit code 1", "", 1), rank)
        self.after()

    @rule(rank=st.sampled_from([LEADER, OTHER]), lost=st.booleans())
    def node_hello(self, rank: int, lost: bool) -> None:
        if lost:
            self.process.pop(rank, None)
        processes = [RunningReplica("talker", 0, self.process[rank], 7)] if rank in self.process else []
        mine = [item for item in self.world.fleet.replicas if item.node == rank and item.stage != "talker"]
        whole = [RunningReplica(item.stage, item.index, item.spawn_epoch, 1) for item in mine if item.spawn_epoch]
        self.world.node_hello(*processes, *whole, rank=rank, launched=True)
        self.after()

    @rule(rank=st.sampled_from([LEADER, OTHER]))
    def node_leaves(self, rank: int) -> None:
        self.process.pop(rank, None)
        self.world.node(NodeLeaving("a test"), rank)
        self.after()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]), silent=st.sampled_from(["", "talker/0", "node 1"]))
    def time_passes(self, seconds: float, silent: str) -> None:
        self.world.wait(seconds, silent)
        self.after()

    @rule()
    def registers_again(self) -> None:
        if LEADER in self.process:
            epoch = max(self.world.replica("talker").epoch, self.process[LEADER]) + 1
            self.world.hello("talker", epoch=epoch, spawn_epoch=self.process[LEADER])
        self.after()

    @rule()
    def ready(self) -> None:
        if self.world.state("talker") is ReplicaState.STARTING and self.world.replica("talker").spawn_epoch:
            self.world.ready("talker")
        self.after()

    def after(self) -> None:
        """Start what the nodes were told to start."""
        seen = {
            rank: [order for order in to_node(self.world.seen, StartReplica, rank) if order.stage == "talker"]
            for rank in (LEADER, OTHER)
        }
        assert seen[LEADER] == seen[OTHER], "started together"
        for order in seen[LEADER]:
            assert not self.process, "ranks of two epochs would meet"
            self.process = dict.fromkeys((LEADER, OTHER), order.spawn_epoch)
        self.world.seen.clear()
        replica = self.world.replica("talker")
        if replica.registered:
            assert self.process == dict.fromkeys((LEADER, OTHER), replica.spawn_epoch), "it is whole"

    def teardown(self) -> None:
        world = self.world
        for rank in (LEADER, OTHER):
            self.node_hello(rank, lost=False)
        for rank in (LEADER, OTHER):
            self.ends(rank)
        if world.state("talker") is ReplicaState.DEAD:
            world.operate(Operation.RESTART, "talker")
        world.wait(5.0)
        self.after()
        assert world.fleet.launch.state is LaunchState.LAUNCHED
        assert world.state("talker") is ReplicaState.STARTING
        world.ready("talker")


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=25)
