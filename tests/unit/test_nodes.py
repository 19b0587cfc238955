"""Hellos of stages and nodes: who is expected, who is taken over, who has to go."""

from __future__ import annotations

import pytest

from omni_actors.coordinator.core.nodes import Node, silent, take_over
from omni_actors.coordinator.core.replicas import NodeEvent, ReplicaState, ReplicaTable
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import Ready, Shutdown, Welcome
from tests.support.fleet import World as FleetWorld
from tests.support.fleet import one_host, to_stage

T = 100.0


class World:
    """The echo chain on one node, whose processes were started as 7."""

    def __init__(self, spawn_epoch: int = 7) -> None:
        self.replicas = ReplicaTable()
        for stage in ("prompt", "thinker", "talker", "code2wav"):
            self.replicas.add(stage, 0, spawn_epoch).heard = T

    def take_over(self, **spawn_epoch: int):
        return take_over(self.replicas, [ReplicaId(stage, 0, epoch) for stage, epoch in spawn_epoch.items()])


@pytest.mark.parametrize(
    ("spawn_epoch", "epoch", "expected"),
    [(7, 7, "expected"), (7, 9, "renewed"), (7, 6, "repeated"), (8, 8, "foreign"), (6, 9, "foreign")],
)
def test_hello_of_a_process(spawn_epoch: int, epoch: int, expected: str) -> None:
    world = FleetWorld()
    world.node_hello()
    started = world.replica("talker").spawn_epoch
    assert answer(world, started - 7 + epoch, started - 7 + spawn_epoch) == expected


def test_a_hello_may_not_reset_what_works_but_may_renew_what_was_lost() -> None:
    world = FleetWorld(one_host(talker={"restarts": 0}))
    world.launch()
    for state in ("ready", "dead"):
        if state == "dead":
            world.ended("talker")
        replica = world.replica("talker")
        assert replica.state == state
        assert answer(world, replica.epoch, replica.spawn_epoch) == "repeated"
        assert answer(world, replica.epoch + 1, replica.spawn_epoch) == "renewed"
        world.says("talker", Ready(seconds=0.5))


def answer(world: FleetWorld, epoch: int, spawn_epoch: int) -> str:
    """What becomes of a talker's hello."""
    before = world.replica("talker").epoch
    instructions = world.hello("talker", epoch=epoch, spawn_epoch=spawn_epoch)
    if to_stage(instructions, Welcome):
        return "renewed" if world.replica("talker").epoch > before else "expected"
    return "foreign" if to_stage(instructions, Shutdown) else "repeated"


def test_a_process_that_is_not_placed_there_is_killed() -> None:
    takeover = World().take_over(prompt=7, thinker=7, talker=7, code2wav=7, other=7)
    assert [process.stage for process in takeover.kill] == ["other"]


def test_a_silent_agent_whose_stages_beat_is_not_lost() -> None:
    replicas = ReplicaTable()
    master, node = nodes = [Node(rank, heard=T) for rank in (0, 1)]
    master.on(NodeEvent.HELLO)
    node.on(NodeEvent.HELLO)
    talker = replicas.add("talker", 0, 7, node=1)
    assert not silent(nodes, replicas, T + 3.9, 4)
    assert silent(nodes, replicas, T + 4.1, 4) == [node], "not the coordinator's own host"
    talker.heard = T + 2
    assert not silent(nodes, replicas, T + 4.1, 4)
    talker.state = ReplicaState.DEAD
    assert silent(nodes, replicas, T + 4.1, 4) == [node]
    node.on(NodeEvent.LOST)
    assert not silent(nodes, replicas, T + 9, 4)
