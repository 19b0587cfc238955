"""Which request is to blame when replicas die: evidence, groups of suspects, and what that costs the others."""

from __future__ import annotations

from omni_actors.coordinator.core.instructions import Instruction, ToClient
from omni_actors.coordinator.core.replicas import Evidence
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.coordinator.core.suspects import EMPTY_SECONDS, MARGIN_SECONDS
from omni_actors.errors import ErrorCode
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
