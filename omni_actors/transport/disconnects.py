"""Detects sockets that have lost their connection and reconnect without a word.

A cut TCP link loses what was on its way, and the credit for it never comes back. A peer that died cuts its link too,
but then the coordinator announces the death within `GRACE_SECONDS`, and the link is no longer watched.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import zmq

from omni_actors.addresses import is_tcp
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
