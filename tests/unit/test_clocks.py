"""Clocks of processes, and the estimated offsets between them."""

from __future__ import annotations

import pytest

from omni_actors.host.processes import AnchoredClock
from omni_actors.telemetry.request_log import ClockOffset
from tests.support.clock import Clock


def test_a_clock_does_not_follow_when_the_wall_clock_is_set() -> None:
    wall, monotonic = Clock(5000.0), Clock(10.0)
    clock = AnchoredClock(wall, monotonic)
    wall.now, monotonic.now = 0.0, 12.5
    assert clock() == 5002.5
    assert clock.of(11.0) == 5001.0


def exchange(offset: ClockOffset, true_offset: float, delay: float, now: float = 100.0) -> None:
    """One message in each direction; `true_offset` is our clock minus the peer's."""
    offset.sent(now, now + delay - true_offset)
    offset.received(now - true_offset, now + delay)


@pytest.mark.parametrize("true_offset", [-3600.0, -0.2, 0.2, 3600.0])
def test_the_offset_of_another_host_is_found_within_the_delay(true_offset: float) -> None:
    offset = ClockOffset()
    for delay in (0.05, 0.002, 0.3):
        exchange(offset, true_offset, delay)
    assert offset.seconds == pytest.approx(true_offset, abs=0.002)


def test_one_direction_alone_corrects_only_what_is_impossible() -> None:
    behind, ahead = ClockOffset(), ClockOffset()
    behind.received(100.0, 105.0)  # five seconds on the way, or another clock: it cannot be known
    ahead.received(105.0, 100.0)  # read before it was sent
    assert behind.seconds == 0.0
    assert ahead.seconds == -5.0


def test_a_clock_that_was_set_is_measured_again() -> None:
    offset = ClockOffset()
    for _ in range(100):
        exchange(offset, 0.0, 0.001)
    exchange(offset, -50.0, 0.001)
    assert offset.seconds == pytest.approx(-50.0, abs=0.01)
    for _ in range(100):
        exchange(offset, 30.0, 0.001)
    assert offset.seconds == pytest.approx(30.0, abs=0.01)
