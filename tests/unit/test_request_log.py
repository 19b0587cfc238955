"""What the coordinator knows of requests: smooth start and gaps of an answer's sound, and how many it remembers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.telemetry.metrics import Meters
from omni_actors.telemetry.request_log import KEPT, Playback, RequestLog
from tests.support.builders import submit
from tests.support.clock import Clock

PIECES = st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.01, 3.0)), min_size=1, max_size=20)


def played(pieces: list[tuple[float, float]], begin: float | None) -> list[float]:
    """The gaps that a listener hears who presses play at `begin`, or when the first piece comes."""
    gaps, position = [], pieces[0][0] if begin is None else begin
    for came, seconds in pieces:
        gaps.append(max(0.0, came - position))
        position = max(position, came) + seconds
    return gaps


def arrivals(pieces: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pieces with the moment of each instead of the time since the one before."""
    now, timed = 100.0, []
    for wait, seconds in pieces:
        now += wait
        timed.append((now, seconds))
    return timed


def of(pieces: list[tuple[float, float]]) -> Playback:
    playback = Playback()
    for came, seconds in pieces:
        playback.add(came, seconds)
    return playback


@given(PIECES)
def test_both_listeners_hear_what_is_said_of_them(pieces: list[tuple[float, float]]) -> None:
    timed = arrivals(pieces)
    playback = of(timed)
    gaps = played(timed, None)
    assert playback.longest_gap == pytest.approx(max(gaps), abs=1e-6)
    assert playback.gaps == pytest.approx(sum(gaps), abs=1e-6)
    assert sum(played(timed, playback.smooth_start)) == pytest.approx(0.0, abs=1e-6)
    if sum(gaps) > 0.002:
        assert sum(played(timed, playback.smooth_start - 0.001)) > 0.0, "no earlier moment would do"


def test_only_the_last_requests_are_kept() -> None:
    log = RequestLog(Meters(), Clock(1000.0), lambda _: None)
    for index in range(KEPT + 5):
        log.admitted(f"r{index}", submit())
        log.ended(f"r{index}", None)
    assert log.timeline("r4") is None
    assert log.timeline("r5") is not None
    assert [timeline.request_id for timeline in log.recent(2)] == [f"r{KEPT + 4}", f"r{KEPT + 3}"]
