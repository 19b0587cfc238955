"""Wake up a thread that waits in a poll, from any other thread, through a file descriptor."""

from __future__ import annotations

import os
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Wakeup:
    """A flag whose file descriptor is readable from `set` to the next `clear`. Thread-safe.

    `set` takes no lock, so a finalizer may call it wherever the interpreter happens to run it.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._event

    def set(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._event, 1)

    def clear(self) -> bool:
        """Reset the flag and return whether it was set."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return False
        return True

    def __del__(self) -> None:  # not earlier: anything that holds a reference may still call `set`
        os.close(self._event)


class WakeableQueue(Generic[T]):
    """A queue with a file descriptor that is readable when items have arrived."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._wakeup.fileno()

    def put(self, item: T) -> None:
        """Append an item and wake the reader."""
        self._items.put(item)
        self._wakeup.set()

    def drain(self) -> list[T]:
        """Take all items that have arrived."""
        if not self._wakeup.clear():
            return []
        items = []
        while True:
            try:
                items.append(self._items.get_nowait())
            except queue.Empty:
                return items
