"""What all sessions of a server share: their number, threads that look for speech, the bound on bytes, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.voice_activity import available
from omni_actors.http_server.reservations import BodyBytes, Reservation
from omni_actors.http_server.settings import ServerSettings
from omni_actors.telemetry.meters import Meters
from omni_actors.telemetry.metric_table import REALTIME_SESSIONS

DETECTOR_THREADS = 2


class Realtime:
    """One per server."""

    def __init__(self, settings: ServerSettings, bodies: BodyBytes) -> None:
        self.settings = settings
        self.meters = Meters()
        self.detects = available()
        self.threads = ThreadPoolExecutor(DETECTOR_THREADS, "voice activity")
        self._bodies = bodies
        self._sessions = 0
        self.meters.set(REALTIME_SESSIONS, to=0)

    @contextmanager
    def session(self) -> Iterator[Reservation]:
        """Take a place for a session, and account for the bytes it holds. Raises `HttpError` 429 if all are taken."""
        if self._sessions >= self.settings.realtime_sessions:
            message = f"All {self.settings.realtime_sessions} realtime sessions of this server are in use: try again."
            raise HttpError(429, message, code="overloaded")
        reservation = Reservation(self._bodies)
        self._count(1)
        try:
            yield reservation
        finally:
            self._count(-1)
            reservation.release()

    def _count(self, change: int) -> None:
        self._sessions += change
        self.meters.set(REALTIME_SESSIONS, to=self._sessions)

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)
