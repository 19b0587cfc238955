"""A bound on the bytes that all requests hold together: bodies, and the media, files and turns that they refer to."""

from __future__ import annotations

from contextvars import ContextVar

from omni_actors.http_server.errors import HttpError


class BodyBytes:
    """Bytes of all requests that arrive or are handled."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Reservation:
    """What one request takes of them."""

    def __init__(self, bodies: BodyBytes) -> None:
        self._bodies = bodies
        self.size = 0

    def add(self, size: int) -> None:
        """Count a piece. Raises `HttpError` 503 if all requests together hold too many."""
        if self._bodies.used + size > self._bodies.limit:
            message = "The server holds too many bytes of other requests: try again."
            raise HttpError(503, message, code="overloaded")
        self.size += size
        self._bodies.used += size

    def settle(self, size: int) -> None:
        """Hold this much from now on, without a refusal: what exceeds the limit makes the next `add` fail."""
        self._bodies.used += size - self.size
        self.size = size

    def release(self) -> None:
        """Give all of it back. Idempotent."""
        self._bodies.used -= self.size
        self.size = 0


RESERVATION: ContextVar[Reservation] = ContextVar("reservation")  # of the request that this task handles


def reserve(size: int) -> None:
    """Count bytes for the request that this task handles, if it has a reservation. Raises as `Reservation.add`."""
    if (reservation := RESERVATION.get(None)) is not None:
        reservation.add(size)
