"""Detects connections that are gone: those that a socket makes, and those that a ROUTER accepts.

A socket reconnects without a word. A cut TCP link loses what was on its way, and the credit for it never comes back. A
peer that died cuts its link too, but then the coordinator announces the death within `GRACE_SECONDS`, and the link is
no longer watched.
"""

from __future__ import annotations

import os
from typing import Generic, NamedTuple, TypeVar

import zmq

from omni_actors.host.addresses import is_tcp
from omni_actors.transport.sockets import Socket, drain

GRACE_SECONDS = 1.0
Name = TypeVar("Name")


class DisconnectDetector(Generic[Name]):
    """Watches the TCP sockets of one thread, each under a name.

    A connection is lost when its peer closes it or dies, and when the peer's host or the link is silent for longer than
    the socket's heartbeat allows.
    """

    def __init__(self) -> None:
        self._watched: dict[Name, tuple[Socket, Socket]] = {}  # with its monitor
        self._since: dict[Name, float] = {}

    def watch(self, name: Name, socket: Socket, endpoint: str) -> None:
        """Start watching a connected socket, unless the endpoint is local: then there is no link to cut."""
        if is_tcp(endpoint):
            self._watched[name] = (socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))

    def forget(self, name: Name) -> None:
        """Stop watching; call it before the socket is closed. Unknown names are ignored."""
        self._since.pop(name, None)
        if name in self._watched:
            socket, monitor = self._watched.pop(name)
            socket.disable_monitor()
            monitor.close(linger=0)

    def found(self, now: float) -> list[Name]:
        """Return the names whose connection was lost `GRACE_SECONDS` ago or earlier."""
        for name, (_, monitor) in self._watched.items():
            if drain(monitor):
                self._since.setdefault(name, now)
        return [name for name, since in self._since.items() if since + GRACE_SECONDS <= now]

    def close(self) -> None:
        """Stop watching all sockets, which are still open."""
        for name in list(self._watched):
            self.forget(name)


class PeerConnection(NamedTuple):
    """An accepted connection: its descriptor in this process, and its inode, which no other connection has."""

    descriptor: int
    inode: int


class PeerConnections:
    """Finds the peers of a ROUTER whose connection was closed, although nothing is sent to them.

    libzmq says with a message which descriptor it came from, and closes that as soon as the peer is gone or silent for
    too long. Its own monitor names no peers.
    """

    def __init__(self) -> None:
        self._connections: dict[bytes, PeerConnection] = {}
        self._since: dict[bytes, float] = {}

    def heard(self, peer: bytes, descriptor: bytes) -> bool:
        """Note that a message of `peer` came over the connection with this descriptor, b"" for an unknown one.

        Returns whether that is another connection than it had before.
        """
        if not descriptor:
            return False
        connection = PeerConnection(int(descriptor), _inode(int(descriptor)))
        before = self._connections.get(peer)
        self._connections[peer] = connection
        if connection.inode:  # else it is closed already
            self._since.pop(peer, None)
        return before is not None and before != connection

    def gone(self, now: float) -> list[bytes]:
        """Return the peers whose connection was closed `GRACE_SECONDS` ago or earlier, and forget them.

        Those that were heard on another connection since then are not among them.
        """
        for peer, connection in self._connections.items():
            if _inode(connection.descriptor) != connection.inode or not connection.inode:
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
