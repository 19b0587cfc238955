"""The oracle for Qwen3-TTS: what Qwen's own package answers, in float32 on the CPU.

The package is installed without its requirements (scripts/setup.sh). The parts of it that are used here need one of
them, librosa, for a bank of mel filters; transformers computes the same one. The others belong to an older codec.
"""

from __future__ import annotations

import json
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.support.reference import one_thread, recorded
from tools.checkpoints.reference import quiet_transformers

OLD_CODEC = ("configuration_qwen3_tts_tokenizer_v1", "modeling_qwen3_tts_tokenizer_v1")
NO_END = -1  # never sampled


def _mel_filters(*, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float) -> np.ndarray:
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm="slaney", mel_scale="slaney")
    return bank.T.astype(np.float32)


@contextmanager
def _importable() -> Iterator[None]:
    """Have the package's modules found without what it requires; whatever else is imported stays."""
    modules = _stand_ins()
    before = {name: sys.modules[name] for name in modules if name in sys.modules}  # other references' stand-ins, too
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def _stand_ins() -> dict[str, types.ModuleType]:
    """Modules in place of those that the package imports and that are not used."""
    modules = {name: types.ModuleType(name) for name in ("librosa", "librosa.filters")}
    modules["librosa.filters"].mel = _mel_filters  # type: ignore[attr-defined]
    old = "qwen_tts.core.tokenizer_25hz"
    modules[old] = types.ModuleType(old)
    modules[old].__path__ = []  # type: ignore[attr-defined]
    for name in OLD_CODEC:
        module = modules[f"{old}.{name}"] = types.ModuleType(f"{old}.{name}")
        for part in ("Config", "Model"):
            setattr(module, f"Qwen3TTSTokenizerV1{part}", type(f"Old{part}", (), {}))
    return modules


def _rotations(config: Any, device: Any = None, **_: Any) -> tuple[torch.Tensor, float]:
    """Frequencies f32 [head size / 2] of plain rotary positions."""
    theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 1.0 / theta ** (torch.arange(0, size, 2, device=device).float() / size), 1.0


@dataclass(frozen=True)
class TtsResult:
    """One answer: F frames."""

    codes: torch.Tensor
    """[F, 16] i64."""
    waveform: torch.Tensor
    """[1920 F] float32 at 24 kHz, one decode of all frames; without the clip's."""


class Qwen3TtsReference:
    """Qwen's model, codec and processor of one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        quiet_transformers()
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        # The package adds a function to transformers' own that fails for the configuration of its codec's encoder.
        ropes = patch.dict(ROPE_INIT_FUNCTIONS, {"default": _rotations})
        with ropes, _importable():
            self._load(folder)

    def _load(self, folder: Path) -> None:
        from qwen_tts import Qwen3TTSModel, Qwen3TTSTokenizer
        from qwen_tts._transformers_compat import restore_mimi_full_attention
        from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration, Qwen3TTSProcessor
        from qwen_tts.core.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as codec_model
        from safetensors.torch import load_file
        from transformers import AutoTokenizer, EncodecFeatureExtractor

        # As the package's from_pretrained does; that would register its configurations with transformers, too.
        model = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**_read(folder / "config.json"))).eval()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        codec = Qwen3TTSTokenizer()
        codec.config = codec_model.Qwen3TTSTokenizerV2Config(**_read(folder / "speech_tokenizer" / "config.json"))
        codec.model = codec_model.Qwen3TTSTokenizerV2Model(codec.config).eval()
        codec.model.load_state_dict(load_file(folder / "speech_tokenizer" / "model.safetensors"))
        restore_mimi_full_attention(codec.model)
        codec.feature_extractor = EncodecFeatureExtractor.from_pretrained(folder / "speech_tokenizer")
        codec.device = torch.device("cpu")
        model.load_speech_tokenizer(codec)
        model.load_generate_config(_read(folder / "generation_config.json"))
        self.model = model
        self.wrapper = Qwen3TTSModel(model, Qwen3TTSProcessor(AutoTokenizer.from_pretrained(folder)), {})

    def speak(self, text: str, *, frames: int, **request: Any) -> TtsResult:
        """Speaks greedily: `frames` frames.

        Args:
            request: `language`; with it `speaker` and `instruct`, `instruct`, or `ref_audio` and `ref_text` or
                `x_vector_only_mode`, by the kind of the checkpoint.
        """
        kind = {"custom_voice": "custom_voice", "voice_design": "voice_design", "base": "voice_clone"}
        generate = getattr(self.wrapper, f"generate_{kind[self.model.tts_model_type]}")
        with one_thread(), recorded(self.model, "generate") as generated, warnings.catch_warnings():
            # transformers warns that the penalty leaves the prompt out, as it should.
            warnings.filterwarnings("ignore", "Passing `repetition_penalty`")
            waveforms, _ = generate(
                text,
                **request,
                do_sample=False,
                subtalker_dosample=False,
                max_new_tokens=frames + 1,
                eos_token_id=NO_END,
            )
        codes = generated[0][0][0]
        return TtsResult(codes, torch.from_numpy(waveforms[0]))

    def encode(self, samples: np.ndarray, rate: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The voice [width] and the codes [frames, 16] of a clip."""
        (item,) = self.wrapper.create_voice_clone_prompt((samples, rate), "Any text.")
        return item.ref_spk_embedding, item.ref_code


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
