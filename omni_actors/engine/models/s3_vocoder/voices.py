"""The voice of a recording: its S3 tokens, its mel frames and the embedding of its speaker, which the flow continues.

Two models of the checkpoint make tokens and embedding, both in ONNX's format. They are small and run on the CPU; a
recording is encoded once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from omni_actors.engine.models.s3_vocoder.flow import FRAMES
from omni_actors.engine.models.s3_vocoder.hift import SAMPLE_RATE, SAMPLES
from omni_actors.errors import InvalidRequest, StartupError

TOKENIZER, SPEAKER = "speech_tokenizer_v2_25hz.onnx", "campplus.onnx"
HEARD_RATE = 16_000  # Hz, of what both models hear
FFT, MELS, HIGHEST = 1920, 80, 8000.0  # of the frames that the flow continues; Hz
SMALLEST = 1e-5  # of what the logarithm is taken
SECONDS = (0.5, 30.0)  # of a recording: no speaker in less, and the tokenizer takes no more


class RecordedVoice(NamedTuple):
    """A recording: `tokens` i64 [n], `mel` f32 [2 n, mels], `embedding` f32 [size]."""

    tokens: torch.Tensor
    mel: torch.Tensor
    embedding: torch.Tensor


def read_recording(path: Path) -> tuple[NDArray[np.float32], int]:
    """Samples f32 [n] and rate of a sound file. Raises `StartupError` if it cannot be read."""
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise StartupError(f"Cannot read the voice {path}: {error}", hint="Replace the file.") from error
    return samples.mean(1), rate


class VoiceEncoder:
    """Encodes recordings. Raises `StartupError` if onnxruntime or one of the two models is missing.

    Args:
        tokenizer: name of the file of the model that makes tokens.
    """

    def __init__(self, folder: Path, tokenizer: str = TOKENIZER) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise StartupError(
                "Voices need the package onnxruntime.", hint="pip install 'omni_actors[realtime]'."
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        models = []
        for name in (tokenizer, SPEAKER):
            if not (folder / name).is_file():
                raise StartupError(f"There is no {folder / name}.", hint="Download the checkpoint completely.")
            models.append(onnxruntime.InferenceSession(folder / name, options, providers=["CPUExecutionProvider"]))
        self._tokenizer, self._speaker = models

    def __call__(self, samples: NDArray[np.float32], rate: int) -> RecordedVoice:
        """Encode a recording, f32 [samples]. Raises `InvalidRequest` if it is too short or too long."""
        shortest, longest = SECONDS
        if not shortest <= len(samples) / rate <= longest:
            raise InvalidRequest(
                f"A voice is a recording of {shortest:g} to {longest:g} s; this one has {len(samples) / rate:.2f} s.",
                field="clip",
            )
        heard = _resampled(samples, rate, HEARD_RATE)
        features = token_features(heard)
        tokens = torch.from_numpy(_run(self._tokenizer, features[None], np.array([features.shape[1]], np.int32)))
        embedding = torch.from_numpy(_run(self._speaker, speaker_features(heard)[None])).reshape(-1)
        mel = mel_frames(torch.from_numpy(_resampled(samples, rate, SAMPLE_RATE)))
        tokens = tokens.reshape(-1).long()
        frames = FRAMES * len(tokens)
        mel = torch.cat([mel[:frames], mel[-1:].expand(max(0, frames - len(mel)), -1)])
        return RecordedVoice(tokens, mel, embedding)


def _run(model: Any, *inputs: NDArray[Any]) -> NDArray[Any]:
    names = [each.name for each in model.get_inputs()]
    output: NDArray[Any] = model.run(None, dict(zip(names, inputs, strict=True)))[0]
    return output


def _resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    if rate == wanted:
        return samples
    import soxr

    resampled: NDArray[np.float32] = soxr.resample(samples, rate, wanted, quality="HQ").astype(np.float32)
    return resampled


def token_features(heard: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the tokenizer hears: Whisper's log mel spectrogram, f32 [128, frames of 10 ms]."""
    bank = mel_filter_bank(201, 128, 0.0, HEARD_RATE / 2, HEARD_RATE, norm="slaney", mel_scale="slaney")
    window = window_function(400, "hann")
    logarithm = spectrogram(heard, window, 400, 160, power=2.0, mel_filters=bank, log_mel="log10")[:, :-1]
    features: NDArray[np.float32] = ((np.maximum(logarithm, logarithm.max() - 8) + 4) / 4).astype(np.float32)
    return features


def speaker_features(heard: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the speaker encoder hears: Kaldi's log mel energies without their mean, f32 [frames of 10 ms, 80]."""
    bank = mel_filter_bank(
        257, 80, 20.0, HEARD_RATE / 2, HEARD_RATE, mel_scale="kaldi", triangularize_in_mel_space=True
    )
    energies = spectrogram(
        heard,
        window_function(400, "povey", periodic=False),
        400,
        160,
        fft_length=512,
        power=2.0,
        center=False,
        preemphasis=0.97,
        mel_filters=bank,
        log_mel="log",
        mel_floor=float(np.finfo(np.float32).eps),
        remove_dc_offset=True,
    ).T
    features: NDArray[np.float32] = (energies - energies.mean(0)).astype(np.float32)
    return features


def mel_frames(samples: torch.Tensor) -> torch.Tensor:
    """Logarithms of a mel spectrogram, f32 [frames of 20 ms, mels], of samples at `SAMPLE_RATE`."""
    bank = mel_filter_bank(FFT // 2 + 1, MELS, 0.0, HIGHEST, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    padded = F.pad(samples[None], ((FFT - SAMPLES) // 2,) * 2, mode="reflect")[0]
    window = torch.hann_window(FFT)
    spectrum = torch.stft(padded, FFT, SAMPLES, window=window, center=False, return_complex=True)
    size = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt()
    return (torch.from_numpy(bank.T.astype(np.float32)) @ size).clamp(min=SMALLEST).log().T
