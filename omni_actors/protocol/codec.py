"""Messages to frames and back, with every check of the wire in one place (`docs/protocol.md`).

Frame 0 is a magic, frame 1 the header, frame 2 the body, frames 3... raw tensor buffers that the body's `TensorRef`s
describe, except those that the header's `blocks` place in the sender's shared memory. A message that does not pass
never reaches the rest of the program:

* `BadHeader`: the sender cannot be told (the request is unknown), so the message is counted and dropped;
* `BadBody`: the header is sound, so the request it names can be failed with a typed error.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, get_args

import msgspec
from msgspec import Struct

from omni_actors.errors import InvalidPayload, OmniError
from omni_actors.protocol.header import Block, Body, Header, Limits
from omni_actors.protocol.tensors import HostTensor, TensorRef, check_extent

MAGIC = b"OMNI1"
FIXED_FRAMES = 3  # magic, header, body

Frame = bytes | bytearray | memoryview


class BadHeader(Exception):
    """Magic, frame count or header are wrong. `reason` is one of a few fixed words, for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BadBody(Exception):
    """The header is sound, the rest is not: `error` belongs to the request in `header`."""

    def __init__(self, header: Header, error: OmniError) -> None:
        super().__init__(str(error))
        self.header = header
        self.error = error


BodyT = TypeVar("BodyT", bound=Body)


class Envelope(Struct, Generic[BodyT], frozen=True):
    """A checked message. `buffers` may alias the receiving socket's memory: copy what is kept and written to."""

    header: Header
    body: BodyT
    buffers: tuple[Frame, ...] = ()

    def tensor(self, ref: TensorRef) -> HostTensor:
        """The tensor that `ref`, a reference out of this message's body, stands for."""
        return HostTensor(ref.dtype, ref.shape, self.buffers[ref.buffer])


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)


def _kind(body: Body) -> str:
    return str(type(body).__struct_config__.tag)


def _check_buffers(body: Body, sizes: Sequence[int], limits: Limits) -> None:
    """Raise `InvalidPayload` unless the body's tensors describe exactly these buffers."""
    if len(sizes) > limits.buffers:
        raise InvalidPayload(f"{len(sizes)} buffers exceed the limit of {limits.buffers}.")
    for index, size in enumerate(sizes):
        if size > limits.buffer_bytes:
            raise InvalidPayload(f"Buffer {index} has {size} bytes; the limit is {limits.buffer_bytes}.")
    if sum(sizes) > limits.message_bytes:
        raise InvalidPayload(f"The buffers have {sum(sizes)} bytes together; the limit is {limits.message_bytes}.")
    refs = body.tensor_refs()
    if len(refs) == len(sizes) <= 1 and (not refs or refs[0].buffer == 0):  # nearly all messages
        pass
    elif sorted(ref.buffer for ref in refs) != list(range(len(sizes))):
        raise InvalidPayload(f"{len(refs)} tensors do not name each of the {len(sizes)} buffers exactly once.")
    for ref in refs:
        check_extent(ref.dtype, ref.shape, sizes[ref.buffer], f"buffer {ref.buffer}")


def encode(
    header: Header,
    body: Body,
    buffers: Sequence[Frame] = (),
    limits: Limits | None = None,
    blocks: tuple[Block, ...] = (),
) -> list[Frame]:
    """Frames of a message. The header's `kind`, `n_buffers` and `blocks` are filled in here.

    Args:
        buffers: all of the message's buffers.
        blocks: where some of them lie in the sender's arena; they become no frames.

    Raises:
        InvalidPayload: the message is larger than `limits`, its tensors do not fit its buffers, or a value in it has
            no encoding.
    """
    limits = limits or DEFAULT_LIMITS
    _check_buffers(body, [memoryview(buffer).nbytes for buffer in buffers], limits)
    header = Header(
        _kind(body),
        header.request_id,
        header.stage,
        header.replica,
        header.epoch,
        header.attempt,
        header.seq,
        header.deadline,
        len(buffers),
        blocks,
    )
    try:
        header_frame = _header_encoder.encode(header)
        body_frame = msgspec.msgpack.encode(body)
    except (TypeError, ValueError, OverflowError) as error:  # for instance half a surrogate pair in a text
        raise InvalidPayload(f"The message cannot be encoded: {error}.") from error
    if len(header_frame) > limits.header_bytes:
        raise InvalidPayload(f"The header has {len(header_frame)} bytes; the limit is {limits.header_bytes}.")
    if len(body_frame) > limits.body_bytes:
        raise InvalidPayload(f"The message body has {len(body_frame)} bytes; the limit is {limits.body_bytes}.")
    if not blocks:
        return [MAGIC, header_frame, body_frame, *buffers]
    elsewhere = {block.buffer for block in blocks}
    inline = [buffer for index, buffer in enumerate(buffers) if index not in elsewhere]
    return [MAGIC, header_frame, body_frame, *inline]


class Decoder(Generic[BodyT]):
    """Checks and decodes the messages of one channel. Not thread-safe; `rejected` counts what was refused, by reason.

    Args:
        channel: the union of body structs legal on this channel.
        open_block: gives the bytes of a buffer in the sender's arena, or raises `InvalidPayload`; without it, a
            message with blocks is refused.
    """

    def __init__(
        self,
        channel: Any,
        limits: Limits | None = None,
        open_block: Callable[[Header, Block], memoryview] | None = None,
    ) -> None:
        self._limits = limits or DEFAULT_LIMITS
        self._open_block = open_block
        self._kinds = {str(struct.__struct_config__.tag) for struct in (get_args(channel) or (channel,))}
        self._decoder = msgspec.msgpack.Decoder(channel)
        self.rejected: collections.Counter[str] = collections.Counter()

    def decode(self, frames: Sequence[Frame]) -> Envelope[BodyT]:
        """The message in `frames`; raises `BadHeader` or `BadBody`, both counted in `rejected`."""
        try:
            header = self._decode_header(frames)
        except BadHeader as bad:
            self.rejected[bad.reason] += 1
            raise
        try:
            return self._decode_rest(header, frames)
        except BadBody as bad:
            self.rejected[bad.error.code.value] += 1
            raise

    def _decode_header(self, frames: Sequence[Frame]) -> Header:
        if len(frames) < FIXED_FRAMES:
            raise BadHeader("frame_count")
        if bytes(frames[0]) != MAGIC:
            raise BadHeader("magic")
        if len(frames[1]) > self._limits.header_bytes:
            raise BadHeader("header_size")
        try:
            header = _header_decoder.decode(frames[1])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadHeader("header") from error
        if header.n_buffers != len(frames) - FIXED_FRAMES + len(header.blocks):
            raise BadHeader("buffer_count")
        if header.kind not in self._kinds:
            raise BadHeader("kind")
        return header

    def _decode_rest(self, header: Header, frames: Sequence[Frame]) -> Envelope[BodyT]:
        if len(frames[2]) > self._limits.body_bytes:
            size = len(frames[2])
            raise BadBody(header, InvalidPayload(f"The body has {size} bytes; the limit is {self._limits.body_bytes}."))
        try:
            body = self._decoder.decode(frames[2])
            buffers = tuple(frames[FIXED_FRAMES:])
            if header.blocks:
                buffers = self._with_blocks(header, buffers)
            _check_buffers(body, [memoryview(buffer).nbytes for buffer in buffers], self._limits)
        except OmniError as error:
            raise BadBody(header, error) from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            # msgspec wraps what __post_init__ raises only when it is a ValueError or TypeError.
            raise BadBody(header, InvalidPayload(f"The message body cannot be decoded: {error}.")) from error
        if _kind(body) != header.kind:
            raise BadBody(header, InvalidPayload(f"The header announces {header.kind!r}, the body is {_kind(body)!r}."))
        return Envelope(header, body, buffers)

    def _with_blocks(self, header: Header, inline: Sequence[Frame]) -> tuple[Frame, ...]:
        """All buffers in their order: those in frames and those in the sender's arena."""
        if self._open_block is None:
            raise InvalidPayload("This receiver reads no shared memory.")
        if header.n_buffers > self._limits.buffers:
            raise InvalidPayload(f"{header.n_buffers} buffers exceed the limit of {self._limits.buffers}.")
        places = {block.buffer: block for block in header.blocks}
        if len(places) < len(header.blocks) or max(places) >= header.n_buffers:
            raise InvalidPayload("The header's blocks do not name different buffers of the message.")
        frames = iter(inline)
        return tuple(
            self._open_block(header, places[index]) if index in places else next(frames)
            for index in range(header.n_buffers)
        )


class BufferList:
    """Collects the buffers of a message while its body is built."""

    def __init__(self) -> None:
        self.buffers: list[Frame] = []

    def add(self, tensor: HostTensor) -> TensorRef:
        """A reference to `tensor`, whose data becomes the message's next buffer."""
        self.buffers.append(tensor.data)
        return TensorRef(tensor.dtype, tuple(tensor.shape), len(self.buffers) - 1)


DEFAULT_LIMITS = Limits()
