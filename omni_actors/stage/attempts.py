"""Attempts at requests in one stage, and their states as a table: a transition that is not in it cannot happen.

A request that runs again comes with the next attempt number. A stage has at most one attempt at a request at a time.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from omni_actors.errors import ProtocolError
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.header import Header, ReplicaId
from omni_actors.protocol.stage import IntoStage
from omni_actors.stage.engine_interface import StageRequest
from omni_actors.stage.meter import Track
from omni_actors.stage.processors import Action, StreamProcessor
from omni_actors.stage.resend_buffer import ResendBuffer
from omni_actors.transitions import advance


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


_LIVE = (AttemptState.OPEN, AttemptState.RUNNING, AttemptState.INPUT_COMPLETE)

ATTEMPT_TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (AttemptState.OPEN, AttemptEvent.STARTED): AttemptState.RUNNING,
    (AttemptState.RUNNING, AttemptEvent.INPUT_ENDED): AttemptState.INPUT_COMPLETE,
    **{(state, AttemptEvent.FINISHED): AttemptState.FINISHED for state in _LIVE},  # an open one had nothing to compute
    **{(state, AttemptEvent.ENDED): AttemptState.ENDED for state in (*_LIVE, AttemptState.FINISHED)},
}


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
            self._open.discard(source)


@dataclass
class Attempt:
    """One attempt at a request. `request` is what the engine knows; its id differs from attempt to attempt."""

    request_id: str
    request: StageRequest
    route: tuple[ReplicaId, ...]
    number: int
    deadline: float  # Unix time in seconds, like `opened` and `first_output`
    opened: float
    input_order: InputOrder
    processor: StreamProcessor | None
    track: Track
    output: ResendBuffer | None  # what later stages got; `None` if the route has none
    held: list[Action] | None = None  # what the engine gets when the attempt may begin; `None` once it may
    state: AttemptState = AttemptState.OPEN  # changed by `Attempts.advance` only
    first_output: float = 0.0
    streamed: int = 0  # characters, samples, pictures or latents that went to later stages
    stream_ended: bool = False  # later stages have got their final chunk
    results: int = 0  # messages sent to the coordinator

    @property
    def live(self) -> bool:
        """Whether this stage still has to finish it."""
        return self.state in _LIVE


class Attempts:
    """All attempts that have not ended, by request and by the engine's id, and how many are in each state."""

    def __init__(self) -> None:
        self._by_request: dict[str, Attempt] = {}
        self._by_engine_id: dict[str, Attempt] = {}  # the live ones
        self._in_state: collections.Counter[AttemptState] = collections.Counter()

    def open(self, attempt: Attempt) -> None:
        """Add an attempt. The one before it at the same request has ended."""
        self._by_request[attempt.request_id] = attempt
        self._by_engine_id[attempt.request.request_id] = attempt
        self._in_state[attempt.state] += 1

    def advance(self, attempt: Attempt, event: AttemptEvent) -> None:
        """Change the state of an attempt; raises `ProtocolError` for an event that has no place in it."""
        before, attempt.state = attempt.state, advance(ATTEMPT_TRANSITIONS, attempt.state, event)
        self._in_state[before] -= 1
        self._in_state[attempt.state] += 1
        if not attempt.live:
            self._by_engine_id.pop(attempt.request.request_id, None)
        if attempt.state is AttemptState.ENDED:
            del self._by_request[attempt.request_id]

    def of(self, request_id: str) -> Attempt | None:
        """The attempt at a request, live or finished."""
        return self._by_request.get(request_id)

    def live(self, request_id: str) -> Attempt | None:
        """The attempt at a request that this stage still has to finish."""
        attempt = self._by_request.get(request_id)
        return attempt if attempt is not None and attempt.live else None

    def of_engine(self, engine_id: str) -> Attempt | None:
        """The live attempt that the engine knows by this id."""
        return self._by_engine_id.get(engine_id)

    def all_live(self) -> Iterable[Attempt]:
        """Attempts that this stage still has to finish."""
        return self._by_engine_id.values()

    def count(self, state: AttemptState) -> int:
        """How many attempts are in a state."""
        return self._in_state[state]

    @property
    def live_count(self) -> int:
        """How many attempts this stage still has to finish."""
        return len(self._by_engine_id)

    def __iter__(self) -> Iterator[Attempt]:
        """All of them, live and finished. They may be ended meanwhile."""
        return iter(list(self._by_request.values()))


MAX_EARLY_BYTES = 64 << 20
MESSAGE_BYTES = 1 << 10  # what a message counts in addition to its buffers


class EarlyChunks:
    """Messages by request, bounded in bytes and, by the owner's tick, in time (`seconds`)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[str, list[tuple[float, Envelope[IntoStage]]]] = {}
        self._bytes = 0

    def put(self, envelope: Envelope[IntoStage], now: float) -> bool:
        """Keep a message; false if too much is kept already."""
        if self._bytes + _size(envelope) > MAX_EARLY_BYTES:
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
        return {"early_requests": len(self._waiting), "early_chunk_bytes": self._bytes}

    def _keep(self, moment: float, envelope: Envelope[IntoStage]) -> None:
        self._waiting.setdefault(envelope.header.request_id, []).append((moment, envelope))
        self._bytes += _size(envelope)

    def _take(self, request_id: str) -> list[tuple[float, Envelope[IntoStage]]]:
        waiting = self._waiting.pop(request_id, [])
        self._bytes -= sum(_size(envelope) for _, envelope in waiting)
        return waiting


def _size(envelope: Envelope[IntoStage]) -> int:
    return MESSAGE_BYTES + sum(memoryview(buffer).nbytes for buffer in envelope.buffers)
