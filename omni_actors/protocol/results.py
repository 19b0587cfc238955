"""Results channel: from a stage to the coordinator."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.common import Credit, Failed
from omni_actors.protocol.fields import TOKEN_BYTES, Attempt, Count, Moment
from omni_actors.protocol.header import Body, ReplicaId
from omni_actors.protocol.logprobs import PositionLogprobs
from omni_actors.protocol.telemetry import StageTimeline
from omni_actors.protocol.tensors import DType, TensorRef
from omni_actors.protocol.tools import MAX_CALLS, ToolCallPiece


class TextDelta(Body, tag="text", frozen=True):
    """Stage -> coordinator -> client: more text. `text` is empty within a character; `token_ids` are int32 bytes.

    `tool_calls` are the pieces of calls that the tokens make, besides the text. `logprobs` has an entry for each token,
    or none at all.
    """

    text: str
    token_ids: bytes = b""
    sent: Moment = 0.0
    tool_calls: Annotated[tuple[ToolCallPiece, ...], Meta(max_length=MAX_CALLS)] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) * TOKEN_BYTES != len(self.token_ids):
            raise InvalidPayload(
                f"A text delta has {len(self.token_ids)} bytes of token ids, but log probabilities of "
                f"{len(self.logprobs)} tokens."
            )


class AudioChunk(Body, tag="audio", frozen=True):
    """Stage -> coordinator -> client: the next samples, f32 [samples] in [-1, 1], at `sample_rate` Hz."""

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


class FinishReason(enum.StrEnum):
    """Why a stage ended a request: the model's own end, or the limit of tokens."""

    STOP = "stop"
    LENGTH = "length"


class StageUsage(Struct, frozen=True, omit_defaults=True):
    """What a stage did for one request. `first_output` and `finished` are seconds since `OpenRequest` arrived."""

    finish_reason: FinishReason
    input_tokens: Count = 0
    output_tokens: Count = 0
    first_output: float = 0.0
    finished: float = 0.0


class StageDone(Body, tag="stage_done", frozen=True):
    """Stage -> coordinator: this stage has finished the request and sent all of its output."""

    usage: StageUsage
    timeline: StageTimeline | None = None


class Unreachable(Body, tag="unreachable", frozen=True):
    """Stage -> coordinator: `receiver` gets no messages of its `attempt`; they are kept for a `Resend`."""

    receiver: ReplicaId
    attempt: Attempt


FromStage = TextDelta | AudioChunk | StageDone | Failed | Unreachable | Credit
