"""A restarted coordinator knows how stages were scaled and what was drained; a broken memory is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.coordinator.shell import read_memory, write_memory
from omni_actors.errors import StartupError
from omni_actors.host.run_directory import FLEET
from omni_actors.protocol.messages import KillReplica, Operation, Shutdown, StartReplica
from tests.support.fleet import World, one_host, starts, to_node, to_stage


def names(world: World) -> list[str]:
    return [replica.name for replica in world.fleet.replicas.of("talker")]


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
    assert names(world) == ["talker/0"]
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
