"""Wakes a thread that waits in a zmq poll, from any other thread, through a file descriptor."""

from __future__ import annotations

import os
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class WakeableQueue(Generic[T]):
    """A queue whose arrival of items can be polled as a readable file descriptor."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, item: T) -> None:
        self._items.put(item)
        os.eventfd_write(self._event, 1)

    def drain(self) -> list[T]:
        """All items that are there now."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        items = []
        while True:
            try:
                items.append(self._items.get_nowait())
            except queue.Empty:
                return items

    def close(self) -> None:
        os.close(self._event)
