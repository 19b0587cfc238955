"""When `scripts/soak.py` says that a process grows."""

from __future__ import annotations

import random

import pytest

from scripts.soak import growth

pytestmark = pytest.mark.nightly

MIB = 2**20
COUNTS = range(50, 1001, 50)  # requests before each reading


def test_what_a_process_fills_while_it_warms_up_is_no_growth() -> None:
    """Code and caches for the shapes that come up."""
    sizes = {count: 600 * MIB + min(count, 250) * MIB // 4 for count in COUNTS}
    assert growth(sizes) == 0


def test_a_leak_shows_in_a_large_process_that_is_not_measured_evenly() -> None:
    noise = random.Random(0)
    leak, size = 4096, 700 * MIB
    sizes = {count: size + leak * count + noise.randrange(-MIB // 8, MIB // 8) for count in COUNTS}
    sizes[600] += 50 * MIB  # a buffer that was held just then
    assert growth(sizes) == pytest.approx(1000 * leak, rel=0.1)


def test_a_stage_that_was_killed_is_judged_by_the_readings_that_there_are() -> None:
    sizes = {count: 30 * MIB + 2048 * count for count in (100, 250, 300, 900, 1000)}
    assert growth(sizes) == pytest.approx(1000 * 2048)
