"""An attempt at a request in a stage: its states, the order of its input, and input that comes before it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from msgspec import Struct

from omni_actors.errors import ProtocolError
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.fields import Header, ReplicaId
from omni_actors.protocol.messages import IntoStage, StageTimeline
from omni_actors.sharing import Budget
from omni_actors.stage.engine_interface import StageRequest
from omni_actors.stage.processors import StreamProcessor
from omni_actors.stage.resend_buffer import ResendBuffer
from omni_actors.transport.link import wire_size


class AttemptState(enum.StrEnum):
    """Where an attempt is between its announcement and its end."""

    OPEN = "open"  # announced; the engine does not have it yet
    RUNNING = "running"  # in the engine, and more input will come
    INPUT_COMPLETE = "input_complete"  # in the engine, which has all of its input
    FINISHED = "finished"  # done here; its output is kept, because a later stage may have to start again
    ENDED = "ended"


class AttemptEvent(enum.StrEnum):
    """What can happen to an attempt."""

    STARTED = "started"
    INPUT_ENDED = "input_ended"
    FINISHED = "finished"
    ENDED = "ended"  # failed, aborted, replaced by the next attempt, or over in every stage


LIVE = (AttemptState.OPEN, AttemptState.RUNNING, AttemptState.INPUT_COMPLETE)

ATTEMPT_TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (AttemptState.OPEN, AttemptEvent.STARTED): AttemptState.RUNNING,
    (AttemptState.RUNNING, AttemptEvent.INPUT_ENDED): AttemptState.INPUT_COMPLETE,
    **{(state, AttemptEvent.FINISHED): AttemptState.FINISHED for state in LIVE},  # an open one had nothing to compute
    **{(state, AttemptEvent.ENDED): AttemptState.ENDED for state in (*LIVE, AttemptState.FINISHED)},
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
