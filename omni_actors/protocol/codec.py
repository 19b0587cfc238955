"""Messages to frames and back, with every check of the wire in one place (`docs/protocol.md`).

Frame 0 is a magic, frame 1 the header, frame 2 the body, frames 3... are raw tensor buffers that the body's
`TensorRef`s describe, except those that the header's `blocks` place in the sender's shared memory. A message that fails
a check never reaches the rest of the program:

* `BadHeader`: the request is unknown, so the message is counted and dropped;
* `BadBody`: the header is sound, so its request can fail with a typed error.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, get_args

import msgspec
from msgspec import Struct

from omni_actors.errors import InvalidPayload, OmniError
from omni_actors.host.processes import STEADY
from omni_actors.protocol.fields import Block, Body, Header, HostTensor, Limits, TensorRef, check_extent

MAGIC = b"OMNI1"
FIXED_FRAMES = 3  # magic, header, body
DEFAULT_LIMITS = Limits()

Frame = bytes | bytearray | memoryview
BodyT = TypeVar("BodyT", bound=Body)

_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


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
        self.reason = error.code.value


class Envelope(Struct, Generic[BodyT], frozen=True):
    """A checked message. `buffers` may alias the receiving socket's memory: copy what you keep or write to."""

    header: Header
    body: BodyT
    buffers: tuple[Frame, ...] = ()

    def tensor(self, ref: TensorRef) -> HostTensor:
        """Return the tensor that `ref`, taken from this message's body, refers to."""
        return HostTensor(ref.dtype, ref.shape, self.buffers[ref.buffer])


class BufferList:
    """Collects the buffers of a message while its body is built."""

    def __init__(self) -> None:
        self.buffers: list[Frame] = []

    def add(self, tensor: HostTensor) -> TensorRef:
        """Make the data of `tensor` the message's next buffer and return a reference to it."""
        self.buffers.append(tensor.data)
        return TensorRef(tensor.dtype, tuple(tensor.shape), len(self.buffers) - 1)


def encode(
    header: Header,
    body: Body,
    buffers: Sequence[Frame] = (),
    limits: Limits | None = None,
    blocks: tuple[Block, ...] = (),
) -> list[Frame]:
    """Return the frames of a message. Fills in the header's `kind`, `n_buffers` and `blocks`, converts its `deadline`.

    Args:
        buffers: all buffers of the message.
        blocks: the places in the sender's arena of some of them; these do not become frames.

    Raises:
        InvalidPayload: the message is larger than `limits`, its tensors do not fit its buffers, or a value in it has
            no encoding.
    """
    limits = limits or DEFAULT_LIMITS
    _check_buffers(body, buffers, limits)
    deadline = header.deadline and header.deadline + STEADY.jumped()
    header = msgspec.structs.replace(header, kind=_kind(body), n_buffers=len(buffers), blocks=blocks, deadline=deadline)
    try:
        header_frame = _header_encoder.encode(header)
        body_frame = msgspec.msgpack.encode(body)
    except (TypeError, ValueError, OverflowError) as error:  # for instance half a surrogate pair in a text
        raise InvalidPayload(f"The message cannot be encoded: {error}.") from error
    if len(header_frame) > limits.header_bytes:
        raise InvalidPayload(f"The header has {len(header_frame)} bytes; the limit is {limits.header_bytes}.")
    if len(body_frame) > limits.body_bytes:
        raise InvalidPayload(f"The message body has {len(body_frame)} bytes; the limit is {limits.body_bytes}.")
    if blocks:
        in_arena = {block.buffer for block in blocks}
        buffers = [buffer for index, buffer in enumerate(buffers) if index not in in_arena]
    return [MAGIC, header_frame, body_frame, *buffers]


class Decoder(Generic[BodyT]):
    """Checks and decodes the messages of one channel. Not thread-safe; `rejected` counts refused messages by reason.

    Args:
        channel: the union of body structs that are legal on this channel.
        open_block: returns the bytes of a buffer in the sender's arena, or raises `InvalidPayload`; without it,
            messages with blocks are refused.
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
        """Return the message in `frames`. Raises `BadHeader` or `BadBody`, both counted in `rejected`."""
        try:
            header = self._decode_header(frames)
            try:
                return self._decode_rest(header, frames)
            except OmniError as error:
                raise BadBody(header, error) from error
        except (BadHeader, BadBody) as bad:
            self.rejected[bad.reason] += 1
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
        except _DECODE_ERRORS as error:
            raise BadHeader("header") from error
        if header.n_buffers != len(frames) - FIXED_FRAMES + len(header.blocks):
            raise BadHeader("buffer_count")
        if header.kind not in self._kinds:
            raise BadHeader("kind")
        if header.deadline and (jumped := STEADY.jumped()):
            header = msgspec.structs.replace(header, deadline=header.deadline - jumped)
        return header

    def _decode_rest(self, header: Header, frames: Sequence[Frame]) -> Envelope[BodyT]:
        """Decode body and buffers. Raises an `OmniError`, most often `InvalidPayload`."""
        if len(frames[2]) > self._limits.body_bytes:
            raise InvalidPayload(f"The body has {len(frames[2])} bytes; the limit is {self._limits.body_bytes}.")
        try:
            body = self._decoder.decode(frames[2])
        except _DECODE_ERRORS as error:
            raise InvalidPayload(f"The message body cannot be decoded: {error}.") from error
        buffers = tuple(frames[FIXED_FRAMES:])
        if header.blocks:
            buffers = self._with_blocks(header, buffers)
        _check_buffers(body, buffers, self._limits)
        if _kind(body) != header.kind:
            raise InvalidPayload(f"The header announces {header.kind!r}, the body is {_kind(body)!r}.")
        return Envelope(header, body, buffers)

    def _with_blocks(self, header: Header, inline: Sequence[Frame]) -> tuple[Frame, ...]:
        """Return all buffers in their order: those in frames and those in the sender's arena."""
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


def _kind(body: Body) -> str:
    return str(type(body).__struct_config__.tag)


def _check_buffers(body: Body, buffers: Sequence[Frame], limits: Limits) -> None:
    """Raise `InvalidPayload` unless the body's tensors describe exactly these buffers, and they are within limits."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    if len(sizes) > limits.buffers:
        raise InvalidPayload(f"{len(sizes)} buffers exceed the limit of {limits.buffers}.")
    for index, size in enumerate(sizes):
        if size > limits.buffer_bytes:
            raise InvalidPayload(f"Buffer {index} has {size} bytes; the limit is {limits.buffer_bytes}.")
    if sum(sizes) > limits.message_bytes:
        raise InvalidPayload(f"The buffers have {sum(sizes)} bytes together; the limit is {limits.message_bytes}.")
    refs = body.tensor_refs()
    only = len(refs) == len(sizes) <= 1 and (not refs or refs[0].buffer == 0)  # nearly all messages: saves the sorting
    if not only and sorted(ref.buffer for ref in refs) != list(range(len(sizes))):
        raise InvalidPayload(f"{len(refs)} tensors do not name each of the {len(sizes)} buffers exactly once.")
    for ref in refs:
        check_extent(ref.dtype, ref.shape, sizes[ref.buffer], f"buffer {ref.buffer}")
