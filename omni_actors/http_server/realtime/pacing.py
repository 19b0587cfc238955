"""Slows down a client that sends too many events, by reading no more of them for a while."""

from __future__ import annotations

BURST_SECONDS = 2.0  # of events that may come at once


class Pace:
    """A bucket of tokens, one for each event.

    Args:
        rate: events per second in the long run.
        now: the time, in seconds of any clock.
    """

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._next = now - BURST_SECONDS  # when an event would come if all came at the rate

    def wait(self, now: float) -> float:
        """Count an event; returns the seconds for which no other one should be read."""
        self._next = max(self._next, now - BURST_SECONDS) + 1 / self._rate
        return max(0.0, self._next - now)
