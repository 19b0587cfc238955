"""Measures how messages become bytes and back: our codec with all its checks, pickle and JSON without any.

    python benchmarks/codec.py [--number 2000] [--repeats 7]

One process, one thread, no socket. Tensors are frames of their own for us and for "pickle, frames" (protocol 5 with
buffers out of band), part of the bytes for pickle, base64 for JSON. The second table is what our codec answers to
messages of a broken or hostile sender, all of which pickle and JSON accept.
"""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import sys
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import workload

from omni_actors.protocol.codec import BadBody, BufferList, Decoder, encode
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Body, Header, ReplicaId
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Prompt, PromptEmbedsPayload, StageParams
from omni_actors.protocol.results import AudioChunk, FromStage, TextDelta
from omni_actors.protocol.stage import Chunk, IntoStage, OpenRequest
from omni_actors.protocol.tensors import DType, HostTensor

WIDTH = 3584  # of a row of Qwen2.5-Omni-7B
HEADER = Header("", "5f0c2a9e", "thinker", 0, 7, 0, 9, 1_763_800_000.5)
STAGES = ("prompt", "thinker", "talker", "code2wav")

Message = tuple[Any, Body, list[Any]]  # the channel's union, the body, its buffers


def messages() -> dict[str, Message]:
    """Messages as they occur in a pipeline."""

    def rows(count: int) -> Message:
        buffers = BufferList()
        tensor = buffers.add(HostTensor(DType.BF16, (count, WIDTH), bytes(count * WIDTH * 2)))
        return IntoStage, Chunk(rows=PromptEmbedsPayload(tensor), start=7, sent=1.0), buffers.buffers

    content = (ContentPart(text=workload.prompt(0, 5)),)
    opened = OpenRequest(
        tuple(ReplicaId(stage, 0, 7) for stage in STAGES),
        StageParams(max_tokens=64, temperature=0.0),
        7,
        prompt=Prompt(messages=(ChatMessage("user", content),)),
    )
    sound = BufferList()
    samples = sound.add(HostTensor(DType.F32, (5760,), bytes(5760 * 4)))
    return {
        "OpenRequest, prompt of 53 words": (IntoStage, opened, []),
        "Chunk, a token's row (7 KiB)": rows(1),
        "Chunk, 65 rows (455 KiB)": rows(65),
        "Chunk, 4096 token ids": (IntoStage, Chunk(token_ids=pack_token_ids(range(4096)), sent=1.0), []),
        "TextDelta, one token": (FromStage, TextDelta(" sea", pack_token_ids([9396]), 1.0), []),
        "AudioChunk, 0.24 s (22 KiB)": (FromStage, AudioChunk(samples, 24_000, 1.0), sound.buffers),
    }


def ours(message: Message) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    channel, body, buffers = message
    decoder: Decoder[Any] = Decoder(channel)
    return lambda: encode(HEADER, body, buffers), decoder.decode


def pickled(message: Message) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    _, body, buffers = message
    return lambda: [pickle.dumps((HEADER, body, buffers), protocol=5)], lambda frames: pickle.loads(frames[0])  # noqa: S301


def pickled_in_frames(message: Message) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    _, body, buffers = message
    wrapped = [pickle.PickleBuffer(buffer) for buffer in buffers]

    def dump() -> list[Any]:
        frames: list[Any] = []
        head = pickle.dumps((HEADER, body, wrapped), protocol=5, buffer_callback=frames.append)
        return [head, *(frame.raw() for frame in frames)]

    return dump, lambda frames: pickle.loads(frames[0], buffers=frames[1:])  # noqa: S301


def as_json(message: Message) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    _, body, buffers = message

    def dump() -> list[bytes]:
        tree = msgspec.to_builtins(body)  # bytes become base64
        texts = [base64.b64encode(buffer).decode() for buffer in buffers]
        return [json.dumps([msgspec.to_builtins(HEADER), tree, texts]).encode()]

    def load(frames: Sequence[bytes]) -> Any:
        header, tree, texts = json.loads(frames[0])
        return header, tree, [base64.b64decode(text) for text in texts]

    return dump, load


FORMATS = {"ours": ours, "pickle": pickled, "pickle, frames": pickled_in_frames, "JSON": as_json}


def microseconds(function: Callable[[], Any], options: argparse.Namespace) -> float:
    """The fastest of several repeats: the rest is other work on the machine."""
    return min(timeit.repeat(function, number=options.number, repeat=options.repeats)) / options.number * 1e6


def speed(options: argparse.Namespace) -> str:
    """Encoding + decoding in microseconds, and bytes, for each message and format."""
    rows = []
    for name, message in messages().items():
        row: dict[str, Any] = {"message": name}
        for kind, make in FORMATS.items():
            dump, load = make(message)
            frames = dump()
            size = sum(memoryview(frame).nbytes for frame in frames)
            spent = microseconds(dump, options), microseconds(lambda load=load, frames=frames: load(frames), options)
            row[f"{kind}: µs"] = " + ".join(f"{each:.1f}" for each in spent)
            row[f"{kind}: bytes"] = f"{size:,}"
        rows.append(row)
    return workload.table(rows)


class Bomb:
    """Runs code where it is unpickled: here it only says so."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return print, ("code of the sender runs in the receiver",)


def hostile() -> dict[str, dict[str, Any]]:
    """The fields of a chunk with one row, and the same with one of them changed."""
    good: dict[str, Any] = {"type": "chunk", "rows": {"tensor": ["bf16", [1, WIDTH], 0]}, "start": 7}
    return {
        "nothing wrong": good,
        "a text in place of a number": good | {"start": "seven"},
        "a negative position": good | {"start": -1},
        "a shape that the buffer does not have": good | {"rows": {"tensor": ["bf16", [1 << 30, WIDTH], 0]}},
        "a dtype that does not exist": good | {"rows": {"tensor": ["object", [1, WIDTH], 0]}},
        "a buffer that does not exist": good | {"rows": {"tensor": ["bf16", [1, WIDTH], 3]}},
        "token ids of 5 bytes": good | {"token_ids": b"12345"},
    }


def refusals() -> str:
    """What our codec makes of them. Pickle and JSON take every one, or this ends with their error."""
    channel, body, buffers = messages()["Chunk, a token's row (7 KiB)"]
    decoder: Decoder[Any] = Decoder(channel)
    frames = encode(HEADER, body, buffers)
    rows = []
    for name, fields in hostile().items():
        answer = "accepted"
        try:
            decoder.decode([*frames[:2], msgspec.msgpack.encode(fields), *frames[3:]])
        except BadBody as bad:
            answer = str(bad.error.message)
        pickle.loads(pickle.dumps(fields))  # noqa: S301
        json.loads(json.dumps(fields, default=lambda value: base64.b64encode(value).decode()))
        rows.append({"chunk with": name, "ours": answer})
    return workload.table(rows)


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=2000, help="messages per repeat")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(json.dumps(workload.versions() | {"msgspec": msgspec.__version__}))
    print(speed(options))
    print(refusals())
    pickle.loads(pickle.dumps(Bomb()))  # noqa: S301
    return 0


if __name__ == "__main__":
    sys.exit(main())
