"""Stages that leave a shared device to those whose requests wait for their first output."""

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


def test_waits_while_the_other_wants_the_device(tmp_path: Path) -> None:
    clock = Clock(100.0)
    sign = DemandFlag(tmp_path, "thinker", 0, clock)
    give_way = DevicePriority(tmp_path, [("thinker", 0)], clock)
    assert not give_way.now()
    sign.show(True)
    assert give_way.now()
    sign.show(False)
    assert not give_way.now()


def test_a_sign_expires_with_its_owner(tmp_path: Path) -> None:
    clock = Clock(100.0)
    DemandFlag(tmp_path, "thinker", 0, clock).show(True)
    give_way = DevicePriority(tmp_path, [("thinker", 0)], clock)
    assert give_way.now()
    clock.now += VALID_SECONDS + 0.01
    assert not give_way.now()


def test_never_waits_for_more_than_half_of_the_time(tmp_path: Path) -> None:
    clock = Clock(100.0)
    sign, give_way = DemandFlag(tmp_path, "thinker", 0, clock), DevicePriority(tmp_path, [("thinker", 0)], clock)
    waited = 0
    for _ in range(2000):
        clock.now += 0.001
        sign.show(True)
        waited += give_way.now()
    assert 800 < waited <= 1010
    assert PATIENCE_SECONDS < 1


def test_replicas_that_start_later_are_found(tmp_path: Path) -> None:
    clock = Clock(100.0)
    give_way = DevicePriority(tmp_path, [("thinker", 0), ("thinker", 1)], clock)
    assert not give_way.now()
    DemandFlag(tmp_path, "thinker", 1, clock).show(True)
    assert not give_way.now(), "it does not look at the disk before every step"
    clock.now += SEARCH_SECONDS
    DemandFlag(tmp_path, "thinker", 1, clock).show(True)
    assert give_way.now()


def test_nobody_to_wait_for(tmp_path: Path) -> None:
    assert not DevicePriority(tmp_path, []).now()
