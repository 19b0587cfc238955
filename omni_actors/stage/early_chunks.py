"""Chunks that come before their request is announced: chunks and announcements travel over different sockets."""

from __future__ import annotations

from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.header import Header
from omni_actors.protocol.stage import IntoStage

MAX_BYTES = 64 << 20
MESSAGE_BYTES = 1 << 10  # what a message counts in addition to its buffers


class EarlyChunks:
    """Messages by request, bounded in bytes and, by the owner's tick, in time (`seconds`)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[str, list[tuple[float, Envelope[IntoStage]]]] = {}
        self._bytes = 0

    def put(self, envelope: Envelope[IntoStage], now: float) -> bool:
        """Keep a message; false if too much is kept already."""
        if self._bytes + _size(envelope) > MAX_BYTES:
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
