"""An attempt at a request in a stage: its states, the order of its input, input that comes before it, and its output.

What a stage has sent is kept until its request ends: a stage after it may have to start again, or the coordinator.

It keeps references to the buffers that were sent. Small ones are copied: they are slices of what a step made for its
whole batch, and would keep all of that alive. Tokens that came one by one are kept, and sent again, as one message.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Literal, TypeGuard

import msgspec
from msgspec import Struct

from omni_actors.errors import ProtocolError
from omni_actors.protocol.codec import Envelope, Frame
from omni_actors.protocol.delivery import Delivery
from omni_actors.protocol.fields import TOKEN_BYTES, Body, Header, ReplicaId
from omni_actors.protocol.messages import Chunk, IntoStage, Output, StageTimeline
from omni_actors.sharing import Budget
from omni_actors.stage.engine_interface import StageRequest
from omni_actors.stage.processors import StreamProcessor
from omni_actors.transport.link import wire_size


class AttemptState(enum.StrEnum):
    """Where an attempt is between its announcement and its end."""

    OPEN = "open"  # announced; the engine does not have it yet
    RUNNING = "running"  # in the engine, and more input will come
    INPUT_COMPLETE = "input_complete"  # in the engine, which has all of its input
    FINISHED = "finished"  # done here; its output is kept, because a later stage may have to start again
    ENDED = "ended"


# What can happen to an attempt. It is "ended" when it failed, was aborted or replaced by the next one, or is over in
# every stage.
AttemptEvent = Literal["started", "input_ended", "finished", "ended"]


LIVE = (AttemptState.OPEN, AttemptState.RUNNING, AttemptState.INPUT_COMPLETE)

ATTEMPT_TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (AttemptState.OPEN, "started"): AttemptState.RUNNING,
    (AttemptState.RUNNING, "input_ended"): AttemptState.INPUT_COMPLETE,
    **{(state, "finished"): AttemptState.FINISHED for state in LIVE},  # an open one had nothing to compute
    **{(state, "ended"): AttemptState.ENDED for state in (*LIVE, AttemptState.FINISHED)},
}


CLIENT = ""  # the source of a text that comes in parts


class InputOrder:
    """Checks that the chunks of each source stage come in order and that none follows the final one."""

    def __init__(self, sources: Iterable[str]) -> None:
        self._next_seq = dict.fromkeys(sources, 0)
        self._open = set(self._next_seq)

    @property
    def complete(self) -> bool:
        """Whether every source has sent its final chunk."""
        return not self._open

    def take(self, source: str, seq: int, final: bool) -> None:
        """Note a chunk; raises `ProtocolError` if it is not the one that is due."""
        expected = self._next_seq[source]
        if seq != expected:
            raise ProtocolError(f"Stage {source!r} sent chunk {seq} where {expected} was due.")
        if source not in self._open:
            raise ProtocolError(f"Stage {source!r} sent another chunk after its final one.")
        self._next_seq[source] = expected + 1
        if final:
            self.end(source)

    def end(self, source: str) -> None:
        """Note that nothing more comes from a source. Idempotent."""
        self._open.discard(source)


COPIED_BYTES = 1 << 20  # buffers up to this size
JOINED_BYTES = 64 << 10  # of token ids in one message
ENTRY_BYTES = 512  # what a kept message counts in addition to its tokens and buffers


class Receiver(Struct):
    """What a stage after this one, or the coordinator, has got. `attempt` is the receiver's."""

    replica_id: ReplicaId | None
    attempt: int
    sent: int = 0  # messages: the number of the next one
    resend_from: int | None = None  # the next entry to be sent again; `None`: it has all
    delivery: Delivery | None = None  # of the coordinator: what its client has, which is not sent again
    unreachable: bool = False  # it takes nothing, and the coordinator knows; or it is the coordinator, and gone

    @property
    def behind(self) -> bool:
        """Whether it lacks something that was made before."""
        return self.unreachable or self.resend_from is not None


class _Kept:
    """One message, or several that held nothing but consecutive tokens."""

    def __init__(self, body: Body, buffers: Sequence[Frame]) -> None:
        self._body = body
        self._tokens = bytearray(body.token_ids) if isinstance(body, Chunk) else bytearray()
        self._final = isinstance(body, Chunk) and body.final
        self.buffers = [_detached(buffer) for buffer in buffers]
        self.size = ENTRY_BYTES + len(self._tokens) + sum(memoryview(buffer).nbytes for buffer in buffers)  # at first

    def join(self, chunk: Body) -> bool:
        """Append the tokens that follow those here; false if there is more than tokens in either."""
        if self._final or not (_only_tokens(self._body) and _only_tokens(chunk)):
            return False
        if self._body.start + len(self._tokens) // TOKEN_BYTES != chunk.start:
            return False
        if len(self._tokens) + len(chunk.token_ids) > JOINED_BYTES:
            return False
        self._tokens += chunk.token_ids
        self._final = chunk.final
        return True

    @property
    def body(self) -> Body:
        if not isinstance(self._body, Chunk):
            return self._body
        return msgspec.structs.replace(self._body, token_ids=bytes(self._tokens), final=self._final)


class ResendBuffer:
    """Everything that one attempt gave to the stages after this one, or all results. All of a stage share the budget.

    Args:
        receivers: the replicas of those stages, or `None` for the coordinator.
    """

    def __init__(self, budget: Budget, receivers: Iterable[ReplicaId | None], attempt: int) -> None:
        self.receivers = {stage_of(replica_id): Receiver(replica_id, attempt) for replica_id in receivers}
        self._budget = budget
        self._entries: list[_Kept] = []
        self.intact = True  # nothing of it was released

    def keep(self, body: Body, buffers: Sequence[Frame]) -> bool:
        """Keep a message of an attempt that is intact. False if that exceeds the budget: then all of it is released."""
        if isinstance(body, Chunk) and self._entries and not buffers and self._entries[-1].join(body):
            self._budget.take(self, len(body.token_ids))
        else:
            self._entries.append(_Kept(body, buffers))
            self._budget.take(self, self._entries[-1].size)
        if not self._budget.fits():
            self.release()
        return self.intact

    def release(self) -> None:
        """Free what is kept. Idempotent."""
        self._budget.release(self)
        self.intact = False
        self._entries.clear()

    def restart(self, receiver: Receiver) -> None:
        """Put a receiver, which has got nothing yet, in the place of its stage's former one."""
        stage = stage_of(receiver.replica_id)
        self.receivers[stage].resend_from = None
        receiver.resend_from = 0 if self._entries else None
        self.receivers[stage] = receiver

    def next_resend(self, receiver: Receiver) -> tuple[Body, Sequence[Frame]] | None:
        """Return the next message to send again to a receiver; `None` if it has all.

        Raises:
            StageLost: what the client has is not what was made here.
        """
        found: tuple[Body, Sequence[Frame]] | None = None
        while found is None and receiver.resend_from is not None and receiver.resend_from < len(self._entries):
            entry = self._entries[receiver.resend_from]
            receiver.resend_from += 1
            found = entry.body, entry.buffers
            if receiver.delivery is not None and isinstance(entry.body, Output):
                found = receiver.delivery.take(entry.body, entry.buffers)
        if receiver.resend_from is not None and receiver.resend_from >= len(self._entries):
            # What is made from now on goes to it directly.
            receiver.resend_from = None
        return found


def stage_of(replica_id: ReplicaId | None) -> str:
    """The stage of a receiver, "" for the coordinator."""
    return replica_id.stage if replica_id is not None else ""


def _only_tokens(body: Body) -> TypeGuard[Chunk]:
    return isinstance(body, Chunk) and not body.tensors and not body.information.entries


def _detached(buffer: Frame) -> Frame:
    return bytes(buffer) if isinstance(buffer, memoryview) and buffer.nbytes <= COPIED_BYTES else buffer


class Attempt(Struct):
    """One attempt at a request. `request` is what the engine knows; its id differs from attempt to attempt."""

    request_id: str
    request: StageRequest
    route: tuple[ReplicaId, ...]
    number: int
    deadline: float  # Unix time in seconds, like `opened` and `first_output`
    opened: float
    input_order: InputOrder
    processor: StreamProcessor | None
    timings: StageTimeline
    output: ResendBuffer  # what later stages got
    results: ResendBuffer  # what the coordinator got
    state: AttemptState = AttemptState.OPEN  # changed by `StageActor._advance` only
    first_output: float = 0.0
    streamed: int = 0  # characters, samples, pictures or latents that went to later stages
    stream_ended: bool = False  # later stages have got their final chunk

    @property
    def live(self) -> bool:
        """Whether this stage still has to finish it."""
        return self.state in LIVE


MAX_EARLY_BYTES = 64 << 20
MESSAGE_BYTES = 1 << 10  # what a message counts in addition to its buffers


class EarlyChunks:
    """Messages by request, bounded in bytes and, by the owner's tick, in time (`seconds`)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[str, list[tuple[float, Envelope[IntoStage]]]] = {}
        self._budget = Budget(MAX_EARLY_BYTES)

    def put(self, envelope: Envelope[IntoStage], now: float) -> bool:
        """Keep a message; false if too much is kept already."""
        if not self._budget.fits(_size(envelope)):
            return False
        self._keep(now, envelope)
        return True

    def take(self, request_id: str) -> list[Envelope[IntoStage]]:
        """Remove and return all messages about a request, in order."""
        return [envelope for _, envelope in self._take(request_id)]

    def drop(self, request_id: str, attempt: int) -> None:
        """Discard messages for attempts up to this one; those for a later attempt stay."""
        for moment, envelope in self._take(request_id):
            if envelope.header.attempt > attempt:
                self._keep(moment, envelope)

    def overdue(self, now: float) -> list[Header]:
        """Return the first message's header of each request whose announcement did not come in time."""
        return [waiting[0][1].header for waiting in self._waiting.values() if waiting[0][0] + self._seconds <= now]

    def counts(self) -> dict[str, int]:
        """Requests with early chunks, and the bytes of those."""
        return {"early_requests": len(self._waiting), "early_chunk_bytes": self._budget.used}

    def _keep(self, moment: float, envelope: Envelope[IntoStage]) -> None:
        self._waiting.setdefault(envelope.header.request_id, []).append((moment, envelope))
        self._budget.take(envelope.header.request_id, _size(envelope))

    def _take(self, request_id: str) -> list[tuple[float, Envelope[IntoStage]]]:
        self._budget.release(request_id)
        return self._waiting.pop(request_id, [])


def _size(envelope: Envelope[IntoStage]) -> int:
    return MESSAGE_BYTES + wire_size(envelope.buffers)
