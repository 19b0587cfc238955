"""The coordinator's decisions: an event in, the list of instructions out."""

from __future__ import annotations

import array
import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_actors.coordinator.core.instructions import Instruction, ToClient, ToStage
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.coordinator.core.replicas import ReplicaTable
from omni_actors.coordinator.core.states import ReplicaEvent, ReplicaState
from omni_actors.errors import EngineError, ErrorCode, InvalidPayload, SlowClient, StageLost
from omni_actors.protocol.client import Done, Submit
from omni_actors.protocol.common import Abort, Failed
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Header, ReplicaId
from omni_actors.protocol.payloads import Prompt, StageParams
from omni_actors.protocol.results import AudioChunk, TextDelta, Unreachable
from omni_actors.protocol.stage import OpenRequest, Resend
from omni_actors.protocol.tensors import DType, TensorRef
from omni_actors.protocol.tombstones import Tombstones
from tests.support.builders import done, header_from, pipeline, submit
from tests.unit.resend_books import CheckedCoordination

STAGES = ("prompt", "thinker", "talker", "code2wav")
NOW = 1000.0
ALICE, BOB = b"alice", b"bob"
CHUNK = AudioChunk(samples=TensorRef(DType.F32, (1,), 0), sample_rate=24_000)


def ready(replicas: int = 1, **coordinator: object) -> RequestMachine:
    state = CheckedCoordination(pipeline(**coordinator), new_seed=lambda: 77)
    for stage in STAGES:
        for index in range(replicas):
            replica = state.replicas.add(stage, index, 1)
            replica.state = ReplicaState.READY
            if stage == "code2wav":
                replica.voices, replica.sample_rate = ("Chelsie", "Ethan"), 24_000
    return state


def replica_id(stage: str, index: int = 0, epoch: int = 1) -> ReplicaId:
    return ReplicaId(stage, index, epoch)


def ask(
    state: RequestMachine, request_id: str = "r1", client: bytes = ALICE, *modalities: str, **fields: object
) -> list:
    return state.submit(client, Header("", request_id), submit(*modalities, **fields), [b"media"], NOW)


def say(
    state: RequestMachine, stage: str, body: object, seq: int = 0, request_id: str = "r1", buffers: tuple = ()
) -> list:
    return state.from_stage(header_from(replica_id(stage), request_id, seq), body, buffers, NOW)


def failure(instructions: list[Instruction]) -> Failed:
    """The one message to the client, which is a failure."""
    (message,) = [item for item in instructions if isinstance(item, ToClient)]
    assert isinstance(message.body, Failed)
    return message.body


def aborts(instructions: list[Instruction]) -> list[str]:
    return [
        item.replica_id.stage for item in instructions if isinstance(item, ToStage) and isinstance(item.body, Abort)
    ]


def test_submit_opens_later_stages_first_and_gives_the_prompt_to_the_entry() -> None:
    instructions = ask(ready(), voice="Ethan", priority=3, params={"talker": StageParams(top_k=5)})
    assert [item.replica_id for item in instructions] == [replica_id(stage) for stage in reversed(STAGES)]
    route = tuple(replica_id(stage) for stage in STAGES)
    for item in instructions:
        entry = item.replica_id.stage == "prompt"
        assert isinstance(item.body, OpenRequest)
        assert item.body.route == route
        assert (item.body.prompt is not None) == entry
        assert list(item.buffers) == ([b"media"] if entry else [])
        assert (item.body.seed, item.body.voice, item.body.priority) == (77, "Ethan", 3)
        assert item.body.params == (StageParams(top_k=5) if item.replica_id.stage == "talker" else StageParams())
        assert (item.request_id, item.attempt, item.deadline) == ("r1", 0, NOW + 600)


def test_text_only_stops_at_the_thinker() -> None:
    instructions = ask(ready(), "r1", ALICE, "text")
    assert [item.replica_id.stage for item in instructions] == ["thinker", "prompt"]


def test_given_seed_and_deadline_are_kept() -> None:
    state = ready()
    instructions = state.submit(ALICE, Header("", "r1", deadline=NOW + 5), submit(seed=3), [], NOW)
    assert {(item.body.seed, item.deadline) for item in instructions} == {(3, NOW + 5)}


def test_long_prompts_of_tokens_are_refused_before_any_stage_sees_them() -> None:
    def prompt(tokens: int) -> Submit:
        return Submit(prompt=Prompt(token_ids=pack_token_ids([1] * tokens)), modalities=("text",))

    state = ready(replicas=2)
    assert state.submit(ALICE, Header("", "r0"), prompt(1000), [], NOW)[0].body.prompt is None, "nobody knows a limit"
    for replica in state.replicas:
        replica.max_input_tokens = {"prompt": 20 - replica.index, "code2wav": 3}.get(replica.stage, 0)
    body = failure(state.submit(ALICE, Header("", "r1"), prompt(20), [], NOW))
    assert (body.code, "20 tokens, at most 19" in body.message) == (ErrorCode.PROMPT_TOO_LONG, True)
    assert failure_free(state.submit(ALICE, Header("", "r2"), prompt(19), [], NOW)), "as many as all replicas take"


def failure_free(instructions: list[Instruction]) -> bool:
    return not any(isinstance(item, ToClient) for item in instructions) and bool(instructions)


@pytest.mark.parametrize(
    ("modalities", "fields", "code", "words"),
    [
        (("smell",), {}, ErrorCode.UNKNOWN_MODALITY, "text, audio"),
        (("text", "audio"), {"voice": "Bob"}, ErrorCode.UNKNOWN_VOICE, "Chelsie, Ethan"),
        (("text",), {"params": {"talkr": StageParams()}}, ErrorCode.INVALID_REQUEST, "Did you mean 'talker'"),
        (
            ("text",),
            {"params": {"thinker": StageParams(min_tokens=5, max_tokens=2)}},
            ErrorCode.INVALID_REQUEST,
            "min_",
        ),
    ],
)
def test_refusals_name_what_would_be_right(modalities, fields, code, words) -> None:
    state = ready()
    body = failure(ask(state, "r1", ALICE, *modalities, **fields))
    assert (body.code, words in body.message) == (code, True)
    assert state.in_flight == 0
    assert not any(replica.requests for replica in state.replicas)
    assert len(ask(state)) == 4, "the id of a refused request may be used again"


def test_parameters_of_the_wrong_kind_of_stage() -> None:
    from omni_actors.config import StageKind
    from omni_actors.coordinator.core.admission import _stage_params

    config = pipeline()
    import msgspec

    stages = [msgspec.structs.replace(config.stages[1], kind=StageKind.AUTOREGRESSIVE)]
    with pytest.raises(Exception, match="num_steps does not apply to stage 'thinker'"):
        _stage_params(msgspec.structs.replace(config, stages=stages), {"thinker": StageParams(num_steps=3)})


def test_overload_says_when_to_come_back() -> None:
    state = ready(max_in_flight=2)
    ask(state, "a")
    ask(state, "b")
    body = failure(ask(state, "c"))
    assert (body.code, body.retryable, body.retry_after) == (ErrorCode.OVERLOADED, True, 1.0)
    state.abort(ALICE, "a", NOW)
    assert len(ask(state, "d")) == 4


def test_ids_are_used_once() -> None:
    state = ready(tombstone_ttl=60)
    ask(state)
    assert failure(ask(state)).code is ErrorCode.INVALID_REQUEST
    assert state.in_flight == 1
    state.abort(ALICE, "r1", NOW)
    assert failure(ask(state)).code is ErrorCode.INVALID_REQUEST
    state.tick(NOW + 61)
    assert len(ask(state)) == 4
    assert failure(ask(state, "")).code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("deadline", [NOW, NOW - 1, -5.0])
def test_deadline_in_the_past(deadline: float) -> None:
    state = ready()
    instructions = state.submit(ALICE, Header("", "r1", deadline=deadline), submit(), [], NOW)
    assert failure(instructions).code is ErrorCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("deadline", [float("nan"), float("inf")])
def test_deadline_that_never_passes(deadline: float) -> None:
    instructions = ready().submit(ALICE, Header("", "r1", deadline=deadline), submit(), [], NOW)
    assert failure(instructions).code is ErrorCode.INVALID_REQUEST


def test_deadline_ends_the_request_everywhere() -> None:
    state = ready(default_timeout=5)
    ask(state)
    assert state.tick(NOW + 4.9) == []
    instructions = state.tick(NOW + 5)
    assert failure(instructions).code is ErrorCode.DEADLINE_EXCEEDED
    assert sorted(aborts(instructions)) == sorted(STAGES)
    assert state.tick(NOW + 6) == []


def test_missing_stage_is_named() -> None:
    state = ready()
    state.replicas.find("talker", 0, 1).state = ReplicaState.DEAD
    body = failure(ask(state))
    assert (body.code, body.stage, body.retryable) == (ErrorCode.STAGE_UNAVAILABLE, "talker", True)
    assert len(ask(state, "r2", ALICE, "text")) == 2


def test_results_reach_the_client_numbered_and_filtered() -> None:
    state = ready()
    ask(state)
    assert say(state, "thinker", TextDelta(text="a"), 0) == [ToClient(ALICE, "r1", 0, TextDelta(text="a"))]
    assert say(state, "code2wav", CHUNK, 0, buffers=(b"1234",)) == [ToClient(ALICE, "r1", 1, CHUNK, (b"1234",))]
    assert say(state, "talker", TextDelta(text="x"), 0) == [], "the talker has no outputs"
    assert say(state, "thinker", CHUNK, 1) == [], "the thinker has no audio output"


def test_audio_only_gets_no_text() -> None:
    state = ready()
    ask(state, "r1", ALICE, "audio")
    assert say(state, "thinker", TextDelta(text="a")) == []
    assert say(state, "code2wav", CHUNK) == [ToClient(ALICE, "r1", 0, CHUNK)]


def test_done_when_the_last_stage_is_done_whatever_the_order() -> None:
    state = ready()
    ask(state)
    for stage in ("code2wav", "prompt", "talker"):
        assert say(state, stage, done()) == []
    (message,) = say(state, "thinker", done("length"))
    assert isinstance(message.body, Done)
    assert set(message.body.usage) == set(STAGES)
    assert message.body.usage["thinker"].finish_reason == "length"
    assert state.in_flight == 0
    assert not any(replica.requests for replica in state.replicas)
    assert say(state, "thinker", TextDelta(text="late"), 1) == []
    assert state.dropped == {"late": 1}


def test_stage_failure_ends_the_request_once() -> None:
    state = ready()
    ask(state)
    instructions = say(state, "talker", Failed.from_error(EngineError("boom"), "talker"))
    body = failure(instructions)
    assert (body.code, body.message, body.stage) == (ErrorCode.ENGINE_ERROR, "boom", "talker")
    assert sorted(aborts(instructions)) == sorted(STAGES)
    assert say(state, "code2wav", Failed.from_error(EngineError("again"))) == []


def test_gap_in_the_results_is_an_error_but_hides_no_failure() -> None:
    state = ready()
    ask(state)
    assert failure(say(state, "thinker", TextDelta(text="b"), 1)).code is ErrorCode.PROTOCOL_ERROR
    ask(state, "r2")
    failed = Failed.from_error(InvalidPayload("too large to send"))
    assert failure(say(state, "code2wav", failed, 3, "r2")).code is ErrorCode.INVALID_PAYLOAD


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (header_from(replica_id("thinker", 0, 2), "r1"), "foreign_epoch"),
        (header_from(replica_id("thinker", 1, 1), "r1"), "foreign_epoch"),
        (header_from(replica_id("stranger"), "r1"), "foreign_epoch"),
        (header_from(replica_id("thinker"), "r1", attempt=1), "foreign_attempt"),
        (header_from(replica_id("thinker"), "r9"), "unknown_request"),
    ],
)
def test_foreign_results_are_dropped_and_counted(header: Header, reason: str) -> None:
    state = ready()
    ask(state)
    assert state.from_stage(header, Failed.from_error(EngineError("x")), (), NOW) == []
    assert state.reject_from_stage(header, InvalidPayload("x"), NOW) == []
    assert state.dropped == {reason: 2}
    assert state.in_flight == 1


def test_only_the_owner_aborts() -> None:
    state = ready()
    ask(state)
    assert state.abort(BOB, "r1", NOW) == []
    instructions = state.abort(ALICE, "r1", NOW)
    assert failure(instructions).code is ErrorCode.ABORTED
    assert sorted(aborts(instructions)) == sorted(STAGES)
    assert state.abort(ALICE, "r1", NOW) == []
    assert state.dropped == {"abort_of_unknown_request": 2}


def test_undecodable_client_message() -> None:
    state = ready()
    ask(state)
    error = InvalidPayload("bad")
    assert failure(state.reject(BOB, Header("", "r1"), error, NOW)).code is ErrorCode.INVALID_PAYLOAD
    assert state.in_flight == 1, "another client's garbage does not end this request"
    assert len(aborts(state.reject(ALICE, Header("", "r1"), error, NOW))) == 4
    (answer,) = state.reject(ALICE, Header("", "new"), error, NOW)
    assert answer.body.code is ErrorCode.INVALID_PAYLOAD


def test_undecodable_result_ends_its_request() -> None:
    state = ready()
    ask(state)
    instructions = state.reject_from_stage(header_from(replica_id("talker"), "r1"), InvalidPayload("bad"), NOW)
    assert failure(instructions).code is ErrorCode.INVALID_PAYLOAD


def test_lost_replica_fails_what_it_held_only() -> None:
    state = ready()
    ask(state, "both")
    ask(state, "text", BOB, "text")
    instructions = lose(state, "talker", restart=False)
    body = failure(instructions)
    assert (body.code, body.stage, body.retryable) == (ErrorCode.STAGE_LOST, "talker", True)
    assert "killed by signal 9" in body.message
    assert sorted(aborts(instructions)) == ["code2wav", "prompt", "thinker"], "nothing is sent to the dead"
    assert state.requests_of(BOB) == ("text",)
    assert state.requests_of(ALICE) == ()


def test_lost_client_gets_nothing_more() -> None:
    state = ready()
    ask(state, "a")
    ask(state, "b")
    ask(state, "c", BOB)
    instructions = state.client_gone(ALICE, NOW)
    assert all(isinstance(item, ToStage) and isinstance(item.body, Abort) for item in instructions)
    assert len(instructions) == 8
    assert state.in_flight == 1


def test_shutdown_answers_everybody() -> None:
    state = ready()
    ask(state, "a")
    ask(state, "b", BOB)
    instructions = state.shut_down(NOW)
    answers = {item.client: item.body.code for item in instructions if isinstance(item, ToClient)}
    assert answers == {ALICE: ErrorCode.STAGE_UNAVAILABLE, BOB: ErrorCode.STAGE_UNAVAILABLE}
    assert failure(ask(state, "too late")).code is ErrorCode.STAGE_UNAVAILABLE
    assert state.in_flight == 0


# -- replicas and tombstones ------------------------------------------------------------------------------------------


def test_least_loaded_replica_is_chosen() -> None:
    state = ready(replicas=2)
    chosen = [[item.replica_id.replica for item in ask(state, f"r{i}")] for i in range(4)]
    assert chosen == [[0] * 4, [1] * 4, [0] * 4, [1] * 4]
    state.abort(ALICE, "r1", NOW)
    assert {item.replica_id.replica for item in ask(state, "next")} == {1}


def test_replica_table_epochs() -> None:
    table = ReplicaTable()
    first = table.add("talker", 0, 1)
    assert table.choose("talker") is None
    assert table.find("talker", 0, 1) is first
    second = table.add("talker", 0, 2)
    assert table.find("talker", 0, 1) is None
    assert table.find("talker", 0, 2) is second
    assert [replica.name for replica in table.missing()] == ["talker/0"]
    second.inbox = "ipc:///x"
    assert [peer.epoch for peer in table.peers(("talker",))] == [2]
    second.state = ReplicaState.DEAD
    assert table.peers(("talker",)) == ()


def test_tombstones_age_and_bound() -> None:
    stones = Tombstones(ttl=10, maximum=3)
    for i in range(5):
        stones.add(str(i), float(i))
    assert [str(i) in stones for i in range(5)] == [False, False, True, True, True]
    stones.add("2", 5.0)  # ended again: younger than 3 and 4 now
    stones.expire(13.5)
    assert [str(i) in stones for i in range(5)] == [False, False, True, False, True]
    assert len(stones) == 2


# -- replay -----------------------------------------------------------------------------------------------------------


def letter(index: int) -> TextDelta:
    return TextDelta(text=chr(97 + index % 26), token_ids=pack_token_ids([index]))


def sound(first: int, count: int) -> tuple[AudioChunk, tuple[bytes, ...]]:
    samples = array.array("f", range(first, first + count)).tobytes()
    return AudioChunk(samples=TensorRef(DType.F32, (count,), 0), sample_rate=24_000), (samples,)


def lose(
    state: RequestMachine, stage: str, index: int = 0, restart: bool = True, why: str = "killed by signal 9"
) -> list[Instruction]:
    replica = state.replicas.current(stage, index)
    assert replica is not None
    replica.on(ReplicaEvent.LOST if restart else ReplicaEvent.GIVEN_UP)
    return state.replica_lost(replica, NOW, why, blame=not replica.orders.restart)


def bring_back(state: RequestMachine, stage: str, index: int = 0) -> list[Instruction]:
    before = state.replicas.current(stage, index)
    assert before is not None
    replica = state.replicas.add(stage, index, before.epoch + 1)
    replica.state = ReplicaState.READY
    return state.reopen(NOW)


def again(state: RequestMachine, stage: str, body: object, seq: int, epoch: int = 1, attempt: int = 1, **more) -> list:
    header = header_from(replica_id(stage, 0, epoch), "r1", seq, attempt)
    return state.from_stage(header, body, more.get("buffers", ()), NOW)


def test_lost_replica_is_replayed_when_it_is_back_with_the_same_seed() -> None:
    state = ready()
    first = ask(state, voice="Ethan")
    lost = lose(state, "prompt")
    assert sorted(aborts(lost)) == ["code2wav", "talker", "thinker"], "the dead one hears nothing"
    assert {item.attempt for item in lost} == {0}
    assert not [item for item in lost if isinstance(item, ToClient)]
    assert not any(replica.requests for replica in state.replicas)
    assert state.reopen(NOW) == []
    opened = bring_back(state, "prompt")
    assert [item.replica_id for item in opened] == [
        replica_id("code2wav"),
        replica_id("talker"),
        replica_id("thinker"),
        replica_id("prompt", 0, 2),
    ]
    assert {item.attempt for item in opened} == {1}
    assert {item.body.seed for item in (*first, *opened)} == {77}
    assert [list(item.buffers) for item in opened] == [[], [], [], [b"media"]]
    assert state.replays == 1


def resends(instructions: list[Instruction]) -> list[tuple[str, str, int]]:
    """Who is asked to give whom its input again, and for which attempt."""
    asked = [item for item in instructions if isinstance(item.body, Resend)]
    return [(item.replica_id.stage, item.body.receiver.stage, item.body.attempt) for item in asked]


def expects(instructions: list[Instruction]) -> list[tuple[str, int]]:
    return [(item.replica_id.stage, item.attempt) for item in instructions if isinstance(item.body, OpenRequest)]


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
    assert expects(opened) == [(name, 1) for name in again]
    assert resends(opened) == [(source, stage, 1)]
    (asked,) = [item for item in opened if isinstance(item.body, Resend)]
    assert (asked.attempt, asked.body.receiver) == (0, replica_id(stage, 0, 2))
    route = {item.body.route for item in opened if isinstance(item.body, OpenRequest)}
    assert route == {tuple(replica_id(name, 0, 2 if name == stage else 1) for name in STAGES)}
    assert {item.body.voice for item in opened if isinstance(item.body, OpenRequest)} == {"Ethan"}


def test_losses_one_after_the_other_have_attempts_of_their_own() -> None:
    state = ready()
    ask(state)
    lose(state, "code2wav")
    bring_back(state, "code2wav")
    lose(state, "talker")
    opened = bring_back(state, "talker")
    assert (expects(opened), resends(opened)) == ([("code2wav", 2), ("talker", 2)], [("thinker", "talker", 2)])
    assert [(item.replica_id.stage, item.attempt) for item in opened if isinstance(item.body, Resend)] == [
        ("thinker", 0)
    ]
    state.replicas.current("code2wav", 0).orders.restart = True  # nobody is accused of this one
    lose(state, "code2wav")
    opened = bring_back(state, "code2wav")
    assert (expects(opened), resends(opened)) == ([("code2wav", 3)], [("talker", "code2wav", 3)])
    assert [item.attempt for item in opened if isinstance(item.body, Resend)] == [2]


def test_a_stage_whose_source_is_gone_as_well_begins_further_up() -> None:
    state = ready()
    ask(state)
    lose(state, "code2wav")
    lose(state, "talker")
    assert bring_back(state, "code2wav") == []
    opened = bring_back(state, "talker")
    assert (expects(opened), resends(opened)) == ([("code2wav", 1), ("talker", 1)], [("thinker", "talker", 1)])

    state = ready()
    ask(state)
    for stage in ("prompt", "thinker", "talker"):
        say(state, stage, done())
    assert lose(state, "thinker") == [], "code2wav has all that it needs"
    opened = bring_back(state, "thinker")
    lose(state, "talker")
    opened = bring_back(state, "talker")
    assert expects(opened) == [("code2wav", 1), ("talker", 1), ("thinker", 1)]
    assert resends(opened) == [("prompt", "thinker", 1)]


def test_a_stage_that_does_not_hold_its_output_any_more_begins_anew() -> None:
    state = ready(max_attempts=2)
    ask(state)
    lose(state, "code2wav")
    bring_back(state, "code2wav")
    refusal = Failed.from_error(StageLost("not kept"), "talker")
    opened = say(state, "talker", refusal)
    assert (expects(opened), resends(opened)) == ([("code2wav", 2), ("talker", 2)], [("thinker", "talker", 2)])
    opened = say(state, "thinker", Failed.from_error(StageLost("not kept"), "thinker"))
    assert resends(opened) == [("prompt", "thinker", 3)]
    opened = say(state, "prompt", Failed.from_error(StageLost("not kept"), "prompt"))
    assert expects(opened) == [(stage, 4) for stage in reversed(STAGES)]
    assert (state.replays, state._requests["r1"].losses_made_up) == (1, 1), "it was one loss"
    assert failure(lose(state, "talker")).code is ErrorCode.STAGE_LOST, "and there may be one only"


def test_an_observer_is_told_of_what_begins_anew_and_of_nothing_else() -> None:
    """The thinker's `StageDone`, of its first attempt, counts after the vocoder's loss as before."""
    state = ready()
    ask(state, voice="Ethan")
    seen = state.onlooker
    say(state, "prompt", done())
    lose(state, "code2wav")
    assert seen.losses == [("r1", True)]
    say(state, "thinker", letter(0), 0)
    say(state, "thinker", done(), 1)
    bring_back(state, "code2wav")
    assert seen.attempts["r1"] == {"prompt": 0, "thinker": 0, "talker": 0, "code2wav": 1}
    say(state, "talker", done())
    again(state, "code2wav", CHUNK, 0, epoch=2, buffers=(bytes(4),))
    again(state, "code2wav", done(), 1, epoch=2)
    assert seen.done["r1"] == seen.done["r1"] | {"thinker": 0, "code2wav": 1}
    assert seen.ends == {"done": 1}


def test_an_unreachable_stage_begins_anew_unless_that_is_under_way() -> None:
    state = ready(replicas=2)
    ask(state)
    body = Unreachable(receiver=replica_id("code2wav"), attempt=0)
    opened = say(state, "talker", body)
    assert (expects(opened), resends(opened)) == ([("code2wav", 1)], [("talker", "code2wav", 1)])
    assert say(state, "talker", body, 1) == []
    assert say(state, "talker", Unreachable(receiver=replica_id("code2wav"), attempt=1), 2) != []
    assert state._requests["r1"].losses == [], "nobody is accused"


def test_without_its_prompt_a_request_survives_all_but_the_first_stage() -> None:
    state = ready(retain_bytes=0)
    ask(state)
    assert state.retained_bytes == 0
    lose(state, "thinker")
    assert resends(bring_back(state, "thinker")) == [("prompt", "thinker", 1)]
    assert failure(lose(state, "prompt")).code is ErrorCode.STAGE_LOST


def test_stages_hear_what_they_may_forget() -> None:
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
    assert told == {"prompt": ("r1", "text"), "thinker": ("r1",), "talker": ("r1",)}
    assert state.tick(NOW) == []


def test_the_client_gets_only_what_it_has_not() -> None:
    state = ready()
    ask(state)
    for index in range(3):
        say(state, "thinker", letter(index), index)
    chunk, buffers = sound(0, 5)
    say(state, "code2wav", chunk, 0, buffers=buffers)
    lose(state, "thinker")
    bring_back(state, "thinker")
    assert say(state, "prompt", done()) == [], "it went on"
    assert say(state, "talker", done()) == [], "the former attempt"
    assert state.dropped == {"foreign_attempt": 1}
    assert again(state, "thinker", TextDelta(text="ab", token_ids=pack_token_ids([0, 1])), 0, 2) == []
    (rest,) = again(state, "thinker", TextDelta(text="cd", token_ids=pack_token_ids([2, 3])), 1, 2)
    assert (rest.seq, rest.body) == (4, TextDelta(text="d", token_ids=pack_token_ids([3])))
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
    assert state.retained_bytes == 0


def test_a_replay_that_says_something_else_or_less_fails() -> None:
    for wrong in (TextDelta(text="ax", token_ids=pack_token_ids([0, 9])), None):
        state = ready()
        ask(state, "r1", ALICE, "text")
        say(state, "thinker", letter(0), 0)
        say(state, "thinker", letter(1), 1)
        lose(state, "thinker")
        bring_back(state, "thinker")
        if wrong is not None:
            body = failure(again(state, "thinker", wrong, 0, 2))
        else:
            say(state, "prompt", done())
            body = failure(again(state, "thinker", done(), 0, 2))
        assert (body.code, "did not repeat" in body.message) == (ErrorCode.STAGE_LOST, True)


def test_poison_after_two_replicas_of_a_stage() -> None:
    state = ready()
    ask(state)
    lose(state, "talker", why="first")
    bring_back(state, "talker")
    body = failure(lose(state, "talker", why="second"))
    assert (body.code, body.stage, body.retryable) == (ErrorCode.POISON, "talker", False)
    assert "talker/0 (epoch 1): first; talker/0 (epoch 2): second" in body.message


def finish(state: RequestMachine, request_id: str) -> None:
    request = state._requests[request_id]
    for stage in STAGES:
        header = header_from(
            request.replica_id(stage), request_id, request.next_seq.get(stage, 0), request.attempts[stage]
        )
        if stage not in request.usage:
            state.from_stage(header, done(), (), NOW)


def opened(instructions: list[Instruction]) -> set[str]:
    return {item.request_id for item in instructions if isinstance(item.body, OpenRequest)}


def test_of_several_suspects_only_the_guilty_one_fails() -> None:
    state = ready(max_in_flight=9)
    for name in ("a", "culprit", "z"):
        ask(state, name)
    lose(state, "talker")
    bring_back(state, "talker")
    ask(state, "new")
    assert not [item for item in lose(state, "talker") if isinstance(item, ToClient)], "it may be any of the three"
    assert opened(bring_back(state, "talker")) == {"new"}, "whoever is not suspected goes first"
    assert ask(state, "later") == [], "the talker is emptied for a suspect"
    assert state.tick(NOW) == []
    finish(state, "new")
    assert opened(state.tick(NOW)) == {"a"}, "alone"
    assert ask(state, "much later") == []
    finish(state, "a")
    assert opened(state.tick(NOW)) == {"later", "much later"}, "between two trials those that waited get in"
    finish(state, "later")
    assert opened(state.tick(NOW)) == set(), "not empty yet"
    finish(state, "much later")
    assert opened(state.tick(NOW)) == {"culprit"}
    body = failure(lose(state, "talker"))
    assert (body.code, "3 replicas died" in body.message) == (ErrorCode.POISON, True)
    assert set(state.requests_of(ALICE)) == {"z"}
    assert opened(bring_back(state, "talker")) == {"z"}
    assert state._requests["z"].suspected_by is None, "it was there each time that the culprit one was"
    assert "r" in opened(ask(state, "r"))


def test_nobody_is_condemned_who_was_not_alone() -> None:
    """Another poisonous request comes each time: the one that was there at every loss has done nothing."""
    state = ready(max_in_flight=9, max_attempts=9)
    ask(state, "innocent")
    ask(state, "first")
    lose(state, "talker")
    state.abort(ALICE, "first", NOW)
    bring_back(state, "talker")
    ask(state, "second")
    lost = lose(state, "talker")
    assert not [item for item in lost if isinstance(item, ToClient)]
    assert opened(bring_back(state, "talker")) == {"second"}
    state.abort(ALICE, "second", NOW)
    assert opened(state.tick(NOW)) == {"innocent"}
    assert ask(state, "third") == [], "it has to wait"
    finish(state, "innocent")
    assert "innocent" not in state.requests_of(ALICE)


def test_a_trial_needs_one_of_the_replicas_only() -> None:
    state = ready(replicas=2, max_in_flight=9)
    for name in ("a", "b", "c"):
        ask(state, name)  # a and c on talker/0, b on talker/1
    lose(state, "talker")  # they run on talker/1 from now on
    second = state.replicas.current("talker", 1)
    assert second.requests == {"a", "b", "c"}
    lose(state, "talker", 1)
    assert opened(bring_back(state, "talker", 0)) == {"b"}
    assert state.replicas.current("talker", 0).reserved_for == "a"
    assert opened(bring_back(state, "talker", 1)) == set(), "one trial at a time"
    assert "new" in opened(ask(state, "new"))
    assert state.replicas.current("talker", 1).requests == {"new"}
    finish(state, "b")
    assert opened(state.tick(NOW)) == {"a"}
    state.abort(ALICE, "a", NOW)
    assert opened(state.tick(NOW)) == {"c"}
    finish(state, "c")
    state.tick(NOW)
    assert not [replica for replica in state.replicas if replica.reserved_for]


def test_a_trial_ends_with_the_replica_it_was_to_have() -> None:
    state = ready(replicas=2, max_in_flight=9)
    ask(state, "a")
    ask(state, "x")
    ask(state, "b")
    lose(state, "talker")
    lose(state, "talker", 1)
    bring_back(state, "talker", 0)
    assert state.replicas.current("talker", 0).reserved_for == "a"
    lose(state, "talker")  # x was there alone, for the second time
    assert opened(bring_back(state, "talker", 1)) != set()
    state.client_gone(ALICE, NOW)
    state.tick(NOW)
    assert not [replica for replica in state.replicas if replica.reserved_for]


def test_losses_of_several_stages_are_no_poison_but_bounded() -> None:
    state = ready(max_attempts=3)
    ask(state)
    for stage in ("talker", "thinker"):
        assert not [item for item in lose(state, stage) if isinstance(item, ToClient)]
        bring_back(state, stage)
    assert failure(lose(state, "code2wav")).code is ErrorCode.STAGE_LOST


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


def test_a_stage_that_cannot_reach_another_one_tries_again() -> None:
    state = ready()
    ask(state)
    lost = Failed.from_error(StageLost("talker/0 takes no messages."), "thinker")
    instructions = say(state, "thinker", lost)
    assert not [item for item in instructions if isinstance(item, ToClient)]
    assert expects(instructions) == [("code2wav", 1), ("talker", 1), ("thinker", 1)]
    assert resends(instructions) == [("prompt", "thinker", 1)]
    assert state._requests["r1"].losses == [], "nobody is accused"


def test_over_the_budget_nothing_is_kept() -> None:
    state = ready(retain_bytes=20)  # one request of 12 + 5 bytes
    ask(state, "kept")
    ask(state, "let go")
    assert state.retained_bytes == 17
    assert failure(lose(state, "prompt")).code is ErrorCode.STAGE_LOST
    assert state.requests_of(ALICE) == ("kept",)


def test_new_requests_wait_for_a_stage_that_comes_back() -> None:
    state = ready(max_in_flight=2)
    lose(state, "talker")
    assert ask(state, "a") == []
    assert [item.replica_id.stage for item in ask(state, "text", ALICE, "text")] == ["thinker", "prompt"]
    assert failure(ask(state, "b")).code is ErrorCode.OVERLOADED
    assert {item.request_id for item in bring_back(state, "talker")} == {"a"}


def test_waiting_requests_end_when_nobody_comes_or_time_is_up() -> None:
    state = ready(default_timeout=5)
    ask(state)
    lose(state, "talker")
    body = failure(state.tick(NOW + 6))
    assert (body.code, "killed by signal 9" in body.message) == (ErrorCode.DEADLINE_EXCEEDED, True)
    ask(state, "r2")
    state.replicas.add("talker", 0, 2)
    body = failure(lose(state, "talker", restart=False, why="bad checkpoint"))
    assert (body.code, body.stage) == (ErrorCode.STAGE_UNAVAILABLE, "talker")


def test_a_client_may_abort_what_waits() -> None:
    state = ready()
    ask(state)
    lose(state, "talker")
    assert failure(state.abort(ALICE, "r1", NOW)).code is ErrorCode.ABORTED
    assert bring_back(state, "talker") == []


def test_draining_replica_takes_nothing_new_and_is_waited_for_when_it_will_be_back() -> None:
    state = ready()
    ask(state, "held")
    talker = state.replicas.find("talker", 0, 1)
    talker.on(ReplicaEvent.DRAIN)
    assert failure(ask(state, "drained")).code is ErrorCode.STAGE_UNAVAILABLE
    talker.orders.restart = True
    assert ask(state, "waits") == []
    say(state, "code2wav", done(), 0, "held")
    assert talker.requests == {"held"}
    lose(state, "talker")
    assert state._requests["held"].losses == [], "a restart that was asked for is nobody's fault"
    assert len(expects(bring_back(state, "talker"))) == 2 + 4


# -- any interleaving -------------------------------------------------------------------------------------------------

request_numbers = st.integers(0, 7)
MAX_ATTEMPTS = 3


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, every admitted request gets exactly one terminal message."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ready(replicas=2, max_in_flight=5, tombstone_ttl=20, max_attempts=MAX_ATTEMPTS)
        self.now = NOW
        self.serial = 0
        self.admitted: dict[str, bytes] = {}
        self.terminals: collections.Counter[str] = collections.Counter()
        self.seqs: collections.Counter[tuple[str, int, str]] = collections.Counter()
        self.client_seq: collections.Counter[str] = collections.Counter()
        self.texts: collections.Counter[str] = collections.Counter()
        self.silenced: set[str] = set()  # their client is gone
        self.running: dict[tuple[str, ReplicaId], int] = {}  # what each replica works on, as it was told: the attempt

    def take(self, instructions: list[Instruction]) -> None:
        for item in instructions:
            if isinstance(item, ToStage):
                replica = self.state.replicas.find(
                    *(item.replica_id.stage, item.replica_id.replica, item.replica_id.epoch)
                )
                assert replica is not None
                assert replica.alive
                self.told(item)
                continue
            assert item.client == self.admitted[item.request_id]
            assert item.request_id not in self.silenced
            assert self.terminals[item.request_id] == 0, "a message after the terminal one"
            assert item.seq == self.client_seq[item.request_id]
            self.client_seq[item.request_id] += 1
            if isinstance(item.body, TextDelta):
                assert item.body == letter(self.texts[item.request_id]), "lost, doubled or out of order"
                self.texts[item.request_id] += 1
            if isinstance(item.body, Done | Failed):
                self.terminals[item.request_id] += 1

    def told(self, item: ToStage) -> None:
        """What a replica makes of it."""
        key = (item.request_id, item.replica_id)
        if isinstance(item.body, OpenRequest):
            assert item.attempt > self.running.get(key, -1), "an attempt is opened once"
            self.running[key] = item.attempt
        elif isinstance(item.body, Resend):
            assert self.running[key] == item.attempt, "only who works on it can send it again"
            assert self.running[(item.request_id, item.body.receiver)] == item.body.attempt

    def pick(self, number: int) -> str:
        return f"r{max(0, self.serial - number)}"

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
        request = self.state._requests.get(request_id)
        bound = (request.replica_id(stage) if request is not None else None) or replica_id(stage, 0, 99)
        attempt = request.attempts.get(stage, 0) if request is not None else 0
        key = (request_id, attempt, stage)
        output = CHUNK if stage == "code2wav" else letter(self.seqs[key])
        body = {
            "out": output,
            "done": done(),
            "fail": Failed.from_error(EngineError("x")),
            "lost": Failed.from_error(StageLost("x", stage=stage)),
            "unreachable": Unreachable(
                receiver=(request.replica_id("talker") if request is not None else None) or replica_id("talker", 0, 99),
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

    @rule(stage=st.sampled_from(STAGES), index=st.integers(0, 1), restart=st.booleans(), wanted=st.booleans())
    def replica_lost(self, stage: str, index: int, restart: bool, wanted: bool) -> None:
        replica = self.state.replicas.current(stage, index)
        if replica is not None and replica.alive:
            replica.orders.restart = restart and wanted
            computing = {name for name in replica.computing if not self.through_with(name, stage)}
            replica.on(ReplicaEvent.LOST if restart else ReplicaEvent.GIVEN_UP)
            instructions = self.state.replica_lost(replica, self.now, "test", blame=not (restart and wanted))
            for item in instructions:
                if isinstance(item.body, Failed) and item.body.code is ErrorCode.POISON:
                    assert computing == {item.request_id}, "condemned, but it was not alone"
                    assert not wanted or not restart
            self.take(instructions)

    def through_with(self, request_id: str, stage: str) -> bool:
        return self.state._planner.is_through_with(self.state._requests[request_id], stage)

    @rule(stage=st.sampled_from(STAGES), index=st.integers(0, 1))
    def replica_drains(self, stage: str, index: int) -> None:
        replica = self.state.replicas.current(stage, index)
        if replica is not None and replica.state is ReplicaState.READY:
            replica.on(ReplicaEvent.DRAIN)

    @rule(stage=st.sampled_from(STAGES), index=st.integers(0, 1))
    def replica_back(self, stage: str, index: int) -> None:
        replica = self.state.replicas.current(stage, index)
        if replica is not None and not replica.alive:
            new = self.state.replicas.add(stage, index, replica.epoch + 1)
            new.state = ReplicaState.READY
            self.take(self.state.reopen(self.now))

    @rule(seconds=st.sampled_from([0.1, 3.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.state.tick(self.now))

    @precondition(lambda self: self.serial > 5)
    @rule()
    def shut_down(self) -> None:
        self.take(self.state.shut_down(self.now))
        assert self.state.in_flight == 0

    @invariant()
    def books_agree(self) -> None:
        active = {*self.state.requests_of(ALICE), *self.state.requests_of(BOB)}
        assert len(active) == self.state.in_flight <= 5
        ended = {request_id for request_id, count in self.terminals.items() if count}
        assert active == set(self.admitted) - ended - self.silenced

    def teardown(self) -> None:
        self.take(self.state.tick(self.now + 10_000))
        assert self.state.in_flight == 0
        for request_id in set(self.admitted) - self.silenced:
            assert self.terminals[request_id] == 1
        assert not any(replica.requests or replica.reserved_for for replica in self.state.replicas)
        assert len(self.state._requests._deadlines) == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_deadline_is_bounded() -> None:
    far = ready().submit(ALICE, Header("", "r1", deadline=NOW + 86_401), submit(), [], NOW)
    assert far[0].body.code is ErrorCode.INVALID_REQUEST
    assert "at most 86400 s" in far[0].body.message
    assert len(ready().submit(ALICE, Header("", "r1", deadline=NOW + 86_399), submit(), [], NOW)) == 4


def test_stage_without_credit_is_overloaded() -> None:
    state = ready()
    replica = next(replica for replica in state.replicas if replica.stage == "talker")
    replica.congested = True
    (refused,) = state.submit(ALICE, Header("", "r1"), submit(), [], NOW)
    assert (refused.body.code, refused.body.stage, refused.body.retryable) == (ErrorCode.OVERLOADED, "talker", True)
    assert refused.body.retry_after
    assert state.in_flight == 0
    assert len(state.submit(ALICE, Header("", "r2"), submit("text"), [], NOW)) == 2, "text needs no talker"
    replica.congested = False
    assert len(state.submit(ALICE, Header("", "r3"), submit(), [], NOW)) == 4


def test_slow_client_loses_its_requests_and_hears_of_it() -> None:
    state = ready()
    for client, name in ((ALICE, "a1"), (ALICE, "a2"), (b"bob", "b1")):
        state.submit(client, Header("", name), submit(), [], NOW)
    assert state.clients() == {ALICE, b"bob"}
    instructions = state.end_client(ALICE, SlowClient("too slow"), NOW)
    told = [item for item in instructions if isinstance(item, ToClient)]
    assert {(item.client, item.request_id, item.body.code) for item in told} == {
        (ALICE, "a1", ErrorCode.SLOW_CLIENT),
        (ALICE, "a2", ErrorCode.SLOW_CLIENT),
    }
    assert len(instructions) == 2 + 2 * 4, "and every stage drops them"
    assert state.in_flight == 1
