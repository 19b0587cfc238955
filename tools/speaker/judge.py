"""Judges sound without a recogniser: which phone each 10 ms of a wave sounds like, by a linear map of mels.

The map lies in data/judge.npz: a linear discriminant, once fitted to 90 sentences of the teacher in each voice (by the
tools/speaker/judge.py of commit 39deabb). On the teacher's own sound of other sentences it is right for six or seven
frames in ten, as it is on the checkpoint's; on noise, silence or sound of something else for at most one or two. That
tells speech from what is broken, not good from better.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tools.speaker.codec import CODES, PHONES, SOUNDS, Sound
from tools.speaker.sound import FRAMES_PER_CODE, Wave, log_mel

DATA = Path(__file__).parent / "data" / "judge.npz"
HELD_OUT = DATA.with_name("held_out_codes.json")
AROUND = (-6, -3, 0, 3, 6)  # frames of 10 ms that are looked at for each
SILENCE = 0

Frames = npt.NDArray[np.float64]


def held_out_speech() -> list[tuple[str, str, list[int]]]:
    """Returns (sentence, voice, codes) of held-out sentences; the teacher is not needed."""
    return [(text, voice, codes) for text, voice, codes in json.loads(HELD_OUT.read_text(encoding="utf-8"))]


def _features(wave: Wave) -> Frames:
    """Returns [frames, 5 * 80]: log mels around each frame."""
    mel = log_mel(torch.from_numpy(np.ascontiguousarray(wave, np.float32))[None])[0].T.numpy().astype(np.float64)
    places = np.clip(np.arange(len(mel))[:, None] + np.array(AROUND), 0, len(mel) - 1)
    features: Frames = mel[places].reshape(len(mel), -1)
    return features


@dataclass(frozen=True)
class Judge:
    """A linear map from mels to scores of the phones: slopes [5 * 80, phones], then a row of offsets."""

    weights: Frames

    @classmethod
    def load(cls, path: Path = DATA) -> Judge:
        """Reads the fitted map."""
        with np.load(path) as data:
            return cls(data["weights"].astype(np.float64))

    def wrong_frames(self, wave: Wave, codes: Iterable[int]) -> float:
        """Returns the part of the frames that do not sound like their code's phone; silences do not count.

        Raises ValueError if the wave is not as long as the codes.
        """
        wanted = np.repeat([SOUNDS[code - 1].phone for code in codes], FRAMES_PER_CODE)
        heard = (_features(wave) @ self.weights[:-1] + self.weights[-1]).argmax(1)
        if len(heard) != len(wanted):
            raise ValueError(f"the wave has {len(heard)} frames, its codes {len(wanted)}")
        spoken = wanted != SILENCE
        return float((heard[spoken] != wanted[spoken]).mean())


def phones_of(codes: Iterable[int]) -> list[str]:
    """Returns the phones that codes stand for; silence and what is no sound are left out."""
    phones: list[str] = []
    previous = Sound(-1, 0, False, 0)
    for code in codes:
        if not 0 < code < CODES:
            continue
        sound = SOUNDS[code - 1]
        if sound.phone != previous.phone or sound.third < previous.third:
            phones.append(PHONES[sound.phone])
        previous = sound
    return [phone for phone in phones if phone != "pau"]


def edit_distance(wanted: Sequence[str], found: Sequence[str]) -> int:
    """Returns how many insertions, deletions and substitutions turn one list into the other."""
    row = list(range(len(found) + 1))
    for index, word in enumerate(wanted, 1):
        diagonal, row[0] = row[0], index
        for place, other in enumerate(found, 1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (word != other))
    return row[-1]
