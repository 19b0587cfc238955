"""Speaks the corpus with the teacher on all cores, once; the files are kept between runs of the training.

WORK/spoken/heard_NNNN.npz      lists of digits and words at 16 kHz at several speeds, for the thinker's ear
WORK/spoken/own_NNNN.npz        the same by DiT and vocoder (`own`)
WORK/spoken/sounds_NNNN.npz     waves at 24 kHz with their codes, for the DiT and the vocoder
WORK/spoken/codes_NNNN.npz      codes alone, for the talker

Each file is of one voice. In all of them utterance `i` lies between `ends[i]` and `ends[i + 1]`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.speaker.codec import VOICES, Voice, encode
from tools.speaker.corpus import Corpus
from tools.speaker.heard import heard_lists, said_texts, spoken_line
from tools.speaker.sound import teacher_wave
from tools.speaker.teacher import speak

SOUND_TEXTS = 3000  # in each voice
LONGEST_SOUND = 110  # letters
PER_FILE = {"heard": 50, "sounds": 60, "codes": 1500}
KINDS = tuple(PER_FILE)
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


def sizes_of(items: list[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Returns where each item begins and the last one ends."""
    return np.cumsum([0, *(len(item) for item in items)])


def _heard(job: Job, voice: Voice) -> dict[str, Any]:
    waves = [said.samples for said in speak(job.lines, voice, wave=True, stretch=job.stretch)]
    return {"wave": np.concatenate(waves), "ends": sizes_of(waves), "first": np.array(job.first)}


def _sounds(job: Job, voice: Voice) -> dict[str, Any]:
    waves, codes = [], []
    for said in speak(job.lines, voice, wave=True):
        if len(said.phones) >= FEWEST_PHONES:
            made, start = encode(said, voice)
            codes.append(made.astype(np.uint16))
            waves.append((teacher_wave(said.samples, start, len(made)) * 32767).astype(np.int16))
    return {"wave": np.concatenate(waves), "codes": np.concatenate(codes), "ends": sizes_of(codes)}


def _codes(job: Job, voice: Voice) -> dict[str, Any]:
    codes = [
        encode(said, voice)[0].astype(np.uint16) if len(said.phones) >= FEWEST_PHONES else np.zeros(0, np.uint16)
        for said in speak(job.lines, voice, wave=False)
    ]
    return {"codes": np.concatenate(codes), "ends": sizes_of(codes), "first": np.array(job.first)}


MAKERS: dict[str, Callable[[Job, Voice], dict[str, Any]]] = {"heard": _heard, "sounds": _sounds, "codes": _codes}


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
    """Yields all files of a corpus, or of its first `texts` texts: first what is heard, each file in one voice."""
    rng, said = random.Random(5), said_texts(corpus)[0][:texts]
    lists, size = heard_lists()[:texts], PER_FILE["heard"]
    for number, first in enumerate(range(0, len(lists), size)):
        voice = list(VOICES)[number % len(VOICES)]
        lines = [spoken_line(words, number) for words in lists[first : first + size]]
        yield Job("heard", folder, number, voice, lines, first, rng.uniform(0.75, 1.3))
    short = [text for text in corpus.spoken_texts()[:texts] if len(text) < LONGEST_SOUND][:SOUND_TEXTS]
    for kind, lines in (("sounds", short), ("codes", said)):
        size, number = PER_FILE[kind], 0
        for first in range(0, len(lines), size):
            for voice in VOICES:
                yield Job(kind, folder, number, voice, lines[first : first + size], first)
                number += 1


def speak_corpus(
    work: Path, workers: int | None = None, texts: int | None = None, kinds: Collection[str] = KINDS
) -> int:
    """Writes all files of some kinds that are missing; returns how many there are."""
    folder = work / "spoken"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in jobs_of(Corpus.load(work), folder, texts) if job.kind in kinds]
    with get_context("spawn").Pool(workers or os.cpu_count()) as pool:
        for done, _ in enumerate(pool.imap_unordered(run_job, jobs), 1):
            if done % 50 == 0 or done == len(jobs):
                print(f"speaker: {done} of {len(jobs)} files", flush=True)
    return len(jobs)
