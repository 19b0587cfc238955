"""Data channel: into a stage's inbox."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.common import Abort, Credit
from omni_actors.protocol.fields import Attempt, Count, Moment, Name, RequestId
from omni_actors.protocol.header import Body, ReplicaId
from omni_actors.protocol.payloads import AdditionalInformationPayload, Prompt, PromptEmbedsPayload, StageParams
from omni_actors.protocol.tensors import TensorRef


class OpenRequest(Body, tag="open_request", frozen=True):
    """Coordinator -> every stage of the route: this request will come (to the entry stage: with its `prompt`)."""

    route: Annotated[tuple[ReplicaId, ...], Meta(min_length=1, max_length=64)]
    params: StageParams
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    voice: str | None = None
    priority: int = 0
    prompt: Prompt | None = None

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        return self.prompt.tensor_refs() if self.prompt is not None else ()


ROWS = "rows"  # name of the streamed embeddings among an engine's tensors
SAMPLES = "samples"  # name of sound, f32 [samples], on its way from a stage to a later one
SAMPLE_RATE = "sample_rate"  # the scalar that goes with it, in Hz


class Chunk(Body, tag="chunk", frozen=True):
    """Stage -> next stage: the next piece of its input.

    `rows` are embeddings that stand in for the receiver's tokens. `start` is the absolute position of the first row or
    token in the sender's own sequence; a receiver drops what it already has (a preempted sender computes rows again).
    `final` ends the stream.
    """

    token_ids: bytes = b""
    rows: PromptEmbedsPayload | None = None
    tensors: Annotated[dict[Name, TensorRef], Meta(max_length=256)] = {}
    information: AdditionalInformationPayload | None = None
    start: Count = 0
    final: bool = False
    sent: Moment = 0.0

    def __post_init__(self) -> None:
        if len(self.token_ids) % 4:
            raise InvalidPayload(f"token_ids are int32: {len(self.token_ids)} bytes is no multiple of 4.")
        if ROWS in self.tensors:
            raise InvalidPayload(f"{ROWS!r} is a field of its own, not one of the tensors.")

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        rows = (self.rows.tensor,) if self.rows is not None else ()
        more = self.information.tensor_refs() if self.information is not None else ()
        return (*rows, *self.tensors.values(), *more)


class Resend(Body, tag="resend", frozen=True):
    """Coordinator -> stage: `receiver` begins anew with `attempt`; give it all that was sent before, and go on with it.

    The header's attempt is that of the stage which sends again. If it does not hold all of it any more it answers
    `Failed` with `stage_lost`, and begins anew itself.
    """

    receiver: ReplicaId
    attempt: Attempt


MAX_ENDED = 4096


class Ended(Body, tag="ended", frozen=True):
    """Coordinator -> stage: these requests are done; what was kept to be sent again may go."""

    request_ids: Annotated[tuple[RequestId, ...], Meta(max_length=MAX_ENDED)]


# A failing stage tells its downstream neighbours nothing: the coordinator aborts them, so that there is one way to end.
IntoStage = OpenRequest | Chunk | Abort | Credit | Resend | Ended
