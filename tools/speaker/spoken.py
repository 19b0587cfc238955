"""Speaks the corpus with the teacher on all cores, once; the files are kept between runs of the training.

WORK/spoken/digits_NNNN.npz     strings of digits at 16 kHz at several speeds, for the thinker's ear
WORK/spoken/sounds_NNNN.npz     waves at 24 kHz with their codes, for the DiT and the vocoder
WORK/spoken/codes_NNNN.npz      codes alone, for the talker

Each file is of one voice. In all of them utterance `i` lies between `ends[i]` and `ends[i + 1]`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.speaker.codec import VOICES, Codes, Voice, encode
from tools.speaker.corpus import Corpus
from tools.speaker.errors import SpeakerError
from tools.speaker.numbers import DIGITS
from tools.speaker.sound import teacher_wave
from tools.speaker.teacher import speak

SOUND_TEXTS, DIGIT_STRINGS = 3000, 1600  # in each voice
LONGEST_SOUND = 110  # letters
PER_FILE = {"digits": 50, "sounds": 60, "codes": 1500}
FEWEST_PHONES = 3  # two of them are silence


@dataclass(frozen=True)
class Job:
    """A file to write: the lines of one voice, and the number of the first in the corpus's order."""

    kind: str
    folder: Path
    number: int
    voice: str
    lines: list[str]
    first: int = 0
    stretch: float | None = None

    @property
    def path(self) -> Path:
        """Where it is written."""
        return self.folder / f"{self.kind}_{self.number:04}.npz"


def _sizes(items: list[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *(len(item) for item in items)])


def _digits(job: Job, voice: Voice) -> dict[str, Any]:
    waves = [said.samples for said in speak(job.lines, voice, wave=True, stretch=job.stretch)]
    return {"wave": np.concatenate(waves), "ends": _sizes(waves), "texts": np.array(job.lines)}


def _sounds(job: Job, voice: Voice) -> dict[str, Any]:
    waves, codes = [], []
    for said in speak(job.lines, voice, wave=True):
        if len(said.phones) >= FEWEST_PHONES:
            made, start = encode(said, voice)
            codes.append(made.astype(np.uint16))
            waves.append((teacher_wave(said.samples, start, len(made)) * 32767).astype(np.int16))
    return {"wave": np.concatenate(waves), "codes": np.concatenate(codes), "ends": _sizes(codes)}


def _codes(job: Job, voice: Voice) -> dict[str, Any]:
    codes = [
        encode(said, voice)[0].astype(np.uint16) if len(said.phones) >= FEWEST_PHONES else np.zeros(0, np.uint16)
        for said in speak(job.lines, voice, wave=False)
    ]
    return {"codes": np.concatenate(codes), "ends": _sizes(codes), "first": np.array(job.first)}


MAKERS: dict[str, Callable[[Job, Voice], dict[str, Any]]] = {"digits": _digits, "sounds": _sounds, "codes": _codes}


def run_job(job: Job) -> Path:
    """Writes one file, unless it is there; returns its path."""
    if not job.path.exists():
        arrays = MAKERS[job.kind](job, VOICES[job.voice])
        temporary = job.path.with_suffix(".new")
        with temporary.open("wb") as file:
            np.savez(file, voice=np.array(job.voice), **arrays)
        temporary.replace(job.path)
    return job.path


def jobs_of(corpus: Corpus, folder: Path, texts: int | None = None) -> Iterator[Job]:
    """Yields all files of a corpus, or of its first `texts` texts: digits and sounds first, which train first."""
    rng, spoken = random.Random(5), corpus.spoken_texts()[:texts]
    strings = [
        " ".join(rng.choices(DIGITS, k=rng.randrange(1, 6))) + "." for _ in range(min(DIGIT_STRINGS, len(spoken)))
    ]
    short = [text for text in spoken if len(text) < LONGEST_SOUND][:SOUND_TEXTS]
    for kind, lines in (("digits", strings), ("sounds", short), ("codes", spoken)):
        size, number = PER_FILE[kind], 0
        for first in range(0, len(lines), size):
            for voice in VOICES:
                stretch = rng.uniform(0.75, 1.3) if kind == "digits" else None
                yield Job(kind, folder, number, voice, lines[first : first + size], first, stretch)
                number += 1


def speak_corpus(work: Path, workers: int | None = None, texts: int | None = None) -> int:
    """Writes all files that are missing; returns how many there are."""
    folder = work / "spoken"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = list(jobs_of(Corpus.load(work), folder, texts))
    with get_context("spawn").Pool(workers or os.cpu_count()) as pool:
        for done, _ in enumerate(pool.imap_unordered(run_job, jobs), 1):
            if done % 50 == 0 or done == len(jobs):
                print(f"speaker: {done} of {len(jobs)} files", flush=True)
    return len(jobs)


def files_of(work: Path, kind: str) -> list[Path]:
    """Returns the files of one kind in order. Raises SpeakerError if there are none."""
    found = sorted((work / "spoken").glob(f"{kind}_*.npz"))
    if not found:
        raise SpeakerError(f"{work} holds no {kind}; run python -m tools.speaker speak {work}.")
    return found


@dataclass(frozen=True)
class SpokenText:
    """Codes of a text of the corpus, by its number in `spoken_texts()`, in one voice."""

    text: int
    voice: str
    codes: Codes


def spoken_codes(work: Path, longest: int = 600) -> list[SpokenText]:
    """Returns the codes of all texts in both voices; those above `longest` codes (12 s) are left out."""
    found = []
    for path in files_of(work, "codes"):
        with np.load(path) as data:
            codes, ends, first, voice = (data[name] for name in ("codes", "ends", "first", "voice"))
        for number, (begin, end) in enumerate(pairwise(ends)):
            if 0 < end - begin <= longest:
                found.append(SpokenText(int(first) + number, str(voice), codes[begin:end].astype(np.int64)))
    return found
