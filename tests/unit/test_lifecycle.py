"""The life of a request in the coordinator: an event in, the list of instructions out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omni_actors.coordinator.core.instructions import ToClient
from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.errors import EngineError, ErrorCode, InvalidPayload, SlowClient
from omni_actors.protocol.fields import DType, Header, TensorRef, pack_token_ids
from omni_actors.protocol.messages import Done, Failed, OpenRequest, TextDelta
from omni_actors.protocol.payloads import (
    ChatMessage,
    ContentPart,
    EngineFacts,
    Media,
    MediaEncoding,
    Prompt,
    StageParams,
)
from omni_actors.sharing import Tombstones
from tests.support.builders import done, header_from, submit
from tests.support.requests import (
    ALICE,
    BOB,
    CHUNK,
    NOW,
    STAGES,
    aborts,
    ask,
    failure,
    finish,
    opened_requests,
    ready,
    replica_id,
    say,
)


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
        assert item.body.seed == 77
        assert item.body.voice == "Ethan"
        assert item.body.priority == 3
        assert item.body.params == (StageParams(top_k=5) if item.replica_id.stage == "talker" else StageParams())
        assert item.request_id == "r1"
        assert item.attempt == 0
        assert item.deadline == NOW + 600
    state = ready()
    given = state.submit(ALICE, Header("", "r1", deadline=NOW + 5), submit("text", seed=3), [], NOW)
    assert [(item.replica_id.stage, item.body.seed, item.deadline) for item in given] == [
        ("thinker", 3, NOW + 5),
        ("prompt", 3, NOW + 5),
    ]


def test_prompts_that_no_replica_takes_are_refused_before_any_stage_sees_them() -> None:
    def tokens(count: int) -> Prompt:
        return Prompt(token_ids=pack_token_ids([1] * count))

    def images(count: int) -> Prompt:
        parts = tuple(ContentPart(media=index) for index in range(count))
        media = (Media("image", MediaEncoding.FILE, TensorRef(DType.U8, (5,), 0)),) * count
        return Prompt(messages=(ChatMessage("user", parts),), media=media)

    state = ready(replicas=2)
    assert len(ask(state, "r0", ALICE, "text", prompt=tokens(1000))) == 2, "no limit is known"
    for replica in state.replicas:
        longest = {"prompt": 20 - replica.index, "code2wav": 3}.get(replica.stage, 0)
        replica.facts = EngineFacts(max_input_tokens=longest, max_media={"image": 3 - replica.index})
    for prompt, code, words in (
        (tokens(20), ErrorCode.PROMPT_TOO_LONG, "20 tokens; at most 19"),
        (images(3), ErrorCode.INVALID_REQUEST, "3 media of the kind image; at most 2"),
    ):
        body = failure(ask(state, "r1", ALICE, "text", prompt=prompt))
        assert body.code is code
        assert words in body.message
    for name, prompt in (("r2", tokens(19)), ("r3", images(2))):
        assert len(ask(state, name, ALICE, "text", prompt=prompt)) == 2, "what all replicas take"


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
        (("text", "audio"), {"params": {"thinker": StageParams(max_tokens=0)}}, ErrorCode.INVALID_REQUEST, "nothing"),
        (("text",), {"params": {"talker": StageParams(max_tokens=0)}}, ErrorCode.INVALID_REQUEST, "makes no text"),
    ],
)
def test_refusals_name_what_would_be_right(modalities, fields, code, words) -> None:
    state = ready()
    body = failure(ask(state, "r1", ALICE, *modalities, **fields))
    assert body.code == code
    assert words in body.message
    assert state.in_flight == 0
    assert not any(replica.requests for replica in state.replicas)
    assert len(ask(state)) == 4, "the id of a refused request may be used again"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (Header("", ""), ErrorCode.INVALID_REQUEST),
        (Header("", "a\n2026-11-22 ERROR forged"), ErrorCode.INVALID_REQUEST),
        (Header("", "\x1b[2J"), ErrorCode.INVALID_REQUEST),
        (Header("", "a\u202eb"), ErrorCode.INVALID_REQUEST),
        (Header("", "r1", deadline=NOW), ErrorCode.DEADLINE_EXCEEDED),
        (Header("", "r1", deadline=-5.0), ErrorCode.DEADLINE_EXCEEDED),
        (Header("", "r1", deadline=float("nan")), ErrorCode.INVALID_REQUEST),
        (Header("", "r1", deadline=float("inf")), ErrorCode.INVALID_REQUEST),
        (Header("", "r1", deadline=NOW + 86_401), ErrorCode.INVALID_REQUEST),
        (Header("", "r1", deadline=NOW + 86_399), None),
    ],
)
def test_ids_that_would_forge_a_line_of_a_log_and_deadlines_that_say_nothing(header: Header, code: object) -> None:
    state = ready()
    instructions = state.submit(ALICE, header, submit(), [], NOW)
    assert state.in_flight == (code is None)
    if code is not None:
        assert failure(instructions).code is code
        assert failure(instructions).message.isprintable()


def test_a_missing_stage_is_named_and_overload_says_when_to_come_back() -> None:
    state = ready(max_in_flight=2, max_queued=0)
    state.replicas.current("talker", 0).state = ReplicaState.DEAD
    body = failure(ask(state))
    assert (body.code, body.stage, body.retryable) == (ErrorCode.STAGE_UNAVAILABLE, "talker", True)
    for name in "ab":
        assert len(ask(state, name, ALICE, "text")) == 2
    body = failure(ask(state, "c", ALICE, "text"))
    assert (body.code, body.retry_after, body.retryable) == (ErrorCode.OVERLOADED, 1.0, True)
    state.abort(ALICE, "a", NOW)
    assert len(ask(state, "d", ALICE, "text")) == 2


def test_results_reach_the_client_numbered_and_filtered() -> None:
    state = ready()
    ask(state)
    first = ToClient(ALICE, "r1", 0, TextDelta(text="a"))
    assert say(state, "thinker", TextDelta(text="a"), 0) == [first]
    assert say(state, "code2wav", CHUNK, 0, buffers=(b"1234",)) == [ToClient(ALICE, "r1", 1, CHUNK, (b"1234",))]
    assert say(state, "talker", TextDelta(text="x"), 0) == [], "the talker has no outputs"
    assert say(state, "thinker", CHUNK, 1) == [], "the thinker has no audio output"
    ask(state, "r2", ALICE, "audio")
    assert say(state, "thinker", TextDelta(text="a"), request_id="r2") == [], "audio alone was asked for"
    assert say(state, "code2wav", CHUNK, request_id="r2") == [ToClient(ALICE, "r2", 0, CHUNK)]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (lambda state: say(state, "talker", Failed.from_error(EngineError("boom"), "talker")), ErrorCode.ENGINE_ERROR),
        (
            lambda state: state.reject_from_stage(header_from(replica_id("talker"), "r1"), InvalidPayload("bad"), NOW),
            ErrorCode.INVALID_PAYLOAD,
        ),
        (lambda state: state.reject(ALICE, Header("", "r1"), InvalidPayload("bad"), NOW), ErrorCode.INVALID_PAYLOAD),
        (lambda state: state.abort(ALICE, "r1", NOW), ErrorCode.ABORTED),
        (lambda state: state.tick(NOW + 600), ErrorCode.DEADLINE_EXCEEDED),
        (lambda state: state.end_client(ALICE, SlowClient("too slow"), NOW), ErrorCode.SLOW_CLIENT),
        (lambda state: state.shut_down(NOW), ErrorCode.STAGE_UNAVAILABLE),
        (lambda state: state.client_gone(ALICE, NOW), None),
    ],
)
def test_every_end_takes_the_request_out_of_all_stages_and_is_told_once(event: Callable, code: object) -> None:
    state = ready(default_timeout=600)
    ask(state)
    ask(state, "other", BOB)
    instructions = [item for item in event(state) if item.request_id == "r1"]
    assert sorted(aborts(instructions)) == sorted(STAGES)
    if code is None:
        assert len(instructions) == 4, "a client that is gone gets nothing"
    else:
        assert failure(instructions).code is code
    assert state.requests_of(ALICE) == ()
    assert not aborts([item for item in event(state) if item.request_id == "r1"]), "once"


def test_only_the_owner_ends_its_request_and_a_stage_that_shuts_down_takes_no_more() -> None:
    state = ready()
    ask(state)
    assert state.abort(BOB, "r1", NOW) == []
    assert state.dropped == {"abort_of_unknown_request": 1}
    assert failure(state.reject(BOB, Header("", "r1"), InvalidPayload("bad"), NOW)).code is ErrorCode.INVALID_PAYLOAD
    assert state.in_flight == 1, "another client's garbage does not end this request"
    state.shut_down(NOW)
    assert failure(ask(state, "too late")).code is ErrorCode.STAGE_UNAVAILABLE


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


def test_requests_wait_in_the_queue_for_a_slot_and_may_be_aborted_there() -> None:
    state = ready(max_in_flight=1)
    ask(state, "a")
    assert [ask(state, "b"), ask(state, "c"), ask(state, "d", BOB)] == [[], [], []]
    assert (state.in_flight, state.queued) == (1, 3)
    assert {status.state for status in state.statuses(NOW)} == {"running", "queued"}
    assert failure(state.abort(ALICE, "b", NOW)).code is ErrorCode.ABORTED
    assert opened_requests(finish(state, "a")) == {"d"}, "of a client that has had nothing"
    assert not opened_requests(ask(state, "b")), "no stage has heard of its id"
    assert opened_requests(finish(state, "d")) == {"c"}
    assert opened_requests(state.abort(ALICE, "c", NOW)) == {"b"}
    assert failure(state.tick(NOW + 600)).code is ErrorCode.DEADLINE_EXCEEDED
    assert (state.in_flight, state.queued, state.retained.used) == (0, 0, 0)


def test_a_client_that_has_more_makes_room_for_one_that_has_less() -> None:
    state = ready(max_in_flight=1, max_queued=3)
    for name in "abcd":
        ask(state, name, priority=name == "c")
    refused = ask(state, "x", BOB)
    assert [(item.client, item.request_id) for item in refused] == [(ALICE, "c")], "its least urgent one"
    assert failure(refused).code is ErrorCode.OVERLOADED
    assert failure(refused).retry_after
    assert state.requests_of(BOB) == ("x",)
    ask(state, "y", BOB)
    assert failure(ask(state, "z", BOB)).code is ErrorCode.OVERLOADED, "now both have as much"


def test_stage_without_credit_holds_requests_back_and_says_so_when_too_many_wait() -> None:
    state = ready(max_queued=1)
    replica = next(replica for replica in state.replicas if replica.stage == "talker")
    state.note_congestion(replica.replica_id, True, NOW)
    assert ask(state, "r0") == []
    (refused,) = state.submit(ALICE, Header("", "r1"), submit(), [], NOW)
    assert refused.body.code is ErrorCode.OVERLOADED
    assert refused.body.stage == "talker"
    assert refused.body.retryable
    assert refused.body.retry_after
    assert state.in_flight == 0
    assert len(state.submit(ALICE, Header("", "r2"), submit("text"), [], NOW)) == 2, "text needs no talker"
    assert opened_requests(state.note_congestion(replica.replica_id, False, NOW)) == {"r0"}
    assert len(state.submit(ALICE, Header("", "r3"), submit(), [], NOW)) == 4


def test_tombstones_age_and_bound() -> None:
    stones = Tombstones(ttl=10, maximum=3)
    for i in range(5):
        stones.add(str(i), float(i))
    assert [str(i) in stones for i in range(5)] == [False, False, True, True, True]
    stones.add("2", 5.0)  # ended again: younger than 3 and 4 now
    stones.expire(13.5)
    assert [str(i) in stones for i in range(5)] == [False, False, True, False, True]
    assert len(stones) == 2
