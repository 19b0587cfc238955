"""Credit: how much of what was sent has not been taken yet. Both ends of an edge, without sockets.

The sender's `Window` shrinks with every message and grows with every `Credit`; at its end messages wait with the
sender, where they are counted and can hold up their source. The receiver's `ReceivedCredit` collects what was taken and
says when it is worth a message: a quarter of the window at a time, the rest on the owner's tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from omni_actors.protocol.codec import Frame

Key = TypeVar("Key")
SHARE = 4  # a grant is worth a message from this fraction of the window on


def wire_size(frames: Sequence[Frame]) -> int:
    """Bytes of a message for the account of its edge: the same on both sides."""
    return sum(len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes for frame in frames)


class EdgeMetrics(NamedTuple):
    """The sender's side of an edge, for metrics. What has left is as in `Traffic`; the rest is as of now."""

    messages: int
    bytes: int
    shared_bytes: int
    open: bool = False  # there is a link now; without one the rest is zero
    messages_out: int = 0  # sent, no credit for them yet
    bytes_out: int = 0
    credit: int = 0  # messages that may be sent without more credit
    waiting: int = 0


class Traffic:
    """What has left on an edge, through all links to one receiver since the process began. Read by other threads."""

    __slots__ = ("bytes", "messages", "shared_bytes")

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0  # of all frames
        self.shared_bytes = 0  # of blocks in shared memory

    def figures(self) -> EdgeMetrics:
        """Those of an edge without a link."""
        return EdgeMetrics(self.messages, self.bytes, self.shared_bytes)


class Window:
    """The sender's side of one edge."""

    def __init__(self, messages: int, size: int) -> None:
        self._messages = messages
        self._size = size
        self.messages_out = 0  # sent, and no credit for them has come back yet
        self.bytes_out = 0

    def admits(self, size: int) -> bool:
        """Whether a message of `size` bytes may be sent now. One alone may always, whatever its size."""
        if not self.messages_out:
            return True
        return self.messages_out < self._messages and self.bytes_out + size <= self._size

    @property
    def messages_left(self) -> int:
        return max(0, self._messages - self.messages_out)

    @property
    def exhausted(self) -> bool:
        return self.messages_out >= self._messages or self.bytes_out >= self._size

    def sent(self, size: int) -> None:
        self.messages_out += 1
        self.bytes_out += size

    def granted(self, messages: int, size: int) -> None:
        """Credit came. More than was sent is no debt of the receiver's: it is ignored."""
        self.messages_out = max(0, self.messages_out - messages)
        self.bytes_out = max(0, self.bytes_out - size)


class ReceivedCredit(Generic[Key]):
    """The receiver's side of all of its edges, by sender."""

    def __init__(self, window_messages: int, window_bytes: int) -> None:
        self._messages = max(1, window_messages // SHARE)
        self._bytes = max(1, window_bytes // SHARE)
        self._taken: dict[Key, list[int]] = {}

    def take(self, sender: Key, size: int) -> bool:
        """A message was taken; true when the sender's share is worth a grant."""
        taken = self._taken.get(sender)
        if taken is None:
            taken = self._taken[sender] = [0, 0]
        taken[0] += 1
        taken[1] += size
        return taken[0] >= self._messages or taken[1] >= self._bytes

    def collect(self, everything: bool) -> list[tuple[Key, int, int]]:
        """(sender, messages, bytes) to grant now: the shares that are large enough, or all of them."""
        due = [
            (sender, messages, size)
            for sender, (messages, size) in self._taken.items()
            if everything or messages >= self._messages or size >= self._bytes
        ]
        for sender, _, _ in due:
            del self._taken[sender]
        return due
