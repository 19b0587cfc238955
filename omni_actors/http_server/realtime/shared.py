"""What all sessions of a server share: their number, threads that look for speech, the bound on bytes, metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from omni_actors.coordinator.core.slots import reserved
from omni_actors.host.processes import give_back_memory
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.turns import LAG_SECONDS, available
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.shares import BodyBytes, Reservation
from omni_actors.telemetry.meters import Meters
from omni_actors.telemetry.metric_table import REALTIME_SESSIONS

DETECTOR_THREADS = 2
LAG_RETRY_SECONDS = 2.0  # for which no session begins after turns were found too late


class Realtime:
    """One per server."""

    def __init__(self, settings: ServerSettings, bodies: BodyBytes) -> None:
        self.settings = settings
        self.meters = Meters()
        self.detects = available()
        self.threads = ThreadPoolExecutor(DETECTOR_THREADS, "voice activity")
        self._bodies = bodies
        self._sessions: Counter[str] = Counter()  # by tenant
        self._lagged = 0.0  # until when no session begins (monotonic clock)
        self.meters.set(REALTIME_SESSIONS, to=0)

    @contextmanager
    def session(self, tenant: str) -> Iterator[Reservation]:
        """Take a place for a session, and account for the bytes it holds.

        As with slots, the last sixteenth of the places is kept for clients that have none (docs/decisions.md).

        Raises:
            HttpError: 429 if the client can have no place, or if turns are found too late as it is.
        """
        places, own = self.settings.realtime_sessions, self._sessions[tenant]
        free = places - self._sessions.total()
        if free <= (reserved(places) if own else 0):
            whose = f"{own} are yours, and the last {free} are kept for other clients" if free else "all are in use"
            message = f"This server has {places} realtime sessions: {whose}. Try again."
            raise HttpError(429, message, code="overloaded")
        if (seconds := self._lagged - time.monotonic()) > 0:
            message = f"The server finds the turns of its sessions over {LAG_SECONDS:g} s too late: try again."
            raise HttpError(429, message, code="overloaded", retry_after=seconds)
        reservation = Reservation(self._bodies)
        self._count(tenant, 1)
        try:
            yield reservation
        finally:
            self._count(tenant, -1)
            reservation.release()
            give_back_memory()  # a model and messages in pieces that the allocator would keep for the next session

    def lags(self) -> None:
        """Refuse sessions for a while: turns are found too late."""
        self._lagged = time.monotonic() + LAG_RETRY_SECONDS

    def _count(self, tenant: str, change: int) -> None:
        self._sessions[tenant] += change
        self._sessions = +self._sessions  # without those that have none
        self.meters.set(REALTIME_SESSIONS, to=self._sessions.total())

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)
