"""The life of a request in the coordinator, and the information that comes with it: events in, instructions out."""

from __future__ import annotations

from typing import Any

import pytest

from omni_actors.coordinator.core.instructions import Instruction, ToClient, ToStage
from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.errors import ErrorCode, InvalidPayload
from omni_actors.protocol.codec import BufferList, Decoder, Envelope, encode
from omni_actors.protocol.fields import DType, Header, HostTensor, TensorRef, pack_token_ids
from omni_actors.protocol.messages import Chunk, IntoStage, OpenRequest, Submit, TextDelta
from omni_actors.protocol.payloads import (
    AdditionalInformationPayload,
    ChatMessage,
    ContentPart,
    Media,
    MediaEncoding,
    Prompt,
    PromptEmbedsPayload,
    StageParams,
)
from omni_actors.sharing import Tombstones
from omni_actors.stage.engine_interface import EngineFacts, StreamEvent
from omni_actors.stage.outbound import chunk_of
from omni_actors.stage.processors import InputPiece, Passthrough
from tests.support.builders import header_from, submit
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
    lose,
    opened_requests,
    opened_stages,
    ready,
    replica_id,
    say,
)
from tests.support.stage import ROUTE, RecordingEngine, StageUnderTest, failed


def test_submit_opens_later_stages_first_and_gives_the_prompt_to_the_entry() -> None:
    instructions = ask(ready(), params={"talker": StageParams(top_k=5)})
    assert [item.replica_id for item in instructions] == [replica_id(stage) for stage in reversed(STAGES)]
    for item in instructions:
        entry = item.replica_id.stage == "prompt"
        assert item.body.route == tuple(replica_id(stage) for stage in STAGES)
        assert (item.body.prompt is not None) == entry
        assert list(item.buffers) == ([b"media"] if entry else [])
        assert item.body.params == (StageParams(top_k=5) if item.replica_id.stage == "talker" else StageParams())
        assert item.deadline == NOW + 600


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
    ("modalities", "stage", "params", "words"),
    [
        (("text",), "talkr", StageParams(), "Did you mean 'talker'"),
        (("text",), "thinker", StageParams(min_tokens=5, max_tokens=2), "min_"),
        (("text", "audio"), "thinker", StageParams(max_tokens=0), "nothing"),
        (("text",), "talker", StageParams(max_tokens=0), "makes no text"),
    ],
)
def test_refusals_name_what_would_be_right(modalities, stage, params, words) -> None:
    state = ready()
    body = failure(ask(state, "r1", ALICE, *modalities, params={stage: params}))
    assert body.code is ErrorCode.INVALID_REQUEST
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


def test_only_the_owner_ends_its_request_and_a_stage_that_shuts_down_takes_no_more() -> None:
    state = ready()
    ask(state)
    assert state.abort(BOB, "r1", NOW) == []
    assert state.dropped == {"abort_of_unknown_request": 1}
    assert failure(state.reject(BOB, Header("", "r1"), InvalidPayload("bad"), NOW)).code is ErrorCode.INVALID_PAYLOAD
    assert state.in_flight == 1, "another client's garbage does not end this request"
    assert failure(state.reject(ALICE, Header("", "r1"), InvalidPayload("bad"), NOW)).code is ErrorCode.INVALID_PAYLOAD
    assert state.in_flight == 0
    state.shut_down(NOW)
    assert failure(ask(state, "too late")).code is ErrorCode.STAGE_UNAVAILABLE


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


def test_what_a_client_claims_to_be_changes_nothing() -> None:
    """Stage, epoch, attempt and seq are the coordinator's to give."""
    plain, lying = ready(), ready()
    header = Header("", "r1", "thinker", 3, 9, attempt=7, seq=5)
    expected = plain.submit(ALICE, Header("", "r1"), submit(), [], NOW)
    assert lying.submit(ALICE, header, submit(), [], NOW) == expected
    assert {item.attempt for item in expected if isinstance(item, ToStage)} == {0}


@pytest.mark.parametrize(
    ("header", "outcome"),
    [
        (header_from(replica_id("thinker"), "r9"), "unknown_request"),
        (header_from(replica_id("thinker", epoch=2), "r1"), "foreign_epoch"),
        (header_from(replica_id("thinker", epoch=0), "r1"), "foreign_epoch"),
        (header_from(replica_id("thinker", 1), "r1"), "foreign_epoch"),
        (header_from(replica_id("stranger"), "r1"), "foreign_epoch"),
        (header_from(replica_id("thinker"), "r1", attempt=1), "foreign_attempt"),
        (header_from(replica_id("thinker"), "r1", seq=1), ErrorCode.PROTOCOL_ERROR),
        (header_from(replica_id("thinker"), "r1"), None),
    ],
)
def test_a_result(header: Header, outcome: object) -> None:
    state = ready()
    ask(state)
    instructions = state.from_stage(header, TextDelta(text="a"), (), NOW)
    if isinstance(outcome, ErrorCode):
        assert failure(instructions).code is outcome
        assert sorted(aborts(instructions)) == sorted(STAGES)
    elif outcome is None:
        assert [one.body for one in instructions if isinstance(one, ToClient)] == [TextDelta(text="a")]
        assert failure(state.reject_from_stage(header, InvalidPayload("x"), NOW)).code is ErrorCode.INVALID_PAYLOAD
    else:
        assert instructions == []
        assert state.reject_from_stage(header, InvalidPayload("x"), NOW) == []
        assert state.dropped == {outcome: 2}
        assert state.in_flight == 1


TABLE = HostTensor(DType.I32, (2,), b"tableaux")
NOISE = HostTensor(DType.F16, (1,), b"no")
VALUES: dict[str, Any] = {"table": TABLE, "names": ["a", 1, 2.5, True], "noise": NOISE, "speed": 1.5}
EMBEDS = HostTensor(DType.F32, (2, 2), bytes(16))


def ask_with(state: RequestMachine, values: dict[str, Any]) -> list[Instruction]:
    buffers = BufferList()
    prompt = Prompt(embeds=PromptEmbedsPayload(buffers.add(EMBEDS)))
    body = Submit(prompt=prompt, information=AdditionalInformationPayload.of(values, buffers.add))
    return state.submit(ALICE, Header("", "r1"), body, buffers.buffers, NOW)


def wanting(state: RequestMachine, **wants: tuple[str, ...]) -> RequestMachine:
    for replica in state.replicas:
        replica.facts = EngineFacts(wants_information=wants.get(replica.stage, ()))
    return state


def arrived(instructions: list[Instruction]) -> dict[str, tuple[dict[str, Any], HostTensor | None]]:
    """What each stage gets of the information and of the embeddings, decoded from the frames that are sent to it."""
    decoder: Decoder[IntoStage] = Decoder(IntoStage)
    got = {}
    for item in instructions:
        if isinstance(item.body, OpenRequest):
            envelope = decoder.decode(encode(Header("", "r1"), item.body, item.buffers))
            body = envelope.body
            values = body.information.values(envelope.tensor)
            embeds = body.prompt.embeds if body.prompt is not None else None
            got[item.replica_id.stage] = (values, envelope.tensor(embeds.tensor) if embeds is not None else None)
    return got


def test_each_stage_gets_the_information_that_it_wants_and_the_entry_stage_the_embeddings() -> None:
    state = wanting(ready(), prompt=("noise",), talker=("speed", "table"), code2wav=("names", "noise"))
    assert arrived(ask_with(state, VALUES)) == {
        "prompt": ({"noise": NOISE}, EMBEDS),
        "thinker": ({}, None),
        "talker": ({"table": TABLE, "speed": 1.5}, None),
        "code2wav": ({"names": VALUES["names"], "noise": NOISE}, None),
    }


def test_information_that_only_a_stage_beside_the_route_wants_is_refused() -> None:
    state = wanting(ready(), talker=("speed", "table"))
    text_only = Submit(
        prompt=Prompt(token_ids=pack_token_ids([1])),
        modalities=("text",),
        information=AdditionalInformationPayload.of({"speed": 1.0}, BufferList().add),
    )
    body = failure(state.submit(ALICE, Header("", "r2"), text_only, (), NOW))
    assert body.code is ErrorCode.INVALID_REQUEST
    assert "none of the stages prompt, thinker wants 'speed'" in body.message, "the talker is not asked"
    assert (state.in_flight, state.retained.used) == (0, 0)


def test_a_later_stage_that_starts_again_gets_its_information_again() -> None:
    state = wanting(ready(), talker=("speed", "table"))
    ask_with(state, {"table": TABLE, "speed": 1.5})
    lose(state, "talker")
    for replica in state.replicas:
        wants = ("speed", "table") if replica.stage == "talker" else ()
        replica.facts = EngineFacts(wants_information=wants)
    before = state.replicas.current("talker", 0)
    state.replicas.add("talker", 0, before.epoch + 1).facts = EngineFacts(wants_information=("speed", "table"))
    state.replicas.current("talker", 0).state = ReplicaState.READY
    opened = state.reopen(NOW)
    assert opened_stages(opened) == [("code2wav", 1), ("talker", 1)]
    assert arrived(opened) == {"talker": ({"table": TABLE, "speed": 1.5}, None), "code2wav": ({}, None)}


def open_with(stage: StageUnderTest, values: dict[str, Any], prompt: Prompt | None = None, tensors: tuple = ()) -> list:
    buffers = BufferList()
    for tensor in tensors:
        buffers.add(tensor)
    information = AdditionalInformationPayload.of(values, buffers.add)
    body = OpenRequest(route=ROUTE, params=StageParams(), seed=3, prompt=prompt, information=information)
    return stage.actor.receive(Envelope(Header("open_request", "r1"), body, tuple(buffers.buffers)))


class TakesEmbeddings(RecordingEngine):
    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(embeds_width=2)


@pytest.mark.parametrize(
    ("engine", "width", "words"),
    [
        (RecordingEngine, 2, "prompt_embeds: this stage takes no prompt embeddings"),
        (TakesEmbeddings, 3, "prompt_embeds have 3 values per position; this model takes 2"),
    ],
)
def test_embeddings_that_a_stage_cannot_take_are_refused(engine: type, width: int, words: str) -> None:
    stage = StageUnderTest("prompt", engine=engine())
    tensor = HostTensor(DType.F32, (1, width), bytes(4 * width))
    prompt = Prompt(embeds=PromptEmbedsPayload(TensorRef(DType.F32, (1, width), 0)))
    body = failed(open_with(stage, {}, prompt, (tensor,)))
    assert body.code is ErrorCode.INVALID_REQUEST
    assert words in body.message
    assert body.stage == "prompt"
    assert stage.engine.started() == []


def piece_of(chunk: Chunk, buffers: list[Any]) -> InputPiece:
    decoder: Decoder[IntoStage] = Decoder(IntoStage)
    envelope = decoder.decode(encode(Header("", "r1"), chunk, buffers))
    return InputPiece.of(envelope.body, envelope)


def test_tensors_scalars_and_lists_pass_from_stage_to_stage() -> None:
    event = StreamEvent("r1", tensors={"table": TABLE}, scalars={"n": 1}, lists={"names": ["a", 2]}, final=True)
    piece = piece_of(*chunk_of(event))
    assert piece == InputPiece([], {"table": TABLE}, {"n": 1}, final=True, lists={"names": ["a", 2]})
    (start,) = Passthrough(0, ("before",)).feed("before", piece)
    assert start.inputs.tensors == {"table": TABLE}
    assert start.inputs.scalars == {"n": 1}
    assert start.inputs.lists == {"names": ["a", 2]}


def test_tensors_among_the_information_of_a_chunk_are_tensors_of_the_piece() -> None:
    buffers = BufferList()
    chunk = Chunk(
        tensors={"table": buffers.add(TABLE)}, information=AdditionalInformationPayload.of(VALUES, buffers.add)
    )
    with pytest.raises(InvalidPayload, match="Two tensors of a chunk are called 'table'"):
        piece_of(chunk, buffers.buffers)
    buffers = BufferList()
    chunk = Chunk(information=AdditionalInformationPayload.of(VALUES, buffers.add), final=True)
    piece = piece_of(chunk, buffers.buffers)
    assert piece.tensors == {"table": TABLE, "noise": NOISE}
    assert piece.lists == {"names": VALUES["names"]}
    assert piece.scalars == {"speed": 1.5}
