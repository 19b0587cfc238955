"""Time that does not jump when the system's clock is set.

A process keeps deadlines in Unix time as its own `STEADY` clock has it. On the wire they are those of the wall clock,
which all processes share: the codec converts them, so that a process that was started after a jump agrees with others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

JUMP_SECONDS = 1.0  # smaller differences between wall clock and monotonic clock do not count as jumps


def _wall() -> float:
    return time.time()


class AnchoredClock:
    """Unix time that starts at the wall clock and advances with the monotonic clock."""

    def __init__(self, wall: Callable[[], float] = _wall, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._anchor = wall() - monotonic()

    def __call__(self) -> float:
        """Seconds since the epoch, never less than at the call before."""
        return self._anchor + self._monotonic()

    def of(self, monotonic: float) -> float:
        """Convert a reading of the monotonic clock."""
        return self._anchor + monotonic

    def jumped(self) -> float:
        """Seconds by which the wall clock was set forward since this clock was made; 0 if it was not set."""
        difference = self._wall() - self()
        return difference if abs(difference) >= JUMP_SECONDS else 0.0


STEADY = AnchoredClock()  # of this process
