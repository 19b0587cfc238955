"""Results channel: from a stage to the coordinator."""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.common import Credit, Failed
from omni_actors.protocol.fields import TOKEN_BYTES, Attempt, Count, Moment, StageNameOrEmpty, Steps, TokenId
from omni_actors.protocol.header import Body, ReplicaId
from omni_actors.protocol.payloads import PositionLogprobs, PromptPosition
from omni_actors.protocol.telemetry import StageTimeline
from omni_actors.protocol.tensors import FLOATING, DType, TensorRef
from omni_actors.protocol.tools import MAX_CALLS, ToolCallPiece

CHANNELS = (3, 4)  # of a picture: RGB or RGBA


class TextDelta(Body, tag="text", frozen=True):
    """Stage -> coordinator -> client: more text. `text` is empty within a character; `token_ids` are int32 bytes.

    `tool_calls` are the pieces of calls that the tokens make, besides the text. `logprobs` has an entry for each token,
    or none at all. `prompt_logprobs` are the next positions of the prompt, from the second on.
    """

    modality: ClassVar[str] = "text"

    text: str
    token_ids: bytes = b""
    sent: Moment = 0.0
    tool_calls: Annotated[tuple[ToolCallPiece, ...], Meta(max_length=MAX_CALLS)] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptPosition, ...] = ()

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) * TOKEN_BYTES != len(self.token_ids):
            raise InvalidPayload(
                f"A text delta has {len(self.token_ids)} bytes of token ids, but log probabilities of "
                f"{len(self.logprobs)} tokens."
            )


class AudioChunk(Body, tag="audio", frozen=True):
    """Stage -> coordinator -> client: the next samples, f32 [samples] in [-1, 1], at `sample_rate` Hz."""

    modality: ClassVar[str] = "audio"

    samples: TensorRef
    sample_rate: Annotated[int, Meta(ge=1, le=768_000)]
    sent: Moment = 0.0

    def __post_init__(self) -> None:
        if len(self.samples.shape) != 1 or self.samples.dtype is not DType.F32:
            raise InvalidPayload(
                f"Audio must be f32 of shape [samples]; got {self.samples.dtype} {list(self.samples.shape)}."
            )

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        return (self.samples,)


class ImageChunk(Body, tag="image", frozen=True):
    """Stage -> coordinator -> client: a whole picture, u8 [height, width, channels], 3 channels for RGB or 4 for RGBA.

    A `preview` shows the picture while it is made; it is not part of the answer.
    """

    modality: ClassVar[str] = "image"

    pixels: TensorRef
    preview: bool = False
    sent: Moment = 0.0

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if self.pixels.dtype is not DType.U8 or len(shape) != 3 or shape[2] not in CHANNELS or 0 in shape:
            raise InvalidPayload(
                f"A picture must be u8 of shape [height, width, 3 or 4]; got {self.pixels.dtype} {list(shape)}."
            )

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        return (self.pixels,)


class LatentsChunk(Body, tag="latents", frozen=True):
    """Stage -> coordinator -> client: the latents of a picture, floating-point numbers of any shape."""

    modality: ClassVar[str] = "latents"

    latents: TensorRef
    sent: Moment = 0.0

    def __post_init__(self) -> None:
        if self.latents.dtype not in FLOATING or not self.latents.shape or 0 in self.latents.shape:
            raise InvalidPayload(
                f"Latents must be floating-point numbers, and not none; got {self.latents.dtype} "
                f"{list(self.latents.shape)}."
            )

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        return (self.latents,)


class StepsDone(Body, tag="progress", frozen=True):
    """Stage -> coordinator -> client: `step` of `steps` are done. The coordinator fills in the `stage` that sent it."""

    modality: ClassVar[str] = ""  # for every client

    step: Steps
    steps: Steps
    stage: StageNameOrEmpty = ""
    sent: Moment = 0.0

    def __post_init__(self) -> None:
        if self.step > self.steps:
            raise InvalidPayload(f"Progress cannot be {self.step} of {self.steps} steps.")


Output = TextDelta | AudioChunk | ImageChunk | LatentsChunk | StepsDone  # what goes on to the client


class FinishReason(enum.StrEnum):
    """Why a stage ended a request: the model's own end, or the limit of tokens."""

    STOP = "stop"
    LENGTH = "length"


class StageUsage(Struct, frozen=True, omit_defaults=True):
    """What a stage did for one request. `first_output` and `finished` are seconds since `OpenRequest` arrived.

    `stop_reason` is the stop string or stop token that ended a text, `None` if the model did. `picture_tokens` says how
    many of an encoder's input tokens stand for pictures.
    """

    finish_reason: FinishReason
    input_tokens: Count = 0
    output_tokens: Count = 0
    first_output: float = 0.0
    finished: float = 0.0
    stop_reason: TokenId | Annotated[str, Meta(max_length=4096)] | None = None
    picture_tokens: Count = 0


class StageDone(Body, tag="stage_done", frozen=True):
    """Stage -> coordinator: this stage has finished the request and sent all of its output."""

    usage: StageUsage
    timeline: StageTimeline | None = None


class Unreachable(Body, tag="unreachable", frozen=True):
    """Stage -> coordinator: `receiver` gets no messages of its `attempt`; they are kept for a `Resend`."""

    receiver: ReplicaId
    attempt: Attempt


FromStage = TextDelta | AudioChunk | ImageChunk | LatentsChunk | StepsDone | StageDone | Failed | Unreachable | Credit
