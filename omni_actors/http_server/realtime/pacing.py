"""How fast a client may send, and how far the server falls behind what it sends in real time."""

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


LAG_SECONDS = 0.5  # behind real time, from which turns are found too late


class Lag:
    """How far the work on a stream of sound is behind a sender in real time, while more waits than is worked on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ended = 0.0
        self._told = False

    def add(self, began: float, ended: float, seconds: float) -> bool:
        """Count a piece of sound, of which the work began and ended at these times of any clock.

        Returns whether the work has fallen behind by more than `LAG_SECONDS`, once until it has caught up.
        """
        waited = self.seconds if began - self._ended < LAG_SECONDS else 0.0  # longer pauses are the sender's
        self._ended = ended
        self.seconds = max(0.0, waited + ended - began - seconds)
        told, self._told = self._told, self.seconds > LAG_SECONDS or (self._told and self.seconds > 0)
        return self._told and not told
