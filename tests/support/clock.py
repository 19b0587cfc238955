"""A clock that tests set by hand."""

from __future__ import annotations


class Clock:
    """Returns `now`, in seconds, until a test changes it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
