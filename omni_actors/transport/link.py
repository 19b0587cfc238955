"""A link: one PUSH to one replica's inbox, with a bounded outbox so that its owner never blocks.

`send` hands a message to zmq or, while the peer is slow or has granted no credit, keeps it; `flush` tries again. A link
whose socket took nothing for `stall_seconds` is broken: the peer is stuck or gone, and its owner gives the messages up.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from omni_actors.protocol.codec import Frame
from omni_actors.transport.credit import EdgeMetrics, Traffic, Window, wire_size
from omni_actors.transport.sockets import ZERO_COPY_BYTES, Socket, descriptor, try_send

STALL_SECONDS = 5.0
OUTBOX_BYTES = 256 << 20
OUTBOX_MESSAGES = 10_000


class Waiting(NamedTuple):
    request_id: str
    frames: Sequence[Frame]
    size: int


class Link:
    """Not thread-safe: it belongs to one thread, or to those that hold one lock.

    A ROUTER's peer has a link too, if every message begins with the peer's identity; its methods raise `PeerGone`.

    Args:
        window: the edge's credit; without it nothing but the socket holds messages up.
        needs_credit: whether a peer that grants nothing for `stall_seconds` counts as broken, too.
        traffic: counts what leaves.
    """

    def __init__(
        self,
        socket: Socket,
        clock: Callable[[], float],
        stall_seconds: float = STALL_SECONDS,
        window: Window | None = None,
        needs_credit: bool = False,
        outbox_messages: int = OUTBOX_MESSAGES,
        outbox_bytes: int = OUTBOX_BYTES,
        traffic: Traffic | None = None,
    ) -> None:
        self.traffic = traffic or Traffic()
        self.socket = socket
        self.window = window
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._needs_credit = needs_credit
        self._outbox_messages = outbox_messages
        self._outbox_bytes = outbox_bytes
        self.moved = clock()  # when a message left, or began to wait behind none
        self._outbox: collections.deque[Waiting] = collections.deque()
        self._urgent: collections.deque[Waiting] = collections.deque()
        self.backlog_bytes = 0
        self.refused = False  # the socket took no more when it was last tried

    @property
    def backlog(self) -> int:
        """Messages that wait for the peer."""
        return len(self._outbox) + len(self._urgent)

    @property
    def settled(self) -> bool:
        """Whether the peer has taken all that was sent: an account like a new one."""
        return not self.backlog and (self.window is None or not self.window.messages_out)

    @property
    def congested(self) -> bool:
        """Whether a message sent now would wait."""
        return bool(self._outbox) or (self.window is not None and self.window.exhausted)

    def send(self, request_id: str, frames: Sequence[Frame], size: int | None = None) -> bool:
        """Send or keep a message, in order. False if the outbox is full: the message was not taken.

        `size` is what the peer will count for it, if that is not all of the frames.
        """
        size = wire_size(frames) if size is None else size
        if not self.backlog:
            self.moved = self._clock()
            if self._try_charged(frames, size):
                return True
        full = len(self._outbox) >= self._outbox_messages or self.backlog_bytes + size > self._outbox_bytes
        if full and self._outbox:  # a single message may be larger than the bound: its limit is the codec's
            return False
        self._outbox.append(Waiting(request_id, frames, size))
        self.backlog_bytes += size
        return True

    def send_urgent(self, request_id: str, frames: Sequence[Frame]) -> None:
        """Send or keep a small message that needs no credit and may overtake: credit itself, and aborts.

        If credit had to wait for credit, two stages could wait for each other for ever.
        """
        size = wire_size(frames)
        if self._urgent or not self._try(frames, size):
            if not self.backlog:
                self.moved = self._clock()
            self._urgent.append(Waiting(request_id, frames, size))
            self.backlog_bytes += size
        elif self._outbox:  # the socket takes messages again, and to try it used up the sign of that
            self.flush()

    def flush(self) -> None:
        """Send what the peer takes now."""
        while self._urgent and self._try(self._urgent[0].frames, self._urgent[0].size):
            self._sent(self._urgent.popleft())
        if self._urgent:
            return
        while self._outbox and self._try_charged(self._outbox[0].frames, self._outbox[0].size):
            self._sent(self._outbox.popleft())

    def granted(self, messages: int, size: int) -> None:
        """The peer has taken this much: more may be sent, and is."""
        if self.window is not None:
            self.window.granted(messages, size)
        self.flush()

    def forget(self, request_id: str) -> None:
        """Messages about a request that has ended need not be sent."""
        if any(waiting.request_id == request_id for waiting in self._outbox):
            kept = [waiting for waiting in self._outbox if waiting.request_id != request_id]
            self.backlog_bytes += sum(waiting.size for waiting in kept) - sum(item.size for item in self._outbox)
            self._outbox = collections.deque(kept)

    @property
    def descriptor(self) -> int:
        """Readable when the socket's state has changed; then call `wake`."""
        return descriptor(self.socket)

    def wake(self) -> None:
        """Take notice of what happened to the socket (which makes the descriptor quiet again), then `flush`."""
        self.socket.getsockopt(zmq.EVENTS)
        self.flush()

    def stalled(self) -> bool:
        """Whether the peer has taken nothing for too long. To be slow with credit is no stall between stages."""
        waits = bool(self.backlog) and (self.refused or self._needs_credit)
        return waits and self.moved + self._stall_seconds < self._clock()

    def give_up(self) -> list[str]:
        """Empty the outbox; the ids of the requests whose messages are lost, each once."""
        lost = list(dict.fromkeys(waiting.request_id for waiting in self._outbox))
        self._outbox.clear()
        self._urgent.clear()
        self.backlog_bytes = 0
        return lost

    def figures(self) -> EdgeMetrics:
        """For metrics. From any thread."""
        left, out, size = 0, 0, 0
        if self.window is not None:
            left, out, size = self.window.messages_left, self.window.messages_out, self.window.bytes_out
        return self.traffic.figures()._replace(
            open=True, messages_out=out, bytes_out=size, credit=left, waiting=self.backlog
        )

    def close(self) -> None:
        self.socket.close()

    def _sent(self, waiting: Waiting) -> None:
        self.backlog_bytes -= waiting.size
        self.moved = self._clock()

    def _try_charged(self, frames: Sequence[Frame], size: int) -> bool:
        if self.window is not None and not self.window.admits(size):
            self.refused = False
            return False
        if not self._try(frames, size):
            return False
        if self.window is not None:
            self.window.sent(size)
        return True

    def _try(self, frames: Sequence[Frame], size: int) -> bool:
        large = size >= ZERO_COPY_BYTES and any(memoryview(frame).nbytes >= ZERO_COPY_BYTES for frame in frames)
        self.refused = not try_send(self.socket, frames, copy=not large)
        if not self.refused:
            self.traffic.messages += 1
            self.traffic.bytes += size
        return not self.refused
