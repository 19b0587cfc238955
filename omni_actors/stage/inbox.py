"""Events for a stage's main thread, in order: checked messages from its socket, and what other threads report.

While the main thread has nothing to do, it waits at the socket itself and decodes what comes. While it computes, the
inbound thread does this instead, so that credit and aborts do not wait for the end of a step. A message wakes only one
of them: the main thread takes the socket out of the other's epoll set before it waits and puts it back afterwards
(docs/decisions.md).
"""

from __future__ import annotations

import collections
import select
import threading
from collections.abc import Callable, Sequence

from omni_actors.protocol.codec import Frame
from omni_actors.stage.events import Event
from omni_actors.transport.sockets import Socket, descriptor, drain
from omni_actors.transport.wakeup import Wakeup

LIMIT = 4096  # events that may wait for the engine; further messages wait in zmq and at the sender
BATCH = 64  # messages that are decoded under one hold of the lock


class Inbox:
    """A queue of events. The main thread calls `take`, any thread `put`, and the inbound thread the rest.

    The inbound thread waits on `epoll`.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._events: collections.deque[Event] = collections.deque()  # its methods are atomic
        self._wakeup = Wakeup()
        self._waiting = False  # the main thread is at the socket, or about to be
        self._lock = threading.Lock()  # around the socket; what was read is put under it, too, which keeps the order
        self._socket: Socket | None = None
        self._descriptor = -1
        self._decode: Callable[[Sequence[Frame]], Event | None] = lambda frames: None
        self._watched = False  # by the inbound thread
        self._full = False  # messages are left in the socket, and its descriptor does not signal them again
        self._poller = select.poll()  # the main thread's
        self._poller.register(self._wakeup.fileno(), select.POLLIN)
        self._polled = -1

    def __len__(self) -> int:
        """Events that wait for the main thread."""
        return len(self._events)

    def put(self, event: Event) -> None:
        """Add an event; callable from any thread."""
        self._events.append(event)
        if self._waiting:
            self._wakeup.set()

    def wake(self) -> None:
        """End the main thread's wait, or its next one; callable from any thread."""
        self._wakeup.set()

    def take(self, timeout: float, maximum: int = LIMIT) -> list[Event]:
        """Return the events that are there; if none are, those that come first within `timeout` seconds.

        Returns an empty list early after `wake`, or when only credit came: the caller may be able to go on.
        """
        if not self._events and timeout > 0:
            self._wait(timeout)
        taken = [self._events.popleft() for _ in range(min(len(self._events), maximum))]
        if self._full and len(self._events) < LIMIT:
            self._read()
        if not self._watched:
            self._watch(True)
        return taken

    def _wait(self, timeout: float) -> None:
        self._watch(False)
        self._waiting = True
        self._read()  # what was left there does not make the descriptor readable again
        if not self._events:
            if self._polled != self._descriptor:
                self._polled = self._descriptor
                self._poller.register(self._polled, select.POLLIN)
            for number, _ in self._poller.poll(1000 * timeout):
                if number == self._polled:
                    self._read()
                else:
                    self._wakeup.clear()
        self._waiting = False

    # -- the inbound thread's -----------------------------------------------------------------------------------------

    def open(self, socket: Socket, decode: Callable[[Sequence[Frame]], Event | None]) -> None:
        """Start reading. `decode` turns a message into an event or `None`; it is called under the lock."""
        with self._lock:
            self._socket, self._decode = socket, decode
            self._descriptor = descriptor(socket)
            self.epoll.register(self._descriptor, select.EPOLLIN)
            self._watched = True
            # The main thread may be waiting already: the inbound thread reads for it until it takes events again.

    def read(self) -> None:
        """Move messages from the socket to the events."""
        self._read()
        if self._events and self._waiting:
            self._wakeup.set()

    def _read(self) -> None:
        """Runs on either thread."""
        with self._lock:
            while self._socket is not None and len(self._events) < LIMIT:
                batch = drain(self._socket, BATCH)
                # Decoded before any is added: the main thread would contend for the interpreter otherwise.
                self._events.extend([event for frames in batch if (event := self._decode(frames)) is not None])
                if len(batch) < BATCH:
                    self._full = False
                    return
            self._full = self._socket is not None
        self._watch(False)  # until the main thread has taken some

    def paused(self) -> threading.Lock:
        """Return the lock; while it is held nothing is decoded."""
        return self._lock

    def close(self) -> None:
        """Close the socket; what has been read can still be taken."""
        with self._lock:
            if self._socket is not None:
                self.epoll.unregister(self._descriptor)
                self._socket.close()
                self._socket = None

    def _watch(self, on: bool) -> None:
        """Choose whether a message wakes the inbound thread."""
        if on is not self._watched:
            with self._lock:
                if self._socket is not None:
                    self._watched = on
                    self.epoll.modify(self._descriptor, select.EPOLLIN if on else 0)
