"""Notices links over a network that were cut: what was on its way is lost, and the credit for it will never come.

A peer that has died cuts its link, too, but then the coordinator says so, within the time that is waited here.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from omni_actors.addresses import is_tcp
from omni_actors.transport.monitor import Departures
from omni_actors.transport.sockets import Socket

GRACE_SECONDS = 1.0
Name = TypeVar("Name")


class Cuts(Generic[Name]):
    """Watches the sockets of one thread, each under a name."""

    def __init__(self) -> None:
        self._watched: dict[Name, Departures] = {}
        self._since: dict[Name, float] = {}

    def watch(self, name: Name, socket: Socket, endpoint: str) -> None:
        """Sockets of this host are left out: there is no link to be cut."""
        if is_tcp(endpoint):
            self._watched[name] = Departures(socket)

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
