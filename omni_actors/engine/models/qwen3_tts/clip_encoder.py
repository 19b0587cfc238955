"""What the talker needs of a clip: its voice, from a speaker encoder, and its codes, from the codec's encoder (Mimi).

Both are small and run on the CPU, outside the engine's loop: a clip is encoded once, however many texts are spoken with
its voice.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import MimiConfig, MimiModel
from transformers.audio_utils import mel_filter_bank
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from omni_actors.engine.models.diffusers_layout import fill, read_tensors, same_everywhere
from omni_actors.engine.models.qwen3_tts.prompt import CODEC_FOLDER, SAMPLE_RATE, codec_config

KEPT = 64  # clips; each takes 8 KiB, and 1.5 KiB a second of its codes
FFT, HOP, MELS = 1024, 256, 128
SMALLEST = 1e-5  # of what the logarithm is taken
SPEAKER_ENCODER = {  # what a configuration leaves open
    "mel_dim": MELS,
    "enc_dim": 1024,
    "enc_channels": [512, 512, 512, 512, 1536],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
}


class Encoded(NamedTuple):
    """A clip's voice, f32 [width], and its codes, i64 [frames, G]."""

    voice: torch.Tensor
    codes: torch.Tensor


def clip_frames(samples: int, rate: int, samples_per_frame: int) -> int:
    """How many frames of codes a clip becomes."""
    return -(-_resampled(samples, rate) // samples_per_frame)


def _resampled(samples: int, rate: int) -> int:
    return -(-samples * SAMPLE_RATE // rate)


class ClipEncoder:
    """Encodes clips, and remembers the last `KEPT`. Not for several threads at a time.

    Args:
        speaker: the speaker encoder's configuration.
        dummy: keep random weights.

    Raises:
        StartupError: the checkpoint lacks a part.
    """

    def __init__(self, model: str, speaker: dict[str, Any], groups: int, *, dummy: bool) -> None:
        codec = codec_config(model)
        self._groups = min(groups, codec["encoder_valid_num_quantizers"])
        self.samples_per_frame: int = codec["encode_downsample_rate"]
        encoder = MimiConfig(**codec["encoder_config"])
        encoder.sliding_window = encoder.max_position_embeddings  # the codec was trained without a window
        with same_everywhere():
            self._speaker = ECAPA_TimeDelayNet(SimpleNamespace(**{**SPEAKER_ENCODER, **speaker})).eval()
            self._codec = MimiModel(encoder).eval()
        for part in ("upsample", "decoder_transformer", "decoder"):
            setattr(self._codec, part, None)
        if not dummy:
            parts = (self._speaker, "", "speaker_encoder."), (self._codec, CODEC_FOLDER, "encoder.")
            for module, folder, prefix in parts:
                fill(module, read_tensors(model, prefix, folder), f"{prefix}* in {model!r}")
        bank = mel_filter_bank(FFT // 2 + 1, MELS, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
        self._mel = torch.from_numpy(bank.T.astype(np.float32))
        self._known: OrderedDict[bytes, Encoded] = OrderedDict()

    def __call__(self, samples: np.ndarray, rate: int) -> Encoded:
        """Encode a clip, f32 [samples]."""
        key = hashlib.sha256(samples.tobytes() + rate.to_bytes(4, "little")).digest()
        if key not in self._known:
            self._known[key] = self._encode(_at_clip_rate(samples, rate))
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    @torch.inference_mode()
    def _encode(self, samples: np.ndarray) -> Encoded:
        wave = torch.from_numpy(samples)[None]
        voice = self._speaker(self._mels(wave))[0]
        codes = self._codec.encode(wave[None], num_quantizers=self._groups).audio_codes[0]
        frames = clip_frames(wave.shape[1], SAMPLE_RATE, self.samples_per_frame)
        return Encoded(voice.clone(), codes[:, :frames].T.contiguous())

    def _mels(self, wave: torch.Tensor) -> torch.Tensor:
        """Logarithms of a mel spectrogram [1, time, MELS] of samples [1, n]."""
        padded = nn.functional.pad(wave[None], ((FFT - HOP) // 2,) * 2, mode="reflect")[0]
        window = torch.hann_window(FFT)
        spectrum = torch.stft(padded, FFT, HOP, window=window, center=False, return_complex=True)
        size = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + 1e-9)
        return (self._mel @ size).clamp(min=SMALLEST).log().transpose(1, 2)


def _at_clip_rate(samples: np.ndarray, rate: int) -> np.ndarray:
    if rate == SAMPLE_RATE:
        return samples
    import soxr

    resampled = soxr.resample(samples, rate, SAMPLE_RATE, quality="HQ")
    length = _resampled(len(samples), rate)
    return np.pad(resampled[:length], (0, max(0, length - len(resampled)))).astype(np.float32)
