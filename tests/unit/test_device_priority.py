"""Stages that yield a shared device to those whose requests await their first output."""

from __future__ import annotations

from pathlib import Path

from omni_actors.stage.device_priority import (
    PATIENCE_SECONDS,
    SEARCH_SECONDS,
    VALID_SECONDS,
    DemandFlag,
    DevicePriority,
)
from tests.support.clock import Clock


def test_yields_while_the_other_wants_the_device(tmp_path: Path) -> None:
    clock = Clock(100.0)
    flag = DemandFlag(tmp_path, "thinker", 0, clock)
    priority = DevicePriority(tmp_path, [("thinker", 0)], clock)
    assert not priority.yields()
    flag.set(True)
    assert priority.yields()
    flag.set(False)
    assert not priority.yields()


def test_a_flag_expires_with_its_owner(tmp_path: Path) -> None:
    clock = Clock(100.0)
    DemandFlag(tmp_path, "thinker", 0, clock).set(True)
    priority = DevicePriority(tmp_path, [("thinker", 0)], clock)
    assert priority.yields()
    clock.now += VALID_SECONDS + 0.01
    assert not priority.yields()


def test_never_yields_for_more_than_half_of_the_time(tmp_path: Path) -> None:
    clock = Clock(100.0)
    flag, priority = DemandFlag(tmp_path, "thinker", 0, clock), DevicePriority(tmp_path, [("thinker", 0)], clock)
    yielded = 0
    for _ in range(2000):
        clock.now += 0.001
        flag.set(True)
        yielded += priority.yields()
    assert 800 < yielded <= 1010
    assert PATIENCE_SECONDS < 1


def test_replicas_that_start_later_are_found(tmp_path: Path) -> None:
    clock = Clock(100.0)
    priority = DevicePriority(tmp_path, [("thinker", 0), ("thinker", 1)], clock)
    assert not priority.yields()
    DemandFlag(tmp_path, "thinker", 1, clock).set(True)
    assert not priority.yields(), "it does not look at the disk before every step"
    clock.now += SEARCH_SECONDS
    DemandFlag(tmp_path, "thinker", 1, clock).set(True)
    assert priority.yields()


def test_without_others_it_never_yields(tmp_path: Path) -> None:
    assert not DevicePriority(tmp_path, []).yields()
