"""What many share: bytes within a limit (`Budget`), slots (`FairQueue`), and which requests have ended (`Tombstones`).

A request in flight has a slot; the others wait in a line of bounded length. Slots are shared among owners (a key, or a
connection without one), and an owner's slots among its tenants: its connections, and the names that it gives to its own
users. No request loses its slot, so the last ones are kept for those who hold none (docs/decisions.md).
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple


class Budget:
    """Counts what holders have. Not thread-safe.

    `take` counts whatever is taken. Whoever takes asks `fits` before or after, and decides what happens if it does not
    fit: it waits, is refused, or others make room.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: dict[Hashable, int] = {}

    def __contains__(self, holder: Hashable) -> bool:
        return holder in self._held

    def held_by(self, holder: Hashable) -> int:
        """What a holder has."""
        return self._held.get(holder, 0)

    def fits(self, size: int = 0) -> bool:
        """Whether the limit allows `size` more."""
        return self.used + size <= self.limit

    def take(self, holder: Hashable, size: int) -> None:
        """Count `size` more for a holder."""
        self._held[holder] = self.held_by(holder) + size
        self.used += size

    def release(self, holder: Hashable) -> None:
        """Give back all that a holder has. Idempotent."""
        self.used -= self._held.pop(holder, 0)


RESERVED_OF = 16  # of this number of slots, one is kept for clients that hold none;
LEAST_SLOTS = 4  # with fewer slots, none is

Stages = tuple[str, ...]


class Tenant(NamedTuple):
    """A part of an owner. `name` is what the client calls it, "" for nothing."""

    client: bytes
    name: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that needs a slot. `size` is in bytes."""

    request_id: str
    owner: bytes
    tenant: Tenant
    priority: int
    size: int
    stages: Stages


class _Entry(NamedTuple):
    """A ticket in line; the smallest goes first."""

    priority: int
    number: int  # in order of arrival
    ticket: Ticket


class _Turn(NamedTuple):
    """Rank of a share's first entry; the smallest goes first."""

    over: bool  # the share is no smaller than a fair one
    priority: int
    held: int
    served: int  # of two that hold as much, the one that has got nothing for longer goes first
    number: int


@dataclass
class _Share:
    """What all, an owner or a tenant have, and wait for. `keeps`: slots are kept for it while it has none."""

    keeps: bool = True
    held: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    latest: int = 0  # number of the last entry that joined
    served: int = 0  # number of the last slot that it got
    parts: dict[Hashable, _Share] = field(default_factory=dict)  # of all by owner, of an owner by tenant
    line: list[_Entry] = field(default_factory=list)  # of a tenant

    def may_have(self, part: _Share, slots: int) -> bool:
        """Whether a part can have one more of the slots that the parts can have together."""
        return slots - self.held > (reserved(slots) if part.keeps and part.held else 0)


def reserved(slots: int) -> int:
    """How many of these slots are kept for those who hold none."""
    return max(1, slots // RESERVED_OF) if slots >= LEAST_SLOTS else 0


class FairQueue:
    """Grants slots, and keeps the line short.

    Args:
        slots: how many there are.
        line: requests that may wait.
        line_bytes: bytes that they may have, all together.
        blocked: whether a request for these stages could not start now even if it had a slot.
    """

    def __init__(self, slots: int, line: int, line_bytes: int, blocked: Callable[[Stages], bool]) -> None:
        self.count = slots
        self._line = line
        self._line_bytes = line_bytes
        self._blocked = blocked
        self._all = _Share()
        self._holders: dict[str, Ticket] = {}
        self._entries: dict[str, _Entry] = {}
        self._arrivals, self._grants = itertools.count(1), itertools.count(1)
        self._settled = True  # none in line can have a slot before something changes

    @property
    def held(self) -> int:
        """Slots in use."""
        return self._all.held

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return self._all.waiting

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the requests in line."""
        return self._all.waiting_bytes

    def enter(self, ticket: Ticket) -> list[str]:
        """Join the line. Returns the ids of requests that left it because it was too long, perhaps this one's.

        They are taken from the owner, and within it from the tenant, with the most requests or bytes.
        """
        self._settled = False
        entry = _Entry(ticket.priority, next(self._arrivals), ticket)
        self._join(entry)
        left: list[_Entry] = []
        while (by_bytes := self.waiting_bytes > self._line_bytes) or self.waiting > self._line:
            if not left and self._may_start(ticket):
                return []  # `next` gives it a slot at once
            left.append(self._largest(by_bytes))
            self._quit(left[-1])
        if entry in left:  # then the others need not leave
            for other in left:
                if other is not entry:
                    self._join(other)
            return [ticket.request_id]
        return [other.ticket.request_id for other in left]

    def next(self) -> Ticket | None:
        """Give a slot to the request whose turn it is; `None` if none can have one."""
        if self._settled or not self.waiting:
            return None
        found = self._first(self._all, self.count, self.count, functools.cache(self._blocked))
        if found is None:
            self._settled = True
            return None
        ticket = found[1].ticket
        grant = next(self._grants)
        for share in self._shares(ticket):
            share.held += 1
            share.served = grant
        self._holders[ticket.request_id] = ticket
        self._quit(found[1])
        return ticket

    def look_again(self) -> None:
        """Ask again which ones are blocked."""
        self._settled = False

    def leave(self, request_id: str) -> bool:
        """Forget a request that has ended, wherever it is. Returns whether it had a slot."""
        self._settled = False
        if request_id in self._entries:
            self._quit(self._entries[request_id])
        ticket = self._holders.pop(request_id, None)
        if ticket is not None:
            for share in self._shares(ticket):
                share.held -= 1
            self._forget_idle(ticket)
        return ticket is not None

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    @property
    def _owners_limit(self) -> int:
        """What one owner can have."""
        return self.count - reserved(self.count)

    def _may_start(self, ticket: Ticket) -> bool:
        _, owner, tenant = self._shares(ticket)
        free = self._all.may_have(owner, self.count) and owner.may_have(tenant, self._owners_limit)
        return free and not self._blocked(ticket.stages)

    def _first(
        self, of: _Share, slots: int, fair: int, blocked: Callable[[Stages], bool]
    ) -> tuple[_Turn, _Entry] | None:
        """The entry that goes first, of those in a share that can have a slot, and the rank of its part.

        Args:
            slots: those that the parts can have together.
            fair: those that the parts share fairly.
        """
        found = []
        for part in of.parts.values():
            if not part.waiting or not of.may_have(part, slots):
                continue
            if part.parts:
                best = self._first(part, self._owners_limit, max(part.held + 1, fair // len(of.parts)), blocked)
                entry = best[1] if best is not None else None
            else:
                entry = next((entry for entry in part.line if not blocked(entry.ticket.stages)), None)
            if entry is not None:
                over = part.held * len(of.parts) >= fair
                found.append((_Turn(over, entry.priority, part.held, part.served, entry.number), entry))
        return min(found, default=None)

    # -- the line -----------------------------------------------------------------------------------------------------

    def _largest(self, by_bytes: bool) -> _Entry:
        """The entry that has to leave: the last one of the owner that has most; of two, the later one."""

        def size(share: _Share) -> tuple[int, int]:
            return share.waiting_bytes if by_bytes else share.held + share.waiting, share.latest

        share = self._all
        while share.parts:
            share = max((part for part in share.parts.values() if part.waiting), key=size)
        return share.line[-1]

    def _join(self, entry: _Entry) -> None:
        shares = self._shares(entry.ticket)
        for share in shares:
            share.waiting += 1
            share.waiting_bytes += entry.ticket.size
            share.latest = max(share.latest, entry.number)
        bisect.insort(shares[-1].line, entry)
        self._entries[entry.ticket.request_id] = entry

    def _quit(self, entry: _Entry) -> None:
        shares = self._shares(entry.ticket)
        for share in shares:
            share.waiting -= 1
            share.waiting_bytes -= entry.ticket.size
        line = shares[-1].line
        del line[bisect.bisect_left(line, entry)]
        del self._entries[entry.ticket.request_id]
        self._forget_idle(entry.ticket)

    def _shares(self, ticket: Ticket) -> tuple[_Share, _Share, _Share]:
        """Everything that a request counts for."""
        owner = self._all.parts.setdefault(ticket.owner, _Share())
        # Only owners that name tenants keep slots for them.
        return self._all, owner, owner.parts.setdefault(ticket.tenant, _Share(keeps=bool(ticket.tenant.name)))

    def _forget_idle(self, ticket: Ticket) -> None:
        for of, name in ((self._all.parts[ticket.owner], ticket.tenant), (self._all, ticket.owner)):
            if not of.parts[name].held and not of.parts[name].waiting:
                del of.parts[name]


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
