"""A link: one PUSH to one replica's inbox, with a bounded outbox so that its owner never blocks.

`send` hands a message to zmq or, while the peer is slow, keeps it; `flush` tries again. A link whose oldest message
waits longer than `STALL_SECONDS` is broken: the peer is stuck or gone, and its owner has to give the messages up.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from omni_actors.codec import Frame

STALL_SECONDS = 5.0
OUTBOX_BYTES = 256 << 20
OUTBOX_MESSAGES = 10_000
ZERO_COPY_BYTES = 64 << 10  # below this a copy is cheaper than tracking the buffer


class Waiting(NamedTuple):
    request_id: str
    frames: Sequence[Frame]
    size: int
    since: float


class Link:
    """Not thread-safe: it belongs to the thread that made the socket."""

    def __init__(self, socket: zmq.Socket[bytes], clock: Callable[[], float]) -> None:
        self.socket = socket
        self._clock = clock
        self._outbox: collections.deque[Waiting] = collections.deque()
        self._bytes = 0

    @property
    def backlog(self) -> int:
        """Messages that wait for the peer."""
        return len(self._outbox)

    def send(self, request_id: str, frames: Sequence[Frame]) -> bool:
        """Send or keep a message, in order. False if the outbox is full: the message was not taken."""
        if not self._outbox and self._try(frames):
            return True
        size = sum(memoryview(frame).nbytes for frame in frames)
        if len(self._outbox) >= OUTBOX_MESSAGES or self._bytes + size > OUTBOX_BYTES:
            return False
        self._outbox.append(Waiting(request_id, frames, size, self._clock()))
        self._bytes += size
        return True

    def flush(self) -> None:
        """Send what the peer takes now."""
        while self._outbox and self._try(self._outbox[0].frames):
            self._bytes -= self._outbox.popleft().size

    def stalled(self) -> bool:
        """Whether the peer has taken nothing for too long."""
        return bool(self._outbox) and self._outbox[0].since + STALL_SECONDS < self._clock()

    def give_up(self) -> list[str]:
        """Empty the outbox; the ids of the requests whose messages are lost, each once."""
        lost = list(dict.fromkeys(waiting.request_id for waiting in self._outbox))
        self._outbox.clear()
        self._bytes = 0
        return lost

    def close(self) -> None:
        self.socket.close()

    def _try(self, frames: Sequence[Frame]) -> bool:
        large = any(memoryview(frame).nbytes >= ZERO_COPY_BYTES for frame in frames)
        try:
            self.socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=not large)
        except zmq.Again:
            return False
        return True
