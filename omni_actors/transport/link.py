"""A link: one PUSH to one replica's inbox, with a bounded outbox so that its owner never blocks.

`send` hands a message to zmq or, while the peer is slow, keeps it; `flush` tries again. A link that has messages but
could not send any for `STALL_SECONDS` is broken: the peer is stuck or gone, and its owner has to give them up.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from omni_actors.codec import Frame
from omni_actors.transport.sockets import Socket, try_send

STALL_SECONDS = 5.0
OUTBOX_BYTES = 256 << 20
OUTBOX_MESSAGES = 10_000
ZERO_COPY_BYTES = 64 << 10  # below this a copy is cheaper than tracking the buffer


class Waiting(NamedTuple):
    request_id: str
    frames: Sequence[Frame]
    size: int


class Link:
    """Not thread-safe: it belongs to the thread that made the socket.

    A ROUTER's peer has a link too, if every message begins with the peer's identity; its methods raise `PeerGone`.
    """

    def __init__(self, socket: Socket, clock: Callable[[], float], stall_seconds: float = STALL_SECONDS) -> None:
        self.socket = socket
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._moved = clock()  # when the outbox was last empty or got shorter
        self._outbox: collections.deque[Waiting] = collections.deque()
        self._bytes = 0

    @property
    def backlog(self) -> int:
        """Messages that wait for the peer."""
        return len(self._outbox)

    def send(self, request_id: str, frames: Sequence[Frame]) -> bool:
        """Send or keep a message, in order. False if the outbox is full: the message was not taken."""
        if not self._outbox:
            if self._try(frames):
                return True
            self._moved = self._clock()
        size = sum(memoryview(frame).nbytes for frame in frames)
        full = len(self._outbox) >= OUTBOX_MESSAGES or self._bytes + size > OUTBOX_BYTES
        if full and self._outbox:  # a single message may be larger than the bound: its limit is the codec's
            return False
        self._outbox.append(Waiting(request_id, frames, size))
        self._bytes += size
        return True

    def flush(self) -> None:
        """Send what the peer takes now."""
        while self._outbox and self._try(self._outbox[0].frames):
            self._bytes -= self._outbox.popleft().size
            self._moved = self._clock()

    @property
    def descriptor(self) -> int:
        """Readable when the socket's state has changed; then call `wake`."""
        return int(self.socket.getsockopt(zmq.FD))

    def wake(self) -> None:
        """Take notice of what happened to the socket (which makes the descriptor quiet again), then `flush`."""
        self.socket.getsockopt(zmq.EVENTS)
        self.flush()

    def stalled(self) -> bool:
        """Whether the peer has taken nothing for too long."""
        return bool(self._outbox) and self._moved + self._stall_seconds < self._clock()

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
        return try_send(self.socket, frames, copy=not large)
