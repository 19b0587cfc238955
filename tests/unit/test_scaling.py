"""Operators give a stage more or fewer replicas: where they go, which leave, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.messages import KillReplica, NodeLeaving, Operation, Shutdown, StartReplica
from tests.support.fleet import World, announced, one_host, starts, to_node, to_stage, two_hosts


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


def test_new_replicas_start_and_take_requests_once_they_are_ready() -> None:
    world = World().launch()
    text = world.scale("talker", 3)
    assert text == "talker has 3 replicas: talker/1 starts on node 0, talker/2 starts on node 0."
    assert starts(world.seen)[-2:] == ["talker/1", "talker/2"]
    assert world.fleet.replicas.healthy, "those that still load are no fault"
    world.ready("talker", 2)
    world.replica("talker", 0).hold("r")
    chosen = world.fleet.replicas.choose("talker")
    assert chosen is world.replica("talker", 2)
    assert world.peers[world.replica("thinker").replica_id].peers[-1].inbox.startswith("ipc:///talker/2")


def test_a_replica_that_leaves_ends_when_it_is_empty_and_is_forgotten() -> None:
    world = three_talkers()
    world.replica("talker", 2).hold("r")
    assert world.scale("talker", 2) == "talker has 2 replicas: talker/2 leaves."
    assert world.state("talker", 2) is ReplicaState.DRAINING
    assert world.fleet.replicas.healthy
    assert to_stage(world.wait(1.0), Shutdown) == []
    world.replica("talker", 2).release("r")
    assert to_stage(world.tick(), Shutdown) == ["talker/2"]
    ended = world.ended("talker", 2, how="exit code 0", exit_code=0)
    assert announced(ended) == ["talker/2 has left"]
    assert talkers(world) == {"talker/0": "ready", "talker/1": "ready"}
    assert starts(world.wait(5.0)) == []


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
