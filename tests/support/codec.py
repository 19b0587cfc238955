"""A small codec decoder with lively random weights, transformers' version of it, and codes to decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
    Qwen3OmniMoeConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder
from omni_actors.engine.models.diffusers_layout import read_tensors
from omni_actors.engine.models.qwen3_omni.code2wav import decoder_of

WINDOW = 6  # frames that attention sees
CODEBOOK = 32
CONFIG = {
    "codebook_size": CODEBOOK,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": WINDOW,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_quantizers": 16,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 32,
    "max_position_embeddings": 200,
}


def liven(model: nn.Module, decode: Callable[[torch.Tensor], torch.Tensor], seed: int) -> None:
    """Set weights with which every layer matters, as in no model that has not been trained, and a peak of 0.6."""
    generator = torch.Generator().manual_seed(seed)
    model.eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("alpha", "beta")):
            parameter.normal_(std=0.3, generator=generator)
        elif name.endswith(("gamma", "scale")):
            parameter.uniform_(0.2, 0.5, generator=generator)
        elif parameter.dim() > 1:
            spread = 1.0 if "embedding" in name else 0.7 * parameter[0].numel() ** -0.5
            parameter.normal_(std=spread, generator=generator)
    last = model.get_submodule("decoder")[-1].conv
    last.bias.zero_()
    last.weight.mul_(1e-6)  # far from where the sound is clipped
    last.weight.mul_(0.6 / decode(codes(30)[None]).abs().max())


@cache
def reference_decoder() -> Qwen3OmniMoeCode2Wav:
    """transformers' decoder."""
    model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**CONFIG))
    liven(model, model, seed=1)
    return model


@cache
def own_decoder() -> CodecDecoder:
    """Ours, with the weights of `reference_decoder`."""
    reference = reference_decoder()
    decoder = decoder_of(reference.config)
    decoder.load_state_dict(reference.state_dict())
    return decoder.eval().requires_grad_(False)


def codes(frames: int, seed: int = 0) -> torch.Tensor:
    """[16, frames]."""
    return torch.randint(CODEBOOK, (16, frames), generator=torch.Generator().manual_seed(seed))


def flat(frames: torch.Tensor) -> list[int]:
    """Codes [16, frames] as they travel: frame after frame."""
    return frames.T.reshape(-1).tolist()


def checkpoint_decoder(folder: Path) -> Qwen3OmniMoeCode2Wav:
    """transformers' version of a checkpoint's decoder."""
    model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeConfig.from_pretrained(folder).code2wav_config).eval()
    model.load_state_dict(dict(read_tensors(str(folder), "code2wav.")))
    return model.requires_grad_(False)


@torch.no_grad()
def whole(frames: torch.Tensor, reference: Qwen3OmniMoeCode2Wav | None = None) -> torch.Tensor:
    """What transformers makes of codes [16, frames]: f32 [samples]."""
    return (reference or reference_decoder())(frames[None]).reshape(-1)
