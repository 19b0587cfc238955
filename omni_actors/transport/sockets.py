"""The one factory of sockets: every option that keeps a peer's death or slowness from becoming ours is set here.

Facts behind the values: a PUSH without peers accepts messages unless IMMEDIATE is set; a closed socket holds its
process for ever unless LINGER is; an oversize message takes the good ones behind it along, so MAXMSGSIZE is only the
last wall behind the codec's own limits; sockets belong to one thread, or to those that hold one lock.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import zmq

from omni_actors.codec import Frame
from omni_actors.errors import InvalidRequest, ProtocolError

HIGH_WATER_MARK = 1000  # messages; a last wall, not the flow control
LAST_WORDS_MS = 500  # how long a closing socket may still send
TCP_HEARTBEAT_MS = 1000
CONNECT_TIMEOUT_MS = 2000  # the system's own two minutes would outlast every cut of a link
DRAIN_MESSAGES = 256
ZERO_COPY_BYTES = 64 << 10  # below this a copy is cheaper than tracking the buffer

# What the owners of sockets outside this package need of zmq: a type and the means to wait.
Socket = zmq.Socket[bytes]
Poller = zmq.Poller
READABLE = int(zmq.POLLIN)
WRITABLE = int(zmq.POLLOUT)
# pyzmq's own loop over frames combines enumeration members for each of them, which takes longer than to send.
_WITHOUT_WAITING = int(zmq.NOBLOCK)
_MORE_WITHOUT_WAITING = int(zmq.NOBLOCK | zmq.SNDMORE)


class PeerGone(Exception):
    """A ROUTER does not know the peer (any more)."""


def try_send(socket: Socket, frames: Sequence[Frame], copy: bool = True) -> bool:
    """Hand a message to zmq without waiting. False: the peer takes no more for now, and nothing was sent.

    Raises:
        PeerGone: the socket is a ROUTER and the peer is not connected.
    """
    try:
        for frame in frames[:-1]:
            socket.send(frame, _MORE_WITHOUT_WAITING, copy)
        socket.send(frames[-1], _WITHOUT_WAITING, copy)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise PeerGone from error
        raise
    return True


def descriptor(socket: Socket) -> int:
    """Readable when something has happened to the socket. Then read, or send, until it refuses: only that quiets it."""
    return int(socket.getsockopt(zmq.FD))


def receive(socket: Socket) -> list[bytes]:
    """The next message.

    Raises:
        zmq.Again: there is none.
    """
    # Whether more follow comes with a frame; to ask the socket, as pyzmq's own loop does, costs as much as to receive.
    frame = socket.recv(_WITHOUT_WAITING, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(_WITHOUT_WAITING, copy=False)
        frames.append(frame.bytes)
    return frames


def receive_views(socket: Socket) -> list[Frame]:
    """As `receive`, but large frames are views of zmq's own memory."""
    frame = socket.recv(_WITHOUT_WAITING, copy=False)
    frames: list[Frame] = [frame.bytes]
    while frame.more:
        frame = socket.recv(_WITHOUT_WAITING, copy=False)
        frames.append(frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer)
    return frames


def drain(socket: Socket, maximum: int = DRAIN_MESSAGES) -> list[list[Frame]]:
    """The messages that have come, at most `maximum`; large frames are views."""
    messages: list[list[Frame]] = []
    # To ask first costs half of being refused, which makes an exception.
    while len(messages) < maximum and int(socket.getsockopt(zmq.EVENTS)) & READABLE:
        messages.append(receive_views(socket))
    return messages


class Sockets:
    """Makes sockets of one context. Not thread-safe except for `context`, which is."""

    def __init__(self, context: zmq.Context[Socket] | None = None, max_message_bytes: int = -1) -> None:
        self.context = context or zmq.Context()
        self._max_message_bytes = max_message_bytes

    def _socket(self, kind: int, linger_ms: int) -> Socket:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, linger_ms)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.setsockopt(zmq.HEARTBEAT_IVL, TCP_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * TCP_HEARTBEAT_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        return socket

    def push(self, endpoint: str) -> Socket:
        """A PUSH to exactly one PULL. Never one PUSH over several replicas: it would spread requests at random."""
        socket = self._socket(zmq.PUSH, LAST_WORDS_MS)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        _connect(socket, endpoint)
        return socket

    def pull(self, endpoint: str) -> tuple[Socket, str]:
        """A bound PULL and the endpoint at which it is reached."""
        socket = self._socket(zmq.PULL, 0)
        return socket, _bind(socket, endpoint)

    def router(self, endpoint: str) -> tuple[Socket, str]:
        """A bound ROUTER that refuses to send to a peer that is gone or full instead of dropping silently."""
        socket = self._socket(zmq.ROUTER, LAST_WORDS_MS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        return socket, _bind(socket, endpoint)

    def dealer(self, endpoint: str, identity: bytes) -> Socket:
        """A DEALER under a fixed identity."""
        socket = self._socket(zmq.DEALER, LAST_WORDS_MS)
        socket.setsockopt(zmq.IDENTITY, identity)
        _connect(socket, endpoint)
        return socket


def _connect(socket: Socket, endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise InvalidRequest(f"{endpoint!r} is no endpoint: {error}.") from error


def _bind(socket: Socket, endpoint: str) -> str:
    """Bind and return the real endpoint (port 0 becomes a number)."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ProtocolError(
            f"Cannot bind {endpoint}: {error}.", hint="Is another pipeline using this address or run directory?"
        ) from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
