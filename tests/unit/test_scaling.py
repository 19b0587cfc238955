"""More or fewer replicas: by operators, by load, as spares, and on nodes that join, leave or are lost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from omni_actors.cli.autoscale import Bounds, Load, Look, Pace, parse_bounds, wished
from omni_actors.config import describe, memory_plan
from omni_actors.config.placement import shared_devices
from omni_actors.coordinator.core.instructions import ReplicaLost, ReplicaReady
from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import KillReplica, NodeLeaving, Operation, Shutdown, StartReplica
from tests.support.builders import chain, load
from tests.support.fleet import World, announced, one_host, to_node, to_stage, two_hosts


def talkers(world: World) -> dict[str, str]:
    """The talkers and their states, in the order in which they are listed."""
    return {
        replica.name: "leaving" if replica.leaving else replica.state.value
        for replica in world.fleet.replicas.of("talker")
    }


def three_talkers(**talker: Any) -> World:
    world = World({**one_host(talker=talker), "coordinator": {"default_timeout": 30.0}}).launch()
    world.scale("talker", 3)
    for index in (1, 2):
        world.ready("talker", index)
    return world


def on_gpus(share: float, *devices: int, **talker: Any) -> World:
    """A talker that vLLM gives this share of each GPU, on a host with two of them."""
    engine = {"gpu_memory_utilization": share}
    stage = {"kind": "autoregressive", "engine": engine, "devices": [*devices], **talker}
    return World(one_host(talker=stage)).launch(devices=2)


def slots_of(world: World) -> list[int]:
    return [start.slot for start in to_node(world.seen, StartReplica) if start.process.stage == "talker"]


def test_those_that_serve_least_leave_first() -> None:
    world = three_talkers(restarts=0)
    world.ended("talker", 0)
    world.operate(Operation.DRAIN, "talker", 1)
    world.scale("talker", 2)
    assert talkers(world) == {"talker/1": "draining", "talker/2": "ready"}
    world.scale("talker", 1)
    assert talkers(world) == {"talker/1": "leaving", "talker/2": "ready"}


def test_one_that_still_loads_is_killed_and_never_ready() -> None:
    world = World().launch()
    world.scale("talker", 2)
    world.hello("talker", 1)
    world.seen.clear()
    world.scale("talker", 1)
    assert [kill.process.replica for kill in to_node(world.seen, KillReplica)] == [1]
    world.ended("talker", 1, how="killed by signal 9", exit_code=-9)
    assert list(talkers(world)) == ["talker/0"]


def test_scaling_up_again_keeps_those_that_have_not_left() -> None:
    world = three_talkers()
    for index in (1, 2):
        world.replica("talker", index).hold(f"r{index}")
    world.scale("talker", 1)
    world.replica("talker", 2).release("r2")
    world.tick()  # talker/2 was asked to stop
    assert world.scale("talker", 3).endswith("talker/1 stays, talker/3 starts on node 0.")
    assert talkers(world) == {"talker/0": "ready", "talker/1": "ready", "talker/2": "leaving", "talker/3": "starting"}


def test_a_node_can_be_chosen_for_more_and_for_fewer() -> None:
    world = World(two_hosts()).launch()
    world.scale("talker", 4, node=1)
    assert [replica.node for replica in world.fleet.replicas.of("talker")] == [0, 1, 1, 1]
    for index in (2, 3):
        world.ready("talker", index)
    world.scale("talker", 3, node=0)
    assert talkers(world)["talker/0"] == "leaving"


def test_replicas_take_the_gpus_of_their_stage_by_turns_and_share_what_has_room() -> None:
    world = on_gpus(0.4, 0, 1)
    world.scale("talker", 3)
    assert slots_of(world) == [0, 1, 0]
    for index in (1, 2):
        world.ready("talker", index)
    world.scale("talker", 2)
    world.tick()
    world.ended("talker", 2)
    world.scale("talker", 3)
    assert slots_of(world) == [0, 1, 0, 0], "the place that was left is free again"


def test_gpus_that_are_taken_are_named_and_nothing_changes() -> None:
    world = on_gpus(0.6, 0, 1)
    with pytest.raises(InvalidRequest) as refused:
        world.scale("talker", 3)
    assert "GPU 0 of node 0 is promised to talker/0 0.6, and a talker takes 0.6 of its memory" in str(refused.value)
    assert "GPU 1 of node 0 is promised to talker/1 0.6" in str(refused.value)
    assert "let a node with free GPUs join" in str(refused.value)
    assert list(talkers(world)) == ["talker/0"]
    world.scale("talker", 2)
    assert slots_of(world) == [0, 1], "what was refused took no place"


@pytest.mark.parametrize(
    ("stage", "count", "node", "words"),
    [
        ("talkr", 2, None, "no stage 'talkr'. Did you mean 'talker'?"),
        ("talker", 0, None, "cannot have 0 replicas; a stage has 1 to 1024. To stop the pipeline"),
        ("talker", 1025, None, "cannot have 1025 replicas"),
        ("talker", 3, 7, "Node 7 does not belong to this pipeline; present are: 0, 1. Name one of these"),
        ("talker", 1, 7, "Node 7 does not belong"),
        ("thinker", 1, 7, "Node 7 does not belong"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(stage: str, count: int, node: int | None, words: str) -> None:
    world = World(two_hosts()).launch()
    with pytest.raises(InvalidRequest) as refused:
        world.scale(stage, count, node)
    assert words in str(refused.value)
    assert len(list(world.fleet.replicas)) == 5


def test_a_node_that_is_away_or_has_too_few_is_refused() -> None:
    world = World(two_hosts(replicas=3)).launch()
    with pytest.raises(InvalidRequest, match="Node 1 has 1 of the 3 replicas of talker, so at least 2 stay"):
        world.scale("talker", 1, node=1)
    world.node(NodeLeaving("a test"), 1)
    with pytest.raises(InvalidRequest, match="Node 1 is not there; present are: 0"):
        world.scale("talker", 4, node=1)


def with_a_spare(**talker: Any) -> World:
    return World(one_host(talker={"spares": 1, **talker})).launch()


def chosen(world: World) -> str:
    replica = world.fleet.replicas.choose("talker")
    return replica.name if replica is not None else ""


def test_the_launch_waits_for_spares_and_gives_them_nothing() -> None:
    world = World(one_host(talker={"spares": 1}))
    world.node_hello()
    for stage in ("prompt", "thinker", "code2wav"):
        world.ready(stage)
    world.ready("talker", 1)
    assert chosen(world) == "", "the place is the other's until the launch is over"
    world.ready("talker", 0)
    assert world.fleet.launch.serving
    assert chosen(world) == "talker/0"
    assert [replica.name for replica in world.fleet.replicas if replica.spare] == ["talker/1"]


def test_a_spare_takes_the_place_before_the_lost_requests_run_again() -> None:
    world = with_a_spare()
    ended = world.ended("talker", 0, how="killed by signal 9")
    assert "talker/1 takes the place of talker/0" in announced(ended)
    kinds = [type(item) for item in ended if isinstance(item, ReplicaLost | ReplicaReady)]
    assert kinds == [ReplicaLost, ReplicaReady], "the loss is carried out first, and finds the spare in its place"
    assert chosen(world) == "talker/1"
    assert world.fleet.replicas.healthy
    assert world.fleet.replicas.missing() == [world.replica("talker", 0)]


def test_a_restart_by_an_operator_moves_requests_to_the_spare_at_once() -> None:
    world = with_a_spare()
    held = world.replica("talker", 0)
    held.hold("r")
    world.operate(Operation.RESTART, "talker", 0)
    assert chosen(world) == "talker/1", "new requests do not wait for the end of those it holds"
    held.release("r")
    assert to_stage(world.tick(), Shutdown) == ["talker/0"]
    world.ended("talker", 0, how="exit code 0")
    world.ready("talker", 0)
    assert world.replica("talker", 0).spare
    world.operate(Operation.RESTART, "talker", 1)
    assert chosen(world) == "talker/0"


def on_a_gpu(**talker: Any) -> dict[str, Any]:
    data = chain()
    data["stages"][2] |= {"kind": "autoregressive", "engine": {"gpu_memory_utilization": 0.4}, "devices": [0], **talker}
    return data


def test_a_spare_has_a_share_of_the_memory_and_shares_the_device(tmp_path: Path) -> None:
    loaded = load(tmp_path, on_a_gpu(spares=1), devices=1)
    assert memory_plan(loaded.pipeline, 1) == {(0, 0): [("talker", 0.8)]}
    assert shared_devices(loaded.pipeline, 0, 1) == {0: [("talker", 0), ("talker", 1)]}
    assert "talker: 1 x autoregressive and 1 spare on GPU 0" in describe(loaded, devices=1)


@pytest.mark.parametrize(
    ("talker", "words"),
    [
        ({"spares": 2}, "promised 1.20 of its memory"),
        ({"spares": -1}, "spares"),
        ({"spares": 1, "node": [0, 1, 2]}, "names 3 nodes, but there are 2 replicas and spares"),
    ],
)
def test_spares_that_do_not_fit_are_refused(tmp_path: Path, talker: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, {**on_a_gpu(**talker), "cluster": {"nnodes": 3}}, devices=1)


def world_with(node: int, gpus: int = 0, **talker: Any) -> World:
    """A running pipeline on node 0, which another node joins."""
    world = World({**one_host(talker=talker), "cluster": {"nnodes": 2}}).launch(devices=gpus)
    world.node_hello(rank=node, devices=gpus)
    return world


def nodes_of(world: World) -> list[int]:
    return [replica.node for replica in world.fleet.replicas.of("talker")]


def test_a_node_without_the_stages_gpus_is_no_place() -> None:
    talker = {"kind": "autoregressive", "engine": {"gpu_memory_utilization": 0.6}, "devices": [3]}
    world = world_with(1, 4, **talker)
    world.node_hello(rank=2, devices=1)
    with pytest.raises(InvalidRequest, match=r"stages\.talker\.devices names GPU 3, and node 2 has 1 GPU"):
        world.scale("talker", 2, node=2)
    world.scale("talker", 2)
    assert nodes_of(world) == [0, 1], "its own node is full"


def test_a_node_that_stops_with_the_whole_pipeline_ends_with_it() -> None:
    """Its replicas may be needed for requests that are in flight and have not come to them."""
    world = World(two_hosts()).launch()
    world.fleet.stop()
    world.node(NodeLeaving("SIGTERM", drains=True), 1)
    assert world.state("talker", 1) is ReplicaState.READY
    assert to_node(world.wait(2.0), Shutdown, 1) == []
    assert to_node(world.take(world.fleet.shut_down()), Shutdown, 1)


def lost_node(**talker: Any) -> World:
    """Two nodes with a talker each; node 1 has just been lost."""
    world = World(two_hosts(**talker), move_after=60.0).launch(devices=1)
    world.node(NodeLeaving("a test"), 1)
    world.seen.clear()
    return world


def test_a_node_that_comes_back_too_late_gives_up_what_has_moved_and_is_of_use() -> None:
    world = lost_node()
    epoch = world.replica("talker", 1).spawn_epoch
    world.wait(65.0)
    world.ready("talker", 1)
    back = world.node_hello(ReplicaId("talker", 1, epoch), rank=1, launched=True)
    assert to_node(back, KillReplica, 1) == [KillReplica(ReplicaId("talker", 1, epoch))]
    world.scale("talker", 3, node=1)
    assert nodes_of(world) == [0, 0, 1]


def test_without_room_it_waits_for_a_node_that_has_some_and_says_so_once() -> None:
    gpu = {"kind": "autoregressive", "engine": {"gpu_memory_utilization": 0.6}, "devices": [0]}
    world = lost_node(**gpu)
    texts = announced(world.wait(80.0))
    (text,) = [text for text in texts if text.startswith("degraded")]
    assert "talker/1 cannot move from node 1" in text
    assert "GPU 0 of node 0 is promised to talker/0 0.6" in text
    assert world.state("talker", 1) is ReplicaState.DEAD
    world.node_hello(rank=2, devices=1)
    moved = world.wait(4.0)
    assert [start.process.replica for start in to_node(moved, StartReplica, 2)] == [1]


PACE = Pace(up=3.0, down=10.0)
TALKER = Bounds("talker", 1, 4, 2)


def looks(requests: Sequence[float], replicas: int = 2, spoken: int = 0, stalled: int = 0) -> list[Look]:
    """One look a second; the answers end with the last."""
    seen = [Look(float(second), {"talker": Load(replicas, held)}) for second, held in enumerate(requests)]
    return [*seen[:-1], seen[-1]._replace(spoken=float(spoken), stalled=float(stalled))]


@pytest.mark.parametrize(
    ("why", "seen", "count"),
    [
        ("what fits is kept", looks([4] * 20), 2),
        ("more in every look of three seconds", looks([4, 5, 5, 5, 5]), 3),
        ("a look of these three asks for no more", looks([5, 5, 5, 4, 5]), 2),
        ("too early to know", looks([9, 9, 9]), 2),
        ("one at a time", looks([99] * 5), 3),
        ("no more than may be", looks([99] * 5, replicas=4), 4),
        ("less in every look of ten seconds", looks([2] * 11), 1),
        ("one of these ten needed as many", looks([2, 3] + [2] * 9), 2),
        ("ten seconds are not over", looks([2] * 10), 2),
        ("no less than may be", looks([0] * 11, replicas=1), 1),
        ("what is out of bounds is mended at once", looks([4], replicas=7), 4),
        ("answers stalled", looks([4] * 11, spoken=100, stalled=6), 3),
        ("few answers stalled", looks([4] * 11, spoken=100, stalled=5), 2),
        ("two stalled answers say nothing", looks([4] * 11, spoken=3, stalled=2), 2),
        ("none leaves while answers stall", looks([2] * 11, replicas=3, spoken=30, stalled=9)[1:], 3),
        ("answers stalled before the last change", [*looks([4] * 5), *looks([4] * 11, 3, 30, 9)[5:]], 3),
    ],
)
def test_replicas_come_soon_leave_late_and_one_at_a_time(why: str, seen: list[Look], count: int) -> None:
    assert wished([TALKER], seen, PACE) == {"talker": count}, why


def test_of_two_stages_the_one_that_is_fuller_gets_more_when_answers_stall() -> None:
    stages = [TALKER, Bounds("code2wav", 1, 4, 8)]
    seen = [look._replace(loads={**look.loads, "code2wav": Load(1, 8)}) for look in looks([3] * 11, 2, 100, 50)]
    assert wished(stages, seen, PACE) == {"talker": 2, "code2wav": 2}


@pytest.mark.parametrize("text", ["talker", "talker=1:2", "=1:2:3", "talker=0:2:3", "talker=3:2:1", "talker=1:2:0"])
def test_bounds_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        parse_bounds(text)
    assert parse_bounds("a=b=1:8:4") == Bounds("a=b", 1, 8, 4)
