"""Whose sound is made next: by priority, then by when listeners fall silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stage.sound import FIRST_SECONDS, PRESSING_SECONDS, Piece, choose

NOW = 100.0
LATER = NOW + 10.0

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


def keys(chosen: list[Piece], places: int = 16) -> list[object]:
    return choose(chosen, NOW, places)


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


@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0, 3), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 3),
)
def test_everybody_is_served_after_at_most_the_steps_of_those_who_fall_silent_earlier(
    arrivals: list[tuple[int, float, int]], places: int
) -> None:
    """Answers arrive at a step, have so many seconds in hand, and need so many steps of 10 ms."""
    left = {number: steps for number, (_, _, steps) in enumerate(arrivals)}
    due = {number: arrivals[number][0] * 0.01 + arrivals[number][1] for number in left}
    waited = dict.fromkeys(left, 0)
    for step in range(31 + sum(left.values())):
        here = [number for number in left if arrivals[number][0] <= step]
        chosen = set(choose([Piece(number, 0, due[number], 0.6) for number in here], step * 0.01, places))
        for number in here:
            if number in chosen:
                left[number] -= 1
                if not left[number]:
                    del left[number]
            else:
                waited[number] += 1
    assert not left
    for number, steps in waited.items():
        before = [other for other in due if other != number and due[other] <= due[number]]
        assert steps <= sum(arrivals[other][2] for other in before)


def test_a_new_answer_goes_before_who_has_sound_in_hand_and_after_who_is_silent() -> None:
    new = Piece("new", 0, NOW + FIRST_SECONDS)
    silent, ahead = Piece("silent", 0, NOW - 1), Piece("ahead", 0, LATER)
    assert keys([ahead, new, silent], places=2) == ["silent", "new"]


def test_who_has_sound_in_hand_fills_a_light_step_and_none_that_is_heavy() -> None:
    silent = Piece("silent", 0, NOW, 0.4)
    ahead = [Piece(name, 0, LATER + number, 0.5) for number, name in enumerate("ab")]
    assert keys([silent, *ahead]) == ["silent", "a"]
    assert keys(ahead) == ["a", "b"]
