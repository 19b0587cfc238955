"""What a stage receives: messages of its inbox and of the coordinator, as events for the main thread.

While the main thread has nothing to do, it waits at the socket itself and decodes what comes. While it computes, the
inbound thread does this instead, so that credit and aborts do not wait for the end of a step. A message wakes only one
of them: the main thread takes the socket out of the other's epoll set before it waits and puts it back afterwards
(docs/decisions.md).
"""

from __future__ import annotations

import collections
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from omni_actors.errors import OmniError, ProtocolError
from omni_actors.logs import get_logger
from omni_actors.protocol.codec import BadBody, BadHeader, Decoder, Envelope, Frame, encode
from omni_actors.protocol.fields import Body, Header, Limits, ReplicaId, identity_of
from omni_actors.protocol.messages import (
    CoordinatorToStage,
    Credit,
    Heartbeat,
    Hello,
    IntoStage,
    Peers,
    Reregister,
    Snapshot,
    Welcome,
)
from omni_actors.transport.arena import ArenaReader
from omni_actors.transport.guard import HandshakeMonitor
from omni_actors.transport.link import Link, wire_size
from omni_actors.transport.sockets import Socket, Sockets, Wakeup, descriptor, drain, drop_queued

logger = get_logger(__name__)


class Received(Struct, frozen=True):
    """A checked message; `size` counts for the credit of its edge."""

    envelope: Envelope[IntoStage]
    size: int


class Rejected(Struct, frozen=True):
    """A message about a request that did not decode (`size` as above), or could not be sent (`size` 0)."""

    header: Header
    error: OmniError
    size: int = 0


class Undelivered(Struct, frozen=True):
    """A later stage takes no messages; at least one of this request is lost."""

    request_id: str
    receiver: ReplicaId
    error: OmniError


class Stop(Struct, frozen=True):
    """End the process: signal, launcher gone, or the thread itself failed (`failed`)."""

    reason: str
    failed: bool = False


class Lost(Struct, frozen=True):
    """The coordinator no longer knows this replica, or was lost too early: drop all requests and register again."""

    reason: str


class Detached(Struct, frozen=True):
    """The coordinator is gone; a hello to the next one is on its way. Until it welcomes us, all results are kept."""


Event = Received | Rejected | Undelivered | CoordinatorToStage | Stop | Lost | Detached


LIMIT = 4096  # events that may wait for the engine; further messages wait in zmq and at the sender
BATCH = 64  # messages that are decoded before any is added
BATCHES = 8  # that are read under one hold of the lock: of messages that do not decode there may be no end
TURN_SECONDS = 0.001  # for which the main thread leaves the lock to the inbound thread


class Inbox:
    """A queue of events. The main thread calls `take`, any thread `put`, and the inbound thread the rest.

    The inbound thread waits on `epoll`.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._events: collections.deque[Event] = collections.deque()  # its methods are atomic
        self._wakeup = Wakeup()
        self._waiting = False  # the main thread is at the socket, or about to be
        self._wanted = False  # the lock, by the inbound thread
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
            for number, _ in self._poller.poll(0 if self._full else 1000 * timeout):
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
        with self.paused():
            self._fill()
        if self._events and self._waiting:
            self._wakeup.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have nothing decoded meanwhile."""
        self._wanted = True
        with self._lock:
            self._wanted = False
            yield

    def _read(self) -> None:
        """Read on the main thread."""
        if self._wanted:  # the lock is not fair, and a thread that reads without end would have it back at once
            time.sleep(TURN_SECONDS)
        with self._lock:
            self._fill()

    def _fill(self) -> None:
        """Read from the socket; called under the lock."""
        for _ in range(BATCHES):
            if self._socket is None or len(self._events) >= LIMIT:
                break
            batch = drain(self._socket, BATCH)
            # Decoded before any is added: the main thread would contend for the interpreter otherwise.
            self._events.extend([event for frames in batch if (event := self._decode(frames)) is not None])
            if len(batch) < BATCH:
                self._full = False
                return
        self._full = self._socket is not None
        self._set_watched(False)  # until the main thread has taken some

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
                self._set_watched(on)

    def _set_watched(self, on: bool) -> None:
        if self._socket is not None:
            self._watched = on
            self.epoll.modify(self._descriptor, select.EPOLLIN if on else 0)


MAXIMUM_POLL_SECONDS = 0.1
ORPHAN_SECONDS = 3.0  # how long the main thread may take to end once the launcher is gone


@dataclass(eq=False, repr=False)
class Inbound(threading.Thread):
    """Feeds `inbox` from the control connection and, while the main thread computes, from the inbox's socket.

    Args:
        hello: makes the first message, given the endpoint to which the inbox is bound.
        arenas: those of the stages before; mapped as the coordinator announces them.
        on_credit: called at once, not through the inbox, because the main thread may be in a long step.
        on_orphaned: called before this thread ends a process whose launcher is gone and whose main thread hangs.
    """

    sockets: Sockets
    identity: ReplicaId
    control_endpoint: str
    inbox_endpoint: str
    hello: Callable[[str, str], Hello]
    inbox: Inbox
    limits: Limits
    heartbeat_interval: float
    launcher_pid: int
    on_orphaned: Callable[[], None]
    arenas: ArenaReader
    on_credit: Callable[[ReplicaId | None, Credit], None]
    remote_endpoint: str = ""

    def __post_init__(self) -> None:
        super().__init__(name="inbound", daemon=True)
        self._outbox: collections.deque[Body | None] = collections.deque()  # its methods are atomic
        self._wakeup = Wakeup()  # something is in the outbox
        self._decoder: Decoder[IntoStage] = Decoder(IntoStage, self.limits, self.arenas.open)
        self._control_decoder: Decoder[CoordinatorToStage] = Decoder(CoordinatorToStage, self.limits)
        self._orphaned_at = math.inf  # when the launcher was found gone
        self._received = 0  # messages that came to the inbox, of any kind
        self._welcomed = False
        # What the heartbeat reports of the engine loop: one thread assigns, another reads, so no lock is needed.
        self.progress = 0
        self.counts: dict[str, int] = {}
        self.serving = False  # the main thread serves requests, and outlives a lost coordinator

    def tell(self, body: Body) -> None:
        """Send `body` to the coordinator on the control connection. Callable from any thread."""
        self._outbox.append(body)
        self._wakeup.set()

    def finish(self) -> None:
        """Send what is queued, close the sockets and end the thread."""
        self._outbox.append(None)
        self._wakeup.set()

    def rejected_by_reason(self) -> dict[str, int]:
        """Messages at the inbox that did not decode, by reason. Callable from any thread."""
        return dict(self._decoder.rejected)

    def rejected(self) -> dict[str, int]:
        """Messages that were rejected, by reason, and all that were received."""
        return {f"rejected_{reason}": count for reason, count in self.rejected_by_reason().items()} | {
            "total_received": self._received
        }

    def run(self) -> None:
        """Serve the connections until the stage ends. A failure ends the process."""
        try:
            self._run()
        except Exception as error:
            # This thread must not end unnoticed: the main thread ends the process.
            logger.exception("the inbound thread failed")
            self.inbox.put(Stop(f"inbound thread: {type(error).__name__}: {error}", failed=True))

    def _run(self) -> None:
        launcher = -1
        try:
            launcher = os.pidfd_open(self.launcher_pid)
            self.inbox.epoll.register(launcher, select.EPOLLIN)
            self.inbox.epoll.register(self._wakeup.fileno(), select.EPOLLIN)
            socket, endpoint = self.sockets.pull(self.inbox_endpoint)
            remote = self.sockets.bind(socket, self.remote_endpoint) if self.remote_endpoint else ""
            self.inbox.open(socket, self._decode)
            hello = self.hello(endpoint, remote)
            while self._serve_connection(hello, launcher):
                hello = msgspec.structs.replace(hello, again=True)
                self._welcomed = False
                self.inbox.put(Detached())
        finally:
            if launcher >= 0:
                os.close(launcher)
            self.inbox.close()

    def _serve_connection(self, hello: Hello, launcher: int) -> bool:
        """Say hello over a new connection to the coordinator and serve it. True when the next coordinator is due.

        A new one each time: what is still queued in the old one must not follow. Nor may it connect once more to send
        that: it has the same identity, so what is for the new one would go there.
        """
        control, handshake = self.sockets.dealer(self.control_endpoint, identity_of(self.identity))
        epoll = self.inbox.epoll
        watched = (descriptor(control), descriptor(handshake.socket))
        try:
            for number in watched:
                epoll.register(number, select.EPOLLIN)
            link = Link(control, time.monotonic)
            self._send(link, hello)
            is_lost = self._loop(link, handshake, launcher, {launcher, self._wakeup.fileno(), *watched})
            if is_lost:
                drop_queued(control)
            return is_lost
        finally:
            for number in watched:
                epoll.unregister(number)
            handshake.close()
            control.close()

    def _loop(self, control: Link, handshake: HandshakeMonitor, launcher: int, others: Set[int]) -> bool:
        epoll = self.inbox.epoll
        next_beat = 0.0
        while True:
            ready = {number for number, _ in epoll.poll(MAXIMUM_POLL_SECONDS)}
            if ready - others:  # first, because the engine may be waiting for it
                self.inbox.read()
            if launcher in ready:
                self.inbox.put(Stop("the launcher is gone"))
                epoll.unregister(launcher)
                self._orphaned_at = time.monotonic()
            if time.monotonic() > self._orphaned_at + ORPHAN_SECONDS:
                self.on_orphaned()
                os._exit(1)  # the main thread loads or hangs, and an orphan must not keep its GPU memory
            control.flush()
            self._wakeup.clear()
            while self._outbox:
                if (body := self._outbox.popleft()) is None:
                    return False
                self._send(control, body)
            if self._welcomed and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self.heartbeat_interval
                if self._orphaned_at == math.inf:
                    self._restore_files()
                self._send(control, Heartbeat(self.progress, {**self.counts, **self.rejected()}))
            refusal = handshake.take()
            # Always, because sending may have consumed the descriptor's signal; and after the check of the connection,
            # because by the time it is lost all of the coordinator's last messages can be read, and they count.
            self._receive_control(control.socket)
            if self._is_lost(handshake, refusal):
                return True

    def _restore_files(self) -> None:
        with self.inbox.paused():  # the main thread may be reading from the socket
            restored = self.sockets.restore_files()
        for path in restored:
            logger.warning("%s was removed; bound it again", path)
            self.inbox.read()  # binding may have consumed the descriptor's signal

    def _is_lost(self, handshake: HandshakeMonitor, refusal: OmniError | None) -> bool:
        """Whether the coordinator that this connection led to is gone, and the stage goes on without it."""
        if refusal is not None and (handshake.final or not self._welcomed):
            self.inbox.put(Stop(str(refusal), failed=True))
        elif handshake.disconnected:
            handshake.disconnected = False
            if self.serving:
                return True
            self.inbox.put(Lost("the coordinator is not connected any more"))
        return False

    def _send(self, control: Link, body: Body) -> None:
        """Send to the coordinator; what it does not take now waits, but for heartbeats, which are out of date then."""
        if control.backlog and isinstance(body, Heartbeat):
            return
        try:
            frames = encode(Header.of(self.identity), body, limits=self.limits)
        except OmniError as error:
            if not isinstance(body, Snapshot):
                raise
            # `snapshot` leaves out timelines that do not fit, so the limit is too small for the metrics alone.
            # No request depends on them.
            logger.warning("metrics are not sent: %s", error)
            return
        if not control.send("", frames):
            raise ProtocolError(f"The coordinator takes no control messages; {control.backlog} wait for it.")

    def _receive_control(self, control: Socket) -> None:
        for frames in drain(control):
            try:
                body = self._control_decoder.decode(frames).body
            except (BadHeader, BadBody) as error:
                logger.error("dropped a control message: %s", error)
                continue
            if isinstance(body, Reregister):
                self.inbox.put(Lost("the coordinator does not know this replica"))
                continue
            if isinstance(body, Welcome):
                self._welcomed = True
            if isinstance(body, Peers):
                with self.inbox.paused():  # a message decoded meanwhile could find half of them mapped
                    self.arenas.attach({peer.replica_id: peer.arena for peer in body.sources})
            self.inbox.put(body)

    def _decode(self, frames: Sequence[Frame]) -> Event | None:
        """Turn a message into an event for the main thread; credit does not go there. Runs on either thread."""
        self._received += 1
        try:
            envelope = self._decoder.decode(frames)
        except BadHeader as error:
            logger.warning("dropped a message with a bad header: %s", error.reason)
            return None
        except BadBody as error:
            return Rejected(error.header, error.error, wire_size(frames))
        if isinstance(envelope.body, Credit):
            self.on_credit(envelope.header.sender, envelope.body)
            return None
        return Received(envelope, wire_size(frames))
