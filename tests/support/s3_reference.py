"""The oracle for the S3 vocoder: the package `minicpmo-utils` in float32 on the CPU, at toy sizes.

The package is installed without its requirements (scripts/setup.sh). Of these its networks need a window of scipy's and
a bank of mel filters of librosa's; the rest reads files.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.audio_utils import mel_filter_bank

from omni_actors.engine.models.s3_vocoder.flow import Flow
from omni_actors.engine.models.s3_vocoder.hift import Hift
from omni_actors.engine.models.s3_vocoder.runner import SEED
from omni_actors.engine.models.s3_vocoder.voices import RecordedVoice
from omni_actors.engine.models.s3_vocoder.weights import Weights
from tools.checkpoints.s3 import MELS, SPEAKER

PACKAGE = "stepaudio2"
SECOND, AHEAD = 25, 3  # tokens


def _mel(*, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float) -> np.ndarray:
    bank = mel_filter_bank(n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm="slaney", mel_scale="slaney")
    return bank.T.astype(np.float32)


def _window(name: str, size: int, *, fftbins: bool) -> np.ndarray:
    return torch.hann_window(size, periodic=fftbins).numpy()


# What the package imports and tests do not use, and two functions that they do.
STAND_INS: dict[str, dict[str, Any]] = {
    "scipy": {},
    "scipy.signal": {"get_window": _window},
    "scipy.io": {},
    "scipy.io.wavfile": {"read": None},
    "librosa": {},
    "librosa.filters": {"mel": _mel},
    "s3tokenizer": {},
    "torchaudio": {},
    "torchaudio.compliance": {},
    "torchaudio.compliance.kaldi": {},
    "hyperpyyaml": {"load_hyperpyyaml": None},
}


def import_package() -> None:
    """Make the package's modules importable one by one: the package itself imports all that it requires."""
    if PACKAGE in sys.modules:
        return
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None, "scripts/setup.sh installs minicpmo-utils"
    assert found.submodule_search_locations
    package = types.ModuleType(PACKAGE)
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[PACKAGE] = package
    for name, functions in STAND_INS.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # other packages look whether there is one
        vars(module).update(functions)
        sys.modules[name] = module


class S3Reference:
    """The package's flow and streaming vocoder, of the files in a folder.

    Args:
        sizes: those of the files.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        import_package()
        from stepaudio2.causal_vocoder.bounded_vocoder import BoundedVocoder
        from stepaudio2.causal_vocoder.f0_predictor import CausalConvRNNF0Predictor
        from stepaudio2.causal_vocoder.generator import CausalHiFTGenerator
        from stepaudio2.cosyvoice2.flow.decoder_dit import DiT
        from stepaudio2.cosyvoice2.flow.flow import CausalMaskedDiffWithXvec
        from stepaudio2.cosyvoice2.flow.flow_matching import CausalConditionalCFM
        from stepaudio2.cosyvoice2.transformer.upsample_encoder_v2 import UpsampleConformerEncoderV2

        width, heads, size, blocks = (sizes[name] for name in ("width", "heads", "head_size", "blocks"))
        encoder = UpsampleConformerEncoderV2(
            width,
            width,
            num_blocks=sizes["layers"],
            num_up_blocks=sizes["wide_layers"],
            attention_heads=heads,
            linear_units=sizes["between"],
        )
        estimator = DiT(4 * MELS, MELS, depth=blocks, num_heads=heads, head_dim=size, hidden_size=width)
        solver = CausalConditionalCFM(estimator)
        self.flow = CausalMaskedDiffWithXvec(
            width, MELS, SPEAKER, vocab_size=sizes["tokens"], encoder=encoder, decoder=solver
        )
        self.flow.load_state_dict(torch.load(folder / "flow.pt"))
        self.flow.eval()
        # The package draws its tables of noise at each start; here they are ours.
        solver.rand_noise = Flow(Weights.read(folder / "flow.pt"), SEED).noise.T[None]
        # The package's buffers are of the published sizes.
        estimator.att_cache_buffer = torch.zeros(blocks, 2, heads, 1000, 2 * size)
        estimator.cnn_cache_buffer = torch.zeros(blocks, 2, 2 * width, 2)
        solver.att_cache_buffer = torch.zeros(16, blocks, 2, heads, 1000, 2 * size)
        solver.cnn_cache_buffer = torch.zeros(16, blocks, 2, 2 * width, 2)
        generator = CausalHiFTGenerator(
            base_channels=sizes["channels"],
            sampling_rate=24_000,
            upsample_rates=[8, 5, 3],
            upsample_kernel_sizes=[16, 11, 7],
            source_resblock_kernel_sizes=[7, 7, 11],
            source_resblock_dilation_sizes=[[1, 3, 5]] * 3,
            f0_predictor=CausalConvRNNF0Predictor(1, MELS, sizes["pitch"]),
        )
        generator.load_state_dict(torch.load(folder / "hift.pt"))
        generator.m_source.l_sin_gen.sine_waves = Hift(Weights.read(folder / "hift.pt"), SEED).noise[None]
        self.generator = generator.eval()
        self.vocoder = BoundedVocoder(self.generator)

    @torch.inference_mode()
    def stream(self, pieces: Sequence[Sequence[int]], voice: RecordedVoice) -> torch.Tensor:
        """Samples f32 of an utterance in pieces; all but the last end with the look-ahead, with which the next begins.

        As `Token2wav.stream` does, without the silence that it begins with.
        """
        prompt = voice.tokens[None]
        mel, speaker = voice.mel[None], voice.embedding[None]
        cache = self.flow.setup_cache(torch.cat([prompt, prompt[:, :3]], 1), mel, speaker)
        self.vocoder.reset()
        sound = []
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            frames, cache = self.flow.inference_chunk(torch.tensor([piece]), speaker, cache, last_chunk=last)
            self._trim(cache, mel.shape[1])
            sound.append(self.vocoder.stream(frames, finalize=last))
        return torch.cat(sound, 1)[0]

    @staticmethod
    def mel(samples: np.ndarray) -> torch.Tensor:
        """The frames [time, mels] of a recording at 24 kHz."""
        from stepaudio2.flashcosyvoice.utils.audio import mel_spectrogram

        frames: torch.Tensor = mel_spectrogram(torch.from_numpy(samples)[None])[0].T
        return frames

    def _trim(self, cache: dict[str, torch.Tensor], frames: int) -> None:
        """As `Token2wav` does, which cannot be made without its other models: two of its methods, on a stand-in."""
        from stepaudio2.token2wav import Token2wav

        wav = types.SimpleNamespace(
            stream_cache=cache, flow=self.flow, CONFORMER_HISTORY_FRAMES=Token2wav.CONFORMER_HISTORY_FRAMES
        )
        for part in ("estimator", "conformer"):
            vars(Token2wav)[f"_trim_{part}_cache"](wav, frames)

    @torch.inference_mode()
    def whole(self, tokens: Sequence[int], voice: RecordedVoice) -> torch.Tensor:
        """Samples f32 of an utterance of which every position sees every other."""
        prompt, spoken = voice.tokens[None], torch.tensor([list(tokens)])
        lengths = [torch.tensor([part.shape[1]]) for part in (spoken, prompt, voice.mel[None])]
        frames = self.flow.inference(
            spoken, lengths[0], prompt, lengths[1], voice.mel[None], lengths[2], voice.embedding[None]
        )
        self.vocoder.reset()
        return self.vocoder.stream(frames, finalize=True)[0]


def cut(given: Sequence[int], ends: Sequence[int]) -> list[Sequence[int]]:
    """Pieces with the look-ahead; what is not longer than that is part of the last."""
    begins = [0, *(end for end in ends if end + AHEAD <= len(given))]
    pieces = [given[begin : end + AHEAD] for begin, end in itertools.pairwise(begins)]
    return [*pieces, given[begins[-1] :]]


def growing(given: Sequence[int]) -> list[Sequence[int]]:
    """As they are cut unless the YAML says otherwise."""
    return cut(given, [9, 18, *range(36, len(given), SECOND)])
