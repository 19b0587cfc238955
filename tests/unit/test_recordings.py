"""Long recordings: where they are cut, the times of their words as transformers has them, and subtitles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor, _fix_timestamps

from omni_actors.client import ChoiceStreams, RequestStream, Text
from omni_actors.engine.models.qwen3_asr.aligner import in_order, words_of
from omni_actors.http_server.transcriptions import Said, Stretch, cut_at_sentences, gap, part_by_part, quiet_cuts
from omni_actors.protocol.messages import Done
from omni_actors.protocol.payloads import WordTime

RATE = 1000
LOUD = np.random.default_rng(0).uniform(0.5, 1, 100 * RATE).astype(np.float32)


@pytest.mark.parametrize(
    ("pauses", "wanted"),
    [
        ({28: 0.1, 33: 0.01, 62: 0.1}, [33, 62]),  # the quieter of two
        ({24.8: 0.01, 27: 0.1, 55: 0.1}, [27, 55]),  # what is further away is not looked at
    ],
)
def test_a_cut_is_in_the_quietest_tenth_of_a_second_around(pauses: dict[float, float], wanted: list[float]) -> None:
    samples = LOUD[: 75 * RATE].copy()
    for start, loudness in pauses.items():
        samples[round(start * RATE) : round(start * RATE) + 150] *= loudness
    cuts = quiet_cuts(samples, RATE, 30)
    assert [pause <= cut / RATE < pause + 0.15 for cut, pause in zip(cuts, wanted, strict=True)] == [True, True]
    assert all(samples[cut] <= samples[cut - 5 : cut + 5].min() for cut in cuts)
    assert quiet_cuts(samples, RATE, 75) == []


@pytest.mark.parametrize(
    ("before", "after", "between"),
    [
        ("The tide.", "It is full.", " "),
        ("潮。", "满了。", ""),
        ("The tide. ", "It", ""),
        ("", "It", ""),
        ("It", "", ""),
    ],
)
def test_parts_of_a_text_are_parted_as_its_script_parts_words(before: str, after: str, between: str) -> None:
    assert gap(before, after) == between


async def test_parts_are_read_one_after_the_other_however_they_arrive() -> None:
    streams = [RequestStream(str(part), lambda _: None, lambda *_: None) for part in range(3)]
    choices = ChoiceStreams(streams)
    for part, text in ((2, "c"), (0, "a"), (1, "b"), (0, None), (2, None), (1, None)):
        streams[part].deliver(Done({}) if text is None else Text(text, []))
    found = [(part, item and item.text) async for part, item in part_by_part(choices, 3)]
    assert found == [(0, "a"), (0, None), (1, "b"), (1, None), (2, "c"), (2, None)]


TEXTS = st.text(st.one_of(st.sampled_from(" '-.,aé9你好世。こ\u3000\U00020001\n"), st.characters()), max_size=40)


@given(TEXTS)
def test_words_are_those_of_transformers_with_their_places(text: str) -> None:
    words = words_of(text)
    processor = Qwen3ASRProcessor.__new__(Qwen3ASRProcessor)
    assert [word for _, word in words] == processor.split_words_for_alignment(text)
    assert all(text[place] == word[0] for place, word in words)
    assert [place for place, _ in words] == sorted({place for place, _ in words})


@given(st.lists(st.integers(0, 30), min_size=1, max_size=24))
def test_times_are_put_in_order_as_in_transformers(classes: list[int]) -> None:
    times = np.array(classes) * 80
    ordered = in_order(times).tolist()
    assert ordered == _fix_timestamps(times.astype(np.float32))
    assert ordered == sorted(ordered)


def words(text: str, *times: tuple[float, float]) -> list[WordTime]:
    found = words_of(text)
    return [WordTime(word, start, end, place) for (place, word), (start, end) in zip(found, times, strict=True)]


def spread(text: str, seconds: float) -> list[WordTime]:
    count = len(words_of(text))
    return words(text, *[(index * seconds, (index + 1) * seconds) for index in range(count)])


@pytest.mark.parametrize(
    ("text", "seconds", "wanted"),
    [
        (" The tide is full. Dr. No sails: 3.5!  ", 0.5, [(0, 2, "The tide is full."), (2, 4, "Dr. No sails: 3.5!")]),
        ("one two three four five", 2, [(0, 6, "one two three"), (6, 10, "four five")]),
        ("潮满了。他们出海", 1, [(0, 3, "潮满了。"), (3, 7, "他们出海")]),
        ("one", 9, [(0, 9, "one")]),
    ],
)  # fmt: skip
def test_segments_are_sentences_or_seven_seconds(
    text: str, seconds: float, wanted: list[tuple[float, float, str]]
) -> None:
    segments = cut_at_sentences(Stretch(b"", 100, 200), text, spread(text, seconds))
    assert segments == [Said(100 + start, 100 + end, said) for start, end, said in wanted]
    assert cut_at_sentences(Stretch(b"", 1, 2), f" {text}", []) == [Said(1, 2, text.strip())], "without times of words"
