"""For how long the first sound of an answer is kept: as long as the answers before it needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stage.lead import EXCEPTIONS, LONGEST_SECONDS, WINDOW_SECONDS, Lead
from omni_actors.telemetry.playback import AUDIBLE_SECONDS, Playback

SOUND = 0.2  # seconds of a first piece


def answer(lead: Lead, moment: float, late: float) -> float:
    """An answer whose second piece comes so many seconds too late; returns for how long its first piece is kept."""
    made = Playback()
    made.add(moment, SOUND)
    kept = lead.begin(made)
    made.add(moment + SOUND + late, SOUND)
    return kept


@pytest.mark.parametrize("late", [-0.1, 0.0, 0.9 * AUDIBLE_SECONDS])
def test_where_nobody_would_hear_a_gap_nothing_is_kept(late: float) -> None:
    lead = Lead()
    assert [answer(lead, 100 + number, late) for number in range(5)] == [0.0] * 5


def test_what_the_last_answers_needed_is_kept_until_that_was_long_ago() -> None:
    lead = Lead()
    needs = [answer(lead, 100 + number, 0.4) for number in range(4)]
    assert needs == [0.0, 0.0, pytest.approx(0.4), pytest.approx(0.4)]
    assert answer(lead, 103 + WINDOW_SECONDS + 1, 0.0) == 0.0


def test_a_running_answer_tells_as_much_as_one_that_has_ended() -> None:
    lead, running = Lead(), [Playback() for _ in range(2)]
    for made in running:
        made.add(100, SOUND)
        assert lead.begin(made) == 0.0
    for made in running:
        made.add(100 + SOUND + 0.3, SOUND)
    assert answer(lead, 101, 0.0) == pytest.approx(0.3)


def test_one_answer_that_nobody_reads_delays_no_other() -> None:
    lead = Lead()
    answer(lead, 100, 60.0)
    assert [answer(lead, 101 + 0.1 * number, 0.0) for number in range(50)] == [0.0] * 50


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(-0.2, 5)), max_size=120))
def test_no_answer_is_kept_for_longer_than_others_needed_nor_than_the_bound(answers: list[tuple[float, float]]) -> None:
    lead, now, needs = Lead(), 100.0, []
    for after, late in answers:
        now += after
        kept = answer(lead, now, late)
        recent = sorted(max(need, 0.0) for moment, need in needs if moment >= now - WINDOW_SECONDS)
        allowed = recent[: -1 - len(recent) // EXCEPTIONS]
        assert 0.0 <= kept <= LONGEST_SECONDS
        need = max(allowed, default=0.0)
        if abs(need - AUDIBLE_SECONDS) > 1e-6:  # there rounding decides
            expected = min(need, LONGEST_SECONDS) if need > AUDIBLE_SECONDS else 0.0
            assert kept == pytest.approx(expected, abs=1e-6)
        needs.append((now, late))
