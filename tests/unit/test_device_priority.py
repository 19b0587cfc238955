"""Stages that yield a shared device to those whose requests await their first output."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from omni_actors.stage.sound import PATIENCE_SECONDS, SEARCH_SECONDS, VALID_SECONDS, DemandFlag, DevicePriority
from tests.support.clock import Clock


def test_yields_while_the_other_wants_the_device(tmp_path: Path) -> None:
    clock = Clock(100.0)
    flag = DemandFlag(tmp_path, "thinker", 0, clock=clock)
    priority = DevicePriority(tmp_path, {"thinker": True}, clock=clock)
    assert not priority.yields()
    flag.set(True)
    assert priority.yields()
    flag.set(False)
    assert not priority.yields()


def test_what_computes_a_first_output_yields_only_to_stages_before_it(tmp_path: Path) -> None:
    clock = Clock(100.0)
    for stage, before in (("thinker", True), ("code2wav", False)):
        flag = DemandFlag(tmp_path, stage, 0, clock=clock)
        flag.set(True)
        priority = DevicePriority(tmp_path, {stage: before}, clock=clock)
        assert priority.yields(urgent=False)
        assert priority.yields(urgent=True) is before


def test_a_flag_expires_with_its_owner(tmp_path: Path) -> None:
    clock = Clock(100.0)
    DemandFlag(tmp_path, "thinker", 0, clock=clock).set(True)
    priority = DevicePriority(tmp_path, {"thinker": True}, clock=clock)
    assert priority.yields()
    clock.now += VALID_SECONDS + 0.01
    assert not priority.yields()


def test_never_yields_for_more_than_half_of_the_time(tmp_path: Path) -> None:
    clock = Clock(100.0)
    flag, priority = (
        DemandFlag(tmp_path, "thinker", 0, clock=clock),
        DevicePriority(tmp_path, {"thinker": True}, clock=clock),
    )
    yielded = 0
    for _ in range(2000):
        clock.now += 0.001
        flag.set(True)
        yielded += priority.yields()
    assert 800 < yielded <= 1010
    assert PATIENCE_SECONDS < 1


def test_replicas_that_come_later_are_found_though_others_were_there(tmp_path: Path) -> None:
    """More may come at any time (`ctl scale`), and one may come back on another GPU."""
    clock = Clock(100.0)
    priority = DevicePriority(tmp_path, {"thinker": True}, [1], clock)
    assert not priority.yields()
    for replica, devices in ((0, [1]), (3, [1]), (0, [2, 1])):
        later = DemandFlag(tmp_path, "thinker", replica, devices, clock)
        later.set(True)
        assert not priority.yields(), "it does not look at the disk before every step"
        clock.now += SEARCH_SECONDS
        later.set(True)
        assert priority.yields()
        later.set(False)
        assert not priority.yields()


@pytest.mark.parametrize(
    ("own", "theirs", "shared"),
    [
        ([], [], True),  # the processor
        ([0], [0], True),
        ([1], [0], False),
        ([1], [0, 1], True),
        ([1, 2], [0, 1], True),
        ([1], [11], False),
        ([], [0], False),
        ([0], [], False),
    ],
)
def test_yields_where_a_device_is_shared(tmp_path: Path, own: list[int], theirs: list[int], shared: bool) -> None:
    clock = Clock(100.0)
    DemandFlag(tmp_path, "thinker", 0, theirs, clock).set(True)
    assert DevicePriority(tmp_path, dict.fromkeys(["reader", "thinker"], True), own, clock).yields() is shared
    assert not DevicePriority(tmp_path, {"reader": True}, own, clock).yields()
    assert not DevicePriority(tmp_path, {}, own, clock).yields()


def test_a_run_directory_that_is_gone_does_not_end_a_stage(tmp_path: Path) -> None:
    clock = Clock(100.0)
    folder = tmp_path / "run"
    folder.mkdir()
    DemandFlag(folder, "thinker", 0, clock=clock).set(True)
    priority = DevicePriority(folder, {"thinker": True}, clock=clock)
    assert priority.yields()
    shutil.rmtree(folder)
    clock.now += SEARCH_SECONDS
    assert not priority.yields()
