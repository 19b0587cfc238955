"""What requests have to share: bytes in memory, the pipeline's slots, and turns of the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import secrets
from contextvars import ContextVar

from omni_actors.http_server.errors import HttpError

IPV6_NETWORK = 64  # bits; who has one of its addresses usually has them all


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


class TenantNames:
    """Names of clients, among which slots are shared: told apart by address, which the pipeline does not learn."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def name(self, host: str) -> str:
        """Return 16 hexadecimal digits for the address of a connection, "" for none."""
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return ""
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or ipaddress.ip_network((address, IPV6_NETWORK), strict=False).network_address
        return hashlib.blake2b(address.packed, digest_size=8, key=self._secret).hexdigest()


class Turns:
    """Spreads work over turns of the event loop, so that other callbacks run in between.

    A step of a vocoder ends with sound for many answers. To encode all of it in one turn would hold up every text that
    arrives meanwhile.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self) -> None:
        """Wait for a turn of the loop in which no other caller works. Callers come in the order of their calls."""
        async with self._lock:
            await asyncio.sleep(0)
