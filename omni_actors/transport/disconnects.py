"""Detects lost connections of sockets, which reconnect by themselves.

A cut link over the network loses what was on its way, and the credit for it will never come. A peer that has died cuts
its link, too, but then the coordinator says so within the time that is waited here.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import zmq

from omni_actors.addresses import is_tcp
from omni_actors.transport.sockets import Socket, drain

GRACE_SECONDS = 1.0
Name = TypeVar("Name")


class DisconnectMonitor:
    """Watches one connected socket. Belongs to the same thread; close it before the socket.

    A connection is lost when its peer closes it or dies, and when the peer's host or the link is silent for longer than
    the heartbeat of the socket allows. `socket` is readable then, for whoever polls.
    """

    def __init__(self, socket: Socket) -> None:
        self._watched = socket
        self.socket: Socket = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def seen(self) -> bool:
        """Whether a connection was lost since the last call."""
        return bool(drain(self.socket))

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(linger=0)


class DisconnectDetector(Generic[Name]):
    """Watches the sockets of one thread, each under a name."""

    def __init__(self) -> None:
        self._watched: dict[Name, DisconnectMonitor] = {}
        self._since: dict[Name, float] = {}

    def watch(self, name: Name, socket: Socket, endpoint: str) -> None:
        """Sockets of this host are left out: there is no link to be cut."""
        if is_tcp(endpoint):
            self._watched[name] = DisconnectMonitor(socket)

    def forget(self, name: Name) -> None:
        """Before the socket is closed. Unknown names are fine."""
        self._since.pop(name, None)
        departures = self._watched.pop(name, None)
        if departures is not None:
            departures.close()

    def found(self, now: float) -> list[Name]:
        """Links that were cut a while ago and whose peers are nevertheless said to live."""
        for name, departures in self._watched.items():
            if departures.seen():
                self._since.setdefault(name, now)
        return [name for name, since in self._since.items() if since + GRACE_SECONDS <= now]

    def close(self) -> None:
        for name in list(self._watched):
            self.forget(name)
