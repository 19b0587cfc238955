"""The budget for embedding rows: which requests are admitted next to others, and who waits. Pure decisions.

A request counts from when it is opened until it is closed, with all its rows. It is *admitted* when the scheduler takes
it into its batch for the first time; what it receives after that is taken whatever it amounts to, because a request
that has begun must be able to end. Only admission waits, in the order in which the scheduler considers requests, and a
request that is larger than the budget is admitted when no other holds rows.
"""

from __future__ import annotations

from omni_actors.stage.engine_interface import BudgetStatistics


class RowBudget:
    """Not thread-safe.

    Args:
        limit_bytes: that the admitted requests may hold at the moment when another one is admitted.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0  # by all requests, those that wait included
        self.deferrals = 0  # admissions put off, counted in every step
        self._bytes: dict[str, int] = {}
        self._admitted: set[str] = set()
        self._admitted_bytes = 0
        self._refused: set[str] = set()  # requests that wait for the budget, as of the last step
        self._promised_bytes = 0  # to the admitted and, in this step, to those that may be
        self._closed = False  # a request waits, so those after it in this step do, too

    @property
    def waiting(self) -> int:
        """Requests whose admission was put off in the last step, for lack of room or because an earlier one waits."""
        return len(self._refused)

    def open(self, request_id: str, n_bytes: int) -> None:
        """Begin to count a request."""
        self._bytes[request_id] = n_bytes
        self.held_bytes += n_bytes

    def add(self, request_id: str, n_bytes: int) -> None:
        """Count more rows of an open request."""
        self._bytes[request_id] += n_bytes
        self.held_bytes += n_bytes
        if request_id in self._admitted:
            self._admitted_bytes += n_bytes

    def close(self, request_id: str) -> None:
        """Free what an open request holds."""
        n_bytes = self._bytes.pop(request_id)
        self.held_bytes -= n_bytes
        self._refused.discard(request_id)
        if request_id in self._admitted:
            self._admitted.discard(request_id)
            self._admitted_bytes -= n_bytes

    def begin_step(self) -> None:
        """Begin a pass over the requests that could be admitted."""
        self._promised_bytes = self._admitted_bytes
        self._closed = False
        self._refused.clear()

    def admits(self, request_id: str) -> bool:
        """Whether a request, the next in order, may be admitted in this step. Always true for those that were before.

        None overtakes one that waits: a stream of small requests would keep a large one waiting forever.
        """
        n_bytes = self._bytes.get(request_id)
        if n_bytes is None or request_id in self._admitted:
            return True
        if self._closed or (self._promised_bytes and self._promised_bytes + n_bytes > self.limit_bytes):
            self._closed = True
            self._refused.add(request_id)
            self.deferrals += 1
            return False
        self._promised_bytes += n_bytes
        return True

    def admit(self, request_id: str) -> None:
        """Note that the scheduler has taken a request into its batch. Idempotent; ignores others."""
        if request_id in self._bytes and request_id not in self._admitted:
            self._admitted.add(request_id)
            self._admitted_bytes += self._bytes[request_id]

    def statistics(self) -> BudgetStatistics:
        """The figures for the metrics."""
        return BudgetStatistics(self.limit_bytes, self.held_bytes, 0, self.waiting, self.deferrals)

    def has_admitted(self, request_id: str) -> bool:
        """Whether the scheduler has taken a request into its batch."""
        return request_id in self._admitted
