"""The fleet's decisions about processes of a running pipeline. No sockets, no clocks."""

from __future__ import annotations

import logging
import signal
from typing import Any

import pytest

from omni_actors.coordinator.core.fleet import STOP_SECONDS, TICK_SECONDS
from omni_actors.coordinator.core.instructions import Log, ReplicaLost
from omni_actors.coordinator.core.replicas import Evidence, LaunchState, ReplicaState
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import (
    Fatal,
    Heartbeat,
    KillReplica,
    NodeLeaving,
    Operation,
    Ready,
    Reregister,
    Shutdown,
)
from tests.support.fleet import T, World, announced, losses, one_host, starts, to_node, to_stage, two_hosts


def test_a_stuck_replica_is_killed_once_and_restarts() -> None:
    world = World(heartbeat_timeout=4.0).launch()
    silent = world.wait(5.0, "talker/0")
    assert len(to_node(silent, KillReplica)) == 1
    assert [item.level for item in silent if isinstance(item, Log)] == [logging.ERROR]
    ended = world.ended("talker", how="killed by signal 9")
    (why,) = losses(ended).values()
    assert why == "no sign of life for 4.0 s; killed by signal 9"
    assert starts(ended) == ["talker/0"]


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


def test_restarts_wait_longer_each_time_until_the_pipeline_is_degraded() -> None:
    world = World(one_host(talker={"restarts": 3, "restart_backoff": 0.5})).launch()
    for delay in (0.0, 0.5, 1.0):
        ended = world.ended("talker")
        assert announced(ended)[0].endswith(f"talker/0 restarts in {delay:.1f} s")
        assert (starts(ended) == ["talker/0"]) == (delay == 0.0)
        assert delay == 0.0 or not starts(world.wait(delay - 2 * TICK_SECONDS))
        world.wait(3 * TICK_SECONDS)
    ended = world.ended("talker", log="Traceback")
    assert announced(ended) == [
        "degraded: talker/0 died (exit code 1) while starting process.\n--- last lines of its log\nTraceback\n---"
    ]
    assert world.state("talker") is ReplicaState.DEAD
    assert world.operate(Operation.RESTART, "talker") == "talker/0 restarts."
    assert world.state("talker") is ReplicaState.STARTING


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


def test_a_drained_replica_stays_and_takes_nothing_new_even_when_it_registers_again() -> None:
    world = World().launch()
    replica = world.replica("talker")
    replica.hold("r")
    assert world.operate(Operation.DRAIN, "talker") == "talker/0 drains; it holds 1 request."
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
    assert not any(item.evidence for item in ended if isinstance(item, ReplicaLost))
    assert [item.level for item in ended if isinstance(item, Log)] == [logging.DEBUG]
    assert world.replica("talker").history is None
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
