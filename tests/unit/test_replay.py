"""Requests whose replicas or whose coordinator are lost: what runs again, what the client gets, who is to blame."""

from __future__ import annotations

import array
import zlib
from typing import Any

import pytest

from omni_actors.coordinator.core.instructions import Instruction, ToClient
from omni_actors.coordinator.core.replicas import Evidence, ReplicaState
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.coordinator.core.suspects import EMPTY_SECONDS, MARGIN_SECONDS
from omni_actors.errors import ErrorCode, StageLost
from omni_actors.protocol.fields import ATTEMPTS, DType, Header, TensorRef, pack_token_ids
from omni_actors.protocol.messages import (
    Delivered,
    Done,
    Failed,
    HeldRequest,
    OpenRequest,
    Resend,
    TextDelta,
    Unreachable,
)
from omni_actors.protocol.payloads import PositionLogprobs, PromptPosition, TokenLogprob, ToolCallPiece
from tests.support.builders import done, header_from, submit
from tests.support.requests import (
    ALICE,
    NOW,
    STAGES,
    CheckedRequestMachine,
    aborts,
    again,
    ask,
    bring_back,
    failure,
    finish,
    letter,
    lose,
    opened_requests,
    opened_stages,
    ready,
    replica_id,
    resends,
    say,
    sound,
)


def restart(state: RequestMachine, stage: str, index: int = 0, **options: Any) -> list[Instruction]:
    instructions = lose(state, stage, index, **options)
    return instructions + bring_back(state, stage, index)


@pytest.mark.parametrize(
    ("stage", "again", "source"),
    [
        ("code2wav", ["code2wav"], "talker"),
        ("talker", ["code2wav", "talker"], "thinker"),
        ("thinker", ["code2wav", "talker", "thinker"], "prompt"),
    ],
)
def test_stages_before_the_lost_one_go_on_and_give_it_its_input_again(stage, again, source) -> None:
    state = ready()
    ask(state, voice="Ethan")
    say(state, "thinker", letter(0), 0)
    lost = lose(state, stage)
    assert sorted(aborts(lost)) == sorted(set(again) - {stage})
    if stage != "thinker":
        (told,) = say(state, "thinker", letter(1), 1)
        assert told.body == letter(1), "its text is not held up"
    opened = bring_back(state, stage)
    assert opened_stages(opened) == [(name, 1) for name in again]
    assert resends(opened) == [(source, stage, 1)]
    (asked,) = [item for item in opened if isinstance(item.body, Resend)]
    assert asked.attempt == 0
    assert asked.body.receiver == replica_id(stage, 0, 2)
    route = {item.body.route for item in opened if isinstance(item.body, OpenRequest)}
    assert route == {tuple(replica_id(name, 0, 2 if name == stage else 1) for name in STAGES)}
    assert {item.body.voice for item in opened if isinstance(item.body, OpenRequest)} == {"Ethan"}


def test_a_replay_starts_further_up_when_the_source_is_gone_as_well() -> None:
    state = ready()
    ask(state)
    lose(state, "code2wav")
    lose(state, "talker")
    assert bring_back(state, "code2wav") == []
    opened = bring_back(state, "talker")
    assert opened_stages(opened) == [("code2wav", 1), ("talker", 1)]
    assert resends(opened) == [("thinker", "talker", 1)]

    state = ready()
    ask(state)
    for stage in ("prompt", "thinker", "talker"):
        say(state, stage, done())
    assert lose(state, "thinker") == [], "code2wav has all that it needs"
    opened = bring_back(state, "thinker")
    lose(state, "talker")
    opened = bring_back(state, "talker")
    assert opened_stages(opened) == [("code2wav", 1), ("talker", 1), ("thinker", 1)]
    assert resends(opened) == [("prompt", "thinker", 1)]


def test_a_stage_that_no_longer_holds_its_output_runs_again() -> None:
    state = ready(max_attempts=2)
    ask(state)
    restart(state, "code2wav")
    refusal = Failed.from_error(StageLost("not kept"), "talker")
    opened = say(state, "talker", refusal)
    assert opened_stages(opened) == [("code2wav", 2), ("talker", 2)]
    assert resends(opened) == [("thinker", "talker", 2)]
    opened = say(state, "thinker", Failed.from_error(StageLost("not kept"), "thinker"))
    assert resends(opened) == [("prompt", "thinker", 3)]
    opened = say(state, "prompt", Failed.from_error(StageLost("not kept"), "prompt"))
    assert opened_stages(opened) == [(stage, 4) for stage in reversed(STAGES)]
    assert state.replays == 1
    assert state.active["r1"].losses_made_up == 1, "it was one loss"
    assert failure(lose(state, "talker")).code is ErrorCode.STAGE_LOST, "and there may be one only"


def test_an_unreachable_stage_runs_again_unless_that_is_under_way() -> None:
    state = ready(replicas=2)
    ask(state)
    body = Unreachable(receiver=replica_id("code2wav"), attempt=0)
    opened = say(state, "talker", body)
    assert opened_stages(opened) == [("code2wav", 1)]
    assert resends(opened) == [("talker", "code2wav", 1)]
    assert say(state, "talker", body, 1) == []
    assert say(state, "talker", Unreachable(receiver=replica_id("code2wav"), attempt=1), 2) != []
    assert state.active["r1"].losses == [], "no request is blamed"


def test_stages_learn_what_they_may_forget() -> None:
    state = ready()
    ask(state)
    ask(state, "text", ALICE, "text")
    ask(state, "aborted")
    for stage in STAGES:
        say(state, stage, done())
    for stage in STAGES[:2]:
        say(state, stage, done(), 0, "text")
    state.abort(ALICE, "aborted", NOW)
    told = {item.replica_id.stage: item.body.request_ids for item in state.tick(NOW)}
    assert told == {stage: ("r1", "text") for stage in STAGES[:2]} | {stage: ("r1",) for stage in STAGES[2:]}
    assert state.tick(NOW) == []


def test_the_client_gets_only_what_it_has_not() -> None:
    state = ready()
    ask(state)
    for index in range(3):
        say(state, "thinker", letter(index), index)
    chunk, buffers = sound(0, 5)
    say(state, "code2wav", chunk, 0, buffers=buffers)
    restart(state, "thinker")
    assert say(state, "prompt", done()) == [], "it went on"
    assert say(state, "talker", done()) == [], "the former attempt"
    assert state.dropped == {"foreign_attempt": 1}
    assert again(state, "thinker", TextDelta(text="ab", token_ids=pack_token_ids([0, 1])), 0, 2) == []
    (rest,) = again(state, "thinker", TextDelta(text="cd", token_ids=pack_token_ids([2, 3])), 1, 2)
    assert rest.seq == 4
    assert rest.body == TextDelta(text="d", token_ids=pack_token_ids([3]))
    (whole,) = again(state, "thinker", letter(4), 2, 2)
    assert whole.body == letter(4)
    chunk, buffers = sound(0, 4)
    assert again(state, "code2wav", chunk, 0, buffers=buffers) == []
    chunk, buffers = sound(4, 4)
    (audio,) = again(state, "code2wav", chunk, 1, buffers=buffers)
    assert audio.body.samples == TensorRef(DType.F32, (3,), 0)
    assert array.array("f", bytes(audio.buffers[0])).tolist() == [5.0, 6.0, 7.0]
    for stage, seq, epoch in (("thinker", 3, 2), ("talker", 0, 1)):
        assert again(state, stage, done(), seq, epoch) == []
    (end,) = again(state, "code2wav", done(), 2)
    assert isinstance(end.body, Done)
    assert state.retained.used == 0


def restarted_after(*said: TextDelta, modalities: tuple[str, ...] = ()) -> RequestMachine:
    """The thinker has said this, was lost and is back."""
    state = ready()
    ask(state, "r1", ALICE, *modalities)
    for seq, body in enumerate(said):
        say(state, "thinker", body, seq)
    restart(state, "thinker")
    return state


def test_a_replay_sends_the_rest_of_a_call_under_its_first_id() -> None:
    def calls(*pieces: ToolCallPiece, token: int) -> TextDelta:
        return TextDelta(text="", token_ids=pack_token_ids([token]), tool_calls=pieces)

    def begin(call_id: str) -> ToolCallPiece:
        return ToolCallPiece(index=0, id=call_id, name="weather")

    def more(arguments: str) -> ToolCallPiece:
        return ToolCallPiece(index=0, arguments=arguments)

    state = restarted_after(calls(begin("first"), token=0), calls(more('{"ci'), token=1))
    assert again(state, "thinker", calls(begin("second"), token=0), 0, 2) == []
    (rest,) = again(state, "thinker", calls(more('{"city"'), token=1), 1, 2)
    assert rest.body == TextDelta(text="", tool_calls=(more('ty"'),))
    last = calls(more(": 1}"), ToolCallPiece(index=1, id="other", name="time"), token=2)
    (whole,) = again(state, "thinker", last, 2, 2)
    assert whole.body == last


def test_a_replay_sends_log_probabilities_of_tokens_and_of_the_prompt_once() -> None:
    def with_logprobs(text: str, *tokens: int) -> TextDelta:
        logprobs = tuple(PositionLogprobs(TokenLogprob(token, "x", -0.5)) for token in tokens)
        return TextDelta(text=text, token_ids=pack_token_ids(tokens), logprobs=logprobs)

    state = restarted_after(with_logprobs("", 0))
    (rest,) = again(state, "thinker", with_logprobs("ab", 0, 1), 0, 2)
    assert rest.body == with_logprobs("ab", 1)

    def of_prompt(*tokens: int) -> TextDelta:
        return TextDelta(
            text="", prompt_logprobs=tuple(PromptPosition(TokenLogprob(token, "x", -0.5), 1) for token in tokens)
        )

    state = restarted_after(of_prompt(0, 1))
    assert again(state, "thinker", of_prompt(0), 0, 2) == []
    (rest,) = again(state, "thinker", of_prompt(1, 2), 1, 2)
    assert rest.body == of_prompt(2)


def test_a_replay_that_says_something_else_or_less_fails() -> None:
    for wrong in (TextDelta(text="ax", token_ids=pack_token_ids([0, 9])), None):
        state = restarted_after(letter(0), letter(1), modalities=("text",))
        if wrong is not None:
            body = failure(again(state, "thinker", wrong, 0, 2))
        else:
            say(state, "prompt", done())
            body = failure(again(state, "thinker", done(), 0, 2))
        assert body.code is ErrorCode.STAGE_LOST
        assert "did not repeat" in body.message


def test_a_stage_that_has_finished_is_not_missed() -> None:
    state = ready()
    ask(state)
    say(state, "prompt", done())
    assert aborts(lose(state, "prompt")) != [], "its last chunks may have died with it"
    bring_back(state, "prompt")
    again(state, "prompt", done(), 0, 2)
    again(state, "thinker", done(), 0)
    assert lose(state, "prompt") == []
    assert state.in_flight == 1
    assert state.replicas.current("prompt", 0).requests == set(), "a dead replica owns nothing"


def test_over_the_budget_nothing_is_kept() -> None:
    state = ready(retain_bytes=20)  # one request of 12 + 5 bytes
    ask(state, "kept")
    ask(state, "released")
    assert state.retained.used == 17
    assert failure(lose(state, "prompt")).code is ErrorCode.STAGE_LOST
    assert state.requests_of(ALICE) == ("kept",)


def test_waiting_requests_end_when_no_replica_comes_or_time_is_up() -> None:
    state = ready(default_timeout=5)
    ask(state)
    lose(state, "talker")
    body = failure(state.tick(NOW + 6))
    assert body.code is ErrorCode.DEADLINE_EXCEEDED
    assert "killed by signal 9" in body.message
    ask(state, "r2")
    state.replicas.add("talker", 0, 2)
    body = failure(lose(state, "talker", restart=False, why="bad checkpoint"))
    assert body.code is ErrorCode.STAGE_UNAVAILABLE
    assert body.stage == "talker"


SEED = 77


def next_coordinator(*stages: str, seed: int = SEED) -> RequestMachine:
    """The second coordinator of a launch; these stages hold request r1."""
    state = CheckedRequestMachine(ready().pipeline, generation=1)
    for index, stage in enumerate(STAGES):
        replica = state.replicas.add(stage, 0, 1)
        replica.state = ReplicaState.READY
        receivers = tuple((replica_id(name), 0) for name in STAGES[index + 1 : index + 2])
        if stage in stages:
            state.replica_holds(replica, [HeldRequest("r1", 0, seed, receivers)])
    state.serve_clients(NOW)
    return state


def claim(state: RequestMachine, *letters: int) -> list[Instruction]:
    """The client asks for the rest of its request; it has these letters of the text."""
    counts, checksum = dict.fromkeys(("tokens", "characters"), len(letters)), zlib.crc32(pack_token_ids(letters))
    delivered = Delivered(counts=counts, checksum=checksum)
    return state.submit(ALICE, Header("", "r1"), submit(seed=SEED, delivered=delivered), [b"media"], NOW)


def test_a_stage_whose_source_sends_to_another_attempt_runs_again() -> None:
    """The order that would have told the source was lost with the coordinator."""
    state = next_coordinator("prompt", "thinker")
    talker = state.replicas.current("talker", 0)
    state.replica_holds(talker, [HeldRequest("r1", 1, SEED, ((replica_id("code2wav"), 0),))])
    assert opened_stages(claim(state)) == [("code2wav", ATTEMPTS), ("talker", ATTEMPTS)]


def test_a_request_that_nobody_holds_starts_over_and_is_delivered_from_where_the_client_is() -> None:
    state = next_coordinator()
    instructions = claim(state, 0)
    assert opened_stages(instructions) == [(stage, ATTEMPTS) for stage in reversed(STAGES)]
    header = header_from(replica_id("thinker"), "r1", 0, ATTEMPTS)
    assert state.from_stage(header, letter(0), (), NOW) == []
    (second,) = state.from_stage(header_from(replica_id("thinker"), "r1", 1, ATTEMPTS), letter(1), (), NOW)
    assert second.body == letter(1)


def test_another_request_of_that_id_gets_nothing_of_it() -> None:
    state = next_coordinator(*STAGES, seed=SEED + 1)
    instructions = claim(state)
    assert sorted(aborts(instructions)) == sorted(STAGES)
    assert not any(isinstance(item.body, Resend) and item.body.receiver is None for item in instructions)
    assert {number for _, number in opened_stages(instructions)} == {ATTEMPTS}


def ask_all(state: RequestMachine, names: str) -> None:
    """Text requests, one per letter; the thinker has each of them."""
    for name in names:
        ask(state, name, ALICE, "text")


def on(state: RequestMachine, index: int = 0) -> str:
    """The requests on a thinker, one per letter."""
    return "".join(sorted(state.replicas.current("thinker", index).requests))


def test_a_group_that_crashes_is_halved_until_the_culprit_runs_alone() -> None:
    state = ready(max_in_flight=9)
    ask_all(state, "abcXe")
    restart(state, "thinker")
    assert on(state) == "Xabce", "once may be an accident"
    restart(state, "thinker")
    assert on(state) == "Xab", "the first half; all others wait"
    ask(state, "new", ALICE, "text")
    assert on(state) == "Xab"
    restart(state, "thinker")
    assert on(state) == "Xa"
    restart(state, "thinker")
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
    restart(state, "thinker")
    restart(state, "thinker")
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
        restart(state, "thinker", evidence=Evidence.KILLED)
        assert on(state) == "abcd"
    restart(state, "thinker", evidence=Evidence.KILLED)
    assert on(state) == "ab"
    restart(state, "thinker", evidence=Evidence.KILLED)
    assert on(state) == "cd", "after a kill the other group goes first"
    finish(state, "c")
    finish(state, "d")
    state.tick(NOW)
    assert on(state) == "a"
    assert not [item for item in restart(state, "thinker", evidence=Evidence.KILLED) if isinstance(item, ToClient)], (
        "once alone"
    )
    assert on(state) == "b"
    finish(state, "b")
    state.tick(NOW)
    assert failure(restart(state, "thinker", evidence=Evidence.KILLED)).code is ErrorCode.POISON, "twice alone"


def test_a_stage_that_has_begun_nothing_accuses_nobody() -> None:
    """The talker holds the request, but its input begins with the thinker's first token."""
    state = ready(max_attempts=9)
    ask(state)
    for _ in range(3):
        for stage in ("talker", "code2wav"):
            restart(state, stage)
    assert state.active["r1"].evidence("talker") == state.active["r1"].evidence("code2wav") == 0
    say(state, "thinker", letter(0), 0)
    lose(state, "talker")
    assert state.active["r1"].evidence("talker") == Evidence.CRASHED


def test_several_groups_run_at_a_time_but_one_replica_stays_for_the_others() -> None:
    state = ready(replicas=3, max_in_flight=20)
    ask_all(state, "abcdefghi")
    restart(state, "thinker", 0)
    restart(state, "thinker", 1)
    restart(state, "thinker", 2)
    for index in range(3):
        restart(state, "thinker", index)
    groups = [index for index in range(3) if state.replicas.current("thinker", index).reserved]
    assert len(groups) == 2
    ask_all(state, "n")
    (free,) = {0, 1, 2} - set(groups)
    assert "n" in on(state, free)


def test_a_group_whose_members_wait_for_another_stage_lets_others_in() -> None:
    state = ready(max_in_flight=9)
    for name in "ab":
        ask(state, name)
    restart(state, "thinker")
    restart(state, "thinker")
    lose(state, "talker")
    assert state.replicas.current("thinker", 0).requests == {"a"}, "it goes on"
    lose(state, "prompt")
    assert on(state) == ""
    state.tick(NOW)
    ask_all(state, "n")
    bring_back(state, "prompt")
    assert on(state) == "n", "the suspects wait for the talker"
