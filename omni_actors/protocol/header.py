"""The header of every message, the base class of every body, and the limits of their sizes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.protocol.fields import Attempt, Count, ReplicaIndex, StageName, StageNameOrEmpty
from omni_actors.protocol.tensors import BufferIndex, TensorRef

PROTOCOL_VERSION = 1
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
    n_buffers: Annotated[int, Meta(ge=0, le=MAX_BUFFERS)] = 0
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS)] = ()


class Body(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all bodies."""

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """The tensors of this body, each in a buffer of its own."""
        return ()
