"""Remembers for a while which requests have ended, so that late messages about them are recognised.

A request that runs again keeps its id and gets the next attempt number: only the attempts up to the one that ended are
over.
"""

from __future__ import annotations

import collections

MAXIMUM = 100_000


class Tombstones:
    """Ids of ended requests, bounded by age (`ttl` seconds) and by number; the oldest are forgotten first."""

    def __init__(self, ttl: float, maximum: int = MAXIMUM) -> None:
        self._ttl = ttl
        self._maximum = maximum
        # (time, attempt), in order of time. A plain dict looks for its first entry among all that were deleted.
        self._ended: collections.OrderedDict[str, tuple[float, int]] = collections.OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ended

    def __len__(self) -> int:
        return len(self._ended)

    def covers(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt, or a later one, has ended."""
        return request_id in self._ended and attempt <= self._ended[request_id][1]

    def add(self, request_id: str, now: float, attempt: int = 0) -> None:
        """Remember an end; the oldest is forgotten when there are too many."""
        _, before = self._ended.pop(request_id, (0.0, 0))
        self._ended[request_id] = (now, max(before, attempt))
        while len(self._ended) > self._maximum:
            self._ended.popitem(last=False)

    def expire(self, now: float) -> None:
        """Forget the requests that ended `ttl` seconds ago or earlier."""
        while self._ended:
            oldest = next(iter(self._ended))
            if self._ended[oldest][0] + self._ttl > now:
                return
            self._ended.popitem(last=False)
