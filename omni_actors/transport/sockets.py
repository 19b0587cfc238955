"""The one factory of sockets: every option that keeps a peer's death or slowness from becoming ours is set here.

Facts behind the values: a PUSH without peers accepts messages unless IMMEDIATE is set; a closed socket holds its
process for ever unless LINGER is; an oversize message takes the good ones behind it along, so MAXMSGSIZE is only the
last wall behind the codec's own limits; sockets belong to the thread that made them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

import zmq

from omni_actors.codec import Frame
from omni_actors.errors import InvalidRequest, ProtocolError

HIGH_WATER_MARK = 1000  # messages; a last wall, not the flow control
LAST_WORDS_MS = 500  # how long a closing socket may still send
TCP_HEARTBEAT_MS = 1000
DRAIN_MESSAGES = 256

# What the owners of sockets outside this package need of zmq: a type and the means to wait.
Socket = zmq.Socket[bytes]
Poller = zmq.Poller
READABLE = zmq.POLLIN
WRITABLE = zmq.POLLOUT


class PeerGone(Exception):
    """A ROUTER does not know the peer (any more)."""


def try_send(socket: Socket, frames: Sequence[Frame], copy: bool = True) -> bool:
    """Hand a message to zmq without waiting. False: the peer takes no more for now, and nothing was sent.

    Raises:
        PeerGone: the socket is a ROUTER and the peer is not connected.
    """
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise PeerGone from error
        raise
    return True


def arrivals(socket: Socket, maximum: int = DRAIN_MESSAGES) -> Iterator[list[bytes]]:
    """The messages that have come, at most `maximum`, each as soon as it is read."""
    for _ in range(maximum):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield frames


def drain(socket: Socket, maximum: int = DRAIN_MESSAGES) -> list[list[bytes]]:
    """All of `arrivals`."""
    return list(arrivals(socket, maximum))


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
