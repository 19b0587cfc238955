"""Structs check themselves, and the bytes of every message kind stay as `docs/protocol.md` describes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from omni_actors.errors import ErrorCode, InvalidPayload
from omni_actors.protocol import messages, payloads
from omni_actors.protocol.codec import MAGIC, Decoder, encode
from omni_actors.protocol.fields import (
    PROTOCOL_VERSION,
    Body,
    DType,
    Header,
    HostTensor,
    ReplicaId,
    TensorRef,
    pack_token_ids,
    unpack_token_ids,
)
from omni_actors.protocol.messages import Abort, Credit, Failed
from omni_actors.protocol.payloads import StageParams, ToolCall, ToolCallPiece, Tools

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden_messages.json")
REF = TensorRef(DType.BF16, (2, 4), 0)


# -- golden bytes -----------------------------------------------------------------------------------------------------

REPLICA = ReplicaId("talker", 1, 3)
PROMPT = payloads.Prompt(
    messages=(payloads.ChatMessage("user", (payloads.ContentPart(text="hi"), payloads.ContentPart(media=0))),),
    media=(payloads.Media("audio", payloads.MediaEncoding.ARRAY, TensorRef(DType.F32, (2,), 0), sample_rate=16_000),),
)
USAGE = messages.StageUsage(messages.FinishReason.LENGTH, 3, 4, 0.5, 1.5)
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
    payloads.Parameter("width", "int", least=64, most=2048, multiple_of=16, default=1024, about="pixels"),
    payloads.Parameter("mode", "text", choices=("soft", "hard")),
)
INFORMATION = payloads.AdditionalInformationPayload(
    {
        "number": payloads.AdditionalInformationEntry(scalar=3),
        "names": payloads.AdditionalInformationEntry(list=(1, 2.5, "x")),
        "rows": payloads.AdditionalInformationEntry(tensor=TensorRef(DType.U8, (1,), 1)),
    }
)
TIMELINE = messages.StageTimeline(
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
    [messages.TransferTimeline("thinker/0", 2, 64, 0.5, 1.25, 1.5, 2.0)],
)
ARENA = messages.ArenaAddress(42, 7, 1 << 20, bytes(range(16)))
BODIES: list[tuple[Body, list[bytes]]] = [
    (messages.Submit(prompt=PROMPT, voice="Ethan", params={"thinker": PARAMS}, seed=1, priority=2), [bytes(8)]),
    (messages.Submit(prompt=payloads.Prompt(token_ids=pack_token_ids([1, 2])), modalities=("text",)), []),
    (Abort(), []),
    (messages.Describe(), []),
    (
        messages.Description(
            pipeline="p",
            model="m",
            modalities=("text",),
            voices=("Ethan",),
            sample_rate=24_000,
            healthy=True,
            in_flight=1,
            max_in_flight=9,
            requests=("r",),
            stages=(messages.StageStatus("thinker", 0, 1, "ready", 42, 1, {"requests": 1}),),
            counts={"rejected_client_magic": 1},
        ),
        [],
    ),
    (messages.TextDelta(text="hé", token_ids=pack_token_ids([5])), []),
    (messages.TextDelta(text="", tool_calls=(ToolCallPiece(0, "call_1", "f"), ToolCallPiece(1, arguments="{"))), []),
    (
        messages.Submit(
            prompt=payloads.Prompt(
                messages=(
                    payloads.ChatMessage("assistant", (), (ToolCall("call_1", "f", "{}"),)),
                    payloads.ChatMessage("tool", (payloads.ContentPart(text="1"),), tool_call_id="call_1"),
                ),
                tools=Tools(('{"name":"f"}',), "required", "f", parallel=False),
            )
        ),
        [],
    ),
    (messages.AudioChunk(samples=TensorRef(DType.F32, (2,), 0), sample_rate=24_000), [bytes(8)]),
    (
        messages.TextDelta(
            text="a",
            token_ids=pack_token_ids([1]),
            logprobs=(
                payloads.PositionLogprobs(payloads.TokenLogprob(1, "a", -0.5), (payloads.TokenLogprob(2, "b", -0.25),)),
            ),
        ),
        [],
    ),
    (
        messages.TextDelta(
            text="",
            prompt_logprobs=(
                payloads.PromptPosition(
                    payloads.TokenLogprob(1, "a", -2.5), 9, (payloads.TokenLogprob(2, "b", -0.25),)
                ),
            ),
        ),
        [],
    ),
    (messages.Done(usage={"thinker": USAGE}), []),
    (Failed(ErrorCode.OVERLOADED, "full", "wait", "thinker", True, 1.0), []),
    (
        messages.OpenRequest(route=(REPLICA,), params=PARAMS, seed=9, voice="Ethan", priority=1, prompt=PROMPT),
        [bytes(8)],
    ),
    (
        messages.Chunk(token_ids=pack_token_ids([1]), tensors={"f": REF}, information=INFORMATION, start=2, final=True),
        [bytes(16), b"x"],
    ),
    (messages.Chunk(rows=payloads.PromptEmbedsPayload(TensorRef(DType.BF16, (2, 3), 0)), start=4), [bytes(12)]),
    (messages.StageDone(usage=USAGE), []),
    (messages.Hello(protocol=1, package="0.1.0", config="abc", pid=42, inbox="ipc:///x"), []),
    (messages.Welcome(results="ipc:///r"), []),
    (messages.Loading(phase="weights"), []),
    (messages.Ready(seconds=1.5, voices=("Ethan",), sample_rate=24_000, max_input_tokens=99), []),
    (messages.Peers(peers=(messages.Peer("talker", 0, 1, "ipc:///t"),)), []),
    (messages.Heartbeat(progress=5, counts={"requests": 1}), []),
    (messages.Shutdown(reason="end"), []),
    (messages.Fatal(message="no"), []),
    (Credit(messages=3, bytes=2**40, released=(7, 2**53), mapped=True), []),
    (messages.Hello(protocol=1, package="0.1.0", config="abc", pid=42, inbox="ipc:///x", arena=ARENA), []),
    (messages.Peers(peers=(), sources=(messages.Peer("prompt", 0, 1, "ipc:///p", ARENA),)), []),
    (messages.Operate(operation=messages.Operation.RESTART, stage="talker", replica=1), []),
    (messages.Operate(operation=messages.Operation.SCALE, stage="talker", count=3, node=1), []),
    (
        messages.Report(
            text="x",
            description=messages.Description("p", "m", ("text",), (), 0, True, 1, 9, ()),
            edges=(messages.EdgeStatus("talker", 1, 3, 4, 5, 6, 1, 0.5, 0.25, "ready"),),
            requests=(messages.RequestStatus("r", "running", 1, ("talker/1",), ("prompt",), 3.5, ("talker/0: died",)),),
        ),
        [],
    ),
    (messages.Reregister(), []),
    (messages.NodeHello(1, "0.1.0", "abc", (messages.RunningReplica("talker", 1, 3, 42),), launched=True), []),
    (messages.NodeWelcome(), []),
    (messages.NodeBeat(), []),
    (messages.NodeLeaving(reason="SIGTERM"), []),
    (messages.StartReplica("talker", 1, 3), []),
    (messages.KillReplica("talker", 1, 3), []),
    (messages.ReplicaEnded("talker", 1, 3, "killed by signal 9", "last words", -9), []),
    (messages.Launched(), []),
    (messages.Resend(receiver=REPLICA, attempt=2), []),
    (messages.Ended(request_ids=("r1", "r2")), []),
    (messages.Unreachable(receiver=REPLICA, attempt=1), []),
    (
        messages.Submit(
            prompt=payloads.Prompt(token_ids=pack_token_ids([1])), traceparent=f"00-{'a' * 32}-{'b' * 16}-01", sent=1.5
        ),
        [],
    ),
    (messages.Heartbeat(progress=5), []),
    (
        messages.Snapshot(
            samples=(messages.Sample("omni_stage_requests", ("talker", "1"), 2.0),),
            histograms=(messages.HistogramSample("omni_stage_step_seconds", ("talker", "1"), (1, 0, 2), 0.5),),
            ended=(
                messages.EndedWork(
                    "r", messages.StageTimeline("talker", 1, 3, outcome="dropped", expected=1.0, ended=2.0)
                ),
            ),
        ),
        [],
    ),
    (messages.StageDone(usage=USAGE, timeline=TIMELINE), []),
    (messages.Observe(subject=messages.Subject.TIMELINE, request_id="r"), []),
    (
        messages.Observation(
            timelines=(
                messages.RequestTimeline(
                    "r",
                    "a" * 32,
                    "done",
                    1,
                    [messages.TimelineEvent("bound", 1.5, "talker/1")],
                    [TIMELINE],
                    [messages.TransferTimeline("talker/1", 1, 4, 3.0, 3.5, 3.0, 3.5)],
                ),
            )
        ),
        [],
    ),
    (
        messages.Submit(
            prompt=payloads.Prompt(
                embeds=payloads.PromptEmbedsPayload(TensorRef(DType.F16, (1, 2), 0)), token_ids=pack_token_ids([7])
            ),
            information=INFORMATION,
        ),
        [bytes(4), b"x"],
    ),
    (
        messages.OpenRequest(
            route=(REPLICA,),
            params=StageParams(),
            seed=9,
            prompt=payloads.Prompt(embeds=payloads.PromptEmbedsPayload(TensorRef(DType.BF16, (1, 2), 0))),
            information=INFORMATION,
        ),
        [bytes(4), b"x"],
    ),
    (messages.Ready(seconds=1.5, wants_information=("speed", "names")), []),
    (messages.Ready(seconds=1.5, max_media={"image": 4, "video": 1}), []),
    (messages.OpenRequest(route=(REPLICA,), params=StageParams(), seed=9), []),
    (messages.ImageChunk(pixels=TensorRef(DType.U8, (2, 1, 3), 0), preview=True, sent=1.5), [bytes(6)]),
    (messages.LatentsChunk(latents=TensorRef(DType.BF16, (1, 2), 0)), [bytes(4)]),
    (messages.StepsDone(step=3, steps=8, stage="dit"), []),
    (messages.OpenRequest(route=(REPLICA,), params=PICTURE_PARAMS, seed=9), []),
    (messages.Ready(seconds=1.5, parameters=PARAMETERS), []),
    (messages.Ready(seconds=1.5, speech=payloads.SpeechAbility(("German",), "optional", "required", 1.0, 20.0)), []),
    (messages.Description("p", "m", ("image",), (), 0, True, 1, 9, (), parameters={"dit": PARAMETERS}), []),
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
        ("client → coordinator", messages.ClientToCoordinator),
        ("coordinator → client", messages.CoordinatorToClient),
        ("into a stage's inbox", messages.IntoStage),
        ("stage → coordinator, results", messages.FromStage),
        ("stage → coordinator, control", messages.StageToCoordinator),
        ("coordinator → stage, control", messages.CoordinatorToStage),
        ("node agent → coordinator, control", messages.NodeToCoordinator),
        ("coordinator → node agent, control", messages.CoordinatorToNode),
    ],
)
def test_the_documentation_lists_the_messages_of_every_channel(row: str, channel: object) -> None:
    lines = (ROOT / "docs" / "protocol.md").read_text().splitlines()
    (messages,) = [line.split("|")[3] for line in lines if line.startswith(f"| {row} |")]
    assert set(re.findall(r"`(\w+)`", messages)) == kinds_of(channel)


# -- payloads ---------------------------------------------------------------------------------------------------------

Entry, Chat, Part = payloads.AdditionalInformationEntry, payloads.ChatMessage, payloads.ContentPart


@pytest.mark.parametrize(
    "given", [{}, {"tensor": REF, "scalar": 1}, {"list": (1,), "scalar": 1}, {"tensor": REF, "list": (1,), "scalar": 0}]
)
def test_information_entry_holds_exactly_one(given: dict) -> None:
    with pytest.raises(InvalidPayload, match="exactly one"):
        Entry(**given)
    with pytest.raises(InvalidPayload, match="exactly one"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=Entry)


@pytest.mark.parametrize("given", [{"scalar": 0}, {"scalar": False}, {"scalar": ""}, {"list": ()}, {"tensor": REF}])
def test_information_entry_takes_falsy_values(given: dict) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Entry(**given)), type=Entry) == Entry(**given)


def test_information_limits_and_lookup() -> None:
    many = {f"n{i}": {"scalar": 1} for i in range(65)}
    for wrong in ({"entries": many}, {"entries": {"": {"scalar": 1}}}, {"entries": {"n": {"list": [1] * 65_537}}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, payloads.AdditionalInformationPayload)
    assert INFORMATION.scalar("number") == 3
    for name in ("names", "missing"):
        with pytest.raises(InvalidPayload, match=name):
            INFORMATION.scalar(name)
    assert INFORMATION.tensor_refs() == (TensorRef(DType.U8, (1,), 1),)


EMBEDS, AUDIO, OPERATE = payloads.PromptEmbedsPayload, messages.AudioChunk, messages.Operate
ONE_TOKEN = payloads.TokenLogprob(0, "a", -0.5)
REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("65536", lambda: Entry(scalar="x" * 65_537)),
    *(
        ("Prompt embeddings", lambda dtype=dtype, shape=shape: EMBEDS(TensorRef(dtype, shape, 0)))
        for dtype, *shapes in ((DType.F32, (3,), (0, 3), (3, 0), (1, 2, 3)), (DType.I32, (2, 2)), (DType.U8, (2, 2)))
        for shape in shapes
    ),
    (
        "4 bytes of token ids, but log probabilities of 2 tokens",
        lambda: messages.TextDelta(text="a", token_ids=bytes(4), logprobs=(payloads.PositionLogprobs(ONE_TOKEN),) * 2),
    ),
    ("exactly one", payloads.Prompt),
    ("exactly one", lambda: payloads.Prompt(messages=(Chat("user", (Part(text="x"),)),), token_ids=bytes(4))),
    ("multiple of 4", lambda: payloads.Prompt(token_ids=bytes(5))),
    ("names media 0", lambda: payloads.Prompt(messages=(Chat("user", (Part(media=0),)),))),
    ("Tools go with messages", lambda: payloads.Prompt(token_ids=bytes(4), tools=Tools(("{}",)))),
    ("exactly one", Part),
    ("exactly one", lambda: Part(text="x", media=0)),
    ("Audio must be f32", lambda: AUDIO(samples=TensorRef(DType.F32, (1, 2), 0), sample_rate=24_000)),
    ("Audio must be f32", lambda: AUDIO(samples=TensorRef(DType.F16, (2,), 0), sample_rate=24_000)),
    ("multiple of 4", lambda: unpack_token_ids(b"abc")),
    ("multiple of 4", lambda: messages.Chunk(token_ids=b"abc")),
    *(("stage", lambda word=word: OPERATE(messages.Operation(word), "")) for word in ("drain", "restart", "scale")),
    *(("stage", lambda word=word: OPERATE(messages.Operation(word), "x")) for word in ("status", "shutdown")),
    ("needs a count", lambda: OPERATE(messages.Operation.SCALE, "talker")),
    ("does not take a count", lambda: OPERATE(messages.Operation.DRAIN, "talker", count=2)),
    ("does not take a node", lambda: OPERATE(messages.Operation.RESTART, "talker", node=1)),
    ("rows: .*needs 16 bytes, got 15", lambda: HostTensor(DType.I64, (2,), bytes(15)).validate("rows")),
]


@pytest.mark.parametrize(("words", "make"), REFUSED)
def test_structs_that_contradict_themselves_are_refused(words: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidPayload, match=words):
        make()


def test_what_is_just_allowed() -> None:
    for dtype in (DType.F32, DType.F16, DType.BF16):
        assert EMBEDS(TensorRef(dtype, (1, 1), 0)).tensor.dtype is dtype
    HostTensor(DType.I64, (2,), bytes(16)).validate()
    ids = [0, 1, 2**31 - 1]
    assert unpack_token_ids(pack_token_ids(ids)) == ids
    assert pack_token_ids([1]) == b"\x01\x00\x00\x00"


WRONG_PARAMS: dict[str, list[Any]] = {
    "max_tokens": [-1, 1_000_001, "8"],
    "min_tokens": [-1],
    "temperature": [-0.1, 101.0],
    "top_p": [0.0, 1.1],
    "top_k": [-2],
    "min_p": [1.5],
    "repetition_penalty": [0.0],
    "stop_token_ids": [[-1], [2**31], [1] * 257],
    "frequency_penalty": [2.1],
    "presence_penalty": [-2.1],
    "logit_bias": [{-1: 1.0}, {1: 101.0}, dict.fromkeys(range(1025), 1.0)],
    "allowed_token_ids": [[], [1] * 1025],
    "bad_words": [[""]],
    "stop": [[""], ["x" * 1025], ["x"] * 65],
    "logprobs": [21],
    "prompt_logprobs": [21],
    "structured_outputs": [
        *({}, {"json": "{}", "regex": "a"}, {"json_object": False}, {"json": "x" * 65_537}, {"choice": []})
    ],
    "seed": [-1, 2**63],
    "num_steps": [0, 1001],
    "guidance_scale": [-1.0],
    "sway_coefficient": [11.0],
    "width": [0],
    "height": [65_537],
    "negative_prompt": ["x" * 65_537],
    "previews": [17],
    "extra_args": [{"": 1}, {"list": [1]}, {str(number): number for number in range(65)}],
    "max_token": [8],
}


@pytest.mark.parametrize("name", WRONG_PARAMS)
def test_stage_params_limits(name: str) -> None:
    for value in WRONG_PARAMS[name]:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({name: value}, StageParams, strict=True)


def test_stage_params_merge() -> None:
    merged = StageParams(max_tokens=4, temperature=0.0).merged_over(StageParams(max_tokens=9, top_k=3))
    assert merged.given() == {"max_tokens": 4, "temperature": 0.0, "top_k": 3}
    assert set(StageParams.__struct_fields__) == payloads.AUTOREGRESSIVE_PARAMS | payloads.DIFFUSION_PARAMS
    assert {"seed"} == payloads.AUTOREGRESSIVE_PARAMS & payloads.DIFFUSION_PARAMS
    own = StageParams(extra_args={"shift": 2.0}).merged_over(StageParams(extra_args={"shift": 3.0, "mode": "soft"}))
    assert own.extra_args == {"shift": 2.0, "mode": "soft"}


if __name__ == "__main__":
    frames = {
        key_of(i): [bytes(frame).hex() for frame in encode(HEADER, body, buffers)]
        for i, (body, buffers) in enumerate(BODIES)
    }
    GOLDEN.write_text(json.dumps({"protocol": PROTOCOL_VERSION, "frames": frames}, indent=1) + "\n")
