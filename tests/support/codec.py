"""A small codec decoder with lively random weights, transformers' version of it, and codes to decode."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
    Qwen3OmniMoeConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder
from omni_actors.engine.models.qwen3_omni.code2wav import MeanEmbedding, codec_sizes
from omni_actors.engine.models.weights import read_tensors

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


@cache
def reference_decoder() -> Qwen3OmniMoeCode2Wav:
    """Every weight matters: no layer scale or activation is left as it begins in training."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**CONFIG)).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith(("alpha", "beta")):
                torch.nn.init.normal_(parameter, std=0.3)
            elif name.endswith(("gamma", "scale")):
                torch.nn.init.uniform_(parameter, 0.2, 0.5)
            elif name.endswith("conv.weight"):
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        last = model.decoder[-1].conv
        last.bias.zero_()
        last.weight.mul_(1e-6)  # far from where the sound is clipped
        last.weight.mul_(0.6 / model(codes(30)[None]).abs().max())
    return model


@cache
def own_decoder() -> CodecDecoder:
    """Ours, with the weights of `reference_decoder`."""
    reference = reference_decoder()
    sizes = codec_sizes(reference.config)
    decoder = CodecDecoder(sizes, MeanEmbedding(sizes.num_quantizers, CODEBOOK, sizes.width), "code_embedding")
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
