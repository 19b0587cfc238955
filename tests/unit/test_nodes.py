"""Hellos of stages and nodes: who is expected, who is taken over, who has to go."""

from __future__ import annotations

import msgspec
import pytest

from omni_actors.config import PipelineConfig, placement
from omni_actors.coordinator.core.nodes import HelloKind, NodeTable, classify_hello
from omni_actors.coordinator.core.replicas import NodeEvent, Replica, ReplicaEvent, ReplicaState, ReplicaTable
from omni_actors.protocol.messages import RunningReplica
from tests.support.builders import chain, pipeline

T = 100.0


class World:
    """The echo chain on one node, whose processes were started as 7."""

    def __init__(self, spawn_epoch: int = 7) -> None:
        self.replicas = ReplicaTable()
        self.nodes = NodeTable(self.replicas, placement.ranks(pipeline()), T)
        self.node = self.nodes.find(0)
        for stage in ("prompt", "thinker", "talker", "code2wav"):
            self.replicas.add(stage, 0, spawn_epoch).heard = T

    def replica(self, stage: str = "talker") -> Replica:
        return self.replicas.current(stage, 0)

    def take_over(self, **spawn_epoch: int):
        return self.nodes.take_over(self.node, [RunningReplica(stage, 0, b, 1) for stage, b in spawn_epoch.items()])


def advanced(replica: Replica, *events: ReplicaEvent) -> Replica:
    for event in events:
        replica.on(event)
    return replica


@pytest.mark.parametrize(
    ("spawn_epoch", "epoch", "expected"),
    [
        (7, 7, HelloKind.EXPECTED),
        (7, 9, HelloKind.RENEWED),
        (7, 6, HelloKind.REPEATED),
        (8, 8, HelloKind.FOREIGN),
        (6, 9, HelloKind.FOREIGN),
    ],
)
def test_hello_of_a_process(spawn_epoch: int, epoch: int, expected: HelloKind) -> None:
    assert classify_hello(World().replica(), epoch, spawn_epoch) is expected


def test_a_hello_may_not_reset_what_works_but_may_renew_what_was_lost() -> None:
    working = advanced(World().replica(), ReplicaEvent.HELLO, ReplicaEvent.READY)
    assert classify_hello(working, 7, 7) is HelloKind.REPEATED
    assert classify_hello(working, 8, 7) is HelloKind.RENEWED
    lost = advanced(World().replica(), ReplicaEvent.GIVEN_UP)
    assert classify_hello(lost, 7, 7) is HelloKind.REPEATED
    assert classify_hello(lost, 8, 7) is HelloKind.RENEWED


def test_a_process_that_is_not_placed_there_is_killed() -> None:
    takeover = World().take_over(prompt=7, thinker=7, talker=7, code2wav=7, other=7)
    assert [item.stage for item in takeover.kill] == ["other"]


def test_a_silent_agent_whose_stages_beat_is_not_lost() -> None:
    data = {**chain(), "cluster": {"nnodes": 2}}
    data["stages"][2]["node"] = 1
    replicas = ReplicaTable()
    nodes = NodeTable(replicas, placement.ranks(msgspec.convert(data, PipelineConfig)), T)
    master, node = nodes.find(0), nodes.find(1)
    master.on(NodeEvent.HELLO)
    node.on(NodeEvent.HELLO)
    talker = replicas.add("talker", 0, 7, node=1)
    assert not nodes.silent(T + 3.9, 4)
    assert nodes.silent(T + 4.1, 4) == [node], "not the coordinator's own host"
    talker.heard = T + 2
    assert not nodes.silent(T + 4.1, 4)
    talker.state = ReplicaState.DEAD
    assert nodes.silent(T + 4.1, 4) == [node]
    node.on(NodeEvent.LOST)
    assert not nodes.silent(T + 9, 4)
