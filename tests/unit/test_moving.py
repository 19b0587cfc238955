"""Nodes join and leave a running pipeline, and the replicas of a node that is gone for good move to others."""

from __future__ import annotations

from typing import Any

import pytest

from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import KillReplica, NodeLeaving, Shutdown, StartReplica
from tests.support.fleet import World, announced, one_host, starts, to_node, two_hosts


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


def test_a_node_that_stops_ends_once_its_replicas_have_finished_and_takes_none_meanwhile() -> None:
    world = World(two_hosts()).launch()
    talker = world.replica("talker", 1)
    talker.hold("r")
    drained = world.node(NodeLeaving("SIGTERM", drains=True), 1)
    assert announced(drained) == ["node 1 stops; requests on its replicas: 1", "talker/1 drains"]
    assert [replica.state for replica in world.fleet.replicas.of("talker")] == ["ready", "draining"]
    with pytest.raises(InvalidRequest, match="Node 1 stops; present are: 0"):
        world.scale("talker", 3, node=1)
    world.node(NodeLeaving("SIGTERM", drains=True), 1)
    assert to_node(world.wait(5.0), Shutdown, 1) == []
    talker.release("r")
    assert [told.failed for told in to_node(world.wait(1.0), Shutdown, 1)] == [False], "once"
    world.node(NodeLeaving("the launcher stops"), 1)
    assert world.state("talker", 1) is ReplicaState.DEAD
    assert starts(world.node_hello(rank=1), 1) == ["talker/1"]
    world.ready("talker", 1)
    assert world.state("talker", 1) is ReplicaState.READY


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


def test_a_replica_moves_once_its_node_is_gone_for_good() -> None:
    world = lost_node()
    world.wait(59.0)
    assert starts(world.seen) == [], "it may come back, with its models"
    moved = world.wait(4.0)
    assert starts(moved) == ["talker/1"]
    assert "talker/1 moves from node 1 to node 0" in announced(moved)
    assert nodes_of(world) == [0, 0]
    assert not world.fleet.replicas.healthy
    world.ready("talker", 1)
    assert world.fleet.replicas.healthy
    assert starts(world.wait(120.0)) == [], "once"


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
