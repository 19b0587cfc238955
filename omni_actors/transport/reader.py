"""Reads a zmq socket from an asyncio loop: waits for its file descriptor, then drains it without blocking.

This is ten times as fast as awaiting each message. zmq's descriptor signals only edges, and sending on the same socket
can use one up, so the sender must call `poke`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from omni_actors.transport.sockets import Discarded, Socket, descriptor, receive

BATCH = 256  # messages before other tasks get a turn


class SocketReader:
    """Calls `on_message(frames)` for every message until `close`, and `on_quiet()` when all that had come was read.

    `on_quiet` is also called when a socket that was full takes messages again.

    Args:
        receive: reads one message from the socket, or raises `zmq.Again` or `Discarded`.
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
        self._descriptor = descriptor(socket)
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
        """Read what has arrived, without waiting: one batch now, the rest soon."""
        for _ in range(BATCH):
            if self._closed:
                return
            try:
                frames = self._receive(self._socket)
            except Discarded:
                continue
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
