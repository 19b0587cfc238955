"""The fleet: the first hello of a node, losses, restarts, and events in any order. No sockets, no clocks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import omni_actors
from omni_actors.coordinator.core.fleet import RESTORE_SECONDS, STOP_SECONDS
from omni_actors.coordinator.core.hosts import ABSENT_SECONDS, silent
from omni_actors.coordinator.core.instructions import FleetInstruction, ReplicaLost, ServeClients
from omni_actors.coordinator.core.nodes import Node
from omni_actors.coordinator.core.replicas import Evidence, LaunchState, ReplicaState, ReplicaTable
from omni_actors.coordinator.shell import read_memory, write_memory
from omni_actors.errors import InvalidRequest, StartupError
from omni_actors.host.run_directory import FLEET
from omni_actors.protocol.fields import PROTOCOL_VERSION, ReplicaId
from omni_actors.protocol.messages import (
    Fatal,
    Heartbeat,
    Hello,
    KillReplica,
    Loading,
    NodeBeat,
    NodeHello,
    NodeLeaving,
    Operation,
    Peers,
    Ready,
    Reregister,
    Shutdown,
    StageToCoordinator,
    StartReplica,
    Welcome,
)
from tests.support.fleet import (
    STAGES,
    T,
    World,
    announced,
    gives_up,
    losses,
    one_host,
    progress,
    starts,
    to_node,
    to_stage,
    two_hosts,
)


def computing(**options: Any) -> World:
    """Thinker, talker and code2wav compute on the only GPU."""
    stages = {name: {"kind": "autoregressive", "devices": [0]} for name in ("thinker", "talker", "code2wav")}
    return World({**one_host(**stages), **options}).launch(devices=1)


def test_a_gpu_that_fails_under_mps_takes_all_that_share_it_along() -> None:
    """Who computes nothing does not notice, and MPS accepts nobody while one of them is there."""
    world = computing()
    world.replica("thinker").requests.add("r1")
    world.says("code2wav", Fatal("CUDA error: an illegal memory access was encountered", device=True))
    ended = world.ended("code2wav")
    assert [kill.process.name for kill in to_node(ended, KillReplica)] == ["thinker/0", "talker/0"]
    killed = world.ended("thinker", how="killed by signal 9", exit_code=-signal.SIGKILL)
    assert starts(killed) == ["thinker/0"]
    (lost,) = [item for item in killed if isinstance(item, ReplicaLost)]
    assert lost.evidence is Evidence.NONE, "it was no request's doing"


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
    assert lost.evidence is Evidence.NONE
    assert world.replica("talker").spawn_epoch == epoch
    assert not starts(again)
    assert to_stage(world.take(world.fleet.link_cut(lost.replica.replica_id)), Reregister) == ["talker/0"]


@pytest.mark.parametrize(
    ("exit_code", "hangs", "evidence"),
    [
        (1, False, Evidence.CRASHED),
        (-11, False, Evidence.CRASHED),
        (137, False, Evidence.CRASHED),
        (-9, False, Evidence.KILLED),
        (128 + signal.SIGTERM, False, Evidence.KILLED),
        (0, False, Evidence.KILLED),
        (None, False, Evidence.KILLED),
        (-9, True, Evidence.CRASHED),
    ],
)
def test_what_a_loss_says_depends_on_how_the_process_ended(
    exit_code: int | None, hangs: bool, evidence: Evidence
) -> None:
    """One that hung was killed, too, but by its launcher."""
    world = World(heartbeat_timeout=2.0).launch()
    if hangs:
        world.wait(2.5, "talker/0")
    (lost,) = [item for item in world.ended("talker", exit_code=exit_code) if isinstance(item, ReplicaLost)]
    assert lost.evidence is evidence


def test_a_restart_does_not_wait_for_ever_for_requests_or_for_the_process() -> None:
    world = World(default_timeout=3.0).launch()
    world.replica("talker").hold("r")
    world.operate(Operation.RESTART, "talker")
    assert to_stage(world.wait(3.1), Shutdown) == ["talker/0"]
    assert len(to_node(world.wait(STOP_SECONDS + 0.1), KillReplica)) == 1
    assert list(losses(world.ended("talker", how="killed by signal 9")).values()) == [
        "it did not stop; killed by signal 9"
    ]


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


# -- the start --------------------------------------------------------------------------------------------------------


def test_a_line_of_progress_says_something_new_or_comes_after_a_minute() -> None:
    world = World()
    world.node_hello()
    world.hello("talker")

    def lines(seconds: int) -> list[str]:
        shown = [item for _ in range(seconds) for item in progress(world.wait(1.0)) if item.is_line]
        return [item.text.partition("; missing: ")[2] for item in shown]

    first = lines(30)
    assert len(first) == 1
    world.says("talker", Loading("loading weights"))
    assert lines(2) == [first[0].replace("talker/0 (starting process)", "talker/0 (loading weights)")]
    assert lines(60) == []
    assert len(lines(60)) == 1


def test_a_startup_timeout_ends_the_launch_with_the_log_of_the_late_one() -> None:
    world = World(startup_timeout=3.0)
    world.node_hello()
    world.ready("prompt")
    world.hello("thinker")
    overdue = world.wait(2.1)
    assert to_node(overdue, KillReplica) == [KillReplica(world.replica("thinker").process)]
    assert "missing: thinker/0" in announced(overdue)[-1]
    assert not gives_up(overdue), "the log comes first"
    (reason,) = gives_up(world.ended("thinker", how="killed by signal 9", log="still loading"))
    assert reason.startswith("thinker/0 is not ready in time while starting process.")
    assert "still loading" in reason


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


def test_a_stage_process_of_another_version_is_refused_and_named() -> None:
    world = World()
    world.node_hello()
    hello = Hello(protocol=0, package="0", config="x", pid=1, inbox="ipc:///x")
    assert to_stage(world.stage(world.replica("talker").replica_id, hello), Shutdown) == ["talker/0"]
    (reason,) = gives_up(world.ended("talker"))
    assert "talker/0: protocol, package and configuration are (0, '0', 'x') there" in reason


# -- a coordinator that was restarted ---------------------------------------------------------------------------------


def running(*stages: str, spawn_epoch: int = 500) -> list[ReplicaId]:
    return [ReplicaId(stage, 0, spawn_epoch) for stage in stages]


def test_clients_are_served_and_peers_announced_once_all_that_ran_is_here() -> None:
    world = World()
    assert serves(world.node_hello(*running(*STAGES), launched=True)) == 0
    for stage in STAGES[:-1]:
        registered = world.hello(stage, epoch=500) + world.says(stage, Ready(seconds=0.1))
        assert to_stage(registered, Peers) == [], "a stage would close its links to those that are missing"
        assert serves(registered) == 0
    last = world.hello(STAGES[-1], epoch=500) + world.says(STAGES[-1], Ready(seconds=0.1))
    assert to_stage(last, Peers) == [f"{stage}/0" for stage in STAGES]
    assert serves(last) == 1
    assert serves(world.wait(RESTORE_SECONDS)) == 0


def test_clients_do_not_wait_long_for_a_process_that_does_not_come() -> None:
    world = World()
    world.node_hello(*running(*STAGES), launched=True)
    world.hello("talker", epoch=500)
    world.says("talker", Ready(seconds=0.1))
    assert serves(world.wait(RESTORE_SECONDS - 0.5)) == 0
    late = world.wait(1.0)
    assert serves(late) == 1
    assert to_stage(late, Peers) == ["talker/0"]


def test_a_stage_that_this_coordinator_knows_and_that_says_hello_again_registers_anew() -> None:
    """Its connection was lost, and with it what was on its way."""
    world = World().launch()
    assert to_stage(world.hello("talker"), Reregister) == [], "a stray one harms nobody"
    assert to_stage(world.hello("talker", again=True), Reregister) == ["talker/0"]


def serves(instructions: list[FleetInstruction]) -> int:
    return sum(isinstance(item, ServeClients) for item in instructions)


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
    assert to_node(hello, KillReplica) == [KillReplica(ReplicaId("other", 0, 500))]
    foreign = ReplicaId("talker", 0, 400)
    assert to_stage(world.hello("talker", epoch=400), Shutdown) == ["talker/0"]
    assert world.fleet.dropped == {"control_of_unknown_replica": 1}
    assert world.replica("talker").replica_id != foreign
    assert to_stage(world.hello("talker", epoch=499, spawn_epoch=500), Welcome) == [], "an earlier life of its own"


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
    assert not any(item.evidence for item in silent if isinstance(item, ReplicaLost))
    assert world.state("talker", 1) is ReplicaState.DEAD
    assert not world.killed
    assert to_node(world.node(NodeBeat(), 1), Reregister, 1) == [Reregister()]
    back = world.node_hello(ReplicaId("talker", 1, epoch), rank=1)
    assert announced(back) == ["talker/1 still running on node 1"]
    assert not starts(back, 1)
    world.hello("talker", 1, epoch=epoch + 1, spawn_epoch=epoch)
    world.says("talker", Ready(seconds=0.0), 1)
    assert world.state("talker", 1) is ReplicaState.READY


def test_a_silent_agent_whose_stages_beat_is_not_lost() -> None:
    replicas = ReplicaTable()
    master, node = nodes = [Node(rank, heard=T) for rank in (0, 1)]
    master.on("hello")
    node.on("hello")
    talker = replicas.add("talker", 0, 7, node=1)
    assert not silent(nodes, replicas, T + 3.9, 4)
    assert silent(nodes, replicas, T + 4.1, 4) == [node], "not the coordinator's own host"
    talker.heard = T + 2
    assert not silent(nodes, replicas, T + 4.1, 4)
    talker.state = ReplicaState.DEAD
    assert silent(nodes, replicas, T + 4.1, 4) == [node]
    node.on("lost")
    assert not silent(nodes, replicas, T + 9, 4)


def scaled(count: int = 3, **talker: Any) -> World:
    world = World(one_host(talker=talker)).launch()
    world.scale("talker", count)
    for replica in world.fleet.replicas.of("talker"):
        if not replica.registered:
            world.ready("talker", replica.index)
    return world


def test_a_replica_that_left_does_not_come_back_and_one_that_was_leaving_ends() -> None:
    world = scaled()
    for index in (1, 2):
        world.replica("talker", index).hold("r")
    world.scale("talker", 1)
    world.replica("talker", 2).release("r")
    world.tick()
    world.ended("talker", 2)
    world.seen.clear()
    world.restart_coordinator()
    assert [replica.name for replica in world.fleet.replicas.of("talker")] == ["talker/0"]
    assert [kill.process.replica for kill in to_node(world.seen, KillReplica)] == [1], "its requests are lost anyway"


def test_what_died_with_the_coordinator_starts_again_in_its_place() -> None:
    world = scaled(2, kind="autoregressive", engine={"gpu_memory_utilization": 0.4})
    slots = [replica.slot for replica in world.fleet.replicas.of("talker")]
    world.replica("talker", 1).spawn_epoch = 0  # its node does not list it
    world.seen.clear()
    world.restart_coordinator()
    assert starts(world.seen) == ["talker/1"]
    assert [start.slot for start in to_node(world.seen, StartReplica)] == slots[1:]


@pytest.mark.parametrize("operation", [Operation.DRAIN, Operation.RESTART])
def test_a_drain_and_a_restart_are_remembered(operation: Operation) -> None:
    world = scaled(2)
    world.replica("talker", 1).hold("r")
    world.operate(operation, "talker", 1)
    world.restart_coordinator()
    ready = world.ready("talker", 1)
    assert world.state("talker", 1) is ReplicaState.DRAINING
    stops = to_stage(ready + world.tick(), Shutdown)
    assert stops == (["talker/1"] if operation is Operation.RESTART else [])


BROKEN = {  # what becomes of the file, and the words for it
    "half of it": (lambda whole: whole[: len(whole) // 2], "truncated"),
    "nothing": (lambda whole: b"", "truncated"),
    "no text": (lambda whole: b"\xff\x00", "malformed"),
    "an unknown key": (lambda whole: whole.replace(b'"stage"', b'"stages"'), "unknown field"),
    "a node that cannot be": (lambda whole: whole.replace(b'"node":0', b'"node":-1', 1), ">= 0"),
}


@pytest.mark.parametrize(("broken", "words"), BROKEN.values(), ids=list(BROKEN))
def test_the_file_gives_back_what_was_written_and_a_broken_one_is_refused_with_what_to_do(
    tmp_path: Path, broken: Callable[[bytes], bytes], words: str
) -> None:
    file, memory = tmp_path / FLEET, scaled().memory
    assert read_memory(file) == []
    write_memory(file, memory)
    assert read_memory(file) == memory
    assert [path.name for path in tmp_path.iterdir()] == [FLEET]
    content = broken(file.read_bytes())
    file.write_bytes(content)
    with pytest.raises(StartupError) as refused:
        read_memory(file)
    for part in (words, str(file), "remove it, and the pipeline goes on with the replicas of its configuration"):
        assert part in str(refused.value)
    assert file.read_bytes() == content


silents = ("talker/0", "talker/1", "node 1", "node 2")
places = st.sampled_from([("prompt", 0), ("talker", 0), ("talker", 1), ("talker", 2)])


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, the invariants of `World` hold, and healthy nodes bring everything back."""

    @initialize(spares=st.integers(0, 1))
    def launch(self, spares: int) -> None:
        """Without a spare, or with one of the two talkers as one."""
        data = two_hosts(restarts=2, replicas=2 - spares, spares=spares)
        self.world = World(data, heartbeat_timeout=2.0, startup_timeout=60.0, move_after=3.0).launch()

    @rule(rank=st.integers(0, 2), knows=st.booleans())
    def node_hello(self, rank: int, knows: bool) -> None:
        replicas = [replica for replica in self.world.fleet.replicas if replica.node == rank and replica.spawn_epoch]
        listed = [item.process for item in replicas if knows]
        self.world.node_hello(*listed, rank=rank, launched=True)

    @rule(rank=st.integers(0, 2), drains=st.booleans())
    def node_leaves(self, rank: int, drains: bool) -> None:
        self.world.node(NodeLeaving("a test", drains), rank)

    @rule(place=places, newer=st.integers(0, 1))
    def hello(self, place: tuple[str, int], newer: int) -> None:
        if not self.world.has(*place):
            return
        replica = self.world.replica(*place)
        self.world.hello(*place, epoch=replica.epoch + newer, spawn_epoch=replica.spawn_epoch)

    @rule(place=places, body=st.sampled_from([Ready(seconds=1.0), Loading("x"), Heartbeat(progress=1), Fatal("x")]))
    def says(self, place: tuple[str, int], body: StageToCoordinator) -> None:
        if self.world.has(*place):
            self.world.says(place[0], body, place[1])

    @rule(place=places)
    def ended(self, place: tuple[str, int]) -> None:
        if self.world.has(*place):
            self.world.ended(*place)

    @rule(place=places, operation=st.sampled_from([Operation.DRAIN, Operation.RESTART]))
    def operate(self, place: tuple[str, int], operation: Operation) -> None:
        try:
            self.world.operate(operation, *place)
        except InvalidRequest:
            may_drain = self.world.has(*place) and not self.world.replica(*place).leaving
            assert not (may_drain and self.world.state(*place) in (ReplicaState.READY, ReplicaState.DRAINING))

    @rule(count=st.integers(0, 4), node=st.sampled_from([None, 0, 1, 2]))
    def scale(self, count: int, node: int | None) -> None:
        before = self.world.wanted["talker"]
        try:
            self.world.scale("talker", count, node)
        except InvalidRequest:
            assert self.world.wanted["talker"] == before, "a refused command changes nothing"

    @rule()
    def the_coordinator_is_killed(self) -> None:
        self.world.restart_coordinator()

    @rule(place=places, busy=st.booleans())
    def is_busy(self, place: tuple[str, int], busy: bool) -> None:
        replica = self.world.replica(*place) if self.world.has(*place) else None
        if replica is not None and busy and replica.takes_requests:
            replica.hold("r")
        elif replica is not None and not busy:
            replica.release_all()

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]), silent=st.sampled_from(["", *silents]))
    def time_passes(self, seconds: float, silent: str) -> None:
        self.world.wait(seconds, silent)

    def teardown(self) -> None:
        world = self.world
        for rank in (0, 1, 2):
            world.node_hello(rank=rank)
        for replica in list(world.fleet.replicas):
            if replica.state is ReplicaState.DEAD:
                world.operate(Operation.RESTART, replica.stage, replica.index)
        for replica in world.fleet.replicas:
            replica.release_all()
        world.wait(5.0)
        for replica in list(world.fleet.replicas):
            if replica.leaving:
                world.ended(replica.stage, replica.index)
        for replica in list(world.fleet.replicas):
            if world.state(replica.stage, replica.index) is ReplicaState.STARTING:
                world.ready(replica.stage, replica.index)
        states = {replica.state for replica in world.fleet.replicas}
        assert states <= {ReplicaState.READY, ReplicaState.DRAINING}
        assert not any(replica.leaving for replica in world.fleet.replicas), "what was to leave has left"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=30)
