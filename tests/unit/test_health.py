"""Who is stuck, who is started again and when; the state tables."""

from __future__ import annotations

from typing import get_args

import pytest

from omni_actors.coordinator.core.fleet import TICK_SECONDS
from omni_actors.coordinator.core.nodes import plan_restart, why_stuck
from omni_actors.coordinator.core.replicas import (
    LAUNCH_TRANSITIONS,
    NODE_TRANSITIONS,
    REPLICA_TRANSITIONS,
    REQUEST_TRANSITIONS,
    LaunchState,
    NodeState,
    Replica,
    ReplicaEvent,
    ReplicaState,
    ReplicaTable,
    RequestEvent,
    RequestState,
)
from omni_actors.errors import ProtocolError, advance
from scripts.state_diagrams import TARGET, document
from tests.support.builders import pipeline

T = 100.0
CONFIG = pipeline()


def spawned(table: ReplicaTable, epoch: int = 1, now: float = T) -> Replica:
    return table.add("talker", 0, epoch, now=now)


def ready(table: ReplicaTable, epoch: int = 1, now: float = T) -> Replica:
    replica = spawned(table, epoch, now)
    replica.on("hello")
    replica.on("ready")
    return replica


def test_with_defaults_a_stuck_loop_is_known_within_five_seconds_and_only_with_work() -> None:
    """It hangs right after a heartbeat, so that the next one still shows that it had turned."""
    beats = CONFIG.coordinator.heartbeat_interval
    for requests in ({"r"}, set()):
        replica = ready(ReplicaTable())
        replica.requests = requests
        found, next_beat = {}, T + beats
        for hundredth in range(1000):
            now = T + hundredth / 100
            if now >= next_beat:
                replica.beat(1, now)
                next_beat += beats
            if why := why_stuck(CONFIG, replica, now):
                found.setdefault(now - T, why)
        if not requests:
            assert found == {}
            continue
        assert 4.0 < min(found) <= 5.0 - TICK_SECONDS
        assert all("no progress" in why and why.endswith("with 1 request") for why in found.values())
    assert CONFIG.coordinator.heartbeat_timeout <= 5.0 - TICK_SECONDS


def restart_delays(
    table: ReplicaTable, losses: int, every: float, *, becomes_ready: bool = True, productive: bool = False
) -> list[float]:
    """The delays of all restarts of one replica that is lost so many times, or until it is given up."""
    delays = []
    for life in range(1, losses + 1):
        now = T + life * every
        replica = ready(table, life, now) if becomes_ready else spawned(table, life, now)
        if productive:
            replica.hold("r")
            replica.finished("r")
        restarts = plan_restart(CONFIG, replica, now)
        replica.on("lost" if restarts else "given_up")
        if not restarts:
            break
        delays.append(replica.restart_at - now)
    return delays


def test_a_stage_is_given_up_that_does_not_start_or_becomes_ready_and_never_finishes_a_request() -> None:
    assert restart_delays(ReplicaTable(), 20, 1.0) == [0.0] + 19 * [0.5], "20 kills in 20 s end no stage"
    assert restart_delays(ReplicaTable(), 100, 60.0) == [0.0] + 29 * [0.5]
    assert restart_delays(ReplicaTable(), 100, 60.0, productive=True) == 100 * [0.0]
    table = ReplicaTable()
    replica = ready(table)
    assert plan_restart(CONFIG, replica, T)
    replica.on("lost")
    assert restart_delays(table, 5, 1.0, becomes_ready=False) == [0.5, 1.0], "three restarts in all"


def test_what_is_not_in_the_table_does_not_happen() -> None:
    for state in ReplicaState:
        for event in get_args(ReplicaEvent):
            if (state, event) not in REPLICA_TRANSITIONS:
                with pytest.raises(ProtocolError, match=f"{event} cannot happen while {state.value}"):
                    advance(REPLICA_TRANSITIONS, state, event)
    for ended in (RequestState.DONE, RequestState.FAILED):
        for event in get_args(RequestEvent):
            assert (ended, event) not in REQUEST_TRANSITIONS, "one terminal message"


def test_every_state_is_reached_and_named_in_the_document() -> None:
    for table, states, initial in (
        (REPLICA_TRANSITIONS, ReplicaState, ReplicaState.STARTING),
        (NODE_TRANSITIONS, NodeState, NodeState.EXPECTED),
        (LAUNCH_TRANSITIONS, LaunchState, LaunchState.STARTING),
        (REQUEST_TRANSITIONS, RequestState, RequestState.QUEUED),
    ):
        assert set(table.values()) | {initial} == set(states)
    assert TARGET.read_text() == document(), "run scripts/state_diagrams.py"
