"""Watches connections: bounds on what strangers' may cost, and why one does not come up.

A peer that refuses our key ends the attempt for good: libzmq does not try again. A peer that cannot read our handshake
(other keys, or not a pipeline at all) hangs up, and libzmq tries forever.

libzmq accepts connections until no file descriptor is left, keeps handshakes of any size up to MAXMSGSIZE, and keeps
the frames of an unfinished message without a bound on their sum. A socket's monitor tells the descriptors of accepted
connections, and the kernel how much each has received: from these the guard finds those to close.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import socket as kernel
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import zmq
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from omni_actors.errors import OmniError, Unauthorized
from omni_actors.host.processes import raise_file_limit
from omni_actors.logs import get_logger
from omni_actors.transport.curve import MAKE_KEYS, Keys

logger = get_logger(__name__)

HANG_UPS = 3  # this many in a row,
HANG_UP_SECONDS = 2.0  # over at least this time, are more than a peer that is just shutting down
HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class HandshakeMonitor:
    """Monitors a socket from before it connects: a refusal may be the only event, a millisecond later.

    Belongs to the socket's thread; close it before the socket. `socket` is readable when there are events.

    Attributes:
        final: the socket will never connect.
        connected: there is an established connection.
        disconnected: one was lost. Its reader may reset it.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, keys: Keys | None) -> None:
        self._monitored = socket
        self._endpoint = endpoint
        self._keys = keys
        self._hang_ups = 0
        self._first_hang_up = 0.0
        self._refusal: tuple[str, str] | None = None
        self.connected = self.final = self.disconnected = False
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(HANDSHAKE_EVENTS)
        self.socket.setsockopt(zmq.LINGER, 0)

    @property
    def refusal(self) -> OmniError | None:
        """Why nothing gets through, as a new error each time; `None` while it may still connect."""
        return Unauthorized(self._refusal[0], hint=self._refusal[1]) if self._refusal is not None else None

    def take(self) -> OmniError | None:
        """Read the events that have arrived and return why the peer cannot be reached, if that is certain."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return self.refusal
            self.on(frames)

    def on(self, frames: Sequence[bytes]) -> None:
        """Take note of one message read from `socket`."""
        self.note(int(parse_monitor_message(list(frames))["event"]), time.monotonic())

    def note(self, event: int, now: float) -> None:
        """Take note of an event, and conclude whether the connection is refused or lost."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._hang_ups, self._refusal, self.connected = 0, None, True
        elif event == zmq.EVENT_DISCONNECTED:  # also follows a failed handshake
            self.disconnected = self.disconnected or self.connected
            self.connected = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refuse("does not allow this key", "Ask its operator whether the key was revoked.", final=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and self._keys is None:
            self._refuse("asks for keys, and none were given", "Give the folder of keys for it.", final=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            hint = f"Connect without keys; or start it with keys. {MAKE_KEYS}."
            self._refuse("has no keys, and keys were given here", hint, final=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._first_hang_up = self._first_hang_up if self._hang_ups else now
            self._hang_ups += 1
            if self._hang_ups >= HANG_UPS and now - self._first_hang_up >= HANG_UP_SECONDS:
                self._refuse_by_hang_ups()

    def _refuse_by_hang_ups(self) -> None:
        """Name the likely reasons: the peer gave none, or it was lost with the connection."""
        if self._keys is None:
            reason, hint = "it asks for keys, and none were given", "Give the folder of keys for it"
        else:
            reason, hint = "it has other keys", f"Compare cluster.key in {self._keys.folder} with its own"
        hint += ", and check that the endpoint is right."
        self._refuse(f"hangs up during the handshake: {reason}, or it is not a pipeline", hint, final=False)

    def _refuse(self, what: str, hint: str, final: bool) -> None:
        self._refusal = (f"The peer at {self._endpoint} {what}.", hint)
        self.final = final

    def close(self) -> None:
        """Stop monitoring. The monitored socket stays open."""
        if not self._monitored.closed:
            self._monitored.disable_monitor()
        self.socket.close()


CONNECTIONS = 4096  # at most, of all endpoints of a process
RESERVED_FILES = 256  # for everything else in the process
HANDSHAKE_BYTES = 16 << 10  # that a peer may send before its key is accepted; libzmq's own handshake has 600
UNFINISHED = 4  # messages of the largest size that all connections together may have sent without completing them
TICK_SECONDS = 0.1
# What CURVE's server sends before it has accepted the peer's key: its greeting and WELCOME (ZeroMQ RFC 26).
SENT_BEFORE_ACCEPTED = 64 + 170
CONNECTION_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
SO_COOKIE = 57  # identifies a connection for as long as the system runs, where a descriptor is used again
TCP_INFO_BYTES = struct.Struct("=120xQQ")  # of `struct tcp_info`: bytes that the peer acknowledged, bytes received


class GuardedConnection(Struct):
    """An accepted connection.

    Attributes:
        descriptor: libzmq's, which may be that of another connection by now.
        cookie: the kernel's name of it.
        watched: unfinished messages are limited as well.
        accepted: its handshake has succeeded, as far as can be known.
        counted: bytes that it had sent when it last completed a message.
    """

    descriptor: int
    cookie: int
    watched: bool
    accepted: bool = False
    counted: int = 0


@dataclass(eq=False)
class Connections:
    """Decides which connections to close, and forgets those. Pure: the kernel's counters are arguments.

    Args:
        limit: connections at a time.
        message_bytes: largest message, -1 for any.
        encrypted: they use keys, so that what was sent to one tells whether its key was accepted.
    """

    limit: int
    message_bytes: int
    encrypted: bool
    open: dict[int, GuardedConnection] = field(default_factory=dict)  # by descriptor, the oldest first

    def add(self, connection: GuardedConnection) -> tuple[GuardedConnection, str] | None:
        """Take note of a new connection and return which one has to make room, if any, and why."""
        self.open.pop(connection.descriptor, None)  # its end was not seen
        self.open[connection.descriptor] = connection
        if len(self.open) <= self.limit:
            return None
        leaving = next((other for other in self.open.values() if not other.accepted), connection)
        return self.open.pop(leaving.descriptor), f"all {self.limit} connections are in use"

    def heard(self, descriptor: int, received: int) -> None:
        """Take note that a connection has completed a message; `received` are its bytes until now."""
        if (connection := self.open.get(descriptor)) is not None:
            connection.accepted = True
            connection.counted = received

    def to_close(self, counters: Mapping[int, tuple[int, int]]) -> Iterator[tuple[GuardedConnection, str]]:
        """Yield the connections that have sent too much, and why.

        Args:
            counters: bytes sent to a connection and received of it until now, by descriptor.
        """
        unfinished: dict[int, int] = {}
        for descriptor, (sent, received) in counters.items():
            connection = self.open[descriptor]
            if self.encrypted and sent > SENT_BEFORE_ACCEPTED:
                connection.accepted = True
            if self.encrypted and not connection.accepted and received > HANDSHAKE_BYTES:
                yield self.open.pop(descriptor), f"it sent {received} bytes before it showed its key"
            elif connection.watched and self.message_bytes >= 0:
                unfinished[descriptor] = received - connection.counted
        total = sum(unfinished.values())
        for descriptor, size in sorted(unfinished.items(), key=lambda item: -item[1]):
            # Encryption and framing add a little to what the codec counts.
            if size <= self.message_bytes + (self.message_bytes >> 4) and total <= UNFINISHED * self.message_bytes:
                return
            total -= size
            yield self.open.pop(descriptor), f"it sent {size} bytes without completing a message"


class ConnectionGuard(threading.Thread):
    """Closes connections to the bound TCP endpoints of one context, for as long as it exists; see `Connections`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], message_bytes: int, encrypted: bool) -> None:
        super().__init__(name="connection guard", daemon=True)
        # As that of the authenticator: destroying the context must not close sockets that this thread uses.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._connections = Connections(min(CONNECTIONS, raise_file_limit(RESERVED_FILES)), message_bytes, encrypted)
        self._monitors: dict[zmq.Socket[bytes], bool] = {}  # and whether what it accepts is watched
        self._new: collections.deque[tuple[zmq.Socket[bytes], bool]] = collections.deque()
        self._numbers = itertools.count()
        self._heard: dict[int, None] = {}

    def watch(self, socket: zmq.Socket[bytes], watched: bool) -> None:
        """Start monitoring a socket that is about to be bound, in the socket's thread.

        Args:
            watched: every message that is read from it will be reported with `heard`.
        """
        address = f"inproc://connection-guard-{next(self._numbers)}"
        socket.monitor(address, CONNECTION_EVENTS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(address)
        self._new.append((monitor, watched))

    def heard(self, descriptor: int) -> None:
        """Report that a message of a connection was read. Thread-safe."""
        self._heard[descriptor] = None

    def run(self) -> None:
        """Guard until the context ends. Called by `Thread.start`."""
        end = self._context.socket(zmq.PAIR)  # without peers: the poll ends with the context, also without monitors
        poller = zmq.Poller()
        poller.register(end, zmq.POLLIN)
        next_look = 0.0
        try:
            while True:
                while self._new:
                    monitor, watched = self._new.popleft()
                    self._monitors[monitor] = watched
                    poller.register(monitor, zmq.POLLIN)
                for monitor, _ in poller.poll(int(1000 * TICK_SECONDS)):
                    if not self._read(monitor):
                        poller.unregister(monitor)
                        del self._monitors[monitor]
                        monitor.close()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + TICK_SECONDS
                    self._look()
        except zmq.ContextTerminated:
            pass  # the intended end
        finally:
            for socket in (end, *self._monitors, *(monitor for monitor, _ in self._new)):
                socket.close()

    def _read(self, monitor: zmq.Socket[bytes]) -> bool:
        """Take note of what a monitor reports. False: its socket was closed.

        All events must be read: once a thousand are queued, libzmq waits.
        """
        while True:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return True
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return False
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._connections.open.pop(descriptor, None)
            elif (cookie := _cookie(descriptor, bytes(event["endpoint"]))) is not None:
                leaving = self._connections.add(GuardedConnection(descriptor, cookie, self._monitors[monitor]))
                if leaving is not None:
                    self._close(*leaving)

    def _look(self) -> None:
        """Read the counters of all connections and close those that have sent too much."""
        counters: dict[int, tuple[int, int]] = {}
        for descriptor, connection in list(self._connections.open.items()):
            if connection.accepted and not connection.watched:
                continue
            found = _counters(descriptor, connection.cookie)
            if found is None:
                del self._connections.open[descriptor]
            else:
                counters[descriptor] = found
        while self._heard:
            descriptor, _ = self._heard.popitem()
            if descriptor in counters:
                self._connections.heard(descriptor, counters[descriptor][1])
        for connection, why in self._connections.to_close(counters):
            self._close(connection, why)

    def _close(self, connection: GuardedConnection, why: str) -> None:
        """End a connection as if its peer had; libzmq then closes the descriptor."""
        with _borrowed(connection.descriptor) as socket:
            if socket is None or _cookie_of(socket) != connection.cookie:
                return
            peer = socket.getpeername()[0]
            socket.shutdown(kernel.SHUT_RDWR)
        logger.warning("closed a connection of %s: %s", peer, why)


# ---------------------------------------------------------------------------------------------------------------------
# What the kernel knows. libzmq may close a descriptor at any time, and the process may use its number again.


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[kernel.socket | None]:
    """A socket for libzmq's descriptor, which stays open; `None` if it is closed by now."""
    try:
        borrowed = kernel.socket(fileno=descriptor)
    except OSError:
        yield None
        return
    try:
        yield borrowed
    except OSError:
        pass  # it was closed meanwhile
    finally:
        borrowed.detach()


def _cookie_of(connection: kernel.socket) -> int:
    return int.from_bytes(connection.getsockopt(kernel.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)


def _cookie(descriptor: int, endpoint: bytes) -> int | None:
    """The cookie of a connection that was accepted at `endpoint`; `None` if it is local, or gone by now."""
    with _borrowed(descriptor) as connection:
        if connection is not None and endpoint.endswith(b":%d" % _port(connection)):
            return _cookie_of(connection)
    return None


def _port(connection: kernel.socket) -> int:
    inet = connection.family in (kernel.AF_INET, kernel.AF_INET6)
    return int(connection.getsockname()[1]) if inet else -1


def _counters(descriptor: int, cookie: int) -> tuple[int, int] | None:
    """The bytes sent to a connection and received of it so far; `None` if it is gone by now."""
    with _borrowed(descriptor) as connection:
        if connection is not None and _cookie_of(connection) == cookie:
            sent, received = TCP_INFO_BYTES.unpack(
                connection.getsockopt(kernel.IPPROTO_TCP, kernel.TCP_INFO, TCP_INFO_BYTES.size)
            )
            return sent, received
    return None
