"""Whose key may connect where (ZAP, ZeroMQ RFC 27), and whose key a message came with (docs/decisions.md).

libzmq accepts every key unless an authenticator answers it, and works without one by default: `ZapAuthenticator` and
the options that `transport/sockets.py` sets belong together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from omni_actors.errors import ConfigError
from omni_actors.logs import get_logger
from omni_actors.transport.curve import ALLOWED, CLUSTER, OPERATORS, PUBLIC, Keys, read_key

logger = get_logger(__name__)

# ZAP domains: who may connect to a socket.
MEMBERS = "members"  # the pipeline's processes
EVERYONE = "everyone"  # those and the allowed clients
LOCAL = "local"  # every process that can open the socket file; only for ipc:// endpoints

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_FRAMES = 7  # version, request, domain, address, identity, mechanism, key
PEER_KEY = "Omni-Key"  # property of a message in which libzmq gives the public key of its connection
REVOKED_SECONDS = 1.0  # after which a key whose file was deleted has no rights on an open connection


class KeyOwner(NamedTuple):
    """The peer of a connection. The default stands for a connection without keys, whose peer may do everything."""

    name: str = ""
    may_operate: bool = True


class KeyOwners:
    """Finds the owner of a public key (Z85). Deleting a client's file locks it out.

    Args:
        keys: `None` for a pipeline without keys; then every peer may do everything.
    """

    def __init__(self, keys: Keys | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._known: dict[bytes, KeyOwner | None] = {}
        self._outdated = 0.0
        self._broken: set[Path] = set()

    def read(self, keys: Keys) -> dict[bytes, KeyOwner]:
        """Read from the files who may connect now."""
        found = {keys.cluster: KeyOwner(CLUSTER)}
        for folder in (OPERATORS, ALLOWED):
            for path in sorted((keys.folder / folder).glob(f"*{PUBLIC}")):
                try:
                    found.setdefault(read_key(path)[0], KeyOwner(path.stem, folder == OPERATORS))
                except ConfigError as error:  # one broken file locks out one client
                    if path not in self._broken:
                        logger.warning("ignored a client's key: %s", error)
                    self._broken.add(path)
        return found

    def of(self, key: bytes) -> KeyOwner | None:
        """Return the owner of a connection's `key` (b"": no keys), or `None` if it is no longer allowed.

        The files are read at most once in `REVOKED_SECONDS` for each key.
        """
        if not key or self._keys is None:
            return KeyOwner()
        now = self._clock()
        if now >= self._outdated:
            self._known.clear()
            self._outdated = now + REVOKED_SECONDS
        if key not in self._known:
            self._known[key] = self.read(self._keys).get(key)
        return self._known[key]


class ZapAuthenticator(threading.Thread):
    """Answers libzmq's questions whether a peer's key may connect, for as long as its context exists.

    pyzmq's own authenticators must be stopped before the context is terminated, by the thread that started them, or
    need an event loop. This one ends with the context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        super().__init__(name="zap authenticator", daemon=True)
        self._keys = keys
        self._owners = KeyOwners(keys)
        # From a shadow context: destroying the context closes the sockets made from it, while this thread uses its own.
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)  # before any endpoint: no peer is refused for lack of an answer

    def run(self) -> None:
        """Answer questions until the context ends. Called by `Thread.start`."""
        try:
            while True:
                self._socket.send_multipart(self.answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass  # the intended end
        except zmq.ZMQError:
            logger.exception("the authenticator failed; all new TCP connections will be refused")
        finally:
            self._socket.close()

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Return the reply to one question. Anything malformed or unexpected is refused."""
        number = request[1] if len(request) > 1 else b""
        refusal = [ZAP_VERSION, number, b"400", b"No access", b"", b""]
        if request[2:3] == [LOCAL.encode()] and request[5:] == [b"NULL"]:
            return [ZAP_VERSION, number, b"200", b"OK", b"", b""]
        if len(request) != ZAP_FRAMES or request[0] != ZAP_VERSION or request[5] != b"CURVE":
            return refusal
        domain, address = (frame.decode(errors="replace") for frame in request[2:4])
        try:
            key = z85.encode(request[6])
            if key == self._keys.cluster:
                owner: KeyOwner | None = KeyOwner(CLUSTER)
            else:
                owner = self._owners.read(self._keys).get(key) if domain == EVERYONE else None
        except Exception:  # the thread has to go on answering: without it no peer could connect
            logger.exception("cannot read the allowed keys; refused a peer at %s", address)
            return refusal
        if owner is None:
            logger.warning("refused a peer at %s: its key is not allowed here", address)
            return refusal
        logger.debug("accepted %s from %s", owner.name, address)
        # The user id (the fifth frame) stays empty: libzmq would put it in front of the connection's messages, where it
        # makes a socket readable that has nothing to read. A property comes with each message instead.
        return [ZAP_VERSION, number, b"200", b"OK", b"", _property(PEER_KEY, key)]


def _property(name: str, value: bytes) -> bytes:
    """Encode one property as ZMTP does."""
    return len(name).to_bytes(1, "big") + name.encode() + len(value).to_bytes(4, "big") + value
