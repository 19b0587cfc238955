"""Who is stuck, who is started again and when; the state tables."""

from __future__ import annotations

import pytest

from omni_actors.coordinator.core.fleet import TICK_SECONDS
from omni_actors.coordinator.core.nodes import HealthPolicy
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
from omni_actors.errors import ProtocolError
from omni_actors.transitions import advance
from scripts.state_diagrams import TARGET, document
from tests.support.builders import pipeline

T = 100.0


class World:
    def __init__(self, **coordinator: object) -> None:
        self.table = ReplicaTable()
        self.supervision = HealthPolicy(pipeline(**coordinator), self.table)

    def spawn(self, stage: str = "talker", epoch: int = 1, now: float = T) -> Replica:
        replica = self.table.add(stage, 0, epoch)
        self.supervision.spawned(replica, now)
        return replica

    def ready(self, now: float = T, epoch: int = 1) -> Replica:
        replica = self.spawn(epoch=epoch, now=now)
        replica.on(ReplicaEvent.HELLO)
        replica.on(ReplicaEvent.READY)
        return replica

    def look(self, until: float, since: float = T) -> dict[float, str]:
        """What is found stuck, looking ten times a second."""
        found = {}
        for tenth in range(int((until - since) * 10)):
            now = since + tenth / 10
            for _, why in self.supervision.stuck(now):
                found.setdefault(round(now - since, 1), why)
        return found


def test_a_loop_that_does_not_turn_is_noticed_only_with_work() -> None:
    for requests, expected in (({"r"}, 4.3), (set(), None)):
        world = World()
        replica = world.ready()
        replica.requests = requests
        found = {}
        for tenth in range(80):
            now = T + tenth / 10
            world.supervision.beat(replica, 7, now)
            for _, why in world.supervision.stuck(now):
                found.setdefault(round(now - T, 1), why)
        assert min(found, default=None) == (pytest.approx(expected) if expected else None)
        assert all("no progress" in why and why.endswith("with 1 request") for why in found.values())


def test_with_defaults_whoever_is_stuck_is_known_within_five_seconds() -> None:
    """A loop that hangs right after a heartbeat, so that the next one still shows that it had turned."""
    config = pipeline()
    beats = config.coordinator.heartbeat_interval
    world = World()
    replica = world.ready()
    replica.requests = {"r"}
    found, next_beat, progress = 0.0, T + beats, 1
    for hundredth in range(1000):
        now = T + hundredth / 100
        if now >= next_beat:
            world.supervision.beat(replica, progress, now)
            next_beat += beats
        if world.supervision.stuck(now):
            found = now - T
            break
    assert 4.0 < found <= 5.0 - TICK_SECONDS
    assert config.coordinator.heartbeat_timeout <= 5.0 - TICK_SECONDS


def restart_delays(world: World, losses: int, every: float, *, ready: bool, productive: bool = False) -> list[float]:
    """The delays of all restarts of one replica that is lost so many times, or until it is given up."""
    delays = []
    for life in range(1, losses + 1):
        now = T + life * every
        replica = world.ready(now, epoch=life) if ready else world.spawn(epoch=life, now=now)
        if productive:
            replica.hold("r")
            replica.finished("r")
        restarts = world.supervision.plan(replica, now)
        replica.on(ReplicaEvent.LOST if restarts else ReplicaEvent.GIVEN_UP)
        if not restarts:
            break
        delays.append(replica.restart_at - now)
    return delays


def test_twenty_losses_within_twenty_seconds_do_not_end_a_stage_that_becomes_ready_each_time() -> None:
    assert restart_delays(World(), 20, 1.0, ready=True) == [0.0] + 19 * [0.5]


def test_a_stage_that_becomes_ready_but_never_finishes_a_request_is_given_up() -> None:
    assert restart_delays(World(), 100, 60.0, ready=True) == [0.0] + 29 * [0.5]


def test_a_loss_of_a_ready_replica_begins_a_series_of_restarts() -> None:
    world = World()
    replica = world.ready()
    assert world.supervision.plan(replica, T)
    replica.on(ReplicaEvent.LOST)
    assert restart_delays(world, 5, 1.0, ready=False) == [0.5, 1.0], "three restarts in all"


def test_a_restart_that_was_asked_for_counts_nothing() -> None:
    world = World()
    for epoch in range(1, 11):
        replica = world.ready(epoch=epoch)
        replica.on(ReplicaEvent.DRAIN)
        assert world.supervision.drained(T) == []
        replica.orders.restart, replica.orders.drain_until = True, T + 5
        replica.requests = {"r"}
        assert world.supervision.drained(T) == []
        assert world.supervision.drained(T + 5) == [replica]
        replica.requests = set()
        assert world.supervision.drained(T) == [replica]
        replica.stopping = True
        assert world.supervision.drained(T) == []
        assert world.supervision.plan(replica, T)
        replica.on(ReplicaEvent.LOST)
        assert world.supervision.due(T) == [replica]
    assert world.supervision.restarts(replica) == 0


# -- tables -----------------------------------------------------------------------------------------------------------


def test_what_is_not_in_the_table_does_not_happen() -> None:
    for state in ReplicaState:
        for event in ReplicaEvent:
            if (state, event) not in REPLICA_TRANSITIONS:
                with pytest.raises(ProtocolError, match=f"{event.value} cannot happen while {state.value}"):
                    advance(REPLICA_TRANSITIONS, state, event)
    for ended in (RequestState.DONE, RequestState.FAILED):
        for event in RequestEvent:
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
