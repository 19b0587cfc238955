"""For how long the first sound of an answer is kept: until the rest of it is foreseen to follow without a gap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stage.lead import FIXED_SHARE, HORIZON_SECONDS, LONGEST_SECONDS, Ahead, Arrivals, Forecast, Outlook
from omni_actors.telemetry.playback import Playback

NOW = 100.0
LENGTHS = (0.24, 0.48, 0.96, 1.92, 1.92)  # of the pieces after the first
FIRST = 0.24
STEPS = 9
BLOCK_SHARE = 1 / 48 / 0.24  # of a light step, for a second of sound


def begun(seconds_per_token: float = 0.0, missing: bool = False) -> Outlook:
    """An answer whose first piece has just been made; the tokens of the others may be missing, 50 a second of sound."""
    made = Playback()
    made.add(NOW, FIRST)
    arrivals = Arrivals()
    arrivals.add(NOW - 1.0, 10)
    arrivals.add(NOW - 1.0 + 10 * seconds_per_token, 20)
    ahead, before = [], FIRST
    for length in LENGTHS:
        ahead.append(Ahead(before, length * BLOCK_SHARE, STEPS, round(50 * (before + length)) if missing else 0))
        before += length
    return Outlook(made, made.runs_out, arrivals, ahead)


def forecast(seconds: float) -> Forecast:
    """Of a stage whose light steps take so many seconds, pieces and all."""
    forecast = Forecast(16)
    now = 0.0
    for _ in range(50):
        forecast.stepped(1.0, now, now + seconds)
        now += seconds
    return forecast


def kept(forecast: Forecast, answers: list[Outlook]) -> list[float]:
    forecast.look(answers, NOW)
    return [answer.leaves() - NOW for answer in answers]


def test_alone_on_a_fast_stage_nothing_is_kept() -> None:
    assert kept(forecast(0.01), [begun()]) == [0.0]


def test_the_pieces_of_one_answer_do_not_make_each_others_steps_longer() -> None:
    """They are made one after the other, so the second is made before the first has been heard, even here."""
    assert kept(forecast(0.055), [begun()]) == [0.0]
    assert min(kept(forecast(0.055), [begun() for _ in range(4)])) > 0


def test_in_a_burst_the_first_answers_are_kept_though_nothing_was_learnt_from_others() -> None:
    waits = kept(forecast(0.025), [begun() for _ in range(32)])
    assert 0.3 < max(waits) < LONGEST_SECONDS


def test_a_stage_that_has_become_slow_is_noticed_within_a_second_of_computing() -> None:
    stage = forecast(0.01)
    assert max(kept(stage, [begun() for _ in range(24)])) < 0.1
    now = 50.0
    while now < 51.0:
        stage.stepped(1.0, now, now + 0.04)
        now += 0.04
    assert max(kept(stage, [begun() for _ in range(24)])) > 0.5


def test_for_how_many_it_makes_sound_in_time_is_known_after_its_first_large_piece() -> None:
    """Sixteen pieces of nine blocks, 1.92 s each, in nine steps."""
    stage = forecast(0.02)
    assert stage.listeners == 0
    stage.completed(2 / 48, STEPS, 0.13)
    few = stage.listeners
    stage.completed(9 / 48, STEPS, 1.92)
    step = 0.02 / (1 + FIXED_SHARE) * (FIXED_SHARE + 3.0)
    assert stage.listeners == int(16 * 1.92 / (STEPS * step)) > few > 0
    stage.completed(3 / 48, STEPS, 0.4)
    assert stage.listeners == int(16 * 1.92 / (STEPS * step)), "the last piece of an answer is short"


def test_what_it_makes_alone_on_its_device_does_not_count_as_what_it_makes_usually() -> None:
    stage = forecast(0.02)
    stage.completed(9 / 48, STEPS, 1.92)
    usually, now = stage.listeners, 100.0
    while now < 102.0:
        stage.stepped(1.0, now, now + 0.01)
        now += 0.01
    assert usually <= stage.listeners < 1.25 * usually
    while now < 104.0:
        stage.stepped(1.0, now, now + 0.04)
        now += 0.04
    assert stage.listeners < 0.6 * usually, "that it has become slow counts at once"


def test_steps_after_a_pause_do_not_count_the_pause() -> None:
    stage = forecast(0.01)
    stage.stepped(1.0, 60.0, 60.01)
    assert kept(stage, [begun()]) == [0.0]


def test_input_that_comes_slowly_keeps_the_first_sound() -> None:
    fast, slow = begun(0.005, missing=True), begun(0.019, missing=True)
    assert kept(forecast(0.001), [fast]) == [0.0]
    assert kept(forecast(0.001), [slow])[0] > 0.3


def test_an_answer_whose_input_came_at_once_is_thought_as_slow_as_the_slowest_of_the_others() -> None:
    unknown, slow = begun(missing=True), begun(0.019, missing=True)
    unknown.arrivals = Arrivals()
    unknown.arrivals.add(NOW - 1.0, 20)
    first, second = kept(forecast(0.001), [unknown, slow])
    assert first == pytest.approx(second)


def test_those_who_hear_seconds_ahead_delay_no_other() -> None:
    """Their pieces are due after those of an answer that begins."""
    before = begun()
    ahead = [begun() for _ in range(30)]
    for answer in ahead:
        answer.made.add(NOW, 8.0)
        answer.due = answer.made.runs_out
        answer.ahead = [Ahead(answer.made.seconds, 8 / 48, STEPS)]
    alone, among = kept(forecast(0.02), [begun()]), kept(forecast(0.02), [before, *ahead])
    assert among[0] <= alone[0] + 0.2


def test_what_is_due_after_the_horizon_is_not_looked_at() -> None:
    answer = begun()
    answer.ahead = [Ahead(FIRST + HORIZON_SECONDS + 1.0, 1.0, 1_000_000)]
    assert kept(forecast(0.02), [answer]) == [0.0]


@given(st.integers(1, 100), st.floats(0.001, 0.2), st.floats(0.0, 0.1))
def test_no_sound_is_kept_for_longer_than_the_limit_and_more_answers_never_shorten_it(
    count: int, step: float, pace: float
) -> None:
    stage = forecast(step)
    few, more = ([begun(pace, missing=True) for _ in range(many)] for many in (count, count + 1))
    stage.look(few, NOW)
    stage.look(more, NOW)
    assert all(NOW <= answer.leaves() <= NOW + LONGEST_SECONDS for answer in (*few, *more))
    assert max(answer.smooth_start for answer in more) >= max(answer.smooth_start for answer in few) - 1e-9
