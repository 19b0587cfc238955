"""The fleet under events in any order (hypothesis)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.messages import Fatal, Heartbeat, Loading, NodeLeaving, Operation, Ready, StageToCoordinator
from tests.support.fleet import World, two_hosts

silents = ("talker/0", "talker/1", "node 1", "node 2")
places = st.sampled_from([("prompt", 0), ("talker", 0), ("talker", 1), ("talker", 2)])


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, the invariants of `World` hold, and healthy nodes bring everything back."""

    spares = 0

    def __init__(self) -> None:
        super().__init__()
        data = two_hosts(restarts=2, replicas=2 - self.spares, spares=self.spares)
        self.world = World(data, heartbeat_timeout=2.0, startup_timeout=60.0, move_after=3.0).launch()

    @rule(rank=st.integers(0, 2), knows=st.booleans())
    def node_hello(self, rank: int, knows: bool) -> None:
        replicas = [replica for replica in self.world.fleet.replicas if replica.node == rank and replica.spawn_epoch]
        listed = [item.process for item in replicas if knows]
        self.world.node_hello(*listed, rank=rank, launched=True)

    @rule(rank=st.integers(0, 2), drains=st.booleans())
    def node_leaves(self, rank: int, drains: bool) -> None:
        self.world.node(NodeLeaving("a test", drains), rank)

    @rule(place=places, newer=st.integers(0, 1))
    def hello(self, place: tuple[str, int], newer: int) -> None:
        if not self.world.has(*place):
            return
        replica = self.world.replica(*place)
        self.world.hello(*place, epoch=replica.epoch + newer, spawn_epoch=replica.spawn_epoch)

    @rule(place=places, body=st.sampled_from([Ready(seconds=1.0), Loading("x"), Heartbeat(progress=1), Fatal("x")]))
    def says(self, place: tuple[str, int], body: StageToCoordinator) -> None:
        if self.world.has(*place):
            self.world.says(place[0], body, place[1])

    @rule(place=places)
    def ended(self, place: tuple[str, int]) -> None:
        if self.world.has(*place):
            self.world.ended(*place)

    @rule(place=places, operation=st.sampled_from([Operation.DRAIN, Operation.RESTART]))
    def operate(self, place: tuple[str, int], operation: Operation) -> None:
        try:
            self.world.operate(operation, *place)
        except InvalidRequest:
            may_drain = self.world.has(*place) and not self.world.replica(*place).leaving
            assert not (may_drain and self.world.state(*place) in (ReplicaState.READY, ReplicaState.DRAINING))

    @rule(count=st.integers(0, 4), node=st.sampled_from([None, 0, 1, 2]))
    def scale(self, count: int, node: int | None) -> None:
        before = self.world.wanted["talker"]
        try:
            self.world.scale("talker", count, node)
        except InvalidRequest:
            assert self.world.wanted["talker"] == before, "a refused command changes nothing"

    @rule()
    def the_coordinator_is_killed(self) -> None:
        self.world.restart_coordinator()

    @rule(place=places, busy=st.booleans())
    def is_busy(self, place: tuple[str, int], busy: bool) -> None:
        replica = self.world.replica(*place) if self.world.has(*place) else None
        if replica is not None and busy and replica.takes_requests:
            replica.hold("r")
        elif replica is not None and not busy:
            replica.release_all()

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]), silent=st.sampled_from(["", *silents]))
    def time_passes(self, seconds: float, silent: str) -> None:
        self.world.wait(seconds, silent)

    def teardown(self) -> None:
        world = self.world
        for rank in (0, 1, 2):
            world.node_hello(rank=rank)
        for replica in list(world.fleet.replicas):
            if replica.state is ReplicaState.DEAD:
                world.operate(Operation.RESTART, replica.stage, replica.index)
        for replica in world.fleet.replicas:
            replica.release_all()
        world.wait(5.0)
        for replica in list(world.fleet.replicas):
            if replica.leaving:
                world.ended(replica.stage, replica.index)
        for replica in list(world.fleet.replicas):
            if world.state(replica.stage, replica.index) is ReplicaState.STARTING:
                world.ready(replica.stage, replica.index)
        states = {replica.state for replica in world.fleet.replicas}
        assert states <= {ReplicaState.READY, ReplicaState.DRAINING}
        assert not any(replica.leaving for replica in world.fleet.replicas), "what was to leave has left"


class AnyOrderWithASpare(AnyOrder):
    """The same; the second talker is a spare."""

    spares = 1


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=30)
TestAnyOrderWithASpare = AnyOrderWithASpare.TestCase
TestAnyOrderWithASpare.settings = settings(stateful_step_count=30)
