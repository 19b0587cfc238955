"""Lets the checkpoint's DiT and vocoder say lists of words, so that the thinker learns to hear its own voices.

WORK/spoken/own_NNNN.npz: as heard_NNNN.npz, each file in the other voice and with pauses where that one has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tools.speaker.codec import VOICES, Codes, Voice, encode
from tools.speaker.heard import heard_lists, spoken_line
from tools.speaker.parts import read_voices
from tools.speaker.sound import SAMPLE_RATE, SAMPLES_PER_CODE, TEACHER_RATE, resample
from tools.speaker.spoken import PER_FILE, sizes_of
from tools.speaker.teacher import speak

AT_ONCE = 3000  # codes; lists follow one another in one wave, since the model hears only a second around each code

Samples = npt.NDArray[np.int16]


def together(codes: Sequence[Codes], most: int) -> Iterator[list[Codes]]:
    """Yields the lists in order, as many at a time as have at most `most` codes together, at least one."""
    group, total = list[Codes](), 0
    for one in codes:
        if group and total + len(one) > most:
            yield group
            group, total = [], 0
        group.append(one)
        total += len(one)
    if group:
        yield group


def say_own(model: Any, codes: Sequence[Codes], fields: dict[str, torch.Tensor], device: str) -> Iterator[Samples]:
    """Yields what DiT and vocoder make of each list's codes, at 16 kHz."""
    for group in together(codes, AT_ONCE):
        with torch.no_grad():
            wave = model(
                torch.from_numpy(np.concatenate(group))[None].to(device),
                conditioning=fields["cond"].to(device),
                reference_mel=fields["ref_mel"].to(device),
            )
        ends = np.cumsum([len(one) for one in group])[:-1] * SAMPLES_PER_CODE
        for piece in np.split(wave.reshape(-1).float().cpu().numpy(), ends):
            heard = resample(piece, SAMPLE_RATE, TEACHER_RATE)
            yield (heard.clip(-1, 1) * 32767).astype(np.int16)


def speak_own(work: Path, checkpoint: Path, device: str, lists: int) -> int:
    """Writes the files of the first lists; returns how many files there are."""
    from tools.checkpoints.measure import load_reference_model

    model = load_reference_model(checkpoint).token2wav.to(device)
    voices, size, folder = read_voices(checkpoint), PER_FILE["heard"], work / "spoken"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = heard_lists()[:lists]
    torch.manual_seed(0)
    for number, first in enumerate(range(0, len(wanted), size)):
        path = folder / f"own_{number:04}.npz"
        if not path.exists():
            voice: Voice = list(VOICES.values())[(number + 1) % len(VOICES)]
            lines = [spoken_line(words, number + 2) for words in wanted[first : first + size]]
            codes = [encode(said, voice)[0] for said in speak(lines, voice, wave=False)]
            waves = list(say_own(model, codes, voices[voice.name], device))
            with path.with_suffix(".new").open("wb") as file:
                ends = sizes_of(waves)
                np.savez(file, voice=np.array(voice.name), wave=np.concatenate(waves), ends=ends, first=np.array(first))
            path.with_suffix(".new").replace(path)
    return len(range(0, len(wanted), size))
