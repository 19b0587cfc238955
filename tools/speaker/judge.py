"""Judges sound without a recogniser: which phone each 10 ms of a wave sounds like, by a linear map of mels.

The map is fitted to the teacher's speech (`python -m tools.speaker judge WORK`) and lies in data/judge.npz. On the
teacher's own sound of other sentences it is right for six or seven frames in ten, as it is on the checkpoint's; on
noise, silence or sound of something else for at most one or two. That tells speech from what is broken, not good from
better.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tools.speaker.codec import PHONES, SOUNDS, VOICES, encode
from tools.speaker.sound import FRAMES_PER_CODE, Wave, log_mel, teacher_wave
from tools.speaker.teacher import speak

DATA = Path(__file__).parent / "data" / "judge.npz"
HELD_OUT = DATA.with_name("held_out_codes.json")
AROUND = (-6, -3, 0, 3, 6)  # frames of 10 ms that are looked at for each
SILENCE = 0
RIDGE = 0.02

Frames = npt.NDArray[np.float64]


def write_held_out(sentences: Sequence[str]) -> None:
    """Writes what `held_out_speech` returns: the teacher's codes of each sentence, the voices in turn."""
    spoken = []
    for number, sentence in enumerate(sentences):
        voice = list(VOICES.values())[number % len(VOICES)]
        spoken.append([sentence, voice.name, encode(speak([sentence], voice, wave=False)[0], voice)[0].tolist()])
    HELD_OUT.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in spoken) + "\n]\n", encoding="utf-8")


def held_out_speech() -> list[tuple[str, str, list[int]]]:
    """Returns (sentence, voice, codes) of held-out sentences; the teacher is not needed."""
    return [(text, voice, codes) for text, voice, codes in json.loads(HELD_OUT.read_text(encoding="utf-8"))]


def frame_phones(codes: Iterable[int]) -> npt.NDArray[np.int64]:
    """Returns the phone's number for each frame of codes."""
    return np.repeat([SOUNDS[code - 1].phone for code in codes], FRAMES_PER_CODE)


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

    @classmethod
    def fit(cls, examples: Iterable[tuple[Wave, Iterable[int]]]) -> Judge:
        """Fits the map to waves and their codes: a linear discriminant, each phone a normal distribution."""
        pairs = [(_features(wave), frame_phones(codes)) for wave, codes in examples]
        features, phones = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        counts = np.bincount(phones, minlength=len(PHONES))
        means = np.zeros((len(PHONES), features.shape[1]))
        np.add.at(means, phones, features)
        means /= np.maximum(counts, 1)[:, None]
        spread = features - means[phones]
        covariance = spread.T @ spread / len(features) + RIDGE * np.eye(features.shape[1])
        slopes = np.linalg.solve(covariance, means.T)
        offsets = -0.5 * (means.T * slopes).sum(0) + np.log(np.maximum(counts, 1e-9) / len(phones))
        return cls(np.concatenate([slopes, offsets[None]]))

    @classmethod
    def fit_to_teacher(cls, texts: Sequence[str]) -> Judge:
        """Fits the map to what the teacher says of the texts, in both voices."""
        examples = []
        for voice in VOICES.values():
            for said in speak(texts, voice, wave=True):
                if len(said.phones) > 2:  # more than two silences
                    codes, start = encode(said, voice)
                    examples.append((teacher_wave(said.samples, start, len(codes)), codes))
        return cls.fit(examples)

    def save(self, path: Path = DATA) -> None:
        """Writes the map in half precision."""
        np.savez_compressed(path, weights=self.weights.astype(np.float32))

    def wrong_frames(self, wave: Wave, codes: Iterable[int]) -> float:
        """Returns the part of the frames that do not sound like their code's phone; silences do not count.

        Raises ValueError if the wave is not as long as the codes.
        """
        wanted = frame_phones(codes)
        heard = (_features(wave) @ self.weights[:-1] + self.weights[-1]).argmax(1)
        if len(heard) != len(wanted):
            raise ValueError(f"the wave has {len(heard)} frames, its codes {len(wanted)}")
        spoken = wanted != SILENCE
        return float((heard[spoken] != wanted[spoken]).mean())
