"""When a first sound may leave, for how many listeners a stage makes sound, and whose is made next."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stage.sound import (
    HORIZON_SECONDS,
    LONGEST_SECONDS,
    PRESSING_SECONDS,
    ROOM,
    Ahead,
    Arrivals,
    Costs,
    Outlook,
    Piece,
    choose,
    foresee,
)
from omni_actors.telemetry.request_log import Playback

NOW = 100.0
CHUNK = 0.24  # seconds of sound
STEPS = 9  # of a chunk


def costs(step: float = 0.005, shares: Sequence[float] = (0.1,), count: int = 200) -> Costs:
    """Those of a stage whose last steps took so many seconds each."""
    made = Costs(32)
    for number in range(count):
        made.stepped(shares, number * step, (number + 1) * step)
    return made


def answer(pace: float = 0.005, missing: int = 12, chunks: int = 8, due: float = NOW + CHUNK) -> Outlook:
    """One with one chunk, which has just been made; each of those to come lacks more tokens than the one before."""
    made = Playback()
    made.add(NOW, CHUNK)
    ahead = [Ahead(CHUNK * n, 0.1, STEPS, missing * n) for n in range(1, chunks + 1)]
    return Outlook(made, due, pace, ahead)


def leaves(answers: Sequence[Outlook], stage: Costs) -> list[float]:
    foresee(answers, stage, NOW)
    return [each.leaves - NOW for each in answers]


def test_alone_on_a_fast_stage_a_first_sound_leaves_at_once() -> None:
    assert leaves([answer()], costs()) == [0]


def test_tokens_that_come_more_slowly_than_they_are_heard_keep_it() -> None:
    (kept,) = leaves([answer(pace=0.03, chunks=4)], costs())
    last = 4 * 12 * 0.03 + (STEPS + 1) * 0.005  # when the last of the chunks is made
    assert kept == pytest.approx(last - 4 * CHUNK)


def test_work_that_is_due_before_keeps_it() -> None:
    crowd = [answer() for _ in range(60)]
    assert max(leaves(crowd, costs())) > 1
    late = [answer(due=NOW + 60) for _ in range(60)]
    assert leaves([answer(), *late], costs())[0] == 0, "who has sound in hand for long delays nobody"


def test_slow_steps_keep_it_and_no_longer_once_they_are_fast_again() -> None:
    stage = costs(step=0.05)
    assert leaves([answer()], stage)[0] > 0.2
    for number in range(600):
        stage.stepped((0.1,), 50 + number * 0.005, 50 + (number + 1) * 0.005)
    assert leaves([answer()], stage) == [0]


def test_steps_after_a_pause_do_not_count_the_pause() -> None:
    stage = Costs(32)
    for second in range(50):
        stage.stepped((0.1,), second, second + 0.005)
    assert stage.step == pytest.approx(0.005)


def test_only_the_next_seconds_are_looked_at() -> None:
    far = Outlook(answer().made, NOW, 1.0, [Ahead(CHUNK + HORIZON_SECONDS + 0.01, 0.1, STEPS, 1000)])
    assert leaves([far], costs()) == [0]


@given(st.lists(st.builds(answer, st.floats(0, 10), st.integers(0, 100), st.integers(0, 12)), min_size=1, max_size=12))
def test_no_sound_is_kept_for_longer_than_the_limit(answers: list[Outlook]) -> None:
    assert all(0 <= wait <= LONGEST_SECONDS + 1e-6 for wait in leaves(answers, costs(step=0.02)))


def test_the_pace_of_an_answers_input_is_its_own_once_it_is_known() -> None:
    arrivals = Arrivals()
    arrivals.add(NOW, 12)
    assert arrivals.pace(0.5) == 0.5
    arrivals.add(NOW + 1, 12)  # nothing new
    arrivals.add(NOW + 2, 32)
    assert arrivals.pace(0.5) == pytest.approx(0.1)


def test_for_how_many_listeners_it_makes_sound_follows_from_the_cost_of_full_steps() -> None:
    assert Costs(32).listeners == math.inf, "nothing is known"
    small, full = costs(step=0.003), costs(step=0.02, shares=[0.1] * 32)
    for stage in (small, full):
        stage.completed(0.1, STEPS, 2.0)
        stage.completed(0.05, STEPS, 0.2)  # the largest one counts
    assert full.listeners == pytest.approx(32 * 2.0 / (STEPS * 0.02 * ROOM))
    assert small.listeners == pytest.approx(full.listeners, rel=0.4), "small steps say nearly the same"
    slow = costs(step=100.0)
    slow.completed(0.1, STEPS, 2.0)
    assert slow.listeners == 1, "one is spoken however slow the stage is"


def test_chunks_of_models_without_light_steps_count_alike() -> None:
    stage = costs(step=0.01, shares=[0.0] * 32)
    stage.completed(0.0, 1, 2.0)
    assert stage.listeners == pytest.approx(32 * 2.0 / (0.01 * ROOM))


pieces = st.lists(
    st.builds(
        Piece,
        key=st.uuids(),
        priority=st.integers(-1, 1),
        due=st.floats(NOW - 5, NOW + 5),
        share=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]),
    ),
    max_size=12,
    unique_by=lambda piece: piece.key,
)


def rank(piece: Piece) -> tuple[int, float]:
    return piece.priority, piece.due


@given(pieces, st.integers(1, 6), st.sets(st.integers(0, 11)))
def test_nobody_is_served_before_one_who_falls_silent_earlier(
    given_pieces: list[Piece], places: int, too_large: set[int]
) -> None:
    refused = {piece.key for number, piece in enumerate(given_pieces) if number in too_large}
    chosen = choose(given_pieces, NOW, places, lambda key: key not in refused)
    by_key = {piece.key: piece for piece in given_pieces}
    taken = [by_key[key] for key in chosen]
    left = [piece for piece in given_pieces if piece.key not in {*chosen, *refused}]
    assert [rank(piece) for piece in taken] == sorted(rank(piece) for piece in taken)
    assert all(rank(served) <= rank(waiting) for served in taken for waiting in left)
    assert len(taken) <= places
    assert bool(taken) or not left, "a step is never empty while something could be done"
    assert not refused & set(chosen)


@given(pieces)
def test_while_a_listener_is_about_to_fall_silent_only_others_like_it_make_a_step_heavy(
    given_pieces: list[Piece],
) -> None:
    chosen = set(choose(given_pieces, NOW, len(given_pieces) + 1))
    taken = sorted((piece for piece in given_pieces if piece.key in chosen), key=rank)
    share, pressed = 0.0, False
    for piece in taken:
        presses = piece.due < NOW + PRESSING_SECONDS
        share += piece.share
        assert presses or not pressed or share <= 1
        pressed |= presses
    if not any(piece.due < NOW + PRESSING_SECONDS for piece in given_pieces):
        assert len(taken) == len(given_pieces)
