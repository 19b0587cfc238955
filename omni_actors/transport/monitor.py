"""Tells when the connection of a socket has been lost, although the socket connects again by itself."""

from __future__ import annotations

import zmq

from omni_actors.transport.sockets import Socket, drain


class Departures:
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
