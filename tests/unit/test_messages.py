"""Structs check themselves, and the bytes of every message kind stay as `docs/protocol.md` describes them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from omni_actors.errors import InvalidPayload
from omni_actors.protocol import fields, messages, payloads
from omni_actors.protocol.codec import MAGIC, Decoder, encode
from omni_actors.protocol.fields import PROTOCOL_VERSION, Body, DType, Header, HostTensor, TensorRef, unpack_token_ids
from omni_actors.protocol.payloads import StageParams, Tools
from tests.support.paths import REPOSITORY

GOLDEN = Path(__file__).with_name("golden_messages.json")
REF = TensorRef(DType.BF16, (2, 4), 0)


HEADER = Header("", "r1", "thinker", 2, 7, 1, 9, 5.5, 4.5)
KINDS = {
    cls.__struct_config__.tag: cls
    for base in (Body, messages.TensorChunk)
    for cls in base.__subclasses__()
    if cls is not messages.TensorChunk
}
RECORDED = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", RECORDED["frames"])
def test_golden_bytes(name: str) -> None:
    """Fails when the wire changes: what was recorded is read, and written again it is the same.

    Then raise PROTOCOL_VERSION, update `docs/protocol.md`, delete what is recorded of the messages that are no longer
    read, and write new bytes with `python -m tests.unit.test_messages ["Ready(seconds=1.5)" [BUFFER_IN_HEX ...]]`.
    """
    frames = [bytes.fromhex(frame) for frame in RECORDED["frames"][name]]
    envelope = Decoder(KINDS[name.split()[1]]).decode(frames)
    assert [bytes(frame) for frame in encode(envelope.header, envelope.body, envelope.buffers)] == frames


def test_every_kind_has_golden_bytes() -> None:
    assert {name.split()[1] for name in RECORDED["frames"]} == set(KINDS)
    assert RECORDED["protocol"] == PROTOCOL_VERSION
    assert all(bytes.fromhex(frames[0]) == MAGIC for frames in RECORDED["frames"].values())


def test_the_documentation_lists_the_messages_of_every_channel() -> None:
    listed = {
        "client → coordinator": messages.ClientToCoordinator,
        "coordinator → client": messages.CoordinatorToClient,
        "into a stage's inbox": messages.IntoStage,
        "stage → coordinator, results": messages.FromStage,
        "stage → coordinator, control": messages.StageToCoordinator,
        "coordinator → stage, control": messages.CoordinatorToStage,
        "node agent → coordinator, control": messages.NodeToCoordinator,
        "coordinator → node agent, control": messages.CoordinatorToNode,
    }
    lines = (REPOSITORY / "docs" / "protocol.md").read_text().splitlines()
    for row, channel in listed.items():
        (cell,) = [line.split("|")[3] for line in lines if line.startswith(f"| {row} |")]
        assert set(re.findall(r"`(\w+)`", cell)) == {struct.__struct_config__.tag for struct in get_args(channel)}, row


Entry, Chat, Part = payloads.AdditionalInformationEntry, payloads.ChatMessage, payloads.ContentPart


def test_information_entry_holds_exactly_one_and_takes_falsy_values() -> None:
    for given in (
        {},
        {"tensor": REF, "scalar": 1},
        {"list": (1,), "scalar": 1},
        {"tensor": REF, "list": (), "scalar": 0},
    ):
        with pytest.raises(InvalidPayload, match="exactly one"):
            Entry(**given)
        with pytest.raises(InvalidPayload, match="exactly one"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=Entry)
    for given in ({"scalar": 0}, {"scalar": False}, {"scalar": ""}, {"list": ()}, {"tensor": REF}):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(Entry(**given)), type=Entry) == Entry(**given)


def test_information_limits_and_tensors() -> None:
    many = {f"n{i}": {"scalar": 1} for i in range(65)}
    for wrong in ({"entries": many}, {"entries": {"": {"scalar": 1}}}, {"entries": {"n": {"list": [1] * 65_537}}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, payloads.AdditionalInformationPayload)
    tensor = Entry(tensor=TensorRef(DType.U8, (1,), 1))
    information = payloads.AdditionalInformationPayload({"number": Entry(scalar=3), "rows": tensor})
    assert information.tensor_refs() == (TensorRef(DType.U8, (1,), 1),)


EMBEDS, AUDIO, OPERATE = payloads.PromptEmbedsPayload, messages.AudioChunk, messages.Operate
VIDEO = messages.VideoChunk
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
    *(
        (r"A picture must be u8 of shape \[height, width, 3 or 4\]", lambda ref=ref: messages.ImageChunk(pixels=ref))
        for ref in (
            TensorRef(DType.F32, (2, 2, 3), 0),
            *(TensorRef(DType.U8, shape, 0) for shape in ((2, 2), (2, 2, 1), (2, 2, 5), (0, 2, 3), (1, 2, 2, 3))),
        )
    ),
    *(
        (r"A video must be u8 of shape \[frames, height, width, 3\]", lambda ref=ref: VIDEO(ref, 24.0))
        for ref in (
            TensorRef(DType.F32, (1, 2, 2, 3), 0),
            *(TensorRef(DType.U8, shape, 0) for shape in ((2, 2, 3), (1, 2, 2, 4), (0, 2, 2, 3))),
        )
    ),
    ("multiple of 4", lambda: unpack_token_ids(b"abc")),
    ("multiple of 4", lambda: messages.Chunk(token_ids=b"abc")),
    *(
        (r"of shape \[positions, width\]", lambda ref=ref: messages.Chunk(tensors={messages.ROWS: ref}))
        for ref in (TensorRef(DType.I32, (2, 4), 0), TensorRef(DType.F32, (8,), 0), TensorRef(DType.F32, (0, 4), 0))
    ),
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


WRONG_PARAMS: dict[str, list[Any]] = {
    "max_tokens": [-1, 1_000_001, "8"],
    "stop_token_ids": [[-1], [2**31], [1] * 257],
    "logit_bias": [{-1: 1.0}, {1: 101.0}, dict.fromkeys(range(1025), 1.0)],
    "allowed_token_ids": [[], [1] * 1025],
    "bad_words": [[""]],
    "stop": [[""], ["x" * 1025], ["x"] * 65],
    "structured_outputs": [
        *({}, {"json": "{}", "regex": "a"}, {"json_object": False}, {"json": "x" * 65_537}, {"choice": []})
    ],
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
    frames = {}
    for name, recorded in RECORDED["frames"].items():
        _, _, body, *buffers = (bytes.fromhex(frame) for frame in recorded)
        frames[name] = encode(HEADER, msgspec.msgpack.decode(body, type=KINDS[name.split()[1]]), buffers)
    if sys.argv[1:]:
        new = eval(sys.argv[1], {**vars(fields), **vars(payloads), **vars(messages)})
        number = 1 + max(int(name.split()[0]) for name in frames)
        given = encode(HEADER, new, [bytes.fromhex(buffer) for buffer in sys.argv[2:]])
        frames[f"{number:02d} {type(new).__struct_config__.tag}"] = given
    written = {name: [bytes(frame).hex() for frame in each] for name, each in frames.items()}
    GOLDEN.write_text(json.dumps({"protocol": PROTOCOL_VERSION, "frames": written}, indent=1) + "\n")
