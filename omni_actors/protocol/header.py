"""The header of every message and the base class of every body."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.protocol.fields import Attempt, Count
from omni_actors.protocol.tensors import TensorRef

PROTOCOL_VERSION = 1


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Largest message that is sent or accepted.

    Args:
        header_bytes: bytes of a message's header.
        body_bytes: bytes of its body: everything but tensors and media.
        buffers: tensors and media of one message.
        buffer_bytes: bytes of one of them.
        message_bytes: bytes of the whole message.
    """

    header_bytes: int = 2048
    body_bytes: int = 4 << 20
    buffers: int = 256
    buffer_bytes: int = 256 << 20
    message_bytes: int = 512 << 20


class ReplicaId(Struct, frozen=True, array_like=True):
    """The replica of one stage that a request is bound to."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    epoch: Count

    @property
    def name(self) -> str:
        """As "talker/0"."""
        return f"{self.stage}/{self.replica}"


MAX_BLOCKS = 16  # per message; further buffers travel as frames


class Block(Struct, frozen=True, array_like=True):
    """Says that buffer number `buffer` is no frame, but lies in the sender's arena (`transport/arena.py`).

    `ticket` numbers the sender's publications and is written in the block, too: one that was freed meanwhile is
    noticed. The receiver gives the ticket back in a `Credit`.
    """

    buffer: Annotated[int, Meta(ge=0, le=4096)]
    offset: Count
    length: Count
    ticket: Annotated[int, Meta(ge=1, le=2**53)]


class Header(Struct, frozen=True, array_like=True):
    """Who sends what about which request.

    `stage`, `replica` and `epoch` name the sending process (empty for clients and the coordinator). `attempt` is the
    one that a stage works on: of a result its sender, of everything else the receiver. `seq` counts the messages of one
    sender about one attempt of a request, from 0. `deadline` is Unix time in seconds, 0 for none. `blocks` are those of
    the `n_buffers` buffers that are no frames of this message.
    """

    kind: Annotated[str, Meta(max_length=32)]
    request_id: Annotated[str, Meta(max_length=128)] = ""
    stage: Annotated[str, Meta(max_length=64)] = ""
    replica: Annotated[int, Meta(ge=0, le=65535)] = 0
    epoch: Count = 0
    attempt: Attempt = 0
    seq: Count = 0
    deadline: float = 0.0
    n_buffers: Annotated[int, Meta(ge=0, le=4096)] = 0
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS)] = ()


class Body(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all bodies. A body that carries tensors names them in `tensor_refs`."""

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        return ()
