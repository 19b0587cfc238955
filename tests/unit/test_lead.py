"""For how long the first sound of an answer is kept: until the rest of it is foreseen to follow without a gap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stage.sound import (
    FIXED_SHARE,
    HORIZON_SECONDS,
    LONGEST_SECONDS,
    PHASE_SECONDS,
    PROVEN_SECONDS,
    Ahead,
    Arrivals,
    Forecast,
    Outlook,
    foreseen,
)
from omni_actors.telemetry.request_log import Playback

NOW = 100.0
LENGTHS = (0.24, 0.48, 0.96, 1.92, 1.92)  # of the pieces after the first
FIRST = 0.24
STEPS = 9
BLOCK_SHARE = 1 / 48 / 0.24  # of a light step, for a second of sound


def begun(seconds_per_token: float = 0.0, missing: bool = False, arrivals: Arrivals | None = None) -> Outlook:
    """An answer whose first piece has just been made; the tokens of the others may be missing, 50 a second of sound."""
    made = Playback()
    made.add(NOW, FIRST)
    arrivals = arrivals or Arrivals()
    arrivals.add(NOW - 1.0, 10)
    arrivals.add(NOW - 1.0 + 10 * seconds_per_token, 20)
    ahead, before = [], FIRST
    for length in LENGTHS:
        ahead.append(Ahead(before, length * BLOCK_SHARE, STEPS, round(50 * (before + length)) if missing else 0))
        before += length
    return Outlook(made, made.runs_out, arrivals, ahead)


def forecast(seconds: float, share: float = 0.4, steps: int = 50) -> Forecast:
    """Of a stage whose light steps take so many seconds, pieces and all; steps take that share of one."""
    forecast = Forecast(16)
    compute(forecast, 0.0, steps, seconds * (FIXED_SHARE + share) / (FIXED_SHARE + 1), share)
    return forecast


def compute(forecast: Forecast, now: float, steps: int, seconds: float, share: float = 0.4) -> None:
    for _ in range(steps):
        forecast.stepped(share, now, now + seconds)
        now += seconds


def late(gap: float) -> Outlook:
    """An answer whose sound ran out for so many seconds, and then went on for long enough to tell."""
    answer = begun()
    answer.made.add(answer.made.runs_out + gap, PROVEN_SECONDS)
    answer.due = answer.made.runs_out
    return answer


def kept(forecast: Forecast, answers: list[Outlook]) -> list[float]:
    forecast.look(answers, NOW)
    return [answer.leaves() - NOW for answer in answers]


def test_alone_on_a_fast_stage_nothing_is_kept() -> None:
    assert kept(forecast(0.01), [begun()]) == [0.0]


def test_the_pieces_of_one_answer_do_not_make_each_others_steps_longer() -> None:
    """They are made one after the other, in steps with little else in them, while those before are heard."""
    assert kept(forecast(0.04, share=0.05), [begun()]) == [0.0]
    assert max(kept(forecast(0.04, share=0.4), [begun() for _ in range(16)])) > 0


def test_two_steps_end_before_a_piece_is_in_one() -> None:
    """The device computes one, and another is queued behind it: with asynchronous scheduling both are decided."""
    light = 0.02
    unit = light / (FIXED_SHARE + 1)
    full, hardly_any = (forecast(light, share, steps=200) for share in (3.0, 0.1))
    step = unit * (LENGTHS[0] * BLOCK_SHARE + 3.0 + FIXED_SHARE)
    assert kept(full, [begun()]) == pytest.approx([(2 + STEPS) * step - FIRST])
    # Behind many others it is their steps that count, besides the one under way.
    waits = [max(kept(stage, [begun() for _ in range(64)])) for stage in (full, hardly_any)]
    assert waits[0] - waits[1] == pytest.approx(unit * (3.0 - 0.1))


def test_what_is_slow_now_is_not_thought_slow_for_long() -> None:
    assert foreseen(10, 0.02, 0.01) == pytest.approx(0.2)
    assert foreseen(100, 0.02, 0.01) == pytest.approx(PHASE_SECONDS + 0.75)
    assert foreseen(100, 0.01, 0.02) == pytest.approx(PHASE_SECONDS + 1.0), "nor fast"
    stage, slow = forecast(0.01), forecast(0.025)
    compute(stage, 50.0, 30, 0.025 * (FIXED_SHARE + 0.4) / (FIXED_SHARE + 1))  # as slow for the last half second
    waits = [max(kept(each, [begun() for _ in range(32)])) for each in (stage, slow)]
    assert 0 < waits[0] < 0.6 * waits[1]


def test_in_a_burst_the_first_answers_are_kept_though_nothing_was_learnt_from_others() -> None:
    waits = kept(forecast(0.03), [begun() for _ in range(32)])
    assert 0.3 < max(waits) < LONGEST_SECONDS


def test_a_stage_that_has_become_slow_is_noticed_within_a_second_of_computing() -> None:
    stage = forecast(0.01)
    assert max(kept(stage, [begun() for _ in range(24)])) < 0.1
    compute(stage, 50.0, 20, 0.05)
    assert max(kept(stage, [begun() for _ in range(24)])) > 0.3


def test_for_how_many_it_makes_sound_in_time_is_known_after_its_first_large_piece() -> None:
    """Sixteen pieces of nine blocks, 1.92 s each, in nine steps."""
    stage = forecast(0.02)
    assert stage.listeners == 0
    stage.completed(2 / 48, STEPS, 0.13, 0.13)
    assert stage.listeners == 0, "pieces of an answer's beginning are small"
    stage.completed(9 / 48, STEPS, 1.92, 3.84)
    step = 0.02 / (1 + FIXED_SHARE) * (FIXED_SHARE + 3.0)
    assert stage.listeners == int(16 * 1.92 / (STEPS * step))
    stage.completed(3 / 48, STEPS, 0.4, 4.24)
    assert stage.listeners == int(16 * 1.92 / (STEPS * step)), "the last piece of an answer is short"


def test_for_how_many_it_makes_sound_hardly_changes_in_a_second_and_follows_in_the_end() -> None:
    """While others compute on the device, or none does, it makes less or more than usually."""
    stage = forecast(0.02, share=1.0, steps=1000)
    stage.completed(9 / 48, STEPS, 1.92, 3.84)
    usually = stage.listeners
    assert usually
    compute(stage, 50.0, 100, 0.01, share=1.0)
    assert usually <= (stage.listeners or 0) < 1.25 * usually
    compute(stage, 52.0, 1000, 0.04, share=1.0)
    assert (stage.listeners or 0) < 0.6 * usually


def test_slow_steps_with_little_in_them_count_by_the_work_in_them() -> None:
    even, uneven = Forecast(16), Forecast(16)
    for number in range(100):
        compute(even, number, 2, 0.02, share=1.0)
        compute(uneven, number, 1, 0.02, share=0.1)
        compute(uneven, number + 0.02, 1, 0.02, share=1.9)
    for stage in (even, uneven):
        stage.completed(9 / 48, STEPS, 1.92, 3.84)
    assert uneven.listeners == even.listeners


def test_a_stage_whose_pieces_take_no_part_of_a_step_does_not_say_what_it_makes() -> None:
    stage = Forecast(16)
    compute(stage, 0.0, 10, 0.01, share=0.0)
    assert stage.listeners == 0
    stage.completed(0.0, 1, 0.5, 2.0)
    assert stage.listeners is None


def test_steps_after_a_pause_do_not_count_the_pause() -> None:
    stage = forecast(0.01)
    stage.stepped(1.0, 60.0, 60.01)
    assert kept(stage, [begun()]) == [0.0]


def test_input_that_comes_slowly_keeps_the_first_sound() -> None:
    fast, slow = begun(0.005, missing=True), begun(0.019, missing=True)
    assert kept(forecast(0.001), [fast]) == [0.0]
    assert kept(forecast(0.001), [slow])[0] > 0.3


def test_an_answer_whose_first_tokens_come_slowly_gets_the_others_as_fast_as_answers_usually_do() -> None:
    stage = forecast(0.001)
    begun(0.004, arrivals=stage.arrivals())
    usual, own = (begun(0.019, missing=True, arrivals=arrivals) for arrivals in (stage.arrivals(), Arrivals()))
    for _ in range(20):
        begun(0.004, arrivals=stage.arrivals())
    waits = kept(stage, [usual]), kept(stage, [own])
    assert waits[0][0] < 0.5 * waits[1][0]


def test_an_answer_whose_input_came_at_once_is_thought_to_get_the_rest_as_answers_usually_do() -> None:
    stage = forecast(0.001)
    slow, unknown = stage.arrivals(), stage.arrivals()
    begun(0.019, arrivals=slow)
    unknown.add(NOW - 1.0, 20)
    assert unknown.foresee(100) == pytest.approx(1.9)
    assert Arrivals().foresee(100) == 0.0


def test_what_most_of_the_others_have_needed_is_foreseen_for_all() -> None:
    """Their sound is late because of answers that began after them, and so will this one's be."""
    stage = forecast(0.001)
    others = [late(0.8) for _ in range(10)]
    assert kept(stage, [begun(), *others])[0] == pytest.approx(0.8)
    assert kept(stage, [begun(), late(3.0), *[late(0.0) for _ in range(19)]])[0] == 0.0, "one of them says little"


def test_what_a_burst_has_needed_is_foreseen_for_the_next_one_but_not_for_fewer_answers() -> None:
    stage = forecast(0.001)
    stage.look([late(0.8) for _ in range(10)], 0.0)
    assert kept(stage, [begun() for _ in range(10)]) == pytest.approx([0.8] * 10)
    assert kept(stage, [begun() for _ in range(5)]) == [0.0] * 5
    stage.look([late(0.0) for _ in range(5)], 0.0)
    assert kept(stage, [begun() for _ in range(10)]) == [0.0] * 10, "what was needed last counts"


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
