"""Events on their way to the client, in order, and the bounds on those that wait for a client that does not read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from omni_actors.http_server.realtime.server_events import ServerEvent

ANSWER_BYTES = 64 << 10  # that may wait before no more of an answer is taken: a second of sound
EVENT_BYTES = 4 << 20  # that may wait before no more events of the client are taken


class Outbox:
    """A queue with one writer, so that nothing that a session decides has to wait for the network.

    Args:
        send: sends a text to the client, and waits while it does not read.
        write_timeout: seconds for which a client may leave an event unread.
    """

    def __init__(self, send: Callable[[str], Awaitable[None]], write_timeout: float) -> None:
        self._send = send
        self._write_timeout = write_timeout
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()

    def put(self, event: ServerEvent) -> None:
        """Append an event."""
        data = msgspec.json.encode(event)
        self._waiting.append(data)
        self._bytes += len(data)
        self._filled.set()

    async def room(self, limit: int) -> None:
        """Wait until at most `limit` bytes wait. The deadline is that of the writer, which ends the session."""
        while self._bytes > limit:
            self._drained.clear()
            await self._drained.wait()

    async def write(self) -> None:
        """Send events for as long as the session lasts. Raises `TimeoutError` if the client does not read them."""
        while True:
            await self.flush()
            self._filled.clear()
            await self._filled.wait()

    async def flush(self) -> None:
        """Send what waits; while `write` runs, only that may call it. Raises `TimeoutError`."""
        while self._waiting:
            async with asyncio.timeout(self._write_timeout):
                await self._send(self._waiting[0].decode())
            self._bytes -= len(self._waiting.popleft())
            self._drained.set()
