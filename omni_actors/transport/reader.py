"""Reads a zmq socket from an asyncio loop: wait on its file descriptor, then drain without blocking.

Ten times the rate of awaiting each message. zmq's descriptor only signals edges, and sending on the same socket can
swallow one, so whoever sends calls `poke`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from omni_actors.transport.sockets import Socket, receive

BATCH = 256  # messages before other tasks get a turn


class SocketReader:
    """Calls `on_message(frames)` for every message until `close`, and `on_quiet()` when all that had come was read.

    A socket that takes messages again after it was full ends in a call of `on_quiet`, too. `receive` reads one message
    or raises `zmq.Again`.
    """

    def __init__(
        self,
        socket: Socket,
        on_message: Callable[[Sequence[bytes]], None],
        on_quiet: Callable[[], None] = lambda: None,
        receive: Callable[[Socket], Sequence[bytes]] = receive,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._on_quiet = on_quiet
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._closed = False
        self._scheduled = False
        self._loop.add_reader(self._descriptor, self.drain)
        self.poke()

    def poke(self) -> None:
        """Look at the socket again soon."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._scheduled = False
        self.drain()

    def drain(self) -> None:
        """Read what has come, without waiting; if that is more than a batch, the rest soon."""
        for _ in range(BATCH):
            if self._closed:
                return
            try:
                frames = self._receive(self._socket)
            except zmq.Again:
                self._on_quiet()
                return
            try:
                self._on_message(frames)
            except BaseException:
                self.poke()  # the edge is used up: without this the messages behind would wait for the next one
                raise
        self.poke()

    def close(self) -> None:
        """Stop reading; the socket stays open. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
