"""The codec: round trips, every check of the wire, and no error other than its two."""

from __future__ import annotations

import time
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.errors import InvalidPayload
from omni_actors.host.processes import STEADY
from omni_actors.protocol.codec import MAGIC, BadBody, BadHeader, BufferList, Decoder, encode
from omni_actors.protocol.fields import DType, Header, HostTensor, Limits, TensorRef, check_extent
from omni_actors.protocol.messages import (
    Abort,
    AudioChunk,
    Chunk,
    ClientToCoordinator,
    CoordinatorToStage,
    FromStage,
    IntoStage,
    TextDelta,
)

HEADER = Header("", request_id="r1", stage="thinker", replica=2, epoch=7, attempt=1, seq=9, deadline=5.5)


def audio(samples: int = 3) -> tuple[AudioChunk, list[bytes]]:
    buffers = BufferList()
    ref = buffers.add(HostTensor(DType.F32, (samples,), bytes(4 * samples)))
    return AudioChunk(samples=ref, sample_rate=24_000), [bytes(buffer) for buffer in buffers.buffers]


def frames_of(body: object = None, buffers: object = None, **header: object) -> list[bytes]:
    """Make frames without the checks of `encode`."""
    default, data = audio()
    body = default if body is None else body
    data = data if buffers is None else buffers
    kind = type(body).__struct_config__.tag
    made = msgspec.structs.replace(HEADER, **{"kind": kind, "n_buffers": len(data), **header})
    return [MAGIC, msgspec.msgpack.encode(made), msgspec.msgpack.encode(body), *data]


@pytest.mark.parametrize("dtype", list(DType))
def test_round_trip_of_every_dtype(dtype: DType) -> None:
    tensors = {
        "features": HostTensor(dtype, (2, 3), bytes(range(2 * 3 * dtype.itemsize))),
        "none": HostTensor(dtype, (0, 5), b""),
        "one": HostTensor(dtype, (), bytes(dtype.itemsize)),
    }
    buffers = BufferList()
    refs = {name: buffers.add(tensor) for name, tensor in tensors.items()}
    chunk = Chunk(token_ids=b"\x01\x00\x00\x00", tensors=refs, start=4)
    envelope = Decoder(IntoStage).decode(encode(HEADER, chunk, buffers.buffers))
    assert envelope.body == chunk
    assert envelope.header == msgspec.structs.replace(HEADER, kind="chunk", n_buffers=3)
    assert {name: envelope.tensor(ref) for name, ref in envelope.body.tensors.items()} == tensors


def with_frame(number: int, frame: bytes, *given: Any) -> list[bytes]:
    frames = frames_of(*given)
    frames[number] = frame
    return frames


TEXT = (TextDelta(text="x"), [])
HEADERS: list[tuple[str, list[bytes]]] = [
    *(("frame_count", frames_of()[:count]) for count in (0, 1, 2)),
    ("magic", with_frame(0, b"OMNI2")),
    ("magic", [b"OMNI2", b"no msgpack", b"none either"]),
    ("header_size", with_frame(1, bytes(5000))),
    *(("header", with_frame(1, wrong)) for wrong in (b"", b"\xc1", b"\xff" * 40, b"\x92\x01\x02", b"\x91" * 900)),
    *(("header", frames_of(**{name: value})) for name, value in (("replica", 70_000), ("seq", -1), ("seq", "1"))),
    *(("header", frames_of(**{name: value})) for name, value in (("request_id", "r" * 129), ("attempt", 1 << 31))),
    ("buffer_count", frames_of(n_buffers=2)),
    ("buffer_count", [*frames_of(), b"one more"]),
    ("kind", frames_of(Abort(), [])),
]


@pytest.mark.parametrize(("reason", "frames"), HEADERS)
def test_a_header_that_is_none_is_refused_and_counted(reason: str, frames: list[bytes]) -> None:
    decoder: Decoder[FromStage] = Decoder(FromStage)
    for count in (1, 2):
        with pytest.raises(BadHeader) as caught:
            decoder.decode(frames)
        assert caught.value.reason == reason
        assert decoder.rejected == {reason: count}


BODIES: list[tuple[str, list[bytes]]] = [
    ("'failed'.*'text'|'text'.*'failed'", frames_of(*TEXT, kind="failed")),
    *((".", with_frame(2, wrong)) for wrong in (b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "audio"}))),
    ("txet", with_frame(2, msgspec.msgpack.encode({"type": "text", "text": "x", "txet": "y"}), *TEXT)),
    (".", with_frame(2, b"\x91" * 200_000 + b"\xc0", *TEXT)),
    (".", with_frame(2, b"\x81\xa4more" * 100_000 + b"\xc0", *TEXT)),
    *(("needs 12 bytes", frames_of(buffers=[bytes(size)])) for size in (0, 8, 11, 13, 16)),
    ("f64", with_frame(2, frames_of()[2].replace(b"f32", b"f64"))),
]


@pytest.mark.parametrize(("words", "frames"), BODIES)
def test_a_body_that_is_none_is_refused_with_its_header(words: str, frames: list[bytes]) -> None:
    decoder: Decoder[FromStage] = Decoder(FromStage)
    with pytest.raises(BadBody, match=words) as caught:
        decoder.decode(frames)
    assert decoder.rejected == {"invalid_payload": 1}
    assert caught.value.header.request_id == "r1"
    assert isinstance(caught.value.error, InvalidPayload)


def test_rank_and_dimensions_are_bounded() -> None:
    with pytest.raises(InvalidPayload, match="rank 9"):
        check_extent(DType.U8, (1,) * 9, 1, "x")
    with pytest.raises(InvalidPayload, match="negative"):
        check_extent(DType.U8, (-1, -1), 1, "x")
    for shape in ((1,) * 9, (-1,), (2**41,)):
        frames = frames_of(Chunk(tensors={"x": TensorRef(DType.U8, shape, 0)}), [b"a"])
        with pytest.raises(BadBody):
            Decoder(IntoStage).decode(frames)


def test_buffer_named_twice_or_not_at_all() -> None:
    ref = TensorRef(DType.U8, (1,), 0)
    for tensors, buffers in (
        ({"a": ref, "b": ref}, [b"x"]),
        ({"a": ref, "b": ref}, [b"x", b"y"]),
        ({"a": ref}, [b"x", b"y"]),
        ({"a": TensorRef(DType.U8, (1,), 1)}, [b"x"]),
        ({}, [b"x"]),
        ({"a": ref}, []),
    ):
        with pytest.raises(BadBody, match="exactly once"):
            Decoder(IntoStage).decode(frames_of(Chunk(tensors=tensors), buffers))
        with pytest.raises(InvalidPayload, match="exactly once"):
            encode(HEADER, Chunk(tensors=tensors), buffers)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(buffers=1),
        Limits(buffer_bytes=11),
        Limits(message_bytes=23),
        Limits(body_bytes=8),
        Limits(header_bytes=8),
    ],
)
def test_oversize_is_refused_on_both_sides(limits: Limits) -> None:
    buffers = BufferList()
    chunk = Chunk(tensors={n: buffers.add(HostTensor(DType.F32, (3,), bytes(12))) for n in "ab"})
    frames = encode(HEADER, chunk, buffers.buffers)
    with pytest.raises(InvalidPayload, match="limit"):
        encode(HEADER, chunk, buffers.buffers, limits)
    with pytest.raises((BadBody, BadHeader)):
        Decoder(IntoStage, limits).decode(frames)


def check_only_the_two_errors(channel: object, frames: list[bytes]) -> None:
    decoder: Decoder = Decoder(channel)
    try:
        decoder.decode(frames)
    except (BadHeader, BadBody):
        assert sum(decoder.rejected.values()) == 1
    else:
        assert not decoder.rejected


random_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | st.sampled_from([*map(str, DType), "audio", "text", "chunk", "submit", "open_request"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)
CHANNELS = [ClientToCoordinator, IntoStage, FromStage, CoordinatorToStage]
channels = st.sampled_from(CHANNELS)
kinds = {kind for channel in CHANNELS for kind in get_args(channel)}
FIELDS = sorted({"type", *(field for kind in kinds for field in kind.__struct_fields__)})


@given(
    channels,
    st.sampled_from(["audio", "text", "chunk", "submit", "open_request", "abort", "failed", "welcome", "stage_done"]),
    st.dictionaries(st.sampled_from(FIELDS), random_values, max_size=6),
    st.lists(st.binary(max_size=30), max_size=3),
)
def test_random_bodies_under_a_good_header(channel: object, kind: str, body: dict, buffers: list[bytes]) -> None:
    header = msgspec.structs.replace(HEADER, kind=kind, n_buffers=len(buffers))
    frames = [MAGIC, msgspec.msgpack.encode(header), msgspec.msgpack.encode({"type": kind, **body}), *buffers]
    check_only_the_two_errors(channel, frames)


@given(st.data())
def test_a_good_message_with_one_byte_changed(data: st.DataObject) -> None:
    frames = frames_of()
    number = data.draw(st.integers(0, len(frames) - 1))
    position = data.draw(st.integers(0, len(frames[number]) - 1))
    changed = bytearray(frames[number])
    changed[position] = data.draw(st.integers(0, 255))
    frames[number] = bytes(changed)
    check_only_the_two_errors(FromStage, frames)


def test_deadlines_on_the_wire_are_those_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    header = msgspec.structs.replace(HEADER, deadline=STEADY() + 60)
    usual = time.time
    monkeypatch.setattr(time, "time", lambda: usual() + 3600)
    frames = encode(header, *audio())
    on_the_wire = msgspec.msgpack.decode(frames[1], type=Header).deadline
    assert on_the_wire == pytest.approx(time.time() + 60, abs=5)
    assert Decoder(FromStage).decode(frames).header.deadline == pytest.approx(header.deadline, abs=0.1)
    without = encode(msgspec.structs.replace(HEADER, deadline=0.0), *audio())
    assert Decoder(FromStage).decode(without).header.deadline == 0.0
