"""The way of a held request: the coordinator opens it in every stage, and its speech begins when it has a place."""

from __future__ import annotations

from collections.abc import Sequence

from omni_actors.coordinator.core.instructions import Instruction, ToStage
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.errors import ErrorCode
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.fields import Header, pack_token_ids
from omni_actors.protocol.messages import Begin, Done, FinishReason, OpenRequest, StageDone
from omni_actors.stage.engine_interface import FinishedEvent
from tests.support.builders import done
from tests.support.requests import ALICE, BOB, NOW, STAGES, ask, bring_back, failure, letter, lose, ready, say
from tests.support.stage import EMPTY, StageUnderTest, bodies


def held(instructions: Sequence[Instruction]) -> dict[str, bool]:
    """By stage: whether the request was opened there to be held."""
    return {
        item.replica_id.stage: item.body.held
        for item in instructions
        if isinstance(item, ToStage) and isinstance(item.body, OpenRequest)
    }


def begun(instructions: Sequence[Instruction]) -> list[tuple[str, str, int]]:
    """Request, stage and attempt of every `Begin`."""
    return [
        (item.request_id, item.replica_id.stage, item.attempt)
        for item in instructions
        if isinstance(item, ToStage) and isinstance(item.body, Begin)
    ]


def one_place(**coordinator: object) -> RequestMachine:
    """One answer may be spoken at a time."""
    state = ready(**coordinator)
    state.take_beat(state.replicas.current("code2wav", 0), 1, NOW)
    return state


def speak(state: RequestMachine, name: str) -> list[Instruction]:
    """The thinker's first text comes; what follows from it."""
    return say(state, "thinker", letter(0), 0, name)


def test_speech_begins_with_the_first_text_if_it_has_a_place_and_text_alone_never_waits() -> None:
    state = one_place()
    assert held(ask(state, "r1")) == {"prompt": False, "thinker": False, "talker": True, "code2wav": False}
    assert begun(speak(state, "r1")) == [("r1", "talker", 0)]
    assert held(ask(state, "r2", ALICE, "text")) == {"prompt": False, "thinker": False}
    ask(state, "r3", BOB)
    assert begun(speak(state, "r3")) == []
    assert (state.speech.waiting, state.speech.speaking) == (1, 1)
    for stage in STAGES:
        last = say(state, stage, done(), int(stage == "thinker"), "r1")
    assert isinstance(last[0].body, Done)
    assert begun(last) == [("r3", "talker", 0)]


def test_as_many_are_spoken_at_once_as_the_stage_that_makes_sound_says_and_no_more_after_it_was_lost() -> None:
    state = ready(speech_pace=2.0)
    state.take_beat(state.replicas.current("talker", 0), 50, NOW)
    state.take_beat(state.replicas.current("code2wav", 0), 7, NOW)
    for name in ("r1", "r2", "r3", "r4"):
        ask(state, name, BOB if name == "r4" else ALICE)  # for whom a place is kept
    assert [begun(speak(state, name)) for name in ("r1", "r2", "r3", "r4")] == [
        *([(name, "talker", 0)] for name in ("r1", "r2", "r3")),
        [],
    ]
    assert state.speech.bound == 3
    assert begun(state.take_beat(state.replicas.current("code2wav", 0), 0, NOW)) == []
    assert begun(state.take_beat(state.replicas.add("code2wav", 1, 1), 8, NOW)) == [("r4", "talker", 0)]


def test_nothing_is_held_if_speech_is_not_paced() -> None:
    state = ready(speech_pace=0.0)
    assert set(held(ask(state)).values()) == {False}
    assert begun(speak(state, "r1")) == []


def test_a_request_that_waits_for_its_speech_survives_the_loss_of_the_stage_that_holds_it() -> None:
    state = one_place()
    for name in ("r1", "r2"):
        ask(state, name)
        speak(state, name)
    lose(state, "talker")
    opened = bring_back(state, "talker")
    talkers = [item for item in opened if isinstance(item.body, OpenRequest) and item.replica_id.stage == "talker"]
    flags = {item.request_id: item.body.held for item in talkers}
    assert flags == {"r1": False, "r2": True}, "r1 keeps its place"
    aborted = state.abort(ALICE, "r1", NOW)
    assert begun(aborted) == [("r2", "talker", state.active["r2"].attempts["talker"])]
    assert state.active["r2"].attempts["talker"] > 0


def test_speech_that_would_wait_too_long_ends_with_overloaded() -> None:
    state = one_place(speech_queue=1, speech_wait=5.0)
    for name in ("r1", "r2"):
        ask(state, name)
        speak(state, name)
    ask(state, "r3")
    body = failure(speak(state, "r3"))
    assert body.code is ErrorCode.OVERLOADED
    assert "speaks 1 answer, as many as it can in real time, with 1 answer waiting." in body.message
    assert state.tick(NOW + 5.0) == []
    body = failure(state.tick(NOW + 5.1))
    assert body.code is ErrorCode.OVERLOADED
    assert "with this one waiting for 5 s." in body.message
    assert [request.request_id for request in state.active] == ["r1"]
    assert (state.speech.waiting, state.speech.speaking) == (0, 1)


def test_an_answer_without_text_needs_no_first_text() -> None:
    state = ready()
    ask(state)
    say(state, "prompt", done(), 0)
    assert begun(say(state, "thinker", done(), 0)) == [("r1", "talker", 0)]


def test_a_stage_takes_the_input_of_a_held_request_and_starts_it_when_it_may() -> None:
    stage = StageUnderTest("talker")
    stage.expect(held=True)
    stage.expect("r2", held=True)
    stage.tokens("ab", 0, final=False)
    stage.tokens("cd", 1, start=2)
    assert stage.engine.calls == []
    assert not stage.actor.saturated, "credit for its input is granted"
    assert not stage.actor.urgent()
    stage.actor.receive(Envelope(Header("begin", "r1", attempt=1), Begin()))
    assert stage.engine.calls == [], "another attempt is meant"
    stage.actor.receive(Envelope(Header("begin", "r1"), Begin()))
    assert [list(inputs.token_ids) for inputs in stage.engine.started()] == [list(b"abcd")]
    last = stage.do(FinishedEvent("r1", FinishReason.STOP, 4, 4))
    assert isinstance(bodies(last)[-1], StageDone)
    stage.actor.receive(Envelope(Header("begin", "r2"), Begin()))
    stage.chunk("r2", 0, token_ids=pack_token_ids([1]), final=True)
    assert len(stage.engine.started()) == 2, "one that may begin before its input comes is not held"


def test_a_held_request_that_is_aborted_leaves_nothing() -> None:
    stage = StageUnderTest("talker")
    stage.expect(held=True)
    stage.tokens("ab")
    stage.abort()
    assert stage.held() == EMPTY
    stage.actor.receive(Envelope(Header("begin", "r1"), Begin()))
    assert stage.engine.calls == [("abort", "r1")] or not stage.engine.started()
