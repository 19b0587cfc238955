"""Input that comes before the request is announced: chunks and announcements travel over different sockets."""

from __future__ import annotations

from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.header import Header
from omni_actors.protocol.stage import IntoStage

PARKED_BYTES = 64 << 20
PARKED_OVERHEAD = 1 << 10  # what a parked message counts beside its buffers


class EarlyChunks:
    """Messages by request, bounded in bytes and, by the owner's tick, in time (`seconds`)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._parked: dict[str, list[tuple[float, Envelope[IntoStage]]]] = {}
        self._bytes = 0

    def put(self, envelope: Envelope[IntoStage], now: float) -> bool:
        """Keep a message; false if too much is parked."""
        if self._bytes + _size(envelope) > PARKED_BYTES:
            return False
        self._keep(now, envelope)
        return True

    def take(self, request_id: str) -> list[Envelope[IntoStage]]:
        """All messages about a request, in order."""
        return [envelope for _, envelope in self._take(request_id)]

    def drop(self, request_id: str, attempt: int) -> None:
        """Attempts up to this one are over; what has come for a later one stays."""
        for moment, envelope in self._take(request_id):
            if envelope.header.attempt > attempt:
                self._keep(moment, envelope)

    def overdue(self, now: float) -> list[Header]:
        """The first message of each request whose announcement did not come in time."""
        return [parked[0][1].header for parked in self._parked.values() if parked[0][0] + self._seconds <= now]

    def counts(self) -> dict[str, int]:
        return {"parked": len(self._parked), "parked_bytes": self._bytes}

    def _keep(self, moment: float, envelope: Envelope[IntoStage]) -> None:
        self._parked.setdefault(envelope.header.request_id, []).append((moment, envelope))
        self._bytes += _size(envelope)

    def _take(self, request_id: str) -> list[tuple[float, Envelope[IntoStage]]]:
        parked = self._parked.pop(request_id, [])
        self._bytes -= sum(_size(envelope) for _, envelope in parked)
        return parked


def _size(envelope: Envelope[IntoStage]) -> int:
    return PARKED_OVERHEAD + sum(memoryview(buffer).nbytes for buffer in envelope.buffers)
