"""One request between admission and its one terminal message, and what its client has of the answer.

An answer is counted so that a replay sends only the rest: a stage that runs again computes its part from the start,
with the same seed. Tokens, characters and samples are counted, not messages: another attempt may cut them differently.
A picture, or its latents, is one message.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from omni_actors.coordinator.core.replicas import REQUEST_TRANSITIONS, Evidence, RequestEvent, RequestState
from omni_actors.errors import StageLost
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import TOKEN_BYTES, ReplicaId, TensorRef
from omni_actors.protocol.messages import (
    AudioChunk,
    ImageChunk,
    LatentsChunk,
    Output,
    RequestStatus,
    StageUsage,
    StepsDone,
    TextDelta,
)
from omni_actors.protocol.payloads import (
    AdditionalInformationEntry,
    AdditionalInformationPayload,
    Prompt,
    StageParams,
    ToolCallPiece,
)
from omni_actors.sharing import Ticket
from omni_actors.transitions import advance

Fresh = tuple[Output, Sequence[Frame]]

SAMPLE_BYTES = 4


# What is counted of an answer, and the modality that it belongs to.
COUNTED = {
    "tokens": "text",
    "characters": "text",
    "prompt positions": "text",
    "samples": "audio",
    "image": "image",
    "preview": "image",
    "latents": "latents",
}
ESSENTIAL = ("tokens", "characters", "samples", "image", "latents")  # previews and log probabilities may differ


class Delivery:
    """The count for one request."""

    def __init__(self) -> None:
        self._delivered: collections.Counter[str] = collections.Counter()  # what the client has
        self._to_skip: collections.Counter[str] = collections.Counter()  # of that, what a replay still brings again
        self._checksum = self._checksum_again = 0  # of the tokens that the client has, and of those that came again
        self._calls: dict[int, int] = {}  # characters of arguments that the client has, by the index of the call
        self._calls_to_skip: dict[int, int] = {}  # those that come again, with the call's name
        self._steps: dict[str, int] = {}  # by stage: the progress that the client knows of

    def replay(self, modalities: Collection[str]) -> None:
        """Expect all that was delivered in these modalities to come again."""
        self._to_skip |= {kind: count for kind, count in self._delivered.items() if COUNTED[kind] in modalities}
        if "text" in modalities:
            self._calls_to_skip = dict(self._calls)
            self._checksum_again = 0

    @property
    def complete(self) -> bool:
        """Whether all that the client had before a replay has come again."""
        return not any(self._to_skip[kind] for kind in ESSENTIAL)

    def take(self, stage: str, body: Output, buffers: Sequence[Frame]) -> Fresh | None:
        """The new part of a stage's output, with its buffers; `None` for nothing.

        Raises:
            StageLost: the replay differs from what the client has, so that the rest would not fit.
        """
        match body:
            case TextDelta():
                delta = self._text(body)
                return (delta, ()) if delta is not None else None
            case AudioChunk():
                return self._audio(body, buffers)
            case ImageChunk():
                return None if self._known("preview" if body.preview else "image", 1) else (body, buffers)
            case LatentsChunk():
                return None if self._known("latents", 1) else (body, buffers)
            case StepsDone():
                if body.step <= self._steps.get(stage, 0):  # after a replay, until it has caught up
                    return None
                self._steps[stage] = body.step
                return msgspec.structs.replace(body, stage=stage), ()

    def _known(self, kind: str, count: int) -> int:
        """Count output, and return how much of it, from its start, the client has already."""
        known = min(self._to_skip[kind], count)
        self._to_skip[kind] -= known
        self._delivered[kind] += count - known
        return known

    def _text(self, body: TextDelta) -> TextDelta | None:
        size = self._known("tokens", len(body.token_ids) // TOKEN_BYTES) * TOKEN_BYTES
        letters = self._known("characters", len(body.text))
        positions = self._known("prompt positions", len(body.prompt_logprobs))
        if size:
            self._checksum_again = zlib.crc32(body.token_ids[:size], self._checksum_again)
            if not self._to_skip["tokens"] and self._checksum_again != self._checksum:
                raise diverged()
        calls = self._new_pieces(body.tool_calls) if body.tool_calls else ()
        self._checksum = zlib.crc32(body.token_ids[size:], self._checksum)
        if not (size or letters or positions or calls != body.tool_calls):
            return body
        fresh = TextDelta(
            text=body.text[letters:],
            token_ids=body.token_ids[size:],
            tool_calls=calls,
            logprobs=body.logprobs[size // TOKEN_BYTES :],
            prompt_logprobs=body.prompt_logprobs[positions:],
        )
        return fresh if fresh.text or fresh.token_ids or calls or fresh.prompt_logprobs else None

    def _new_pieces(self, pieces: Sequence[ToolCallPiece]) -> tuple[ToolCallPiece, ...]:
        """Leave out what the client has of tool calls. A call keeps the id under which the client knows it."""
        fresh = []
        for piece in pieces:
            skip = self._calls_to_skip.get(piece.index)
            if skip is not None:
                self._calls_to_skip[piece.index] = max(0, skip - len(piece.arguments))
                piece = ToolCallPiece(index=piece.index, arguments=piece.arguments[skip:])
            self._calls[piece.index] = self._calls.get(piece.index, 0) + len(piece.arguments)
            if piece.name or piece.arguments:
                fresh.append(piece)
        return tuple(fresh)

    def _audio(self, body: AudioChunk, buffers: Sequence[Frame]) -> tuple[AudioChunk, Sequence[Frame]] | None:
        (length,) = body.samples.shape
        known = self._known("samples", length)
        if not known:
            return body, buffers
        if known == length:
            return None
        rest = memoryview(buffers[body.samples.buffer]).cast("B")[known * SAMPLE_BYTES :]
        samples = TensorRef(body.samples.dtype, (length - known,), 0)
        return AudioChunk(samples=samples, sample_rate=body.sample_rate), (rest,)


def diverged() -> StageLost:
    """The error for an answer that cannot be continued."""
    return StageLost("A stage was lost, and the replay did not repeat what had been delivered.")


LISTED_LOSSES = 8  # the newest ones, for operators


@dataclass(frozen=True)
class Loss:
    """A replica that died while it held a request.

    `evidence` is what that says against the request, `alone` whether the replica computed no other one, and `seconds`
    how long it had held the request.
    """

    replica_id: ReplicaId
    why: str
    evidence: Evidence
    alone: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.replica_id.name} (epoch {self.replica_id.epoch}): {self.why}"


@dataclass(frozen=True)
class Retained:
    """What the client sent for the stages, kept to run a request again."""

    prompt: Prompt
    buffers: Sequence[Frame]  # those of the prompt, then those of the information
    size: int  # bytes that count for the budget
    information: AdditionalInformationPayload | None = None

    @property
    def prompt_buffers(self) -> Sequence[Frame]:
        """The prompt's own buffers, without those of the information."""
        of_information = len(self.information.tensor_refs()) if self.information is not None else 0
        return self.buffers[: len(self.buffers) - of_information]

    def select_information(
        self, names: Collection[str], first: int
    ) -> tuple[AdditionalInformationPayload | None, list[Frame]]:
        """Return the information with these names and its buffers, which are numbered from `first`."""
        buffers: list[Frame] = []
        entries = {}
        for name, entry in self.information.entries.items() if self.information is not None else ():
            if name not in names:
                continue
            if entry.tensor is not None:
                buffers.append(self.buffers[entry.tensor.buffer])
                place = msgspec.structs.replace(entry.tensor, buffer=first + len(buffers) - 1)
                entry = AdditionalInformationEntry(tensor=place)
            entries[name] = entry
        return (AdditionalInformationPayload(entries), buffers) if entries else (None, [])


@dataclass
class ActiveRequest:
    """A request between admission and its terminal message.

    `attempt` is the number of the newest attempt, `attempts` the one that each bound stage works on: when a replica is
    lost, only its stage and those after it run again. `losses_made_up` counts what `max_attempts` bounds.
    """

    request_id: str
    client: bytes
    stages: tuple[str, ...]
    modalities: frozenset[str]
    deadline: float
    params: dict[str, StageParams]
    seed: int
    voice: str | None = None
    priority: int = 0
    retained: Retained | None = None
    parts: tuple[bytes, ...] = ()  # hashes by which its conversation is recognized
    information: frozenset[str] = frozenset()  # names of what the client sent, also when it is no longer kept
    state: RequestState = RequestState.QUEUED
    bound: dict[str, ReplicaId] = field(default_factory=dict)  # by stage; not all of them while it waits
    attempt: int = 0
    attempts: dict[str, int] = field(default_factory=dict)
    opened_at: dict[str, float] = field(default_factory=dict)  # when each bound stage was
    losses_made_up: int = 0
    client_seq: int = 0
    next_seq: dict[str, int] = field(default_factory=dict)
    usage: dict[str, StageUsage] = field(default_factory=dict)
    delivery: Delivery = field(default_factory=Delivery)
    losses: list[Loss] = field(default_factory=list)
    ticket: Ticket | None = None  # with which it got its slot
    suspected_by: str | None = None  # the stage in which it runs apart from others, to see if it crashes it again

    def on(self, event: RequestEvent) -> None:
        """Enter the state that follows."""
        self.state = advance(REQUEST_TRANSITIONS, self.state, event)

    @property
    def route(self) -> tuple[ReplicaId, ...]:
        """The replicas that it is bound to, in order of the pipeline."""
        return tuple(self.bound[stage] for stage in self.stages if stage in self.bound)

    @property
    def missing(self) -> list[str]:
        """Its stages that are bound to no replica, in order of the pipeline."""
        return [stage for stage in self.stages if stage not in self.bound]

    def evidence(self, stage: str, alone: bool = False) -> int:
        """Sum of what counts against this request in a stage; `alone`: of losses when no other was computed."""
        losses = [loss for loss in self.losses if loss.replica_id.stage == stage and (loss.alone or not alone)]
        return sum(loss.evidence for loss in losses)

    def forgive(self, excused: Callable[[ReplicaId], bool]) -> None:
        """Stop counting the losses of some replicas against this request."""
        self.losses = [
            dataclasses.replace(loss, evidence=Evidence.NONE) if excused(loss.replica_id) else loss
            for loss in self.losses
        ]

    def history(self) -> str:
        """All losses in one line, for errors and operators."""
        return "; ".join(str(loss) for loss in self.losses)

    def lost_before(self) -> str:
        """A sentence about earlier losses to append to an error, "" if there were none."""
        return f" It was lost before: {self.history()}." if self.losses else ""

    def status(self, now: float) -> RequestStatus:
        """What operators see of it."""
        return RequestStatus(
            self.request_id,
            self.state,
            self.attempt,
            tuple(replica_id.name for replica_id in self.route),
            tuple(self.usage),
            self.deadline - now,
            tuple(str(loss) for loss in self.losses[-LISTED_LOSSES:]),
        )
