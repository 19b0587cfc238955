"""Structs check themselves, and the bytes of every message kind stay as `docs/protocol.md` describes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from omni_actors.errors import ErrorCode, InvalidPayload
from omni_actors.protocol.client import (
    ClientToCoordinator,
    CoordinatorToClient,
    Describe,
    Description,
    Done,
    EdgeStatus,
    Observation,
    Observe,
    Operate,
    Operation,
    Report,
    RequestStatus,
    StageStatus,
    Subject,
    Submit,
)
from omni_actors.protocol.codec import MAGIC, Decoder, encode
from omni_actors.protocol.common import Abort, Credit, Failed
from omni_actors.protocol.control import (
    ArenaAddress,
    CoordinatorToStage,
    Fatal,
    Heartbeat,
    Hello,
    Loading,
    Peer,
    Peers,
    Ready,
    Reregister,
    Shutdown,
    StageToCoordinator,
    Welcome,
)
from omni_actors.protocol.fields import pack_token_ids, unpack_token_ids
from omni_actors.protocol.header import PROTOCOL_VERSION, Body, Header, ReplicaId
from omni_actors.protocol.nodes import (
    CoordinatorToNode,
    KillReplica,
    Launched,
    NodeBeat,
    NodeHello,
    NodeLeaving,
    NodeToCoordinator,
    NodeWelcome,
    ReplicaEnded,
    RunningReplica,
    StartReplica,
)
from omni_actors.protocol.payloads import (
    AUTOREGRESSIVE_PARAMS,
    DIFFUSION_PARAMS,
    AdditionalInformationEntry,
    AdditionalInformationPayload,
    ChatMessage,
    ContentPart,
    Media,
    MediaEncoding,
    Parameter,
    PositionLogprobs,
    Prompt,
    PromptEmbedsPayload,
    PromptPosition,
    SpeechAbility,
    StageParams,
    TokenLogprob,
)
from omni_actors.protocol.results import (
    AudioChunk,
    FinishReason,
    FromStage,
    ImageChunk,
    LatentsChunk,
    Progress,
    StageDone,
    StageUsage,
    TextDelta,
    Unreachable,
)
from omni_actors.protocol.stage import Begin, Chunk, Ended, IntoStage, OpenRequest, Resend
from omni_actors.protocol.telemetry import (
    EndedWork,
    HistogramSample,
    RequestTimeline,
    Sample,
    Snapshot,
    StageTimeline,
    TimelineEvent,
    TransferTimeline,
)
from omni_actors.protocol.tensors import DType, HostTensor, TensorRef
from omni_actors.protocol.tools import ToolCall, ToolCallPiece, Tools

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden_messages.json")
REF = TensorRef(DType.BF16, (2, 4), 0)


# -- golden bytes -----------------------------------------------------------------------------------------------------

REPLICA = ReplicaId("talker", 1, 3)
PROMPT = Prompt(
    messages=(ChatMessage("user", (ContentPart(text="hi"), ContentPart(media=0))),),
    media=(Media("audio", MediaEncoding.ARRAY, TensorRef(DType.F32, (2,), 0), sample_rate=16_000),),
)
USAGE = StageUsage(FinishReason.LENGTH, 3, 4, 0.5, 1.5)
PARAMS = StageParams(
    max_tokens=8,
    min_tokens=1,
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    repetition_penalty=1.1,
    stop_token_ids=(7,),
    ignore_eos=True,
    seed=3,
    num_steps=10,
    guidance_scale=0.5,
    sway_coefficient=-1.0,
)
PICTURE_PARAMS = StageParams(
    num_steps=4, width=64, height=32, negative_prompt="fog", previews=2, extra_args={"shift": 3.5, "mode": "soft"}
)
PARAMETERS = (
    Parameter("width", "int", least=64, most=2048, multiple_of=16, default=1024, about="pixels"),
    Parameter("mode", "text", choices=("soft", "hard")),
)
INFORMATION = AdditionalInformationPayload(
    {
        "number": AdditionalInformationEntry(scalar=3),
        "names": AdditionalInformationEntry(list=(1, 2.5, "x")),
        "rows": AdditionalInformationEntry(tensor=TensorRef(DType.U8, (1,), 1)),
    }
)
TIMELINE = StageTimeline(
    "talker",
    1,
    3,
    1,
    "done",
    1.0,
    1.25,
    1.5,
    1.75,
    2.0,
    2.5,
    3.0,
    4,
    5,
    (TransferTimeline("thinker/0", 2, 64, 0.5, 1.25, 1.5, 2.0),),
)
ARENA = ArenaAddress(42, 7, 1 << 20, bytes(range(16)))
BODIES: list[tuple[Body, list[bytes]]] = [
    (Submit(prompt=PROMPT, voice="Ethan", params={"thinker": PARAMS}, seed=1, priority=2), [bytes(8)]),
    (Submit(prompt=Prompt(token_ids=pack_token_ids([1, 2])), modalities=("text",)), []),
    (Abort(), []),
    (Describe(), []),
    (
        Description(
            pipeline="p",
            model="m",
            modalities=("text",),
            voices=("Ethan",),
            sample_rate=24_000,
            healthy=True,
            in_flight=1,
            max_in_flight=9,
            requests=("r",),
            stages=(StageStatus("thinker", 0, 1, "ready", 42, 1, {"requests": 1}),),
            counts={"rejected_client_magic": 1},
        ),
        [],
    ),
    (TextDelta(text="hé", token_ids=pack_token_ids([5])), []),
    (TextDelta(text="", tool_calls=(ToolCallPiece(0, "call_1", "f"), ToolCallPiece(1, arguments="{"))), []),
    (
        Submit(
            prompt=Prompt(
                messages=(
                    ChatMessage("assistant", (), (ToolCall("call_1", "f", "{}"),)),
                    ChatMessage("tool", (ContentPart(text="1"),), tool_call_id="call_1"),
                ),
                tools=Tools(('{"name":"f"}',), "required", "f", parallel=False),
            )
        ),
        [],
    ),
    (AudioChunk(samples=TensorRef(DType.F32, (2,), 0), sample_rate=24_000), [bytes(8)]),
    (
        TextDelta(
            text="a",
            token_ids=pack_token_ids([1]),
            logprobs=(PositionLogprobs(TokenLogprob(1, "a", -0.5), (TokenLogprob(2, "b", -0.25),)),),
        ),
        [],
    ),
    (
        TextDelta(
            text="", prompt_logprobs=(PromptPosition(TokenLogprob(1, "a", -2.5), 9, (TokenLogprob(2, "b", -0.25),)),)
        ),
        [],
    ),
    (Done(usage={"thinker": USAGE}), []),
    (Failed(ErrorCode.OVERLOADED, "full", "wait", "thinker", True, 1.0), []),
    (OpenRequest(route=(REPLICA,), params=PARAMS, seed=9, voice="Ethan", priority=1, prompt=PROMPT), [bytes(8)]),
    (
        Chunk(token_ids=pack_token_ids([1]), tensors={"f": REF}, information=INFORMATION, start=2, final=True),
        [bytes(16), b"x"],
    ),
    (Chunk(rows=PromptEmbedsPayload(TensorRef(DType.BF16, (2, 3), 0)), start=4), [bytes(12)]),
    (StageDone(usage=USAGE), []),
    (Hello(protocol=1, package="0.1.0", config="abc", pid=42, inbox="ipc:///x"), []),
    (Welcome(results="ipc:///r"), []),
    (Loading(phase="weights"), []),
    (Ready(seconds=1.5, voices=("Ethan",), sample_rate=24_000, max_input_tokens=99), []),
    (Peers(peers=(Peer("talker", 0, 1, "ipc:///t"),)), []),
    (Heartbeat(progress=5, counts={"requests": 1}), []),
    (Shutdown(reason="end"), []),
    (Fatal(message="no"), []),
    (Credit(messages=3, bytes=2**40, released=(7, 2**53), mapped=True), []),
    (Hello(protocol=1, package="0.1.0", config="abc", pid=42, inbox="ipc:///x", arena=ARENA), []),
    (Peers(peers=(), sources=(Peer("prompt", 0, 1, "ipc:///p", ARENA),)), []),
    (Operate(operation=Operation.RESTART, stage="talker", replica=1), []),
    (Operate(operation=Operation.SCALE, stage="talker", count=3, node=1), []),
    (
        Report(
            text="x",
            description=Description("p", "m", ("text",), (), 0, True, 1, 9, ()),
            edges=(EdgeStatus("talker", 1, 3, 4, 5, 6, 1, 0.5, 0.25, "ready"),),
            requests=(RequestStatus("r", "running", 1, ("talker/1",), ("prompt",), 3.5, ("talker/0: died",)),),
        ),
        [],
    ),
    (Reregister(), []),
    (NodeHello(1, "0.1.0", "abc", (RunningReplica("talker", 1, 3, 42),), launched=True), []),
    (NodeWelcome(), []),
    (NodeBeat(), []),
    (NodeLeaving(reason="SIGTERM"), []),
    (StartReplica("talker", 1, 3), []),
    (KillReplica("talker", 1, 3), []),
    (ReplicaEnded("talker", 1, 3, "killed by signal 9", "last words", -9), []),
    (Launched(), []),
    (Resend(receiver=REPLICA, attempt=2), []),
    (Ended(request_ids=("r1", "r2")), []),
    (Unreachable(receiver=REPLICA, attempt=1), []),
    (Submit(prompt=Prompt(token_ids=pack_token_ids([1])), traceparent=f"00-{'a' * 32}-{'b' * 16}-01", sent=1.5), []),
    (Heartbeat(progress=5, sent=2.5), []),
    (
        Snapshot(
            samples=(Sample("omni_stage_requests", ("talker", "1"), 2.0),),
            histograms=(HistogramSample("omni_stage_step_seconds", ("talker", "1"), (1, 0, 2), 0.5),),
            ended=(EndedWork("r", StageTimeline("talker", 1, 3, outcome="dropped", expected=1.0, ended=2.0)),),
        ),
        [],
    ),
    (StageDone(usage=USAGE, timeline=TIMELINE), []),
    (Observe(subject=Subject.TIMELINE, request_id="r"), []),
    (
        Observation(
            timelines=(
                RequestTimeline(
                    "r",
                    "a" * 32,
                    "done",
                    1,
                    (TimelineEvent("bound", 1.5, "talker/1"),),
                    (TIMELINE,),
                    (TransferTimeline("talker/1", 1, 4, 3.0, 3.5, 3.0, 3.5),),
                ),
            )
        ),
        [],
    ),
    (
        Submit(
            prompt=Prompt(embeds=PromptEmbedsPayload(TensorRef(DType.F16, (1, 2), 0)), token_ids=pack_token_ids([7])),
            information=INFORMATION,
        ),
        [bytes(4), b"x"],
    ),
    (
        OpenRequest(
            route=(REPLICA,),
            params=StageParams(),
            seed=9,
            prompt=Prompt(embeds=PromptEmbedsPayload(TensorRef(DType.BF16, (1, 2), 0))),
            information=INFORMATION,
        ),
        [bytes(4), b"x"],
    ),
    (Ready(seconds=1.5, wants_information=("speed", "names")), []),
    (Ready(seconds=1.5, max_media={"image": 4, "video": 1}), []),
    (Begin(), []),
    (OpenRequest(route=(REPLICA,), params=StageParams(), seed=9, held=True), []),
    (ImageChunk(pixels=TensorRef(DType.U8, (2, 1, 3), 0), preview=True, sent=1.5), [bytes(6)]),
    (LatentsChunk(latents=TensorRef(DType.BF16, (1, 2), 0)), [bytes(4)]),
    (Progress(step=3, steps=8, stage="dit"), []),
    (OpenRequest(route=(REPLICA,), params=PICTURE_PARAMS, seed=9), []),
    (Ready(seconds=1.5, parameters=PARAMETERS), []),
    (Ready(seconds=1.5, speech=SpeechAbility(("German",), "optional", "required", 1.0, 20.0)), []),
    (Description("p", "m", ("image",), (), 0, True, 1, 9, (), parameters={"dit": PARAMETERS}), []),
]
HEADER = Header("", "r1", "thinker", 2, 7, 1, 9, 5.5)


def key_of(index: int) -> str:
    body, _ = BODIES[index]
    return f"{index:02d} {type(body).__struct_config__.tag}"


@pytest.mark.parametrize("index", range(len(BODIES)), ids=key_of)
def test_golden_bytes(index: int) -> None:
    """Fails when the wire changes.

    Then raise PROTOCOL_VERSION, update `docs/protocol.md`, and write the new bytes with `python -m
    tests.unit.test_messages`.
    """
    body, buffers = BODIES[index]
    golden = json.loads(GOLDEN.read_text())
    assert golden["protocol"] == PROTOCOL_VERSION
    frames = encode(HEADER, body, buffers)
    assert [bytes(frame).hex() for frame in frames] == golden["frames"][key_of(index)]
    assert Decoder(type(body)).decode(frames).body == body


def test_every_kind_has_golden_bytes() -> None:
    kinds = {cls.__struct_config__.tag for cls in Body.__subclasses__()}
    assert {type(body).__struct_config__.tag for body, _ in BODIES} == kinds
    assert len(json.loads(GOLDEN.read_text())["frames"]) == len(BODIES)
    assert bytes.fromhex(json.loads(GOLDEN.read_text())["frames"][key_of(0)][0]) == MAGIC


def kinds_of(channel: object) -> set[str]:
    return {struct.__struct_config__.tag for struct in get_args(channel)}


@pytest.mark.parametrize(
    ("row", "channel"),
    [
        ("client → coordinator", ClientToCoordinator),
        ("coordinator → client", CoordinatorToClient),
        ("into a stage's inbox", IntoStage),
        ("stage → coordinator, results", FromStage),
        ("stage → coordinator, control", StageToCoordinator),
        ("coordinator → stage, control", CoordinatorToStage),
        ("node agent → coordinator, control", NodeToCoordinator),
        ("coordinator → node agent, control", CoordinatorToNode),
    ],
)
def test_the_documentation_lists_the_messages_of_every_channel(row: str, channel: object) -> None:
    lines = (ROOT / "docs" / "protocol.md").read_text().splitlines()
    (messages,) = [line.split("|")[3] for line in lines if line.startswith(f"| {row} |")]
    assert set(re.findall(r"`(\w+)`", messages)) == kinds_of(channel)


def test_kinds_are_unique() -> None:
    tags = [cls.__struct_config__.tag for cls in Body.__subclasses__()]
    assert len(set(tags)) == len(tags)


# -- payloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tensor": REF, "scalar": 1},
        {"list": (1,), "scalar": 1},
        {"tensor": REF, "list": (1,)},
        {"tensor": REF, "list": (1,), "scalar": 0},
    ],
)
def test_information_entry_holds_exactly_one(given: dict) -> None:
    with pytest.raises(InvalidPayload, match="exactly one"):
        AdditionalInformationEntry(**given)
    with pytest.raises(InvalidPayload, match="exactly one"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=AdditionalInformationEntry)


@pytest.mark.parametrize("given", [{"scalar": 0}, {"scalar": False}, {"scalar": ""}, {"list": ()}, {"tensor": REF}])
def test_information_entry_takes_falsy_values(given: dict) -> None:
    entry = AdditionalInformationEntry(**given)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=AdditionalInformationEntry) == entry


def test_information_limits() -> None:
    with pytest.raises(InvalidPayload, match="65536"):
        AdditionalInformationEntry(scalar="x" * 65_537)
    many = {f"n{i}": {"scalar": 1} for i in range(65)}
    for wrong in ({"entries": many}, {"entries": {"": {"scalar": 1}}}, {"entries": {"n": {"list": [1] * 65_537}}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, AdditionalInformationPayload)


def test_information_scalar_lookup() -> None:
    assert INFORMATION.scalar("number") == 3
    for name in ("names", "missing"):
        with pytest.raises(InvalidPayload, match=name):
            INFORMATION.scalar(name)
    assert INFORMATION.tensor_refs() == (TensorRef(DType.U8, (1,), 1),)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (DType.F32, (3,)),
        (DType.F32, (0, 3)),
        (DType.F32, (3, 0)),
        (DType.F32, (1, 2, 3)),
        (DType.I32, (2, 2)),
        (DType.U8, (2, 2)),
    ],
)
def test_prompt_embeds_shape_and_dtype(dtype: DType, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidPayload):
        PromptEmbedsPayload(TensorRef(dtype, shape, 0))


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_prompt_embeds_good(dtype: DType) -> None:
    assert PromptEmbedsPayload(TensorRef(dtype, (1, 1), 0)).tensor.dtype is dtype


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1},
        {"max_tokens": 1_000_001},
        {"min_tokens": -1},
        {"temperature": -0.1},
        {"temperature": 101.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [2**31]},
        {"stop_token_ids": [1] * 257},
        {"frequency_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [1] * 1025},
        {"bad_words": [""]},
        {"stop": [""]},
        {"stop": ["x" * 1025]},
        {"stop": ["x"] * 65},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": "{}", "regex": "a"}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"json": "x" * 65_537}},
        {"structured_outputs": {"choice": []}},
        {"seed": -1},
        {"seed": 2**63},
        {"num_steps": 0},
        {"num_steps": 1001},
        {"guidance_scale": -1.0},
        {"sway_coefficient": 11.0},
        {"width": 0},
        {"height": 65_537},
        {"negative_prompt": "x" * 65_537},
        {"previews": 17},
        {"extra_args": {"": 1}},
        {"extra_args": {"list": [1]}},
        {"extra_args": {str(number): number for number in range(65)}},
        {"max_tokens": "8"},
        {"max_token": 8},
    ],
)
def test_stage_params_limits(wrong: dict) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, StageParams, strict=True)


def test_log_probabilities_are_those_of_the_tokens() -> None:
    with pytest.raises(InvalidPayload, match="4 bytes of token ids, but log probabilities of 2 tokens"):
        TextDelta(text="a", token_ids=bytes(4), logprobs=(PositionLogprobs(TokenLogprob(0, "a", -0.5)),) * 2)


def test_stage_params_merge() -> None:
    merged = StageParams(max_tokens=4, temperature=0.0).merged_over(StageParams(max_tokens=9, top_k=3))
    assert merged.given() == {"max_tokens": 4, "temperature": 0.0, "top_k": 3}
    assert set(StageParams.__struct_fields__) == AUTOREGRESSIVE_PARAMS | DIFFUSION_PARAMS
    assert {"seed"} == AUTOREGRESSIVE_PARAMS & DIFFUSION_PARAMS
    own = StageParams(extra_args={"shift": 2.0}).merged_over(StageParams(extra_args={"shift": 3.0, "mode": "soft"}))
    assert own.extra_args == {"shift": 2.0, "mode": "soft"}


def test_prompt_is_messages_or_tokens() -> None:
    message = ChatMessage("user", (ContentPart(text="x"),))
    for wrong in ({}, {"messages": (message,), "token_ids": bytes(4)}):
        with pytest.raises(InvalidPayload, match="exactly one"):
            Prompt(**wrong)
    with pytest.raises(InvalidPayload, match="multiple of 4"):
        Prompt(token_ids=bytes(5))
    with pytest.raises(InvalidPayload, match="names media 0"):
        Prompt(messages=(ChatMessage("user", (ContentPart(media=0),)),))
    with pytest.raises(InvalidPayload, match="Tools go with messages"):
        Prompt(token_ids=pack_token_ids([1]), tools=Tools(("{}",)))
    for wrong_part in ({}, {"text": "x", "media": 0}):
        with pytest.raises(InvalidPayload, match="exactly one"):
            ContentPart(**wrong_part)


def test_audio_chunk_is_flat_f32() -> None:
    for ref in (TensorRef(DType.F32, (1, 2), 0), TensorRef(DType.F16, (2,), 0)):
        with pytest.raises(InvalidPayload, match="Audio must be f32"):
            AudioChunk(samples=ref, sample_rate=24_000)


def test_token_ids_travel_as_bytes() -> None:
    ids = [0, 1, 2**31 - 1]
    assert unpack_token_ids(pack_token_ids(ids)) == ids
    assert pack_token_ids([1]) == b"\x01\x00\x00\x00"
    for unpack in (unpack_token_ids, lambda data: Chunk(token_ids=data)):
        with pytest.raises(InvalidPayload, match="multiple of 4"):
            unpack(b"abc")


@pytest.mark.parametrize(
    ("operation", "stage"), [("drain", ""), ("restart", ""), ("scale", ""), ("status", "x"), ("shutdown", "x")]
)
def test_an_operation_names_a_stage_if_it_needs_one(operation: str, stage: str) -> None:
    with pytest.raises(InvalidPayload, match="stage"):
        Operate(operation=Operation(operation), stage=stage)


@pytest.mark.parametrize(
    ("operation", "fields", "word"),
    [
        ("scale", {"stage": "talker"}, "needs a count"),
        ("drain", {"stage": "talker", "count": 2}, "does not take a count"),
        ("restart", {"stage": "talker", "node": 1}, "does not take a node"),
    ],
)
def test_only_scaling_takes_a_count_and_a_node(operation: str, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidPayload, match=word):
        Operate(operation=Operation(operation), **fields)


def test_host_tensor_validates() -> None:
    HostTensor(DType.I64, (2,), bytes(16)).validate()
    with pytest.raises(InvalidPayload, match=r"rows: .*needs 16 bytes, got 15"):
        HostTensor(DType.I64, (2,), bytes(15)).validate("rows")


if __name__ == "__main__":
    frames = {
        key_of(i): [bytes(frame).hex() for frame in encode(HEADER, body, buffers)]
        for i, (body, buffers) in enumerate(BODIES)
    }
    GOLDEN.write_text(json.dumps({"protocol": PROTOCOL_VERSION, "frames": frames}, indent=1) + "\n")
