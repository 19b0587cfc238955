"""Spares: when they take the place of a replica, what they cost, and how they are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_actors.config import describe, memory_plan
from omni_actors.config.placement import shared_devices
from omni_actors.coordinator.core.instructions import ReplicaLost, ReplicaReady
from omni_actors.errors import ConfigError
from omni_actors.protocol.messages import Operation, Shutdown
from tests.support.builders import chain, load
from tests.support.fleet import World, announced, one_host, to_stage


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
