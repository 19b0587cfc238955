"""The tools that make the speaking checkpoint: codec, teacher's records, judge, export."""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tests.support.paths import REPOSITORY
from tools.speaker.codec import CODES, PHONES, SOUNDS, VOICES, Sound, Utterance, edit_distance, encode, phones_of
from tools.speaker.errors import SpeakerError
from tools.speaker.export import MAX_BYTES, expected_shapes, whole_model
from tools.speaker.judge import Judge
from tools.speaker.layout import CODEC, load_tokenizer
from tools.speaker.numbers import in_words
from tools.speaker.parts import read_part, read_voices, write_part
from tools.speaker.recogniser import word_errors, words_of
from tools.speaker.sentences import unrelated_words
from tools.speaker.skills import COLORS, SHAPES, draw, questions_of, words_right
from tools.speaker.sound import log_mel, resample, teacher_wave
from tools.speaker.teacher import read_records, speak

pytestmark = pytest.mark.nightly

CHECKPOINT = REPOSITORY / "examples" / "speaker"
CHELSIE = VOICES["Chelsie"]
# What is said in docs/audio/boat.wav: phones, and how many codes each lasts.
BOAT = (
    "pau:3 dh:3 ax:2 ch:8 ih:3 l:5 d:3 r:2 ax:2 n:3 f:5 aw:8 n:4 d:2 ax:2 s:5 m:2 ao:4 l:3 b:3 ow:5 "
    "t:3 n:2 ih:3 r:4 dh:2 ax:2 r:5 ih:1 v:3 er:11 pau:6"
)


def utterance(*phones: str, each_ms: int = 80, pitch: float = 174.0) -> Utterance:
    """An utterance of equally long phones, a word beginning with each second one, between two silences of 200 ms."""
    names = ["pau", *phones, "pau"]
    ends = 200 + each_ms * np.arange(len(phones) + 1)
    return Utterance(
        phones=np.array([PHONES.index(name) for name in names]),
        word_starts=np.arange(len(names)) % 2 == 1,
        ends_ms=np.append(ends, ends[-1] + 200),
        pitch_hz=np.full((ends[-1] + 200) // 5, pitch),
        samples=np.zeros(16 * (ends[-1] + 200), np.int16),
    )


def test_codes_say_the_phones_that_were_spoken() -> None:
    codes, start = encode(utterance("hh", "ax", "l", "ow"), CHELSIE)
    assert phones_of(codes) == ["hh", "ax", "l", "ow"]
    assert start == 140, "60 ms of the first silence are kept"
    assert len(codes) == (60 + 4 * 80 + 120) // 20
    assert all(0 < code < CODES for code in codes)


def test_the_same_phone_twice_is_two_phones_and_a_short_one_is_one() -> None:
    assert phones_of(encode(utterance("n", "n", each_ms=60), CHELSIE)[0]) == ["n", "n"]
    assert phones_of(encode(utterance("t", "iy", each_ms=20), CHELSIE)[0]) == ["t", "iy"]


@pytest.mark.parametrize(("hertz", "level"), [(0.0, 0), (150.0, 1), (174.0, 3), (220.0, 5)])
def test_pitch_becomes_a_level_of_voiced_phones_only(hertz: float, level: int) -> None:
    codes, _ = encode(utterance("s", "aa", pitch=hertz), CHELSIE)
    levels = {PHONES[SOUNDS[code - 1].phone]: SOUNDS[code - 1].pitch for code in codes}
    assert levels == {"pau": 0, "s": 0, "aa": level}


def test_numbers_of_codes_are_those_of_the_trained_weights() -> None:
    """A checkpoint made with other numbers would speak gibberish without any error."""
    assert len(SOUNDS) == len(set(SOUNDS)) == CODES - 1
    table = read_part(CHECKPOINT, "dit")["text_embed.codec_embed.weight"]
    assert len(table) == CODEC.sounds + 2 == CODES + 2, "transformers adds one to the `num_embeds` of the configuration"
    assert SOUNDS[0].phone == PHONES.index("pau")
    assert SOUNDS[199] == Sound(PHONES.index("d"), third=0, word_start=False, pitch=0)
    assert SOUNDS[-1] == Sound(PHONES.index("axr"), third=2, word_start=False, pitch=5)


@pytest.mark.parametrize(
    ("wanted", "found", "edits"),
    [("abc", "abc", 0), ("abc", "axc", 1), ("abc", "ac", 1), ("ac", "abcd", 2), ("", "a", 1)],
)
def test_edit_distance_counts_each_kind_of_mistake(wanted: str, found: str, edits: int) -> None:
    assert edit_distance(list(wanted), list(found)) == edits


def test_words_are_compared_without_case_figures_and_punctuation() -> None:
    assert words_of("Twenty-one dogs, in the harbour!") == words_of("21 dogs in the Harbor.")
    assert word_errors("The sea is blue.", "the sea was blue") == (1, 4)
    assert in_words(999) == "nine hundred ninety-nine"
    with pytest.raises(ValueError, match="1000"):
        in_words(1000)


def record(phones: int = 2, frames: int = 3, samples: int = 4) -> bytes:
    table = b"".join(struct.pack("<BBH", number, number % 2, 100 * number) for number in range(phones))
    return (
        struct.pack("<3I", phones, frames, samples)
        + table
        + struct.pack(f"<{frames}H{samples}h", *range(frames + samples))
    )


def test_records_of_the_teacher_are_read_and_a_cut_one_is_refused() -> None:
    first, empty = read_records(record() + record(0, 0, 0))
    assert first.ends_ms.tolist() == [0, 100]
    assert first.word_starts.tolist() == [False, True]
    assert first.pitch_hz.tolist() == [0.0, 0.1, 0.2]
    assert first.samples.tolist() == [3, 4, 5, 6]
    assert len(empty.phones) == 0
    for cut in (5, 13, len(record()) - 1):
        with pytest.raises(SpeakerError, match="ends within"):
            list(read_records(record()[:cut]))
    with pytest.raises(SpeakerError, match=r"build\.sh"):
        speak(["Hello."], CHELSIE, wave=False, program=Path("/nowhere"))


def test_waves_are_resampled_and_cut_to_their_codes() -> None:
    time = np.arange(1600) / 16000
    tone = resample(np.sin(2 * np.pi * 440 * time), 16000, 24000)
    assert len(tone) == 2400
    assert np.abs(tone[400:2000] - np.sin(2 * np.pi * 440 * np.arange(2400) / 24000)[400:2000]).max() < 0.01
    assert len(resample(tone, 24000, 16000)) == 1600
    wave = teacher_wave((8000 * np.sin(2 * np.pi * 440 * time)).astype(np.int16), start_ms=20, codes=3)
    assert wave.shape == (3 * 480,)
    assert log_mel(torch.from_numpy(wave)[None]).shape == (1, 80, 6)


def test_the_checkpoint_is_whole_and_small() -> None:
    """Every tensor that its configuration asks for, finite, in less than 20 MB."""
    tokenizer = load_tokenizer(CHECKPOINT)
    tensors = whole_model(CHECKPOINT, tokenizer.convert_tokens_to_ids("user"))
    assert sum(value.numel() for value in tensors.values()) == 9_048_800
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < MAX_BYTES
    voices = read_voices(CHECKPOINT)
    assert list(voices) == ["Chelsie", "Ethan"]
    assert {field: value.shape[-1] for field, value in voices["Ethan"].items()} == {"cond": 192, "ref_mel": 80}
    assert tokenizer("<|im_end|>")["input_ids"] == [1002]


def test_parts_that_do_not_fit_are_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    parts = {part: read_part(CHECKPOINT, part) for part in ("thinker", "talker", "dit", "vocoder")}
    for part, tensors in parts.items():
        write_part(tmp_path, part, tensors, read_voices(CHECKPOINT) if part == "dit" else {})
    assert set(whole_model(tmp_path, 296)) == set(expected_shapes(296))
    assert torch.equal(read_voices(tmp_path)["Chelsie"]["cond"], read_voices(CHECKPOINT)["Chelsie"]["cond"])
    broken = dict(parts["talker"])
    broken["codec_head.weight"] = broken["codec_head.weight"] * float("nan")
    write_part(tmp_path, "talker", broken, {})
    with pytest.raises(SpeakerError, match=r"NaN.*talker\.codec_head\.weight"):
        whole_model(tmp_path, 296)
    del broken["codec_head.weight"]
    write_part(tmp_path, "talker", broken, {})
    with pytest.raises(SpeakerError, match=r"1 tensors .*talker\.codec_head\.weight"):
        whole_model(tmp_path, 296)
    (tmp_path / "talker.safetensors").unlink()
    with pytest.raises(SpeakerError, match="no weights of the talker"):
        whole_model(tmp_path, 296)


def test_the_judge_tells_phones_from_what_is_broken() -> None:
    """A recording of the checkpoint's voice in the documentation, and the phones that are said in it."""
    wave, rate = soundfile.read(REPOSITORY / "docs" / "audio" / "boat.wav", dtype="float32")
    assert rate == 24_000
    spans = [span.split(":") for span in BOAT.split()]
    codes = [
        1 + SOUNDS.index(Sound(PHONES.index(phone), 0, False, 0)) for phone, count in spans for _ in range(int(count))
    ]
    judge = Judge.load()
    assert judge.wrong_frames(wave, codes) < 0.5
    late = np.roll(wave, 2400)
    noise = np.random.default_rng(0).normal(0, 0.1, len(wave)).astype(np.float32)
    for broken in (0 * wave, wave[::-1], late, noise):
        assert judge.wrong_frames(broken, codes) > 0.8
    with pytest.raises(ValueError, match="frames"):
        judge.wrong_frames(wave[:-480], codes)


def test_texts_without_grammar_cannot_be_guessed_from_the_sentences_they_come_from() -> None:
    sentences = ["The sea is deep and blue.", "Bring me the yellow book.", "Our team won."]
    known = {word.strip(".").lower() for sentence in sentences for word in sentence.split()} | {"rare"}
    pairs = {pair for sentence in sentences for pair in pairwise(sentence.lower().strip(".").split())}
    rng, found = random.Random(1), []
    for _ in range(50):
        words = unrelated_words(rng, sentences, ["rare"] * 4).replace(",", "").strip(".").lower().split()
        assert 3 <= len(words) <= 13
        assert known.issuperset(words)
        found += pairwise(words)
    assert sum(pair in pairs for pair in found) / len(found) < 0.2  # by chance, not by grammar


@pytest.mark.parametrize("shape", SHAPES)
def test_a_drawn_shape_covers_its_part_of_the_picture_and_nothing_else(shape: str) -> None:
    pixels = np.asarray(draw("#ff0000", shape, "#0000ff", random.Random(2)))
    red = (pixels == (255, 0, 0)).all(-1)
    assert (red | (pixels == (0, 0, 255)).all(-1)).all()
    rows, columns = (np.flatnonzero(red.any(axis)) for axis in (1, 0))
    box = len(rows) * len(columns)
    parts = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5}
    assert red.sum() / box == pytest.approx(parts[shape], abs=0.05)


def test_questions_about_pictures_ask_for_each_color_and_shape_alike() -> None:
    wanted = [question.wanted for question in questions_of("colors", None)]
    assert sorted(wanted) == sorted(f"It is {color}." for color in COLORS for _ in range(9))
    assert next(iter(questions_of("see", None))).wanted == "I see a red circle."


def test_words_count_where_they_stand() -> None:
    assert words_right("Three, four.", "three, four.") == (2, 2)
    assert words_right("Three, four, five.", "Three, five, four.") == (1, 3)
    assert words_right("Three.", "") == (0, 1)
