"""Messages that travel on several channels, and which requests have ended, so that late messages are recognised."""

from __future__ import annotations

import collections
from typing import Annotated

from msgspec import Meta

from omni_actors.errors import ERROR_CLASSES, ErrorCode, OmniError
from omni_actors.protocol.fields import Count
from omni_actors.protocol.header import Body

MAX_MESSAGE, MAX_HINT, MAX_FIELD = 8192, 2048, 256  # characters


class Credit(Body, tag="credit", frozen=True):
    """Receiver -> sender of an edge: you may send this much more. Credit itself costs no credit.

    A sender starts with the window of the configuration (`flow`). `bytes` are of frames, without arena blocks.
    `released` are the tickets of arena blocks that the receiver no longer needs. `mapped` says that it can read the
    sender's arena, so that blocks may be sent to it.
    """

    messages: Count = 0
    bytes: Count = 0
    released: Annotated[tuple[Count, ...], Meta(max_length=65536)] = ()
    mapped: bool = False


class Abort(Body, tag="abort", frozen=True):
    """Client -> coordinator, coordinator -> stage: end the request named in the header. Idempotent."""


class Failed(Body, tag="failed", frozen=True):
    """Stage -> coordinator -> client, terminal: the request ended with an error.

    `retry_after` is in seconds; `field` names the field of the request that is wrong.
    """

    code: ErrorCode
    message: Annotated[str, Meta(max_length=MAX_MESSAGE)]
    hint: Annotated[str, Meta(max_length=MAX_HINT)] = ""
    stage: str | None = None
    retryable: bool = False
    retry_after: float | None = None
    field: Annotated[str, Meta(max_length=MAX_FIELD)] | None = None

    @classmethod
    def from_error(cls, error: OmniError, stage: str | None = None) -> Failed:
        """Describe an error; `stage` is used if the error names none. Long texts are cut."""
        return cls(
            code=error.code,
            message=error.message[:MAX_MESSAGE],
            hint=error.hint[:MAX_HINT],
            stage=error.stage or stage,
            retryable=error.retryable,
            retry_after=error.retry_after,
            field=error.field[:MAX_FIELD] if error.field is not None else None,
        )

    def to_error(self) -> OmniError:
        """Return the typed exception that this message stands for."""
        return ERROR_CLASSES[self.code](
            self.message, hint=self.hint, stage=self.stage, retry_after=self.retry_after, field=self.field
        )


MAX_TOMBSTONES = 100_000


class Tombstones:
    """Ids of ended requests, bounded by age (`ttl` seconds) and by number; the oldest are forgotten first."""

    def __init__(self, ttl: float, maximum: int = MAX_TOMBSTONES) -> None:
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
