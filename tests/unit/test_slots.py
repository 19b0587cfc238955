"""Slots go to whoever has few, urgent requests first, and none is idle while somebody may have it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_actors.sharing import FairQueue, Tenant, Ticket, reserved

NUMBERS = itertools.count()
MANY = 10_000


def ticket(owner: str, priority: int = 0, size: int = 1, tenant: str = "", stages: tuple[str, ...] = ()) -> Ticket:
    client = owner.encode()
    return Ticket(f"{owner}{tenant} {next(NUMBERS)}", client, Tenant(client, tenant), priority, size, stages)


def slots(count: int, line: int = MANY, line_bytes: int = MANY, blocked: Iterable[str] = ()) -> FairQueue:
    return FairQueue(count, line, line_bytes, lambda stages: not set(blocked).isdisjoint(stages))


def flood(made: FairQueue, count: int, owner: str, **fields: object) -> None:
    for _ in range(count):
        made.enter(ticket(owner, **fields))


def granted(made: FairQueue) -> list[str]:
    """The owners, with their tenants, that got a slot just now."""
    found = []
    while (got := made.next()) is not None:
        found.append(got.owner.decode() + got.tenant.name)
    return found


@given(st.integers(1, 300))
def test_one_client_gets_all_slots_but_those_kept_for_others_who_then_get_in_at_once(count: int) -> None:
    made = slots(count)
    flood(made, count + 5, "flooder")
    assert len(granted(made)) == count - reserved(count)
    for number in range(reserved(count)):
        flood(made, 2, f"newcomer {number}")
        assert granted(made) == [f"newcomer {number}"]
    assert made.held == count
    assert reserved(count) <= max(1, count / 8)


def test_so_do_the_tenants_of_one_client_within_what_it_can_have() -> None:
    made = slots(256)
    flood(made, 300, "http", tenant="a")
    assert len(granted(made)) == 225
    flood(made, 300, "http", tenant="b")
    assert granted(made) == ["httpb"]
    for number in range(14):
        flood(made, 2, "http", tenant=f"c{number}")
        assert granted(made) == [f"httpc{number}"]
    flood(made, 1, "http", tenant="d")
    assert granted(made) == [], "what is left is for other clients,"
    flood(made, 1, "library")
    assert granted(made) == ["library"]


def turns(made: FairQueue, running: list[Ticket], count: int) -> list[str]:
    """Who gets the slots that are freed, one after the other."""
    order = []
    for _ in range(count):
        made.leave(running.pop(0).request_id)
        got = made.next()
        order.append(got.owner.decode() + got.tenant.name if got is not None else "")
    return order


def test_freed_slots_go_to_clients_below_their_share() -> None:
    made = slots(12)
    flood(made, 100, "flooder", priority=-1000)
    running = []
    while (got := made.next()) is not None:
        running.append(got)
    assert len(running) == 11
    flood(made, 100, "other", priority=5)
    assert granted(made) == ["other"]
    assert turns(made, running, 5) == ["", *["other"] * 4], "one is kept again, then priorities do not count"
    assert turns(made, running, 3) == ["flooder"] * 3, "until it, too, is below its share"


def test_within_their_shares_urgent_requests_go_first_then_those_of_clients_with_fewer_slots() -> None:
    made = slots(3, MANY)
    running = [ticket("a"), ticket("b"), ticket("a")]
    for one in running:
        made.enter(one)
        made.next()
    for late in (ticket("b", 3), ticket("c", 3), ticket("c", 2), ticket("d", 3), ticket("a", -9)):
        made.enter(late)
    assert turns(made, running, 2) == ["c", "d"], "the one with priority 2, then one that had nothing yet"


def test_a_blocked_request_does_not_hold_up_those_of_others() -> None:
    blocked = {"talker"}
    made = slots(4, blocked=blocked)
    made.enter(ticket("a", stages=("prompt", "talker")))
    assert granted(made) == []
    made.enter(ticket("b", stages=("prompt",)))
    assert granted(made) == ["b"]
    blocked.clear()
    assert granted(made) == [], "nobody has said that anything changed"
    made.look_again()
    assert granted(made) == ["a"]


def test_bytes_are_bounded_too_and_nobody_leaves_in_vain() -> None:
    made = slots(1, line_bytes=100)
    made.enter(ticket("a"))
    assert granted(made) == ["a"]
    for size in (30, 30, 30):
        assert made.enter(ticket("big", size=size)) == []
    (out,) = made.enter(ticket("small", size=20))
    assert out.startswith("big")
    huge = ticket("huge", size=99)
    assert made.enter(huge) == [huge.request_id]
    assert made.waiting_bytes == 80
    made = slots(1, line_bytes=100)
    made.enter(ticket("a"))
    assert granted(made) == ["a"]
    flood(made, 3, "three", size=33)
    late = ticket("late", size=98)
    assert made.enter(late) == [late.request_id], "one of the three alone would not make room for it"
    assert made.waiting == 3


class AnyOrder(RuleBasedStateMachine):
    """Clients come and go as they like; priorities are equal or not."""

    SLOTS, LINE = 8, 6
    owners = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.slots = slots(self.SLOTS, self.LINE)
        self.waiting: dict[str, Ticket] = {}
        self.running: dict[str, Ticket] = {}

    def held(self, owner: bytes) -> int:
        return sum(one.owner == owner for one in self.running.values())

    def total(self, owner: bytes) -> int:
        return self.held(owner) + sum(one.owner == owner for one in self.waiting.values())

    def fill(self) -> None:
        while (got := self.slots.next()) is not None:
            sharers = {one.owner for one in (*self.waiting.values(), *self.running.values())}
            del self.waiting[got.request_id]
            if self.held(got.owner) * len(sharers) >= self.SLOTS:
                for other in self.waiting.values():
                    few = self.held(other.owner) * len(sharers) < self.SLOTS
                    assert not few or other.owner == got.owner, "a client over its share went before one below it"
            free = self.SLOTS - len(self.running)
            assert free > (reserved(self.SLOTS) if self.held(got.owner) else 0)
            self.running[got.request_id] = got

    @rule(owner=owners, priority=st.sampled_from([0, 0, 0, -5, 5]), tenant=st.sampled_from(["", "x", "y"]))
    def enter(self, owner: str, priority: int, tenant: str) -> None:
        new = ticket(owner, priority, tenant=tenant)
        self.waiting[new.request_id] = new
        for out in self.slots.enter(new):
            victim = self.waiting.pop(out)
            most = max(self.total(one.owner) for one in self.waiting.values())
            assert self.total(victim.owner) + 1 >= most, "somebody else has more"
        self.fill()

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 100))
    def end(self, number: int) -> None:
        request_id = sorted(self.running)[number % len(self.running)]
        del self.running[request_id]
        assert self.slots.leave(request_id)
        self.fill()

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 100))
    def give_up(self, number: int) -> None:
        request_id = sorted(self.waiting)[number % len(self.waiting)]
        del self.waiting[request_id]
        assert not self.slots.leave(request_id)
        self.fill()

    @invariant()
    def books_agree(self) -> None:
        assert self.slots.held == len(self.running) <= self.SLOTS
        assert self.slots.waiting == len(self.waiting) <= self.LINE
        assert self.slots.waiting_bytes == sum(one.size for one in self.waiting.values())

    @invariant()
    def nothing_is_idle_that_somebody_may_have(self) -> None:
        free = self.SLOTS - len(self.running)
        for one in self.waiting.values():
            assert not free or self.held(one.owner), "it has none, and there is one"
            assert free <= reserved(self.SLOTS) or one.tenant.name, "there are more than are kept"

    def teardown(self) -> None:
        for request_id in (*self.running, *self.waiting):
            self.slots.leave(request_id)
        assert (self.slots.held, self.slots.waiting, self.slots.waiting_bytes) == (0, 0, 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=60)
