"""Data channel: into a stage's inbox."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.common import Abort, Credit
from omni_actors.protocol.fields import Attempt, Count, Moment, Name, RequestId, Seed, check_token_ids
from omni_actors.protocol.header import Body, ReplicaId
from omni_actors.protocol.payloads import AdditionalInformationPayload, Prompt, PromptEmbedsPayload, StageParams
from omni_actors.protocol.tensors import TensorRef

ROWS = "rows"  # name of the streamed embeddings among an engine's tensors
SAMPLES = "samples"  # name of sound, f32 [samples], on its way from a stage to a later one
SAMPLE_RATE = "sample_rate"  # the scalar that goes with it, in Hz
PIXELS = "pixels"  # name of a picture, u8 [height, width, 3 or 4], on its way from a stage to a later one
TEXT = "text"  # the scalar with a piece of text, on its way from a stage to a later one
UNHEARD = "unheard"  # the scalar with the number of tokens, from the first, whose sound is not to be heard
LATENTS = "latents"  # the same of latents; those before a request's last are previews
PICTURE = "picture_"  # begin of the names of tensors with the pixels of pictures, u8 [height, width, 4]
MAX_ENDED = 4096


class OpenRequest(Body, tag="open_request", frozen=True):
    """Coordinator -> every stage of the route: a request will come.

    The entry stage receives its `prompt` here, and every stage the `information` that it wants. A stage for which the
    request is `held` takes its input and starts it when `Begin` comes.
    """

    route: Annotated[tuple[ReplicaId, ...], Meta(min_length=1, max_length=64)]
    params: StageParams
    seed: Seed
    voice: str | None = None
    priority: int = 0
    prompt: Prompt | None = None
    information: AdditionalInformationPayload | None = None
    held: bool = False

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        prompt = self.prompt.tensor_refs() if self.prompt is not None else ()
        information = self.information.tensor_refs() if self.information is not None else ()
        return (*prompt, *information)


class Chunk(Body, tag="chunk", frozen=True):
    """Stage -> next stage: the next piece of its input.

    Attributes:
        token_ids: int32 bytes.
        rows: embeddings that stand in for the receiver's tokens.
        start: position of the first row or token in the sender's whole sequence. A receiver drops what it already has,
            since a preempted sender computes rows again.
        final: ends the stream.
    """

    token_ids: bytes = b""
    rows: PromptEmbedsPayload | None = None
    tensors: Annotated[dict[Name, TensorRef], Meta(max_length=256)] = {}
    information: AdditionalInformationPayload | None = None
    start: Count = 0
    final: bool = False
    sent: Moment = 0.0

    def __post_init__(self) -> None:
        check_token_ids(self.token_ids)
        if ROWS in self.tensors:
            raise InvalidPayload(f"{ROWS!r} is a field of its own and cannot be one of the tensors.")

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        rows = (self.rows.tensor,) if self.rows is not None else ()
        more = self.information.tensor_refs() if self.information is not None else ()
        return (*rows, *self.tensors.values(), *more)


class Resend(Body, tag="resend", frozen=True):
    """Coordinator -> stage: `receiver` starts again with `attempt`; send it everything again, then continue.

    The header's attempt is the sending stage's own. A stage that no longer holds everything answers `Failed` with
    `stage_lost`, and then starts again itself.
    """

    receiver: ReplicaId
    attempt: Attempt


class Begin(Body, tag="begin", frozen=True):
    """Coordinator -> stage: start the attempt of the header, which is held there."""


class Ended(Body, tag="ended", frozen=True):
    """Coordinator -> stage: these requests are done; their output need no longer be kept for a `Resend`."""

    request_ids: Annotated[tuple[RequestId, ...], Meta(max_length=MAX_ENDED)]


# A failing stage does not tell the stages after it: the coordinator aborts them, so that there is one way to end.
IntoStage = OpenRequest | Chunk | Abort | Credit | Resend | Begin | Ended
