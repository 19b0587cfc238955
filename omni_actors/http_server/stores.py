"""What the server keeps in memory between requests: uploaded files, transcripts of spoken answers, and responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_FILES = 1000
MAX_TRANSCRIPTS = 10_000
MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20  # of all transcripts, and of all responses; each response counts all turns before it
KEPT_SECONDS = 3600.0  # the same


class UploadedFile(NamedTuple):
    """A file of `/v1/files`; `created` and `expires` are Unix times to show."""

    id: str
    name: str
    purpose: str
    data: bytes
    created: int
    expires: int


class KeptResponse(NamedTuple):
    """A response of `/v1/responses` as JSON, and the turns that another one continues with their bytes."""

    content: bytes
    conversation: list[dict[str, Any]]
    conversation_bytes: int


class Store(Generic[T]):
    """Values by id, bounded in number, bytes and time. The oldest are removed first."""

    def __init__(self, most: int, most_bytes: int, seconds: float) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._kept: dict[str, tuple[T, int, float]] = {}  # with its bytes, and until when (monotonic)
        self._bytes = 0

    def add(self, key: str, value: T, size: int) -> int:
        """Keep a value of `size` bytes, unless it alone is too large; returns the Unix time until which it is kept."""
        if size <= self._most_bytes:
            self._kept[key] = (value, size, time.monotonic() + self._seconds)
            self._bytes += size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self.remove(next(iter(self._kept)))
        return int(time.time() + self._seconds)

    def find(self, key: str) -> T | None:
        """The value with this id, if it is still kept."""
        self._expire()
        return self._kept[key][0] if key in self._kept else None

    def remove(self, key: str) -> bool:
        """Remove a value; false if there is none with this id."""
        if key not in self._kept:
            return False
        self._bytes -= self._kept.pop(key)[1]
        return True

    def values(self) -> Sequence[T]:
        """All values, the oldest first."""
        self._expire()
        return [value for value, _, _ in self._kept.values()]

    def _expire(self) -> None:
        now = time.monotonic()
        while self._kept and next(iter(self._kept.values()))[2] < now:
            self.remove(next(iter(self._kept)))
