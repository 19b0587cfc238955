"""The life of requests in any order of events."""

from __future__ import annotations

import collections
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from omni_actors.coordinator.core.instructions import Instruction, ToStage
from omni_actors.coordinator.core.replicas import Evidence, ReplicaState
from omni_actors.errors import EngineError, ErrorCode, InvalidPayload, StageLost
from omni_actors.protocol.fields import Header, ReplicaId
from omni_actors.protocol.messages import Done, Failed, OpenRequest, Resend, TextDelta, Unreachable
from tests.support.builders import done, header_from, submit
from tests.support.requests import ALICE, BOB, CHUNK, NOW, STAGES, letter, ready, replica_id

request_numbers = st.integers(0, 7)
MAX_ATTEMPTS = 3


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, every admitted request gets exactly one terminal message.

    `CheckedRequestMachine` checks the books, the numbers of messages and who is alive after every event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = ready(replicas=2, max_in_flight=5, max_queued=2, tombstone_ttl=20, max_attempts=MAX_ATTEMPTS)
        self.now = NOW
        self.serial = 0
        self.admitted: dict[str, bytes] = {}
        self.terminals: collections.Counter[str] = collections.Counter()
        self.seqs: collections.Counter[tuple[str, int, str]] = collections.Counter()
        self.texts: collections.Counter[str] = collections.Counter()
        self.silenced: set[str] = set()  # their client is gone
        self.running: dict[tuple[str, ReplicaId], int] = {}  # the attempt that each replica works on

    def take(self, instructions: list[Instruction]) -> None:
        for item in instructions:
            if isinstance(item, ToStage):
                self.note(item)
                continue
            assert item.client == self.admitted[item.request_id]
            assert item.request_id not in self.silenced
            assert self.terminals[item.request_id] == 0, "a message after the terminal one"
            if isinstance(item.body, TextDelta):
                assert item.body == letter(self.texts[item.request_id]), "lost, doubled or out of order"
                self.texts[item.request_id] += 1
            if isinstance(item.body, Done | Failed):
                self.terminals[item.request_id] += 1

    def note(self, item: ToStage) -> None:
        """What a replica makes of it."""
        key = (item.request_id, item.replica_id)
        if isinstance(item.body, OpenRequest):
            assert item.attempt > self.running.get(key, -1), "an attempt is opened once"
            self.running[key] = item.attempt
        elif isinstance(item.body, Resend):
            assert self.running[key] == item.attempt, "only who works on it can send it again"
            assert self.running[(item.request_id, item.body.receiver)] == item.body.attempt

    def pick(self, number: int) -> str:
        """Most often a request that has not ended."""
        names = [request.request_id for request in self.state.active.values()]
        return names[number % len(names)] if names and number < 7 else f"r{max(0, self.serial - number)}"

    @rule(client=st.sampled_from([ALICE, BOB]), audio=st.booleans(), timeout=st.sampled_from([0.0, 2.0, 50.0]))
    def submit(self, client: bytes, audio: bool, timeout: float) -> None:
        self.serial += 1
        request_id = f"r{self.serial}"
        deadline = self.now + timeout if timeout else 0.0
        body = submit("text", "audio") if audio else submit("text")
        instructions = self.state.submit(client, Header("", request_id, deadline=deadline), body, [], self.now)
        if request_id not in self.state.requests_of(client):
            assert len(instructions) == 1
            assert isinstance(instructions[0].body, Failed)
            return
        self.admitted[request_id] = client
        self.take(instructions)

    @rule(
        number=request_numbers,
        stage=st.sampled_from(STAGES),
        kind=st.sampled_from(["out", "out", "done", "done", "fail", "lost", "unreachable"]),
        skip=st.sampled_from([0, 0, 0, 0, 1]),
        stale=st.sampled_from(["", "", "", "epoch", "attempt"]),
    )
    def stage_says(self, number: int, stage: str, kind: str, skip: int, stale: str) -> None:
        request_id = self.pick(number)
        request = self.state.active.get(request_id)
        bound = (request.bound.get(stage) if request is not None else None) or replica_id(stage, 0, 99)
        attempt = request.attempts.get(stage, 0) if request is not None else 0
        key = (request_id, attempt, stage)
        output = CHUNK if stage == "code2wav" else letter(self.seqs[key])
        body = {
            "out": output,
            "done": done(),
            "fail": Failed.from_error(EngineError("x")),
            "lost": Failed.from_error(StageLost("x", stage=stage)),
            "unreachable": Unreachable(
                receiver=(request.bound.get("talker") if request is not None else None) or replica_id("talker", 0, 99),
                attempt=request.attempts.get("talker", 0) if request is not None else 0,
            ),
        }[kind]
        sender = ReplicaId(bound.stage, bound.replica, bound.epoch + 1) if stale == "epoch" else bound
        wrong = header_from(sender, request_id, self.seqs[key] + skip, attempt + (stale == "attempt"))
        buffers = (bytes(4),) if body is CHUNK else ()
        before = sum(self.state.dropped.values())
        instructions = self.state.from_stage(wrong, body, buffers, self.now)
        if stale:
            assert instructions == [], "of an unknown epoch or attempt"
        self.take(instructions)
        if sum(self.state.dropped.values()) == before:
            self.seqs[key] += 1 + skip

    @rule(number=request_numbers, texts=st.integers(1, 3), sounds=st.integers(0, 2), ends=st.booleans())
    def goes_on(self, number: int, texts: int, sounds: int, ends: bool) -> None:
        """What usually happens, and too seldom by chance: output, and the end of a request."""
        for stage, outputs in (("thinker", texts), ("code2wav", sounds)):
            for _ in range(outputs):
                self.stage_says(number, stage, "out", 0, "")
        for stage in STAGES if ends else ():
            self.stage_says(number, stage, "done", 0, "")

    @rule(number=request_numbers, client=st.sampled_from([ALICE, BOB]))
    def abort(self, number: int, client: bytes) -> None:
        self.take(self.state.abort(client, self.pick(number), self.now))

    @rule(number=request_numbers, stage=st.sampled_from(STAGES), index=st.integers(0, 1))
    def bad_result(self, number: int, stage: str, index: int) -> None:
        header = header_from(replica_id(stage, index), self.pick(number))
        self.take(self.state.reject_from_stage(header, InvalidPayload("x"), self.now))

    @rule(client=st.sampled_from([ALICE, BOB]))
    def client_gone(self, client: bytes) -> None:
        self.silenced.update(self.state.requests_of(client))
        self.take(self.state.client_gone(client, self.now))

    @rule(
        stage=st.sampled_from(STAGES),
        index=st.integers(0, 1),
        restart=st.booleans(),
        wanted=st.booleans(),
        evidence=st.sampled_from(Evidence),
    )
    def replica_lost(self, stage: str, index: int, restart: bool, wanted: bool, evidence: Evidence) -> None:
        replica = self.state.replicas.current(stage, index)
        if replica is not None and replica.alive:
            replica.orders.restart = restart and wanted
            computing = {name for name in replica.computing if not self.through_with(name, stage)}
            replica.on("lost" if restart else "given_up")
            instructions = self.state.replica_lost(
                replica, self.now, "test", Evidence.NONE if restart and wanted else evidence
            )
            for item in instructions:
                if isinstance(item.body, Failed) and item.body.code is ErrorCode.POISON:
                    assert computing == {item.request_id}, "declared poison, but it was not alone"
                    assert evidence
                    assert not (wanted and restart)
            self.take(instructions)

    def through_with(self, request_id: str, stage: str) -> bool:
        return self.state.planner.is_through_with(self.state.active[request_id], stage)

    @rule(stage=st.sampled_from(STAGES), index=st.integers(0, 1))
    def replica_drains(self, stage: str, index: int) -> None:
        replica = self.state.replicas.current(stage, index)
        if replica is not None and replica.state is ReplicaState.READY:
            replica.on("drain")

    @rule(stage=st.sampled_from(STAGES), index=st.integers(0, 1))
    def replica_back(self, stage: str, index: int) -> None:
        replica = self.state.replicas.current(stage, index)
        if replica is not None and not replica.alive:
            new = self.state.replicas.add(stage, index, replica.epoch + 1)
            new.state = ReplicaState.READY
            self.take(self.state.reopen(self.now))

    @rule()
    def all_return(self) -> None:
        for stage, index in itertools.product(STAGES, (0, 1)):
            replica = self.state.replicas.current(stage, index)
            if replica is not None and replica.state is ReplicaState.DRAINING:
                self.replica_lost(stage, index, restart=True, wanted=True, evidence=Evidence.NONE)
            self.replica_back(stage, index)

    @rule(seconds=st.sampled_from([0.1, 3.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.state.tick(self.now))

    @precondition(lambda self: self.serial > 5)
    @rule()
    def shut_down(self) -> None:
        self.take(self.state.shut_down(self.now))
        assert self.state.in_flight == 0

    def teardown(self) -> None:
        self.take(self.state.tick(self.now + 10_000))
        assert self.state.in_flight + self.state.queued == 0
        for request_id in set(self.admitted) - self.silenced:
            assert self.terminals[request_id] == 1
        assert not any(replica.requests or replica.reserved for replica in self.state.replicas)
        assert len(self.state.active) == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=50, max_examples=2 * settings().max_examples)
