"""Estimates by how much the clocks of two processes differ."""

from __future__ import annotations

import collections

KEPT = 64  # observations in each direction; older ones say less, as clocks drift


class ClockOffset:
    """Estimates `seconds`, to be added to a peer's moments to have ours, from messages in both directions.

    A message cannot arrive before it was sent. So our time of receipt minus the peer's time of sending is an upper
    bound of the offset; our time of sending minus the peer's time of receipt is a lower bound. While zero lies between
    the two, the clocks count as equal, as those of one host are. Otherwise the middle is the estimate, and it is wrong
    by at most half the distance.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._upper: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._lower: collections.deque[float] = collections.deque(maxlen=KEPT)

    def received(self, sent_there: float, received_here: float) -> None:
        """Take the times of a message from the peer: sent by its clock, received by ours."""
        if sent_there:
            self._upper.append(received_here - sent_there)
            self._forget_contradiction(self._lower)
            self.seconds = self._estimate()

    def sent(self, sent_here: float, received_there: float) -> None:
        """Take the times of a message to the peer: sent by our clock, received by its clock."""
        if sent_here and received_there:
            self._lower.append(sent_here - received_there)
            self._forget_contradiction(self._upper)
            self.seconds = self._estimate()

    def _forget_contradiction(self, older: collections.deque[float]) -> None:
        """If the bounds contradict each other, a clock was set: forget what was observed before."""
        if self._upper and self._lower and min(self._upper) < max(self._lower):
            older.clear()
            newest = self._upper if older is self._lower else self._lower
            last = newest[-1]
            newest.clear()
            newest.append(last)

    def _estimate(self) -> float:
        upper = min(self._upper) if self._upper else None
        lower = max(self._lower) if self._lower else None
        if upper is not None and lower is not None:
            return 0.0 if lower <= 0.0 <= upper else (upper + lower) / 2
        if upper is not None:
            return min(upper, 0.0)
        return max(lower, 0.0) if lower is not None else 0.0
