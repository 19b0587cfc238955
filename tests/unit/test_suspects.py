"""Which request is to blame when replicas die: evidence, groups of suspects, and what that costs the others."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_actors.coordinator.core.instructions import Instruction, ToClient
from omni_actors.coordinator.core.replicas import Evidence, ReplicaEvent, ReplicaState
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.coordinator.core.suspects import EMPTY_SECONDS, GUILTY, MARGIN_SECONDS, SUSPECT
from omni_actors.errors import ErrorCode
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import Abort, Done, Failed, OpenRequest
from tests.support.builders import done, header_from
from tests.support.requests import (
    ALICE,
    NOW,
    ask,
    bring_back,
    failure,
    finish,
    letter,
    lose,
    opened_requests,
    ready,
    say,
)


def ask_all(state: RequestMachine, names: str) -> None:
    """Text requests, one per letter; the thinker has each of them."""
    for name in names:
        ask(state, name, ALICE, "text")


def on(state: RequestMachine, index: int = 0) -> str:
    """The requests on a thinker, one per letter."""
    return "".join(sorted(state.replicas.current("thinker", index).requests))


def crash(state: RequestMachine, index: int = 0, **options: object) -> list[Instruction]:
    """The thinker dies and comes back."""
    instructions = lose(state, "thinker", index, **options)
    return instructions + bring_back(state, "thinker", index)


def test_poison_after_two_replicas_of_a_stage() -> None:
    state = ready()
    ask(state)
    lose(state, "thinker", why="first")
    bring_back(state, "thinker")
    body = failure(lose(state, "thinker", why="second"))
    assert body.code is ErrorCode.POISON
    assert body.stage == "thinker"
    assert not body.retryable
    assert "thinker/0 (epoch 1): first; thinker/0 (epoch 2): second" in body.message


def test_a_group_that_crashes_is_halved_until_the_culprit_runs_alone() -> None:
    state = ready(max_in_flight=9)
    ask_all(state, "abcXe")
    crash(state)
    assert on(state) == "Xabce", "once may be an accident"
    crash(state)
    assert on(state) == "Xab", "the first half; all others wait"
    ask(state, "new", ALICE, "text")
    assert on(state) == "Xab"
    crash(state)
    assert on(state) == "Xa"
    crash(state)
    assert on(state) == "X"
    body = failure(lose(state, "thinker"))
    assert body.code is ErrorCode.POISON
    assert "5 replicas died" in body.message
    bring_back(state, "thinker")
    assert state.replicas.current("thinker", 0).requests == {"a", "b", "c", "e", "new"}, "at once, as all are cleared"
    assert not any(request.suspected_by for request in state.active.values())


def test_suspects_that_the_stage_finishes_are_cleared_and_the_next_group_runs() -> None:
    state = ready(max_in_flight=9)
    ask_all(state, "abcd")
    crash(state)
    crash(state)
    assert on(state) == "ab"
    finish(state, "a")
    assert opened_requests(state.tick(NOW)) == set()
    finish(state, "b")
    assert opened_requests(state.tick(NOW)) == {"c", "d"}
    finish(state, "c")
    ask_all(state, "n")
    assert on(state) == "d", "others wait"
    finish(state, "d")
    assert opened_requests(state.tick(NOW)) == {"n"}


def test_a_suspect_that_runs_for_longer_than_it_took_to_crash_is_cleared() -> None:
    state = ready(max_in_flight=9)
    ask_all(state, "ab")
    for seconds in (1.0, 4.0):
        lose(state, "thinker", now=NOW + seconds)
        bring_back(state, "thinker", now=NOW + seconds)
    assert on(state) == "a"
    began = NOW + 4.0
    passes = 2 * 3.0 + MARGIN_SECONDS  # of the two runs the second was the longer one
    assert opened_requests(state.tick(began + passes - 0.1)) == set()
    ask_all(state, "n")
    assert "n" not in on(state)
    state.tick(began + passes)
    assert state.active["a"].suspected_by is None
    assert on(state) == "a", "the replica is to be empty for the other suspect"
    state.tick(began + passes + EMPTY_SECONDS)
    assert on(state) == "ab", "but that is not waited for as long as the other one may take"
    lost = lose(state, "thinker", now=began + passes + EMPTY_SECONDS + 1)
    assert not [item for item in lost if isinstance(item, ToClient)], "it was not alone"
    bring_back(state, "thinker")
    assert on(state) == "b"
    assert failure(lose(state, "thinker")).code is ErrorCode.POISON


def test_a_crash_in_company_condemns_no_one_whatever_came_before() -> None:
    state = ready(max_in_flight=9)
    ask_all(state, "a")
    crash(state)
    ask_all(state, "b")
    assert not [item for item in crash(state) if isinstance(item, ToClient)]
    assert on(state) == "a", "it is a suspect now, and runs alone"


def test_two_kills_count_as_much_as_one_crash() -> None:
    state = ready(max_in_flight=9)
    ask_all(state, "abcd")
    for _ in range(3):
        crash(state, evidence=Evidence.KILLED)
        assert on(state) == "abcd"
    crash(state, evidence=Evidence.KILLED)
    assert on(state) == "ab"
    crash(state, evidence=Evidence.KILLED)
    assert on(state) == "cd", "after a kill the other group goes first"
    finish(state, "c")
    finish(state, "d")
    state.tick(NOW)
    assert on(state) == "a"
    assert not [item for item in crash(state, evidence=Evidence.KILLED) if isinstance(item, ToClient)], "once alone"
    assert on(state) == "b"
    finish(state, "b")
    state.tick(NOW)
    assert failure(crash(state, evidence=Evidence.KILLED)).code is ErrorCode.POISON, "twice alone"


def test_a_stage_that_has_begun_nothing_accuses_nobody() -> None:
    """The talker holds the request, but its input begins with the thinker's first token."""
    state = ready(max_attempts=9)
    ask(state)
    for _ in range(3):
        for stage in ("talker", "code2wav"):
            lose(state, stage)
            bring_back(state, stage)
    assert state.active["r1"].evidence("talker") == state.active["r1"].evidence("code2wav") == 0
    say(state, "thinker", letter(0), 0)
    lose(state, "talker")
    assert state.active["r1"].evidence("talker") == Evidence.CRASHED


def test_a_loss_without_evidence_is_not_recorded() -> None:
    state = ready()
    ask(state)
    for _ in range(4):
        crash(state, evidence=Evidence.NONE)
    assert state.active["r1"].losses == []


def test_several_groups_run_at_a_time_but_one_replica_stays_for_the_others() -> None:
    state = ready(replicas=3, max_in_flight=20)
    ask_all(state, "abcdefghi")
    crash(state, 0)
    crash(state, 1)
    crash(state, 2)
    for index in range(3):
        crash(state, index)
    groups = [index for index in range(3) if state.replicas.current("thinker", index).reserved]
    assert len(groups) == 2
    ask_all(state, "n")
    (free,) = {0, 1, 2} - set(groups)
    assert "n" in on(state, free)


def test_nothing_stays_reserved_when_suspects_end() -> None:
    state = ready(max_in_flight=9)
    ask_all(state, "abcd")
    crash(state)
    crash(state)
    assert state.replicas.current("thinker", 0).reserved
    state.client_gone(ALICE, NOW)
    assert not any(replica.reserved for replica in state.replicas)
    ask_all(state, "n")
    assert on(state) == "n"


def test_a_group_whose_members_wait_for_another_stage_lets_others_in() -> None:
    state = ready(max_in_flight=9)
    for name in "ab":
        ask(state, name)
    crash(state)
    crash(state)
    lose(state, "talker")
    assert state.replicas.current("thinker", 0).requests == {"a"}, "it goes on"
    lose(state, "prompt")
    assert on(state) == ""
    state.tick(NOW)
    ask_all(state, "n")
    bring_back(state, "prompt")
    assert on(state) == "n", "the suspects wait for the talker"


# -- figures ----------------------------------------------------------------------------------------------------------

STEP = 0.1
RESTART_SECONDS = 0.5


class Storm:
    """Text requests on replicas of the thinker that crash and are killed. Time goes by in steps."""

    def __init__(self, replicas: int, work: list[float], fuse: float | None, kills: dict[float, int]) -> None:
        self.state = ready(replicas=replicas, max_in_flight=100)
        self.now = NOW
        self.work = {f"r{number}": seconds for number, seconds in enumerate(work)}
        self.fuse = fuse  # seconds after which the poison crashes its replica
        self.kills = sorted((NOW + seconds, index) for seconds, index in kills.items())
        self.running: dict[str, tuple[ReplicaId, int, float]] = {}
        self.back: dict[int, float] = {}
        self.ends: dict[str, str] = {}
        self.evidence: dict[str, list[tuple[int, bool]]] = {}  # of each request: how much, and whether it was alone
        self.crashes = 0
        for name in [*self.work, *(["poison"] if fuse is not None else [])]:
            self.take(ask(self.state, name, ALICE, "text"))

    def take(self, instructions: list[Instruction]) -> None:
        for item in instructions:
            if isinstance(item, ToClient):
                if isinstance(item.body, Done | Failed):
                    self.ends[item.request_id] = "done" if isinstance(item.body, Done) else item.body.code.value
                    self.running.pop(item.request_id, None)
            elif isinstance(item.body, Abort) and item.replica_id.stage == "thinker":
                self.running.pop(item.request_id, None)
            elif isinstance(item.body, OpenRequest) and item.replica_id.stage == "thinker":
                self.running[item.request_id] = item.replica_id, item.attempt, self.now
            elif isinstance(item.body, OpenRequest):
                header = header_from(item.replica_id, item.request_id, 0, item.attempt)
                self.take(self.state.from_stage(header, done(), (), self.now))

    def lose(self, index: int, evidence: Evidence) -> None:
        replica = self.state.replicas.current("thinker", index)
        if replica.state is not ReplicaState.READY:
            return
        names = [name for name, (replica_id, _, _) in self.running.items() if replica_id == replica.replica_id]
        for name in names:
            self.evidence.setdefault(name, []).append((int(evidence), len(names) == 1))
            del self.running[name]
        self.back[index] = self.now + RESTART_SECONDS
        replica.on(ReplicaEvent.LOST)
        self.take(self.state.replica_lost(replica, self.now, "storm", evidence))

    def step(self) -> None:
        self.now += STEP
        for index, when in list(self.back.items()):
            if self.now >= when:
                del self.back[index]
                self.take(bring_back(self.state, "thinker", index, self.now))
        while self.kills and self.kills[0][0] <= self.now:
            self.lose(self.kills.pop(0)[1], Evidence.KILLED)
        for name, (replica_id, attempt, since) in list(self.running.items()):
            if name not in self.running:
                continue  # it was on a replica that has crashed in this step
            if name == "poison":
                if self.now >= since + self.fuse:
                    self.crashes += 1
                    self.lose(replica_id.replica, Evidence.CRASHED)
            elif self.now >= since + self.work[name]:
                del self.running[name]
                self.take(self.state.from_stage(header_from(replica_id, name, 0, attempt), done(), (), self.now))
        self.take(self.state.tick(self.now))

    def run(self) -> float:
        """Returns the seconds that it took until all had ended."""
        while self.state.in_flight and self.now < NOW + 600:
            self.step()
        return self.now - NOW


def most_crashes(requests: int) -> int:
    """By which a poison among so many is found: two, one more for each time they are halved, and one alone."""
    return 2 + math.ceil(math.log2(requests)) + 1


@given(
    replicas=st.integers(1, 4),
    work=st.lists(st.sampled_from([0.2, 1.0, 3.0, 20.0]), min_size=1, max_size=30),
    fuse=st.sampled_from([None, 0.0, 0.5, 2.0]),
    kills=st.dictionaries(st.floats(0, 30), st.integers(0, 3), max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_in_any_storm_all_end_and_only_evidence_condemns(
    replicas: int, work: list[float], fuse: float | None, kills: dict[float, int]
) -> None:
    kills = {when: index % replicas for when, index in kills.items()}
    storm = Storm(replicas, work, fuse, kills)
    seconds = storm.run()
    assert len(storm.ends) == len(work) + (fuse is not None)
    for name, end in storm.ends.items():
        records = storm.evidence.get(name, [])
        if end != "poison":
            assert end == "done"
            assert name != "poison"
            continue
        assert sum(evidence for evidence, _ in records) >= SUSPECT
        assert sum(evidence for evidence, alone in records if alone) >= GUILTY
    if fuse is not None:
        assert storm.ends["poison"] == "poison"
        assert storm.crashes <= most_crashes(len(work) + 1) + len(kills)
    losses = storm.crashes + len(kills)
    assert seconds <= (losses + 2) * (EMPTY_SECONDS + 2 * max(work) + 2 * MARGIN_SECONDS + RESTART_SECONDS)
