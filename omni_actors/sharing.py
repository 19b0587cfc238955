"""What many share: bytes within a limit (`Budget`), and slots (`Slots`).

A request in flight has a slot; the others wait in a line of bounded length. Slots are shared among owners (a key, or a
connection without one), and an owner's slots among its tenants: its connections, and the names that it gives to its own
users. No request loses its slot, so the last ones are kept for those who hold none (docs/decisions.md).
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable
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


RESERVED_OF = 16  # one slot in so many is kept for those who hold none;
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


@dataclass
class _Share:
    """What an owner or a tenant has, and waits for."""

    held: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    latest: int = 0  # number of the last entry that joined
    served: int = 0  # number of the last slot that it got
    line: list[_Entry] = field(default_factory=list)  # of a tenant
    tenants: dict[Tenant, _Share] = field(default_factory=dict)  # of an owner

    @property
    def requests(self) -> int:
        return self.held + self.waiting


def reserved(slots: int) -> int:
    """How many of these slots are kept for those who hold none."""
    return max(1, slots // RESERVED_OF) if slots >= LEAST_SLOTS else 0


class Slots:
    """Grants slots, and keeps the line short.

    Args:
        slots: how many there are.
        line: requests that may wait.
        line_bytes: bytes that they may have, all together.
        blocked: whether a request for these stages could not start now even if it had a slot.
    """

    def __init__(self, slots: int, line: int, line_bytes: int, blocked: Callable[[Stages], bool]) -> None:
        self.resize(slots)
        self._line = line
        self._line_bytes = line_bytes
        self._blocked = blocked
        self._all = _Share()
        self._owners: dict[bytes, _Share] = {}
        self._waiting: dict[bytes, _Share] = {}  # those of them that have requests in line
        self._holders: dict[str, Ticket] = {}
        self._entries: dict[str, _Entry] = {}
        self._arrivals = 0
        self._grants = 0
        self._settled = True  # none in line can have a slot before something changes

    def resize(self, slots: int) -> None:
        """Change how many there are. No request loses its own."""
        self._slots = slots
        self._reserved = reserved(slots)
        self._limit = slots - self._reserved  # what one owner can have
        self._settled = False

    @property
    def count(self) -> int:
        """How many there are."""
        return self._slots

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

    def requests_of(self, owner: bytes) -> int:
        """How many requests of an owner have a slot or wait for one."""
        share = self._owners.get(owner)
        return share.requests if share is not None else 0

    def enter(self, ticket: Ticket) -> list[str]:
        """Join the line. Returns the ids of requests that left it because it was too long, perhaps this one's.

        They are taken from the owner, and within it from the tenant, with the most requests or bytes.
        """
        self._settled = False
        self._arrivals += 1
        entry = _Entry(ticket.priority, self._arrivals, ticket)
        self._join(entry)
        left: list[_Entry] = []
        while (by_bytes := self.waiting_bytes > self._line_bytes) or self.waiting > self._line:
            if not left and self._may_have(ticket) and not self._blocked(ticket.stages):
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
        best: tuple[_Turn, _Entry] | None = None
        if not self._settled and self.held < self._slots and self.waiting:
            blocked = functools.cache(self._blocked)
            for owner in self._waiting.values():
                entry = self._first_of(owner, blocked)
                if entry is None:
                    continue
                turn = _turn(owner, len(self._owners), self._slots, entry)
                if best is None or turn < best[0]:
                    best = turn, entry
        if best is None:
            self._settled = True
            return None
        ticket = best[1].ticket
        self._quit(best[1], forget=False)
        self._grants += 1
        for share in self._shares(ticket):
            share.held += 1
            share.served = self._grants
        self._holders[ticket.request_id] = ticket
        return ticket

    def look_again(self) -> None:
        """Ask again which ones are blocked."""
        self._settled = False

    def leave(self, request_id: str) -> bool:
        """Forget a request that has ended, wherever it is. Returns whether it had a slot."""
        self._settled = False
        ticket = self._holders.pop(request_id, None)
        if ticket is None:
            if request_id in self._entries:
                self._quit(self._entries[request_id])
            return False
        for share in self._shares(ticket):
            share.held -= 1
        self._forget_idle(ticket)
        return True

    # -- who may have a slot, and whose turn it is --------------------------------------------------------------------

    def _may_have(self, ticket: Ticket) -> bool:
        owner = self._owners[ticket.owner]
        return self._owner_may(owner) and self._tenant_may(owner, ticket.tenant)

    def _owner_may(self, owner: _Share) -> bool:
        free = self._slots - self.held
        return free > (self._reserved if owner.held else 0)

    def _tenant_may(self, owner: _Share, tenant: Tenant) -> bool:
        """Only owners that name tenants keep slots for them."""
        if not tenant.name or not owner.tenants[tenant].held:
            return True
        return self._limit - owner.held > reserved(self._limit)

    def _first_of(self, owner: _Share, blocked: Callable[[Stages], bool]) -> _Entry | None:
        """The entry of an owner that goes first, of those that can have a slot."""
        if not self._owner_may(owner):
            return None
        share = max(owner.held + 1, self._slots // len(self._owners))
        entries = [
            (_turn(tenant, len(owner.tenants), share, entry), entry)
            for name, tenant in owner.tenants.items()
            if tenant.line and self._tenant_may(owner, name)
            for entry in itertools.islice((entry for entry in tenant.line if not blocked(entry.ticket.stages)), 1)
        ]
        return min(entries)[1] if entries else None

    # -- the line -----------------------------------------------------------------------------------------------------

    def _largest(self, by_bytes: bool) -> _Entry:
        """The entry that has to leave: the last one of the owner that has most; of two, the later one."""

        def size(share: _Share) -> tuple[int, int]:
            return share.waiting_bytes if by_bytes else share.requests, share.latest

        def largest(shares: Iterable[_Share]) -> _Share:
            return max((share for share in shares if share.waiting), key=size)

        return largest(largest(self._waiting.values()).tenants.values()).line[-1]

    def _join(self, entry: _Entry) -> None:
        ticket = entry.ticket
        for share in self._shares(ticket):
            share.waiting += 1
            share.waiting_bytes += ticket.size
            share.latest = max(share.latest, entry.number)
        owner = self._waiting[ticket.owner] = self._owners[ticket.owner]
        bisect.insort(owner.tenants[ticket.tenant].line, entry)
        self._entries[ticket.request_id] = entry

    def _quit(self, entry: _Entry, forget: bool = True) -> None:
        ticket = entry.ticket
        del self._entries[ticket.request_id]
        for share in self._shares(ticket):
            share.waiting -= 1
            share.waiting_bytes -= ticket.size
        owner = self._owners[ticket.owner]
        if not owner.waiting:
            del self._waiting[ticket.owner]
        line = owner.tenants[ticket.tenant].line
        del line[bisect.bisect_left(line, entry)]
        if forget:
            self._forget_idle(ticket)

    def _shares(self, ticket: Ticket) -> tuple[_Share, _Share, _Share]:
        """Everything that a request counts for."""
        owner = self._owners.setdefault(ticket.owner, _Share())
        return self._all, owner, owner.tenants.setdefault(ticket.tenant, _Share())

    def _forget_idle(self, ticket: Ticket) -> None:
        owner = self._owners[ticket.owner]
        if not owner.tenants[ticket.tenant].requests:
            del owner.tenants[ticket.tenant]
        if not owner.requests:
            del self._owners[ticket.owner]


class _Turn(NamedTuple):
    """Rank of a share's first entry; the smallest goes first."""

    over: bool  # the share is no smaller than a fair one
    priority: int
    held: int
    served: int  # of two that hold as much, the one that has got nothing for longer goes first
    number: int


def _turn(share: _Share, sharers: int, slots: int, entry: _Entry) -> _Turn:
    return _Turn(share.held * sharers >= slots, entry.priority, share.held, share.served, entry.number)
