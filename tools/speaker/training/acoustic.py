"""Waves with their codes on the device, and random pieces of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tools.speaker import SpeakerError, files_of
from tools.speaker.codec import VOICES
from tools.speaker.sound import FRAMES_PER_CODE, SAMPLES_PER_CODE, log_mel

Places = npt.NDArray[np.int64]


class Acoustic:
    """All waves [samples] in int16, all codes [samples / 480], and which utterance lies where."""

    def __init__(self, work: Path, device: str) -> None:
        waves, codes, sizes, voices = [], [], [], []
        names = list(VOICES)
        for path in files_of(work, "sounds"):
            with np.load(path) as data:
                waves.append(data["wave"])
                codes.append(data["codes"].astype(np.int64))
                sizes.append(np.diff(data["ends"]))
                voices.append(np.full(len(sizes[-1]), names.index(str(data["voice"]))))
        self.device = device
        self.wave = torch.from_numpy(np.concatenate(waves)).to(device)
        self.codes = torch.from_numpy(np.concatenate(codes)).to(device)
        self.sizes, self.voices = np.concatenate(sizes), np.concatenate(voices)
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    def mels(self) -> Tensor:
        """Returns the log mels [frames, 80] of everything, utterance by utterance, in half precision."""
        parts = []
        for start, size in zip(self.starts, self.sizes, strict=True):
            wave = self.wave[start * SAMPLES_PER_CODE : (start + size) * SAMPLES_PER_CODE]
            parts.append(log_mel(wave[None].float() / 32767)[0].T.half())
        return torch.cat(parts)

    def pieces(
        self, rng: np.random.Generator, count: int, codes: int, voice: int | None = None
    ) -> tuple[Places, Places]:
        """Returns (where each piece of `codes` codes begins, its voice's number); a piece lies in one utterance.

        Raises SpeakerError if no utterance is that long.
        """
        fits = np.flatnonzero((self.sizes >= codes) & ((self.voices == voice) if voice is not None else True))
        if not len(fits):
            raise SpeakerError(f"No utterance has {codes} codes; run `speak` with more texts.")
        room = self.sizes[fits] - codes + 1
        chosen = rng.choice(fits, count, p=room / room.sum())
        return self.starts[chosen] + rng.integers(0, self.sizes[chosen] - codes + 1), self.voices[chosen]

    def gather(self, values: Tensor, begins: Places, per_code: int, codes: int) -> Tensor:
        """Returns [count, codes * per_code, ...] of values that have `per_code` entries for each code."""
        first = torch.from_numpy(begins).to(self.device) * per_code
        return values[first[:, None] + torch.arange(codes * per_code, device=self.device)]

    def waves_of(self, begins: Places, codes: int) -> Tensor:
        """Returns float32 waves [count, 480 * codes]."""
        return self.gather(self.wave, begins, SAMPLES_PER_CODE, codes).float() / 32767

    def mels_of(self, mels: Tensor, begins: Places, codes: int) -> Tensor:
        """Returns float32 mels [count, 2 * codes, 80]."""
        return self.gather(mels, begins, FRAMES_PER_CODE, codes).float()
