"""The clock of a process."""

from __future__ import annotations

from omni_actors.host.processes import AnchoredClock
from tests.support.clock import Clock


def test_a_clock_does_not_follow_when_the_wall_clock_is_set() -> None:
    wall, monotonic = Clock(5000.0), Clock(10.0)
    clock = AnchoredClock(wall, monotonic)
    wall.now, monotonic.now = 0.0, 12.5
    assert clock() == 5002.5
    assert clock.of(11.0) == 5001.0
