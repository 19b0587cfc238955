"""What messages are made of: field types and their bounds, the header, and tensors."""

from __future__ import annotations

import array
import enum
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from omni_actors.errors import InvalidPayload

ATTEMPTS = 256  # at a request under one coordinator; the next coordinator counts on from there
MAX_ATTEMPT = (1 << 31) - 1
TOKEN_BYTES = 4  # token ids travel as int32
TRACEPARENT = r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$"

Scalar = int | float | str | bool
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Label = Annotated[str, Meta(max_length=128)]
StageName = Annotated[str, Meta(min_length=1, max_length=64)]
StageNameOrEmpty = Annotated[str, Meta(max_length=64)]
ReplicaIndex = Annotated[int, Meta(ge=0, le=65535)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=256)]
EndpointOrEmpty = Annotated[str, Meta(max_length=256)]
Moment = Annotated[float, Meta(ge=0.0, le=1e11)]  # Unix time in seconds by the sender's clock; 0: it did not happen
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]  # lower values come first
Count = Annotated[int, Meta(ge=0, le=2**53)]
PositiveInt = Annotated[int, Meta(ge=1, le=1_000_000)]
Dimension = Annotated[int, Meta(ge=0, le=2**40)]
Steps = Annotated[int, Meta(ge=1, le=1_000_000)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as they travel: int32, little-endian."""
    return array.array("i", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """Decode what `pack_token_ids` encoded. Raises `InvalidPayload` if the length is not a multiple of 4."""
    check_token_ids(data)
    return array.array("i", data).tolist()


def check_token_ids(data: bytes) -> None:
    """Raise `InvalidPayload` unless the length is a multiple of 4."""
    if len(data) % 4:
        raise InvalidPayload(f"token_ids are int32, so their length must be a multiple of 4 bytes; got {len(data)}.")


PROTOCOL_VERSION = 7
MAX_BUFFERS = 4096  # per message, in frames and in blocks
MAX_BLOCKS = 16  # per message; further buffers travel as frames


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Largest message that is sent or accepted.

    Args:
        header_bytes: bytes of a message's header.
        body_bytes: bytes of its body: everything but tensors and media.
        buffers: tensors and media of one message.
        buffer_bytes: bytes of one of them.
        message_bytes: bytes of the whole message; at least those of a header, a body and a buffer.
    """

    # With the lowest values a pipeline still starts and answers: a header with all blocks has some 740 bytes.
    header_bytes: Annotated[int, Meta(ge=1024, le=64 << 10)] = 2048
    body_bytes: Annotated[int, Meta(ge=8 << 10, le=1 << 30)] = 4 << 20
    buffers: Annotated[int, Meta(ge=MAX_BLOCKS, le=MAX_BUFFERS)] = 256
    buffer_bytes: Annotated[int, Meta(ge=16 << 10, le=1 << 34)] = 256 << 20
    message_bytes: Annotated[int, Meta(ge=32 << 10, le=1 << 36)] = 512 << 20


class ReplicaId(Struct, frozen=True, array_like=True):
    """A replica of a stage; its epoch grows with every start and registration."""

    stage: StageName
    replica: ReplicaIndex
    epoch: Count

    @property
    def name(self) -> str:
        """Stage and replica, as in "talker/0"."""
        return f"{self.stage}/{self.replica}"


ControlPeer = ReplicaId | int  # a stage process, or the rank of a node, for its agent


def identity_of(peer: ControlPeer) -> bytes:
    """The name of a peer's control connection."""
    return (f"node/{peer}" if isinstance(peer, int) else f"{peer.name}/{peer.epoch}").encode()


class Block(Struct, frozen=True, array_like=True):
    """Places buffer number `buffer` in the sender's arena (`transport/arena.py`) instead of a frame.

    `offset` and `length` are in bytes. `ticket` numbers the sender's publications and also stands in the block, so a
    block that was freed in the meantime is noticed. The receiver returns the ticket in a `Credit`.
    """

    buffer: BufferIndex
    offset: Count
    length: Count
    ticket: Annotated[int, Meta(ge=1, le=2**53)]


class Header(Struct, frozen=True, array_like=True):
    """The sender, the request, and how to read the frames that follow.

    Attributes:
        kind: the body's tag.
        request_id: empty in messages about no request.
        stage: stage of the sending replica; empty for clients, the coordinator and node agents.
        replica: index of the sending replica; a node agent's rank.
        epoch: epoch of the sending replica.
        attempt: the attempt at the request: the sender's in results, the receiver's in everything else.
        seq: number of the message among those of one sender about one attempt, from 0.
        deadline: Unix time in seconds, of the wall clock on the wire and of `STEADY` elsewhere; 0 for none.
        sent: when the message was made, or sent again; only measurements depend on it.
        n_buffers: buffers of the message, in frames and in blocks.
        blocks: the buffers that are not frames of this message.
    """

    kind: Annotated[str, Meta(max_length=32)]
    request_id: Annotated[str, Meta(max_length=128)] = ""
    stage: StageNameOrEmpty = ""
    replica: ReplicaIndex = 0
    epoch: Count = 0
    attempt: Attempt = 0
    seq: Count = 0
    deadline: float = 0.0
    sent: Moment = 0.0
    n_buffers: Annotated[int, Meta(ge=0, le=MAX_BUFFERS)] = 0
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS)] = ()

    @property
    def sender(self) -> ReplicaId | None:
        """The replica that sent the message; `None` for the coordinator, a client or an agent."""
        return ReplicaId(self.stage, self.replica, self.epoch) if self.stage else None

    @classmethod
    def of(
        cls,
        sender: ReplicaId,
        request_id: str = "",
        attempt: int = 0,
        seq: int = 0,
        deadline: float = 0.0,
        sent: float = 0.0,
    ) -> Header:
        """The header of a message of a replica."""
        return cls("", request_id, sender.stage, sender.replica, sender.epoch, attempt, seq, deadline, sent)


class Body(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all bodies."""

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """The tensors of this body, each in a buffer of its own."""
        return ()


MAX_RANK = 8
BufferIndex = Annotated[int, Meta(ge=0, le=4096)]


class DType(enum.StrEnum):
    """Element types that may cross the wire."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]


FLOATING = (DType.BF16, DType.F16, DType.F32)
_ITEMSIZE = {DType.BF16: 2, DType.F16: 2, DType.F32: 4, DType.I32: 4, DType.I64: 8, DType.U8: 1}


def check_extent(dtype: DType, shape: tuple[int, ...], n_bytes: int, what: str) -> None:
    """Raise `InvalidPayload` unless `n_bytes` bytes hold exactly `shape` elements of `dtype`."""
    if len(shape) > MAX_RANK:
        raise InvalidPayload(f"{what}: rank {len(shape)} exceeds the maximum of {MAX_RANK}.")
    if any(dimension < 0 for dimension in shape):
        raise InvalidPayload(f"{what}: shape {shape} has a negative dimension.")
    expected = math.prod(shape) * dtype.itemsize
    if expected != n_bytes:
        raise InvalidPayload(f"{what}: shape {shape} of {dtype} needs {expected} bytes, got {n_bytes}.")


class HostTensor(NamedTuple):
    """A tensor in host memory, without torch: C-contiguous little-endian `data` of `shape` elements of `dtype`."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    def validate(self, what: str = "tensor") -> HostTensor:
        """Return self, or raise `InvalidPayload` if shape, dtype and length disagree."""
        check_extent(self.dtype, self.shape, memoryview(self.data).nbytes, what)
        return self


class TensorRef(Struct, frozen=True, array_like=True):
    """Describes the tensor in buffer number `buffer` of the same message."""

    dtype: DType
    shape: Annotated[tuple[Dimension, ...], Meta(max_length=MAX_RANK)]
    buffer: BufferIndex


def check_form(fits: bool, ref: TensorRef, wanted: str) -> None:
    """Raise `InvalidPayload` with what is `wanted` of a tensor and what it is."""
    if not fits:
        raise InvalidPayload(f"{wanted}; got {ref.dtype} {list(ref.shape)}.")
