"""Random weights and voices, scaled so that the tiny checkpoint's outputs are useful in tests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tools.checkpoints import CheckpointError


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Returns a generator that depends only on the seed and the name, not on the order of calls."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def normal(shape: tuple[int, ...] | torch.Size, seed: int, name: str, std: float = 1.0) -> torch.Tensor:
    """Returns a float32 tensor of independent normal values with mean 0."""
    return torch.randn(shape, generator=seeded_generator(seed, name), dtype=torch.float32) * std


@dataclass(frozen=True)
class Scale:
    """The distribution of one parameter: normal around `mean` with a given spread.

    `gain` is relative to the fan-in: a layer with gain 1 keeps the size of its input. Without it `std` is the spread.
    """

    gain: float | None = None
    std: float = 0.0
    mean: float = 0.0


# The first match counts. docs/decisions.md explains the values.
SCALES: tuple[tuple[str, Scale], ...] = (
    # Thinker and talker: attention dominates the residual stream and is sharp, so that the next token hashes the
    # whole context instead of following from the last token. That is what keeps greedy decoding out of cycles.
    (r"^thinker\.model\.embed_tokens\.weight$", Scale(std=1.0)),
    (r"^talker\.model\.embed_tokens\.weight$", Scale(std=1.0)),
    (r"^(thinker|talker)\.model\.layers\.\d+\.self_attn\.[qk]_proj\.weight$", Scale(gain=2.0)),
    (r"^(thinker|talker)\.model\.layers\.\d+\.self_attn\.o_proj\.weight$", Scale(gain=2.0)),
    (r"^(thinker|talker)\.model\.layers\.\d+\.mlp\.down_proj\.weight$", Scale(gain=2.0)),
    (r"^thinker\.lm_head\.weight$", Scale(gain=3.0)),
    (r"^talker\.codec_head\.weight$", Scale(gain=3.0)),
    # DiT: mel values are log amplitudes around -4, where the vocoder's decibel window (-11 to 2.3) is not clipped.
    (r"\.codec_embed\.weight$", Scale(std=2.0)),
    (r"\.transformer_blocks\.\d+\.attn_norm\.linear\.weight$", Scale(gain=0.5)),
    (r"\.proj_out\.weight$", Scale(gain=2.0)),
    (r"\.proj_out\.bias$", Scale(std=1.0, mean=-4.0)),
    # BigVGAN: quiet residual branches; conv_post sets the loudness.
    (r"\.resblocks\.\d+\.convs[12]\.\d+\.weight$", Scale(gain=0.5)),
    (r"\.conv_post\.weight$", Scale(gain=0.2)),
    (r"\.(alpha|beta)$", Scale(std=0.3)),
    # Qwen3-Omni: norms over each head make the queries and keys sharp, whatever their projections are.
    (r"\.self_attn\.[qk]_norm\.weight$", Scale(std=0.2, mean=2.0)),
    (r"^thinker\..*\.experts\.down_proj$", Scale(gain=4.0)),
    (r"^talker\..*\.experts\.down_proj$", Scale(gain=4.0)),
    (r"\.experts\.gate_up_proj$", Scale(gain=1.0)),
    (r"^talker\.model\.codec_embedding\.weight$", Scale(std=1.0)),
    (r"^talker\.code_predictor\.model\.codec_embedding\.\d+\.weight$", Scale(std=0.5)),
    (r"^talker\.code_predictor\.lm_head\.\d+\.weight$", Scale(gain=3.0)),
    (r"^talker\.code_predictor\.model\.layers\.\d+\.(self_attn\.o|mlp\.down)_proj\.weight$", Scale(gain=2.0)),
    (r"^talker\.text_projection\.linear_fc2\.weight$", Scale(gain=3.0)),
    (r"^code2wav\.code_embedding\.weight$", Scale(std=4.0)),
    (r"_layer_scale\.scale$", Scale(std=0.1, mean=0.5)),
    (r"^code2wav\..*\.gamma$", Scale(std=0.1, mean=0.5)),
    (r"^code2wav\..*\.conv2\.conv\.weight$", Scale(gain=0.3)),
    (r"^code2wav\.decoder\.[1-9]\d*\.conv\.weight$", Scale(gain=0.05)),  # the last layer sets the loudness
    # Everything else.
    (r"(norm\w*|ln_q|layer_norm)\.weight$", Scale(std=0.1, mean=1.0)),
    (r"\.bias$", Scale(std=0.1)),
    (r"\.weight$", Scale(gain=1.0)),
)


def scale_of(name: str) -> Scale:
    """Returns the distribution of the named parameter; raises CheckpointError for a name that no rule covers."""
    for pattern, scale in SCALES:
        if re.search(pattern, name):
            return scale
    raise CheckpointError(f"no rule covers the parameter {name}")


def fan_in(name: str, shape: torch.Size) -> int:
    """Returns the number of inputs that one output of the layer sums."""
    if ".ups." in name or re.search(r"^code2wav\.decoder\.\d+\.block\.1\.", name):
        return shape[0] * 2  # a transposed convolution [in, out, kernel]: about two taps of the kernel meet each output
    if re.search(r"^code2wav\.upsample\.\d+\.0\.", name):  # the same, with a kernel as long as its stride
        return shape[0]
    if ".experts." in name:  # [experts, out, in]
        return shape[-1]
    return int(np.prod(shape[1:]))


def draw_parameter(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Returns the value of one parameter, float32; raises CheckpointError for a name that no rule covers."""
    scale = scale_of(name)
    spread = scale.std if scale.gain is None else scale.gain / fan_in(name, shape) ** 0.5
    value = scale.mean + normal(shape, seed, name, spread)
    if not re.search(r"conv_post\.weight$|^code2wav\.decoder\.[1-9]\d*\.conv\.weight$", name):
        return value
    # The vocoder's activations have a large mean; without this the waveform would have a large offset.
    return value - value.mean(dim=-1, keepdim=True)


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, spoken_ids: list[int], sounds: int) -> None:
    """Fills a model in place. The thinker only answers with `spoken_ids`, the talker with the first `sounds` codes."""
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_parameter(name, parameter.shape, seed))
        restrict_output(name, parameter, spoken_ids, sounds)


def restrict_output(name: str, value: torch.Tensor, spoken_ids: Sequence[int], sounds: int) -> None:
    """Leaves of the two output layers, in place, the rows of `spoken_ids` and of the first `sounds` codec tokens.

    The others are zero: a logit of 0 never wins against the best of the others, so no reply ends before its length
    limit and every codec token has a row in the vocoder's embedding.
    """
    if name == "thinker.lm_head.weight":
        silent = torch.ones(len(value), dtype=torch.bool)
        silent[spoken_ids] = False
        value[silent] = 0
    elif name == "talker.codec_head.weight":
        value[sounds:] = 0


def spoken_token_ids(tokenizer: Any) -> list[int]:
    """Returns the ids of the ordinary tokens that are printable text on their own."""
    special = set(tokenizer.added_tokens_decoder)
    texts = {index: tokenizer.decode([index]) for index in range(len(tokenizer)) if index not in special}
    return [index for index, text in texts.items() if text and text.isprintable() and "\ufffd" not in text]


def make_voices(
    token_ids: Mapping[str, int], seed: int, *, mel_dim: int, speaker_dim: int
) -> dict[str, dict[str, Any]]:
    """Returns the content of spk_dict.pt: per voice the token, the embedding [1, speaker_dim], the mel [1, T, mel_dim].

    T differs between the voices. The mel is smooth in time and lies around -4, as log amplitudes of speech do.
    """
    voices: dict[str, dict[str, Any]] = {}
    for voice, frames in (("Chelsie", 300), ("Ethan", 420)):
        noise = normal((1, mel_dim, frames + 8), seed, f"{voice}.ref_mel", 6.0)
        mel = nn.functional.avg_pool1d(noise, kernel_size=9, stride=1).transpose(1, 2)
        voices[voice] = {
            "bos_token": token_ids[voice],
            "cond": normal((1, speaker_dim), seed, f"{voice}.cond"),
            "ref_mel": (mel - 4.0).contiguous(),
        }
    return voices


@torch.no_grad()
def drawn(model: Any, seed: int, part: str) -> Any:
    """Returns the model, float32, with weights that keep the size of what goes through it; norms differ by channel.

    The same seed and part give the same weights.
    """
    for name, parameter in model.named_parameters():
        value = normal(parameter.shape, seed, f"{part}.{name}")
        norm = name.endswith("gamma") or ("norm" in name and name.endswith("weight") and parameter.ndim == 1)
        if norm:
            parameter.copy_(1 + 0.2 * value)
        elif parameter.ndim >= 2 and not name.endswith("pad_token"):
            parameter.copy_(value / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.2 * value)
    return model.float().eval()
