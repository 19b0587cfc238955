"""Prompt embeddings and additional information on their way from a client to the stages that want them."""

from __future__ import annotations

from typing import Any

import pytest

from omni_actors.coordinator.core.instructions import Instruction
from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.errors import ErrorCode, InvalidPayload
from omni_actors.protocol.codec import BufferList, Decoder, Envelope, encode
from omni_actors.protocol.fields import DType, Header, HostTensor, TensorRef, pack_token_ids
from omni_actors.protocol.messages import Chunk, IntoStage, OpenRequest, Submit
from omni_actors.protocol.payloads import AdditionalInformationPayload, Prompt, PromptEmbedsPayload, StageParams
from omni_actors.stage.engine_interface import EngineFacts, StreamEvent
from omni_actors.stage.outbound import chunk_of
from omni_actors.stage.processors import InputPiece, Passthrough
from tests.support.requests import ALICE, NOW, failure, lose, opened_stages, ready
from tests.support.stage import ROUTE, RecordingEngine, StageUnderTest, failed

TABLE = HostTensor(DType.I32, (2,), b"tableaux")
NOISE = HostTensor(DType.F16, (1,), b"no")
VALUES: dict[str, Any] = {"table": TABLE, "names": ["a", 1, 2.5, True], "noise": NOISE, "speed": 1.5}
EMBEDS = HostTensor(DType.F32, (2, 2), bytes(16))


def submit_of(buffers: BufferList, values: dict[str, Any], embeds: HostTensor | None = EMBEDS) -> Submit:
    if embeds is None:
        prompt = Prompt(token_ids=pack_token_ids([1]))
    else:
        prompt = Prompt(embeds=PromptEmbedsPayload(buffers.add(embeds)))
    return Submit(prompt=prompt, information=AdditionalInformationPayload.of(values, buffers.add))


def ask(state: RequestMachine, values: dict[str, Any], embeds: HostTensor | None = EMBEDS) -> list[Instruction]:
    buffers = BufferList()
    body = submit_of(buffers, values, embeds)
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
    assert arrived(ask(state, VALUES)) == {
        "prompt": ({"noise": NOISE}, EMBEDS),
        "thinker": ({}, None),
        "talker": ({"table": TABLE, "speed": 1.5}, None),
        "code2wav": ({"names": VALUES["names"], "noise": NOISE}, None),
    }


def test_information_that_no_stage_of_the_route_wants_is_refused() -> None:
    state = wanting(ready(), talker=("speed", "table"))
    body = failure(ask(state, {"speeed": 1.5}))
    assert body.code is ErrorCode.INVALID_REQUEST
    assert "prompt, thinker, talker, code2wav wants 'speeed'. Did you mean 'speed'?" in body.message
    assert "additional_information" in body.message
    assert state.in_flight == 0
    assert state.retained.used == 0
    text_only = Submit(
        prompt=Prompt(token_ids=pack_token_ids([1])),
        modalities=("text",),
        information=AdditionalInformationPayload.of({"speed": 1.0}, BufferList().add),
    )
    body = failure(state.submit(ALICE, Header("", "r2"), text_only, (), NOW))
    assert "none of the stages prompt, thinker wants 'speed'" in body.message, "the talker is not asked"


def test_a_later_stage_that_starts_again_gets_its_information_again() -> None:
    state = wanting(ready(), talker=("speed", "table"))
    ask(state, {"table": TABLE, "speed": 1.5})
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
    piece = piece_of(*chunk_of(event, 0.0))
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
