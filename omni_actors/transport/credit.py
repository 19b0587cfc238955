"""Credit: how much of what was sent has not been taken yet. Both ends of an edge, without sockets.

The sender's `Window` shrinks with every message and grows with every `Credit`; when it is used up, messages wait at the
sender, where they are counted and can hold up their source. The receiver's `ReceivedCredit` collects what was taken
until it is worth a message: a quarter of the window at a time, the rest on the owner's tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from omni_actors.protocol.codec import Frame

Key = TypeVar("Key")
GRANTS_PER_WINDOW = 4


def wire_size(frames: Sequence[Frame]) -> int:
    """Bytes of a message as both sides of its edge count them."""
    return sum(len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes for frame in frames)


class EdgeMetrics(NamedTuple):
    """The sender's side of an edge. The first three are totals (see `Traffic`); the rest is the state now."""

    messages: int
    bytes: int
    shared_bytes: int
    open: bool = False  # there is a link; without one the rest is zero
    messages_out: int = 0  # sent, without credit for them yet
    bytes_out: int = 0
    credit: int = 0  # messages that may be sent without more credit
    waiting: int = 0  # messages


class Traffic:
    """Totals of one receiver since the process began, over all links to it. Other threads may read them."""

    __slots__ = ("bytes", "messages", "shared_bytes")

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0  # of all frames
        self.shared_bytes = 0  # of blocks in shared memory

    def metrics(self) -> EdgeMetrics:
        """Return the metrics of an edge without a link."""
        return EdgeMetrics(self.messages, self.bytes, self.shared_bytes)


class Window:
    """The sender's side of one edge: how much may be sent without more credit, in messages and bytes."""

    def __init__(self, messages: int, size: int) -> None:
        self._messages = messages
        self._size = size
        self.messages_out = 0  # sent, without credit for them yet
        self.bytes_out = 0

    def admits(self, size: int) -> bool:
        """Whether a message of `size` bytes may be sent now. When nothing else is out, any size may."""
        if not self.messages_out:
            return True
        return self.messages_out < self._messages and self.bytes_out + size <= self._size

    @property
    def messages_left(self) -> int:
        """Messages that may be sent without more credit, if their bytes allow it."""
        return max(0, self._messages - self.messages_out)

    @property
    def exhausted(self) -> bool:
        """Whether nothing more may be sent before credit comes."""
        return self.messages_out >= self._messages or self.bytes_out >= self._size

    def sent(self, size: int) -> None:
        """Count a message of `size` bytes as out."""
        self.messages_out += 1
        self.bytes_out += size

    def granted(self, messages: int, size: int) -> None:
        """Add credit. Credit for more than was sent is ignored."""
        self.messages_out = max(0, self.messages_out - messages)
        self.bytes_out = max(0, self.bytes_out - size)


class ReceivedCredit(Generic[Key]):
    """The receiver's side of all its edges: what it has taken from each sender and not granted yet."""

    def __init__(self, window_messages: int, window_bytes: int) -> None:
        self._messages = max(1, window_messages // GRANTS_PER_WINDOW)
        self._bytes = max(1, window_bytes // GRANTS_PER_WINDOW)
        self._taken: dict[Key, tuple[int, int]] = {}

    def take(self, sender: Key, size: int) -> bool:
        """Count a message that was taken. True when the sender's share is worth a grant."""
        messages, total = self._taken.get(sender, (0, 0))
        self._taken[sender] = (messages + 1, total + size)
        return self._is_due(messages + 1, total + size)

    def collect(self, everything: bool) -> list[tuple[Key, int, int]]:
        """Return (sender, messages, bytes) to grant now: the shares that are large enough, or all of them."""
        due = [(sender, *taken) for sender, taken in self._taken.items() if everything or self._is_due(*taken)]
        for sender, _, _ in due:
            del self._taken[sender]
        return due

    def _is_due(self, messages: int, size: int) -> bool:
        return messages >= self._messages or size >= self._bytes
