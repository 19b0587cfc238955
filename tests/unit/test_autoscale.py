"""When `ctl scale --auto` gives a stage a replica more or less."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytest

from omni_actors.cli.autoscale import Bounds, Load, Look, Pace, parse_bounds, wished

PACE = Pace(up=3.0, down=10.0)
TALKER = Bounds("talker", 1, 4, 2)


def looks(requests: Sequence[float], replicas: int = 2, spoken: int = 0, stalled: int = 0) -> list[Look]:
    """One look a second; the answers end with the last."""
    seen = [Look(float(second), {"talker": Load(replicas, held)}) for second, held in enumerate(requests)]
    return [*seen[:-1], seen[-1]._replace(spoken=float(spoken), stalled=float(stalled))]


@pytest.mark.parametrize(
    ("why", "seen", "count"),
    [
        ("what fits is kept", looks([4] * 20), 2),
        ("more in every look of three seconds", looks([4, 5, 5, 5, 5]), 3),
        ("a look of these three asks for no more", looks([5, 5, 5, 4, 5]), 2),
        ("too early to know", looks([9, 9, 9]), 2),
        ("one at a time", looks([99] * 5), 3),
        ("no more than may be", looks([99] * 5, replicas=4), 4),
        ("less in every look of ten seconds", looks([2] * 11), 1),
        ("one of these ten needed as many", looks([2, 3] + [2] * 9), 2),
        ("ten seconds are not over", looks([2] * 10), 2),
        ("no less than may be", looks([0] * 11, replicas=1), 1),
        ("what is out of bounds is mended at once", looks([4], replicas=7), 4),
        ("answers stalled", looks([4] * 11, spoken=100, stalled=6), 3),
        ("few answers stalled", looks([4] * 11, spoken=100, stalled=5), 2),
        ("two stalled answers say nothing", looks([4] * 11, spoken=3, stalled=2), 2),
        ("none leaves while answers stall", looks([2] * 11, replicas=3, spoken=30, stalled=9)[1:], 3),
        ("answers stalled before the last change", [*looks([4] * 5), *looks([4] * 11, 3, 30, 9)[5:]], 3),
    ],
)
def test_replicas_come_soon_leave_late_and_one_at_a_time(why: str, seen: list[Look], count: int) -> None:
    assert wished([TALKER], seen, PACE) == {"talker": count}, why


def test_of_two_stages_the_one_that_is_fuller_gets_more_when_answers_stall() -> None:
    stages = [TALKER, Bounds("code2wav", 1, 4, 8)]
    seen = [look._replace(loads={**look.loads, "code2wav": Load(1, 8)}) for look in looks([3] * 11, 2, 100, 50)]
    assert wished(stages, seen, PACE) == {"talker": 2, "code2wav": 2}


@pytest.mark.parametrize("text", ["talker", "talker=1:2", "=1:2:3", "talker=0:2:3", "talker=3:2:1", "talker=1:2:0"])
def test_bounds_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        parse_bounds(text)
    assert parse_bounds("a=b=1:8:4") == Bounds("a=b", 1, 8, 4)
