"""Waves and mel spectrograms as the vocoder's training and the judge see them."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import soxr
import torch
from torch import Tensor
from torch.nn import functional

Wave = npt.NDArray[np.float32]

TEACHER_RATE, SAMPLE_RATE = 16_000, 24_000
HOP, FFT, MELS, MAX_HZ = 240, 1024, 80, 8000.0
SAMPLES_PER_CODE, FRAMES_PER_CODE = 480, 2
GAIN = 1.5  # flite speaks softly
MIN_MEL = 1e-5


def resample(samples: npt.NDArray[np.floating], rate: int, wanted: int) -> Wave:
    """Returns samples at another rate."""
    return np.asarray(soxr.resample(samples, rate, wanted), np.float32)


def teacher_wave(samples: npt.NDArray[np.int16], start_ms: int, codes: int) -> Wave:
    """Returns the 24 kHz wave [480 * codes] that belongs to the codes beginning at `start_ms` of the teacher's."""
    cut = samples[start_ms * TEACHER_RATE // 1000 :].astype(np.float64) * (GAIN / 32768)
    wave = resample(cut, TEACHER_RATE, SAMPLE_RATE)[: codes * SAMPLES_PER_CODE].clip(-1, 1)
    return np.pad(wave, (0, codes * SAMPLES_PER_CODE - len(wave)))


@cache
def _mel_parts(device: str) -> tuple[Tensor, Tensor]:
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(FFT // 2 + 1, MELS, 0.0, MAX_HZ, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(filters.T).float().to(device), torch.hann_window(FFT, device=device)


def log_mel(waves: Tensor) -> Tensor:
    """Returns natural-log mels [B, 80, samples // 240] of waves [B, samples] at 24 kHz."""
    filters, window = _mel_parts(str(waves.device))
    edge = (FFT - HOP) // 2
    padded = functional.pad(waves.float()[:, None], (edge, edge), mode="reflect")[:, 0]
    spectrum = torch.stft(padded, FFT, HOP, FFT, window, center=False, return_complex=True)
    size = torch.sqrt(spectrum.real.square() + spectrum.imag.square() + 1e-9)
    return torch.log(torch.clamp(filters @ size, min=MIN_MEL))
