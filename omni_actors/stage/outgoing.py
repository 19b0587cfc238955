"""Messages that a stage sends, made from the events of its engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from omni_actors.protocol.codec import BufferList, Frame
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Body, Header, ReplicaId
from omni_actors.protocol.payloads import AdditionalInformationPayload, PromptEmbedsPayload
from omni_actors.protocol.results import AudioChunk, ImageChunk, LatentsChunk, StepsDone, TextDelta
from omni_actors.protocol.stage import LATENTS, PIXELS, ROWS, SAMPLE_RATE, SAMPLES, TEXT, Chunk
from omni_actors.stage.engine_interface import (
    AudioEvent,
    ImageEvent,
    LatentsEvent,
    OutputEvent,
    ProgressEvent,
    StreamEvent,
    TextEvent,
)

ForClient = TextEvent | AudioEvent | ImageEvent | LatentsEvent | ProgressEvent


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send: to a downstream replica, or to the coordinator when `destination` is `None`."""

    destination: ReplicaId | None
    header: Header
    body: Body
    buffers: Sequence[Frame] = ()


def divide(
    event: OutputEvent, outputs: Collection[str], sent: int, *, sends_text: bool
) -> tuple[ForClient | None, StreamEvent | None]:
    """Return the part of an event that is for the client, and the part for the stages after this one.

    Args:
        outputs: the modalities of this stage that go to the client.
        sent: characters, samples or tensors that the later stages have got so far.
        sends_text: whether those take the text.
    """
    match event:
        case TextEvent() if sends_text:
            piece = StreamEvent(event.request_id, scalars={TEXT: event.text}, start=sent) if event.text else None
            return (event if "text" in outputs else None), piece
        case StreamEvent():
            return None, event
        case AudioEvent() if "audio" not in outputs:
            tensors, scalars = {SAMPLES: event.samples}, {SAMPLE_RATE: event.sample_rate}
            return None, StreamEvent(event.request_id, (), tensors, scalars, sent)
        case ImageEvent():
            picture = StreamEvent(event.request_id, tensors={PIXELS: event.pixels}, start=sent)
            return (event if "image" in outputs else None), (None if event.preview else picture)
        case LatentsEvent():
            latents = StreamEvent(
                event.request_id, tensors={LATENTS: event.latents}, start=sent, final=not event.preview
            )
            return (event if "latents" in outputs and not event.preview else None), latents
        case TextEvent() | AudioEvent() | ProgressEvent():
            return event, None


def length_of(event: OutputEvent) -> int:
    """By how much an event's part for later stages moves `divide`'s `sent`."""
    match event:
        case TextEvent():
            return len(event.text)
        case AudioEvent():
            return event.samples.shape[0]
        case ImageEvent() | LatentsEvent():
            return 1
        case StreamEvent() | ProgressEvent():
            return 0


def result_of(event: ForClient, sent: float) -> tuple[Body, Sequence[Frame]]:
    """Make the message to the coordinator, and its buffers. `sent`: Unix time in seconds."""
    buffers = BufferList()
    if isinstance(event, TextEvent):
        token_ids = pack_token_ids(event.token_ids)
        delta = TextDelta(
            text=event.text,
            token_ids=token_ids,
            sent=sent,
            tool_calls=event.tool_calls,
            logprobs=event.logprobs,
            prompt_logprobs=event.prompt_logprobs,
        )
        return delta, ()
    body: Body
    match event:
        case AudioEvent():
            body = AudioChunk(samples=buffers.add(event.samples), sample_rate=event.sample_rate, sent=sent)
        case ImageEvent():
            body = ImageChunk(pixels=buffers.add(event.pixels), preview=event.preview, sent=sent)
        case LatentsEvent():
            body = LatentsChunk(latents=buffers.add(event.latents), sent=sent)
        case ProgressEvent():
            body = StepsDone(step=event.step, steps=event.steps, sent=sent)
    return body, buffers.buffers


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
