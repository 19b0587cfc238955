"""Messages that a stage sends, made from the events of its engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_actors.protocol.codec import BufferList, Frame
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Body, Header, ReplicaId
from omni_actors.protocol.payloads import AdditionalInformationPayload, PromptEmbedsPayload
from omni_actors.protocol.results import AudioChunk, TextDelta
from omni_actors.protocol.stage import ROWS, Chunk
from omni_actors.stage.engine_interface import AudioEvent, StreamEvent, TextEvent


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send: to a downstream replica, or to the coordinator when `destination` is `None`."""

    destination: ReplicaId | None
    header: Header
    body: Body
    buffers: Sequence[Frame] = ()


def result_of(event: TextEvent | AudioEvent, sent: float) -> tuple[Body, Sequence[Frame]]:
    """Make the message to the coordinator, and its buffers. `sent`: Unix time in seconds."""
    if isinstance(event, TextEvent):
        token_ids = pack_token_ids(event.token_ids)
        delta = TextDelta(
            text=event.text, token_ids=token_ids, sent=sent, tool_calls=event.tool_calls, logprobs=event.logprobs
        )
        return delta, ()
    buffers = BufferList()
    chunk = AudioChunk(samples=buffers.add(event.samples), sample_rate=event.sample_rate, sent=sent)
    return chunk, buffers.buffers


def chunk_of(event: StreamEvent, sent: float) -> tuple[Chunk, Sequence[Frame]]:
    """Make the message to the stages after this one, and its buffers. `sent`: Unix time in seconds."""
    buffers = BufferList()
    tensors = {name: buffers.add(tensor) for name, tensor in event.tensors.items()}
    rows = tensors.pop(ROWS, None)
    information = None
    if event.scalars or event.lists:
        information = AdditionalInformationPayload.of({**event.scalars, **event.lists}, buffers.add)
    chunk = Chunk(
        token_ids=pack_token_ids(event.token_ids),
        rows=PromptEmbedsPayload(rows) if rows is not None else None,
        tensors=tensors,
        information=information,
        start=event.start,
        final=event.final,
        sent=sent,
    )
    return chunk, buffers.buffers
