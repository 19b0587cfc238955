"""The one factory of sockets: every option that keeps a peer's death or slowness from becoming ours is set here.

Facts behind the values: a PUSH without peers accepts messages unless IMMEDIATE is set; a closed socket holds its
process for ever unless LINGER is; an oversize message takes the good ones behind it along, so MAXMSGSIZE is only the
last wall behind the codec's own limits; sockets belong to one thread, or to those that hold one lock.

Security belongs to the endpoint: tcp:// is encrypted and asks for keys when there are some, and without keys stays on
this host; ipc:// is a file in the run directory, which is ours alone. libzmq takes these options from the socket at
each bind and connect, so that one socket may have endpoints of both kinds.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import zmq

from omni_actors.addresses import LOCAL_SCHEMES, stays_on_host, tcp_host
from omni_actors.errors import ConfigError, InvalidRequest, OmniError, ProtocolError
from omni_actors.protocol.codec import Frame
from omni_actors.transport.curve import LOCAL, MAKE_KEYS, MEMBERS, PEER_KEY, Keys, ZapAuthenticator
from omni_actors.transport.handshake_monitor import Handshake

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


def _receive(socket: Socket) -> list[zmq.Frame]:
    """The next message. Raises `zmq.Again`: there is none."""
    # Whether more follow comes with a frame; to ask the socket, as pyzmq's own loop does, costs as much as to receive.
    frames = [socket.recv(_WITHOUT_WAITING, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(_WITHOUT_WAITING, copy=False))
    return frames


def receive(socket: Socket) -> list[bytes]:
    """The next message.

    Raises:
        zmq.Again: there is none.
    """
    return [frame.bytes for frame in _receive(socket)]


def receive_views(socket: Socket) -> list[Frame]:
    """As `receive`, but large frames are views of zmq's own memory."""
    return [frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer for frame in _receive(socket)]


def receive_known(socket: Socket) -> list[bytes]:
    """As `receive`, with the public key (Z85) of the peer's connection in front; b"" where none was asked for."""
    frames = _receive(socket)
    try:
        key = str(frames[0].get(PEER_KEY)).encode()
    except zmq.ZMQError:  # libzmq knows no such property
        key = b""
    return [key, *(frame.bytes for frame in frames)]


def drain(socket: Socket, maximum: int = DRAIN_MESSAGES) -> list[list[Frame]]:
    """The messages that have come, at most `maximum`; large frames are views."""
    messages: list[list[Frame]] = []
    # To ask first costs half of being refused, which makes an exception.
    while len(messages) < maximum and int(socket.getsockopt(zmq.EVENTS)) & READABLE:
        try:
            messages.append(receive_views(socket))
        except zmq.Again:  # what made it readable was not for us: a peer that left, or its credentials
            break
    return messages


class Sockets:
    """Makes sockets of one context. Not thread-safe except for `context`, which is; one thread binds.

    Args:
        max_message_bytes: larger ones end the connection.
        keys: for all TCP endpoints; without them these must be of loopback.
    """

    def __init__(
        self, context: zmq.Context[Socket] | None = None, max_message_bytes: int = -1, keys: Keys | None = None
    ) -> None:
        self.context = context or zmq.Context()
        self.keys = keys
        self._max_message_bytes = max_message_bytes
        self._doorkeeper: ZapAuthenticator | None = None

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
        self._connect(socket, endpoint)
        return socket

    def pull(self, endpoint: str) -> tuple[Socket, str]:
        """A bound PULL and the endpoint at which it is reached, with keys only by the pipeline's own processes."""
        socket = self._socket(zmq.PULL, 0)
        return socket, self.bind(socket, endpoint)

    def router(self, endpoint: str, open_to: str = MEMBERS) -> tuple[Socket, str]:
        """A bound ROUTER that refuses to send to a peer that is gone or full instead of dropping silently.

        `open_to` is `MEMBERS` (the pipeline's own processes) or `EVERYONE` (and the clients allowed).
        """
        socket = self._socket(zmq.ROUTER, LAST_WORDS_MS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        return socket, self.bind(socket, endpoint, open_to)

    def dealer(self, endpoint: str, identity: bytes) -> Socket:
        """A DEALER under a fixed identity."""
        socket = self._dealer(identity)
        self._connect(socket, endpoint)
        return socket

    def watched_dealer(self, endpoint: str, identity: bytes) -> tuple[Socket, Handshake]:
        """The same, and what tells why its peer cannot be reached, or that it was lost."""
        socket = self._dealer(identity)
        handshake = Handshake(socket, endpoint, self.keys)
        try:
            self._connect(socket, endpoint)
        except OmniError:
            handshake.close()
            raise
        return socket, handshake

    def _dealer(self, identity: bytes) -> Socket:
        socket = self._socket(zmq.DEALER, LAST_WORDS_MS)
        socket.setsockopt(zmq.IDENTITY, identity)
        return socket

    def bind(self, socket: Socket, endpoint: str, open_to: str = MEMBERS) -> str:
        """One (more) endpoint of a socket; what it is really called (port 0 becomes a number).

        Raises:
            ConfigError: others could reach it, and there are no keys to keep them out.
            ProtocolError: the address is taken or not ours.
        """
        try:
            _check_form(endpoint, "Nothing is bound there")
            if self.keys is not None and not self.keys.is_member and not endpoint.startswith(LOCAL_SCHEMES):
                raise ConfigError(f"{self.keys.folder} holds a client's keys; an endpoint needs the pipeline's own.")
            self._secure(socket, endpoint, open_to)
            socket.bind(endpoint)
        except OmniError:
            socket.close()
            raise
        except zmq.ZMQError as error:
            socket.close()
            raise ProtocolError(
                f"Cannot bind {endpoint}: {error}.", hint="Is another pipeline using this address or run directory?"
            ) from error
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _connect(self, socket: Socket, endpoint: str) -> None:
        try:
            _check_form(endpoint, "Nothing is sent there")
            self._secure(socket, endpoint)
            socket.connect(endpoint)
        except OmniError:
            socket.close()
            raise
        except zmq.ZMQError as error:
            socket.close()
            raise InvalidRequest(f"{endpoint!r} is no endpoint: {error}.") from error

    def _secure(self, socket: Socket, endpoint: str, open_to: str | None = None) -> None:
        """Options for the next bind (`open_to`) or connect of a socket."""
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if self.keys is None or endpoint.startswith(LOCAL_SCHEMES):
            socket.setsockopt(zmq.CURVE_SERVER, 0)  # which also takes back that the socket encrypts
            if self.keys is None and not stays_on_host(endpoint):
                raise ConfigError(f"{endpoint} is not on this host, and there are no keys.", hint=f"{MAKE_KEYS}.")
            if self.keys is not None:
                socket.setsockopt_string(zmq.ZAP_DOMAIN, LOCAL)
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)
            return
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        if open_to is None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.keys.cluster)
            return
        if self._doorkeeper is None:
            self._doorkeeper = ZapAuthenticator(self.context, self.keys)
            self._doorkeeper.start()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, open_to)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a doorkeeper nobody comes in, instead of everybody


def _check_form(endpoint: str, consequence: str) -> None:
    if not endpoint.startswith(LOCAL_SCHEMES) and tcp_host(endpoint) is None:
        raise InvalidRequest(
            f"{endpoint!r} is no endpoint. {consequence}.", hint="An endpoint is ipc://PATH or tcp://HOST:PORT."
        )
