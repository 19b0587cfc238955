"""A growing text is cut at the ends of its sentences, and its pieces are one stream of sound."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.client import Audio, RequestStream, Text
from omni_actors.client.prompts import speech_ability
from omni_actors.errors import Overloaded, StageUnavailable
from omni_actors.http_server.encoders import PcmEncoder
from omni_actors.http_server.speech.recital import (
    LONGEST,
    Recital,
    SentenceCutter,
    TextPiece,
    TextSpeaker,
    Utterance,
    pieces_of,
)
from omni_actors.protocol.messages import Description, Done, StageStatus

TEXT = Text("said", [1])
SOUND = Audio(numpy.zeros(8, numpy.float32), 24_000)
END = Done(usage={})


class Pipeline:
    """What is asked of a pipeline: the streams by text."""

    in_parts = True

    def __init__(self) -> None:
        self.streams: dict[str, RequestStream] = {}

    async def ask(self, text: str, more_text: bool = False) -> RequestStream:
        if text == "refused":
            raise Overloaded("Too many.")
        stream = self.streams[text] = RequestStream(text, lambda _: None, lambda *_: None)
        return stream


async def item_of(recital: Recital) -> Any:
    async with asyncio.timeout(20):
        return (await anext(recital)).item


async def test_the_next_piece_is_asked_for_with_the_first_sound_of_the_one_before_it() -> None:
    pipeline = Pipeline()
    utterance = Utterance(cast(TextSpeaker, pipeline), PcmEncoder("pcm", 24_000))
    recital = Recital(TextPiece(utterance, text) for text in ("one", "two", "three", ""))
    reading = asyncio.create_task(item_of(recital))
    await asyncio.sleep(0)
    pipeline.streams["one"].deliver(TEXT)
    assert await reading is TEXT
    assert list(pipeline.streams) == ["one"]
    assert not recital.ready
    for item in (SOUND, SOUND, END):
        pipeline.streams["one"].deliver(item)
    assert recital.ready
    assert [await item_of(recital) for _ in range(3)] == [SOUND, SOUND, None]
    assert list(pipeline.streams) == ["one", "two"]
    for item in (SOUND, END):
        pipeline.streams["two"].deliver(item)
    assert [await item_of(recital) for _ in range(2)] == [SOUND, None]
    assert list(pipeline.streams) == ["one", "two", "three"]
    pipeline.streams["three"].deliver(END)
    assert [await item_of(recital) for _ in range(2)] == [None, None], "a piece without text is not spoken"
    assert len(utterance.usages) == 3
    with pytest.raises(StopAsyncIteration):
        await item_of(recital)


async def test_a_piece_that_cannot_be_asked_for_fails_when_its_turn_comes() -> None:
    pipeline = Pipeline()
    utterance = Utterance(cast(TextSpeaker, pipeline), PcmEncoder("pcm", 24_000))
    recital = Recital(TextPiece(utterance, text) for text in ("one", "refused"))
    reading = asyncio.create_task(item_of(recital))
    await asyncio.sleep(0)
    for item in (SOUND, SOUND, END):
        pipeline.streams["one"].deliver(item)
    assert [await reading, await item_of(recital), await item_of(recital)] == [SOUND, SOUND, None]
    with pytest.raises(Overloaded):
        await item_of(recital)


@pytest.mark.parametrize("outputs", [{"audio": "code2wav"}, {"text": "thinker"}])
def test_while_its_stages_load_nobody_knows_whether_a_pipeline_without_text_speaks_what_it_is_given(
    outputs: dict[str, str],
) -> None:
    loading = StageStatus("talker", 0, 0, "loading", 1, 0)
    description = Description("p", "m", ("audio",), (), 24_000, False, 0, 1, (loading,), outputs=outputs)
    if "text" in outputs:
        assert speech_ability(description) is None
        return
    with pytest.raises(StageUnavailable, match=r"not ready to speak: talker \(loading\)"):
        speech_ability(description)


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
    for marks in ("." * 100_000, "a. " * 33_000, ("x" * 200 + " a. " * 50) * 250, '."' * 50_000):
        assert "".join(pieces_of(marks)) == marks
