"""The factory of all sockets, functions that send, receive and wake without waiting, and what has gone.

Every option that keeps a peer's death or slowness from becoming ours is set here. The facts behind the values: a PUSH
without peers accepts messages unless IMMEDIATE is set; a closed socket keeps its process alive forever unless LINGER is
set; a message over MAXMSGSIZE takes the good ones behind it down, so it is only the last wall behind the codec's own
limits. A socket belongs to one thread, or to the threads that share one lock.

Security depends on the endpoint: `tcp://` is encrypted and requires keys if this process has keys, and is limited to
loopback if it has none; `ipc://` is a file in the private run directory. libzmq reads these options at each bind and
connect, so one socket may have endpoints of both kinds.

`ZmqReader` is ten times as fast as awaiting each message. zmq's descriptor signals only edges, and sending on the same
socket can use one up, so the sender must call `poke`.

A socket reconnects without a word. A cut TCP link loses what was on its way, and the credit for it never comes back. A
peer that died cuts its link too, but then the coordinator announces the death within `GRACE_SECONDS`, and the link is
no longer watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq

from omni_actors.errors import ConfigError, InvalidRequest, OmniError, ProtocolError
from omni_actors.host.addresses import IPC, LOCAL_SCHEMES, is_endpoint, stays_on_host
from omni_actors.protocol.codec import FIXED_FRAMES, Frame
from omni_actors.protocol.fields import MAX_BUFFERS
from omni_actors.transport.curve import EVERYONE, LOCAL, MAKE_KEYS, MEMBERS, PEER_KEY, Keys, ZapAuthenticator
from omni_actors.transport.guard import ConnectionGuard, HandshakeMonitor


class Wakeup:
    """A flag whose file descriptor is readable from `set` to the next `clear`. Thread-safe.

    `set` takes no lock, so a finalizer may call it wherever the interpreter happens to run it.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._event

    def set(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """Reset the flag."""
        with contextlib.suppress(BlockingIOError):  # it was not set
            os.eventfd_read(self._event)

    def __del__(self) -> None:  # not earlier: anything that holds a reference may still call `set`
        os.close(self._event)


HIGH_WATER_MARK = 1000  # messages; a last wall: credit is the flow control
LINGER_MS = 500  # how long a closing socket may still send
TCP_HEARTBEAT_MS = 1000
CONNECT_TIMEOUT_MS = 2000  # the system's own two minutes would outlast every cut of a link
HANDSHAKE_MS = 10_000  # that a peer may take; on the connecting side, which may wait for a busy one, 30 s (the default)
DRAIN_MESSAGES = 256
MAX_FRAMES = 1 + FIXED_FRAMES + MAX_BUFFERS  # of a message, with its sender; reading ten million takes 14 s
DISCARDED_FRAMES = 256  # at a time, of a message with more
MAX_IDENTITY = 255  # bytes, as libzmq's own sockets can have
DESCRIPTOR = "__fd"  # property of a message in which libzmq gives the descriptor that it was read from
ZERO_COPY_BYTES = 64 << 10  # below this a copy is cheaper than tracking the buffer

Socket = zmq.Socket[bytes]


def drop_queued(socket: Socket) -> None:
    """Have a socket send nothing more of what it holds once it is closed."""
    socket.setsockopt(zmq.LINGER, 0)


READABLE = int(zmq.POLLIN)
# Plain integers: pyzmq's own loop combines enumeration members for each frame, which takes longer than sending it.
_NO_WAIT = int(zmq.NOBLOCK)
_NO_WAIT_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class PeerGone(Exception):
    """The ROUTER has no connection to this peer."""


def try_send(socket: Socket, frames: Sequence[Frame], copy: bool = True) -> bool:
    """Hand a message to zmq without waiting. False: the peer takes no more now, and nothing was sent.

    Raises:
        PeerGone: the socket is a ROUTER and the peer is not connected.
    """
    try:
        for frame in frames[:-1]:
            socket.send(frame, _NO_WAIT_MORE, copy)
        socket.send(frames[-1], _NO_WAIT, copy)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise PeerGone from error
        raise
    return True


def descriptor(socket: Socket) -> int:
    """File descriptor that is readable when the socket's state has changed.

    Only reading or sending until the socket refuses makes it quiet again.
    """
    return int(socket.getsockopt(zmq.FD))


class Discarded(Exception):
    """What was read belongs to no message that could be passed on. There may be more to read."""


_discarding: weakref.WeakSet[Socket] = weakref.WeakSet()  # sockets in the middle of a message with too many frames


def _receive(socket: Socket) -> list[zmq.Frame]:
    if _discarding and socket in _discarding:
        _discard(socket)
    # Each frame knows whether more follow. Asking the socket, as pyzmq's own loop does, costs as much as receiving.
    frames = [socket.recv(_NO_WAIT, copy=False)]
    while frames[-1].more:
        if len(frames) == MAX_FRAMES:
            _discarding.add(socket)
            break
        frames.append(socket.recv(_NO_WAIT, copy=False))
    return frames


def _discard(socket: Socket) -> None:
    """Read a part of the frames that are left of a message. Raises `Discarded` unless that were all."""
    for _ in range(DISCARDED_FRAMES):
        if not socket.recv(_NO_WAIT, copy=False).more:
            _discarding.discard(socket)
            return
    raise Discarded


def receive(socket: Socket) -> list[bytes]:
    """Return the next message, at most `MAX_FRAMES` of it. Raises `zmq.Again` if there is none, and `Discarded`."""
    return [frame.bytes for frame in _receive(socket)]


def drain(socket: Socket, maximum: int = DRAIN_MESSAGES) -> list[list[Frame]]:
    """Return the messages that have arrived, at most `maximum`. Large frames are views of zmq's own memory."""
    messages: list[list[Frame]] = []
    # Asking first costs half of a refused receive, which raises an exception.
    while len(messages) < maximum and int(socket.getsockopt(zmq.EVENTS)) & READABLE:
        try:
            frames = _receive(socket)
        except Discarded:
            continue
        except zmq.Again:  # the event was no message: a peer that left, or its credentials
            break
        messages.append([frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer for frame in frames])
    return messages


class _SocketFile(NamedTuple):
    """A socket that is bound to a file: `folder` is the inode of the file's folder."""

    socket: Socket
    path: Path
    folder: int


def _property(frame: zmq.Frame, name: str) -> bytes:
    try:
        return str(frame.get(name)).encode()
    except zmq.ZMQError:  # libzmq has no such property
        return b""


class Sockets:
    """Makes sockets of one context. Not thread-safe except for `context`, which is; only one thread may bind.

    Args:
        max_message_bytes: a larger message ends its connection; -1 for no limit.
        keys: required for TCP endpoints that other hosts can reach, and then used for all TCP endpoints.
    """

    def __init__(
        self, context: zmq.Context[Socket] | None = None, max_message_bytes: int = -1, keys: Keys | None = None
    ) -> None:
        self.context = context or zmq.Context()
        self.keys = keys
        self._max_message_bytes = max_message_bytes
        self._authenticator: ZapAuthenticator | None = None
        self._files: list[_SocketFile] = []
        self._guard: ConnectionGuard | None = None

    def _socket(self, kind: int, linger_ms: int) -> Socket:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, linger_ms)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        return socket

    def _connecting(self, kind: int) -> Socket:
        """A socket to be connected, which sends the heartbeats by which both ends miss each other.

        A bound one sends none: libzmq 4.3.5 aborts the process if one is due on a connection from which it reads no
        more, because too much waits, and whose peer is gone.
        """
        socket = self._socket(kind, LINGER_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, TCP_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * TCP_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 5 * TCP_HEARTBEAT_MS)
        return socket

    def push(self, endpoint: str) -> Socket:
        """A PUSH to exactly one PULL. Connected to several replicas it would spread requests at random."""
        socket = self._connecting(zmq.PUSH)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        self.connect(socket, endpoint)
        return socket

    def pull(self, endpoint: str) -> tuple[Socket, str]:
        """A bound PULL and its actual endpoint. If there are keys, only the pipeline's processes may connect."""
        socket = self._socket(zmq.PULL, 0)
        return socket, self.bind(socket, endpoint)

    def router(self, endpoint: str, open_to: str = MEMBERS) -> tuple[Socket, str]:
        """A bound ROUTER and its actual endpoint. It refuses messages for a peer that is gone or full.

        Without ROUTER_MANDATORY it would drop them silently. `open_to` is `MEMBERS` (the pipeline's processes) or
        `EVERYONE` (those and the allowed clients).
        """
        socket = self._socket(zmq.ROUTER, LINGER_MS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        return socket, self.bind(socket, endpoint, open_to)

    def dealer(self, endpoint: str, identity: bytes) -> tuple[Socket, HandshakeMonitor]:
        """A connected DEALER with a fixed identity, and the monitor that reports why it is refused or disconnected."""
        socket = self._connecting(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        # Nothing may be left in the connection itself, for heartbeats would be behind it: credit bounds what comes.
        socket.setsockopt(zmq.RCVHWM, 0)
        monitor = HandshakeMonitor(socket, endpoint, self.keys)
        try:
            self.connect(socket, endpoint)
        except OmniError:
            monitor.close()
            raise
        return socket, monitor

    def bind(self, socket: Socket, endpoint: str, open_to: str = MEMBERS) -> str:
        """Bind one more endpoint and return it with its actual port (0 becomes a number). Closes the socket on error.

        Raises:
            ConfigError: other hosts could connect, and there are no keys to keep them out.
            ProtocolError: the address is in use or does not belong to this host.
        """
        with _closed_on_error(socket):
            _check_form(endpoint)
            if self.keys is not None and not self.keys.is_member and not endpoint.startswith(LOCAL_SCHEMES):
                raise ConfigError(
                    f"{self.keys.folder} holds a client's keys, which cannot open the endpoint {endpoint}.",
                    hint="Start the pipeline with its own folder of keys.",
                )
            self._secure(socket, endpoint, open_to)
            if not endpoint.startswith(LOCAL_SCHEMES):
                self._protect(socket, open_to)
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                hint = "Is another pipeline using this address or run directory?"
                raise ProtocolError(f"Cannot bind {endpoint}: {error}.", hint=hint) from error
            if endpoint.startswith(IPC):
                path = Path(endpoint.removeprefix(IPC))
                self._files.append(_SocketFile(socket, path, path.parent.stat().st_ino))
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def restore_files(self) -> list[str]:
        """Bind again the socket files that others have removed, and return their paths; connections stay as they are.

        A folder that was removed as well is not made again: its owner notices, and ends the pipeline. Call it on the
        thread that binds.
        """
        restored = []
        self._files = [file for file in self._files if not file.socket.closed]
        for socket, path, folder in self._files:
            if not path.exists() and path.parent.exists() and path.parent.stat().st_ino == folder:
                self._secure(socket, f"{IPC}{path}", MEMBERS)  # it may be bound to TCP, too, which is encrypted
                socket.bind(f"{IPC}{path}")
                restored.append(str(path))
        return restored

    def connect(self, socket: Socket, endpoint: str) -> None:
        """Connect to an endpoint. Closes the socket on error.

        Raises:
            ConfigError: the endpoint is on another host, and there are no keys.
            InvalidRequest: this is not an endpoint.
        """
        with _closed_on_error(socket):
            _check_form(endpoint)
            self._secure(socket, endpoint)
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise InvalidRequest(f"{endpoint!r} is not an endpoint: {error}.") from error

    def receive_from_client(self, socket: Socket) -> list[bytes]:
        """Return the next message of a socket that is open to everyone, as `receive` does.

        In front of it are two facts about the peer's connection: its public key (Z85), b"" for a connection without
        keys, and its descriptor in this process, in digits.
        """
        frames = _receive(socket)
        key, connection = (_property(frames[0], name) for name in (PEER_KEY, DESCRIPTOR))
        if self._guard is not None and connection:
            self._guard.heard(int(connection))
        if len(frames[0]) > MAX_IDENTITY:  # it would stand in front of every answer
            raise Discarded
        return [key, connection, *(frame.bytes for frame in frames)]

    def _protect(self, socket: Socket, open_to: str) -> None:
        """Bound what strangers may do to a TCP endpoint that is about to be bound."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if self._guard is None:
            self._guard = ConnectionGuard(self.context, self._max_message_bytes, self.keys is not None)
            self._guard.start()
        self._guard.watch(socket, watched=open_to == EVERYONE)

    def _secure(self, socket: Socket, endpoint: str, open_to: str | None = None) -> None:
        """Set the options of the next bind (if `open_to` is given) or connect of a socket."""
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if self.keys is None:
            if not stays_on_host(endpoint):
                raise ConfigError(
                    f"{endpoint} is not on this host, and connections between hosts require keys.", hint=f"{MAKE_KEYS}."
                )
            return
        if endpoint.startswith(LOCAL_SCHEMES):
            socket.setsockopt(zmq.CURVE_SERVER, 0)  # also switches encryption off again
            socket.setsockopt_string(zmq.ZAP_DOMAIN, LOCAL)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)
            return
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        if open_to is None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.keys.cluster)
            return
        if self._authenticator is None:
            self._authenticator = ZapAuthenticator(self.context, self.keys)
            self._authenticator.start()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, open_to)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator libzmq then refuses everyone


@contextlib.contextmanager
def _closed_on_error(socket: Socket) -> Iterator[None]:
    try:
        yield
    except BaseException:  # Ctrl-C, too: an open socket would keep the context from ending
        socket.close()
        raise


def _check_form(endpoint: str) -> None:
    if not is_endpoint(endpoint):
        raise InvalidRequest(f"{endpoint!r} is not an endpoint.", hint="An endpoint is ipc://PATH or tcp://HOST:PORT.")


BATCH = 256  # messages before other tasks get a turn


@dataclass(eq=False)
class SocketReader:
    """Calls `on_message(frames)` for every message until `close`, and `on_quiet()` when all that had come was read.

    `on_quiet` is also called when a socket that was full takes messages again.

    Args:
        receive: reads one message from the socket, or raises `zmq.Again` or `Discarded`.
        paused: reads nothing before `resume`.
    """

    socket: Socket
    on_message: Callable[[Sequence[bytes]], None]
    on_quiet: Callable[[], None] = lambda: None
    receive: Callable[[Socket], Sequence[bytes]] = receive
    paused: bool = False

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor(self.socket)
        self._closed = False
        self._scheduled = False
        self._loop.add_reader(self._descriptor, self.drain)
        self.poke()

    def poke(self) -> None:
        """Look at the socket again soon."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._run_scheduled)

    def resume(self) -> None:
        """Read what has come and what will come. Idempotent."""
        self.paused = False
        self.poke()

    def _run_scheduled(self) -> None:
        self._scheduled = False
        self.drain()

    def drain(self) -> None:
        """Read what has arrived, without waiting: one batch now, the rest soon."""
        for _ in range(BATCH):
            if self._closed or self.paused:
                return
            try:
                frames = self.receive(self.socket)
            except Discarded:
                continue
            except zmq.Again:
                self.on_quiet()
                return
            try:
                self.on_message(frames)
            except BaseException:
                self.poke()  # the edge is used up: without this the messages behind would wait for the next one
                raise
        self.poke()

    def close(self) -> None:
        """Stop reading; the socket stays open. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)


GRACE_SECONDS = 1.0  # for the coordinator to announce the death of a peer whose link is cut


class PeerConnections:
    """Finds the peers of a ROUTER whose connection was closed, although nothing is sent to them.

    libzmq says with a message which descriptor it came from, and closes that as soon as the peer is gone or silent for
    too long. Its own monitor names no peers.
    """

    def __init__(self) -> None:
        # The descriptor of a peer's connection in this process, and its inode, which no other connection has.
        self._connections: dict[bytes, tuple[int, int]] = {}
        self._since: dict[bytes, float] = {}

    def heard(self, peer: bytes, descriptor: bytes) -> bool:
        """Note that a message of `peer` came over the connection with this descriptor, b"" for an unknown one.

        Returns whether that is another connection than it had before.
        """
        if not descriptor:
            return False
        connection = int(descriptor), _inode(int(descriptor))
        before = self._connections.get(peer, connection)
        self._connections[peer] = connection
        if connection[1]:  # else it is closed already
            self._since.pop(peer, None)
        return before != connection

    def gone(self, now: float) -> list[bytes]:
        """Return the peers whose connection was closed `GRACE_SECONDS` ago or earlier, and forget them.

        Those that were heard on another connection since then are not among them.
        """
        for peer, (descriptor, inode) in self._connections.items():
            if _inode(descriptor) != inode or not inode:
                self._since.setdefault(peer, now)
        found = [peer for peer, since in self._since.items() if since + GRACE_SECONDS <= now]
        for peer in found:
            del self._since[peer], self._connections[peer]
        return found


def _inode(descriptor: int) -> int:
    """The inode of an open descriptor; 0 if it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0
