"""The life of a request in the coordinator: an event in, the list of instructions out."""

from __future__ import annotations

import msgspec
import pytest

from omni_actors.config import StageKind, load
from omni_actors.coordinator.core.admission import admit
from omni_actors.coordinator.core.instructions import Instruction, ToClient, ToStage
from omni_actors.coordinator.core.replicas import ReplicaTable
from omni_actors.coordinator.core.states import ReplicaState
from omni_actors.errors import EngineError, ErrorCode, InvalidPayload, InvalidRequest, SlowClient
from omni_actors.protocol.client import Done, Submit
from omni_actors.protocol.common import Abort, Failed, Tombstones
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Header
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams
from omni_actors.protocol.results import TextDelta
from omni_actors.protocol.stage import Begin, OpenRequest
from omni_actors.protocol.tensors import DType, TensorRef
from tests.support.builders import done, header_from, pipeline, submit
from tests.support.requests import (
    ALICE,
    BOB,
    CHUNK,
    NOW,
    STAGES,
    aborts,
    ask,
    bring_back,
    failure,
    finish,
    lose,
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
    assert state.submit(ALICE, Header("", "r0"), prompt(1000), [], NOW)[0].body.prompt is None, "no limit is known"
    for replica in state.replicas:
        replica.max_input_tokens = {"prompt": 20 - replica.index, "code2wav": 3}.get(replica.stage, 0)
    body = failure(state.submit(ALICE, Header("", "r1"), prompt(20), [], NOW))
    assert body.code is ErrorCode.PROMPT_TOO_LONG
    assert "20 tokens; at most 19" in body.message
    assert failure_free(state.submit(ALICE, Header("", "r2"), prompt(19), [], NOW)), "as many as all replicas take"


def test_more_media_than_every_replica_takes_are_refused_before_any_stage_sees_them() -> None:
    def prompt(*modalities: str) -> Submit:
        media = tuple(Media(modality, MediaEncoding.FILE, TensorRef(DType.U8, (5,), 0)) for modality in modalities)
        message = ChatMessage("user", tuple(ContentPart(media=index) for index in range(len(media))))
        return Submit(prompt=Prompt(messages=(message,), media=media), modalities=("text",))

    state = ready(replicas=2)
    for replica, most in zip(state.replicas, ({"image": 3, "audio": 1}, {"image": 2}), strict=False):
        replica.max_media = most
    body = failure(state.submit(ALICE, Header("", "r1"), prompt(*["image"] * 3), [b"media"], NOW))
    assert body.code is ErrorCode.INVALID_REQUEST
    assert "3 media of the kind image; at most 2" in body.message
    assert failure_free(state.submit(ALICE, Header("", "r2"), prompt("image", "image", "audio"), [b"media"], NOW))


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


def test_parameters_of_the_wrong_kind_of_stage() -> None:
    config = pipeline()
    stages = list(config.stages)
    stages[1] = msgspec.structs.replace(stages[1], kind=StageKind.AUTOREGRESSIVE)
    config = msgspec.structs.replace(config, stages=stages)
    with pytest.raises(InvalidRequest, match="num_steps does not apply to stage 'thinker'"):
        admit(config, submit("text", params={"thinker": StageParams(num_steps=3)}), voices=())


def test_the_vocoders_number_of_points_is_a_key_of_the_pipeline_that_a_request_may_change() -> None:
    pipeline = load("qwen2_5_omni.yaml", {"stages.code2wav.sampling.num_steps": "6"}, devices=1).pipeline
    own = submit("audio", params={"code2wav": StageParams(num_steps=20)})
    points = [admit(pipeline, request, voices=("Ethan",)).params["code2wav"].num_steps for request in (submit(), own)]
    assert points == [6, 20]


def test_parameters_about_text_need_a_stage_with_text() -> None:
    config = pipeline()
    stages = [msgspec.structs.replace(stage, kind=StageKind.AUTOREGRESSIVE) for stage in config.stages]
    config = msgspec.structs.replace(config, stages=stages)
    params = StageParams(stop=(".",))
    assert admit(config, submit("text", params={"thinker": params}), voices=()).params["thinker"] == params
    with pytest.raises(InvalidRequest, match="stop does not apply to stage 'code2wav', which makes no text") as caught:
        admit(config, submit("text", params={"code2wav": params}), voices=())
    assert caught.value.field == "stop"


def test_overload_says_when_to_come_back() -> None:
    state = ready(max_in_flight=2, max_queued=0)
    ask(state, "a")
    ask(state, "b")
    body = failure(ask(state, "c"))
    assert body.code is ErrorCode.OVERLOADED
    assert body.retryable
    assert body.retry_after == 1.0
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


@pytest.mark.parametrize("request_id", ["a\n2026-11-22 ERROR forged", "\x1b[2J", "a\u202eb", "\x00"])
def test_ids_that_would_forge_a_line_of_a_log_are_refused(request_id: str) -> None:
    state = ready()
    body = failure(ask(state, request_id))
    assert body.code is ErrorCode.INVALID_REQUEST
    assert body.message.isprintable()
    assert state.in_flight == 0


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
    state.replicas.find("talker", 0, 1).update(state=ReplicaState.DEAD)
    body = failure(ask(state))
    assert body.code is ErrorCode.STAGE_UNAVAILABLE
    assert body.stage == "talker"
    assert body.retryable
    assert len(ask(state, "r2", ALICE, "text")) == 2


def test_results_reach_the_client_numbered_and_filtered() -> None:
    state = ready()
    ask(state)
    first, begin = say(state, "thinker", TextDelta(text="a"), 0)
    assert first == ToClient(ALICE, "r1", 0, TextDelta(text="a"))
    assert isinstance(begin.body, Begin), "to the talker"
    assert say(state, "code2wav", CHUNK, 0, buffers=(b"1234",)) == [ToClient(ALICE, "r1", 1, CHUNK, (b"1234",))]
    assert say(state, "talker", TextDelta(text="x"), 0) == [], "the talker has no outputs"
    assert say(state, "thinker", CHUNK, 1) == [], "the thinker has no audio output"


def test_audio_only_gets_no_text() -> None:
    state = ready()
    ask(state, "r1", ALICE, "audio")
    (begin,) = say(state, "thinker", TextDelta(text="a"))
    assert isinstance(begin.body, Begin), "to the talker"
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
    assert body.code is ErrorCode.ENGINE_ERROR
    assert body.message == "boom"
    assert body.stage == "talker"
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
    assert body.code is ErrorCode.STAGE_LOST
    assert body.stage == "talker"
    assert body.retryable
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


def test_shutdown_answers_every_client() -> None:
    state = ready()
    ask(state, "a")
    ask(state, "b", BOB)
    instructions = state.shut_down(NOW)
    answers = {item.client: item.body.code for item in instructions if isinstance(item, ToClient)}
    assert answers == {ALICE: ErrorCode.STAGE_UNAVAILABLE, BOB: ErrorCode.STAGE_UNAVAILABLE}
    assert failure(ask(state, "too late")).code is ErrorCode.STAGE_UNAVAILABLE
    assert state.in_flight == 0


def test_deadline_is_bounded() -> None:
    far = ready().submit(ALICE, Header("", "r1", deadline=NOW + 86_401), submit(), [], NOW)
    assert far[0].body.code is ErrorCode.INVALID_REQUEST
    assert "at most 86400 s" in far[0].body.message
    assert len(ready().submit(ALICE, Header("", "r1", deadline=NOW + 86_399), submit(), [], NOW)) == 4


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
    assert (state.in_flight, state.queued, state.retained_bytes) == (0, 0, 0)


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


def test_a_slot_that_a_loss_frees_goes_to_the_next_request() -> None:
    state = ready(replicas=2, max_in_flight=1, max_attempts=1)
    ask(state, "a")
    assert ask(state, "b") == []
    assert opened_requests(lose(state, "thinker", 0)) == {"b"}
    assert state.active["b"].bound["thinker"].replica == 1


def test_the_connections_of_one_key_share_its_slots() -> None:
    state = ready(max_in_flight=1, max_queued=8)

    def with_key(client: bytes, request_id: str, key: bytes) -> list[Instruction]:
        return state.submit(client, Header("", request_id), submit(), [], NOW, key)

    assert opened_requests(with_key(b"1", "a", b"key")) == {"a"}
    for number in range(4):
        with_key(b"%d" % number, f"b{number}", b"key")
    with_key(b"other", "c", b"other key")
    order = ["a"]
    for _ in range(3):
        order += opened_requests(finish(state, order[-1]))
    assert order == ["a", "c", "b0", "b2"], "its connections take turns, too"


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


# -- replicas and tombstones ------------------------------------------------------------------------------------------


def test_requests_that_wait_for_a_stage_enter_it_by_priority_and_arrival() -> None:
    state = ready()
    lose(state, "thinker")
    for request_id, priority in {"first": 0, "second": 0, "urgent": -1, "later": 1}.items():
        assert ask(state, request_id, priority=priority) == []
    opened = [item.request_id for item in bring_back(state, "thinker") if item.replica_id.stage == "prompt"]
    assert opened == ["urgent", "first", "second", "later"]


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
    second.update(state=ReplicaState.DEAD)
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
