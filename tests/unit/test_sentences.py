"""Where a growing text is cut: at the ends of its sentences, however it arrives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.http_server.speech.sentences import LONGEST, SentenceCutter, pieces_of

ALPHABET = st.sampled_from([*"ab1 .!?…。！？、,;:\n\"')」好é", "Dr.", "e.g.", " https://a.b/c?d.", "3.5", "word "])
TEXTS = st.lists(ALPHABET, max_size=120).map("".join)


def sentences(*pieces: str, longest: int = LONGEST) -> list[str]:
    cutter = SentenceCutter(longest)
    return [*(found for piece in pieces for found in cutter.append(piece)), *cutter.flush()]


@given(TEXTS, st.lists(st.integers(0, 150), max_size=30), st.integers(1, 40))
def test_sentences_are_the_text_and_do_not_depend_on_how_it_arrives(text: str, cuts: list[int], longest: int) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    whole = sentences(text, longest=longest)
    assert "".join(whole) == text
    assert all(0 < len(sentence) <= longest for sentence in whole)
    assert sentences(*pieces, longest=longest) == whole
    assert sentences(*text, longest=longest) == whole


@pytest.mark.parametrize(
    "wanted",
    [
        ["The tide is full. ", "It turns! ", "Does it? ", "Perhaps… ", "Yes."],
        ['He said "Go." ', "(She went.) ", "“Why?” ", "So."],
        ["It cost 3.5 pounds, e.g. for Dr. J. R. Smith vs. the sea. ", "He paid."],
        ["See https://sea.example/a.b?c=d.e! ", "Or www.sea.example. ", "Yes."],
        ["1. Rise. ", "10. Shine. ", "It began in 1999. ", "It goes on."],
        ["潮が満ちる。", "「本当か？」", "はい！", "そうです"],
        ["A title\n", "\n", "A line without a mark\n", "The end"],
        ["Wait... ", "What?! ", "Mr.\n", "Smith"],
    ],
)
def test_a_sentence_ends_where_a_reader_would_stop(wanted: list[str]) -> None:
    assert sentences("".join(wanted)) == wanted


def test_a_sentence_is_whole_once_the_space_behind_its_mark_is_there() -> None:
    cutter = SentenceCutter()
    assert cutter.append("The tide is full.") == []
    assert cutter.append(" It") == ["The tide is full. "]
    assert cutter.rest == "It"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("One two, three four five six", ["One two, ", "three four ", "five six"]),
        ("A, two three four", ["A, two ", "three four"]),
        ("Onetwothree. Four", ["Onetwothree.", " Four"]),
        ("Onetwothreefourfive", ["Onetwothreef", "ourfive"]),
        ("潮が満ちて、月が出て、夜が来る", ["潮が満ちて、月が出て、", "夜が来る"]),
    ],
)
def test_a_long_sentence_is_cut_at_a_clause_or_a_space_else_anywhere(text: str, wanted: list[str]) -> None:
    assert sentences(text, longest=len("Onetwothreef")) == wanted


def test_pieces_of_a_long_text_have_whole_sentences_up_to_their_bound() -> None:
    text = "The tide is full, and the boats lie at the quay. " * 50
    pieces = pieces_of(text)
    assert "".join(pieces) == text
    assert {len(piece) for piece in pieces[:-1]} == {LONGEST // 49 * 49}


def test_a_text_of_nothing_but_marks_is_cut_too() -> None:
    for text in ("." * 100_000, "a. " * 33_000, ("x" * 200 + " a. " * 50) * 250, '."' * 50_000):
        assert "".join(pieces_of(text)) == text
