"""The codec decoder's network: frames of codes in, samples out; each chunk continues where the one before ended.

Its layers are those of transformers' Qwen3-Omni, except that whatever looks back keeps what it needs of the past.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2WavDecoderBlock,
    Qwen3OmniMoeCode2WavRMSNorm,
    Qwen3OmniMoeCode2WavTransformerLayer,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)


class Past:
    """The past of a batch during one pass: each layer that looks back takes its part, in the order of the layers.

    Args:
        window: frames that attention sees, the frame itself among them.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._state: torch.Tensor | None = None
        self._taken = 0
        self._left: list[torch.Tensor] = []

    def begin(self, state: torch.Tensor | None) -> None:
        """Begin a pass after chunks that left `state` [batch, size]; None for the first ones."""
        self._state, self._taken, self._left = state, 0, []

    def end(self) -> torch.Tensor:
        """[batch, size], what all layers left for the next chunk."""
        left = torch.cat(self._left, dim=1)
        self.begin(None)
        return left

    def join(self, chunk: torch.Tensor, length: int, *, dim: int = -1, zeros: bool = True) -> torch.Tensor:
        """Put the last `length` entries of the past before a chunk, and keep the last ones for the next.

        Args:
            chunk: [batch, ...].
            dim: the dimension of time.
            zeros: whether zeros stand for the past of a first chunk; if not, it has none.
        """
        shape = list(chunk.shape)
        shape[dim] = length
        if self._state is not None:
            begin, self._taken = self._taken, self._taken + math.prod(shape[1:])
            joined = torch.cat([self._state[:, begin : self._taken].view(shape), chunk], dim)
        elif zeros:
            joined = torch.cat([chunk.new_zeros(shape), chunk], dim)
        else:
            joined = chunk
        self._left.append(joined.narrow(dim, joined.shape[dim] - length, length).flatten(1))
        return joined

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a cache of transformers gives to the attention of a layer: keys and values of the past and the chunk."""
        return self.join(keys, self.window - 1, dim=2), self.join(values, self.window - 1, dim=2)


class _CausalConv(nn.Module):
    """A convolution whose output depends on the past only: as many samples out as in."""

    def __init__(self, given: Qwen3OmniMoeCausalConvNet, past: Past) -> None:
        super().__init__()
        self.conv, self._length, self._past = given.conv, given.padding, past

    def forward(self, chunk: torch.Tensor) -> torch.Tensor:
        """[batch, outputs, time]."""
        output: torch.Tensor = self.conv(self._past.join(chunk, self._length) if self._length else chunk)
        return output


class _Upsampling(nn.Module):
    """A transposed convolution: each entry becomes `stride` samples, which may also depend on the entry before it.

    Args:
        trims_start: whether the very first entry only serves as the past of the second, and becomes no samples.
    """

    def __init__(self, given: Qwen3OmniMoeCausalTransConvNet, past: Past, *, trims_start: bool) -> None:
        super().__init__()
        self.conv, self._overlap, self._past = given.conv, given.left_pad, past
        self._trims_start = trims_start

    def forward(self, chunk: torch.Tensor) -> torch.Tensor:
        """[batch, outputs, stride * time], and `stride` samples less for a first chunk if the start is trimmed."""
        if not self._overlap:
            output: torch.Tensor = self.conv(chunk)
            return output
        output = self.conv(self._past.join(chunk, 1, zeros=not self._trims_start))
        return output[..., self._overlap : output.shape[-1] - self._overlap]


class _SnakeBeta(nn.Module):
    """x + sin(x * exp(alpha))^2 / exp(beta), with an alpha and a beta per channel, in little memory traffic."""

    def __init__(self, given: Qwen3OmniMoeSnakeBeta) -> None:
        super().__init__()
        self.alpha, self.beta = given.alpha, given.beta

    def forward(self, chunk: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        frequency = self.alpha.exp()[:, None]
        scale = (self.beta.exp() + 1e-9).reciprocal()[:, None]
        return torch.addcmul(chunk, scale, (chunk * frequency).sin_().square_())


class FrameTransformer(nn.Module):
    """[batch, frames, width] to the same; every frame sees those of its window."""

    def __init__(self, config: Qwen3OmniMoeCode2WavConfig, width: int, past: Past) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(Qwen3OmniMoeCode2WavTransformerLayer(config, index) for index in layers)
        inner = config.hidden_size
        self.norm = Qwen3OmniMoeCode2WavRMSNorm(inner, config.rms_norm_eps)
        self.input_proj = nn.Linear(width, inner) if width != inner else nn.Identity()
        self.output_proj = nn.Linear(inner, width) if width != inner else nn.Identity()
        self._past = past
        self._head_dim: int = cast("Any", self.layers[0]).self_attn.head_dim
        self._rope_theta: float = config.rope_parameters["rope_theta"]

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The frames' hidden states after the last layer; `position` i64 [batch] is that of the first frame."""
        hidden, back = self.input_proj(hidden), self._past.window - 1
        keys = position[:, None] + torch.arange(-back, hidden.shape[1], device=hidden.device)
        queries = keys[:, back:, None]
        seen = keys[:, None, :]
        mask = ((seen >= 0) & (seen <= queries) & (seen >= queries - back))[:, None]
        even = torch.arange(0, self._head_dim, 2, dtype=torch.float32, device=hidden.device)
        # In float32 whatever the model's type, and as no product: the angles of late frames need every digit.
        angles = queries.float() / self._rope_theta ** (even / self._head_dim)
        angles = torch.cat([angles, angles], -1)
        turns = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=turns, past_key_values=self._past)
        output: torch.Tensor = self.output_proj(self.norm(hidden))
        return output


@dataclass(frozen=True)
class Sizes:
    """What cutting must know of a decoder.

    Args:
        num_quantizers: codes of a frame.
        codebook_size: values that a code can have.
        max_position_embeddings: frames of the longest utterance.
        sample_rate: samples per second.
        widest: elements per frame of the largest tensor between two layers.
        samples: how many samples can be made of the first n frames.
    """

    num_quantizers: int
    codebook_size: int
    max_position_embeddings: int
    sample_rate: int
    widest: int
    samples: Callable[[int], int]


def sizes_of(config: Qwen3OmniMoeCode2WavConfig, trims_start: bool, sample_rate: int) -> Sizes:
    """The sizes of a decoder.

    Args:
        trims_start: whether each convolution that upsamples leaves out the first entry; the sound is then shorter.
        sample_rate: of the sound.
    """
    ratio, rates = math.prod(config.upsampling_ratios), config.upsample_rates  # of frames, and then of convolutions

    def samples(frames: int) -> int:
        length: int = frames * ratio
        for rate in rates:
            length = max(0, length - trims_start) * rate
        return length

    # Each convolution halves the channels.
    widths = [ratio * math.prod(rates[:count]) * (config.decoder_dim >> count) for count in range(1, len(rates) + 1)]
    frames: int = config.max_position_embeddings
    return Sizes(config.num_quantizers, config.codebook_size, frames, sample_rate, max(widths, default=0), samples)


class CodecDecoder(nn.Module):
    """Codes to sound, chunk after chunk. Parameters have the names of the published checkpoints.

    Args:
        front: turns codes [batch, quantizers, frames] into [batch, frames, width].
        front_name: its name in the checkpoint.
        width: of a frame outside of the transformer, where that is another.
        trims_start: see `sizes_of`.
    """

    def __init__(
        self,
        config: Qwen3OmniMoeCode2WavConfig,
        front: nn.Module,
        front_name: str,
        *,
        width: int = 0,
        trims_start: bool,
        sample_rate: int = 24_000,
    ) -> None:
        super().__init__()
        self.sizes, self._trims_start = sizes_of(config, trims_start, sample_rate), trims_start
        width = width or config.hidden_size
        self._past, self._front = Past(config.sliding_window), front_name
        self.add_module(front_name, front)
        self.pre_transformer = FrameTransformer(config, width, self._past)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [Qwen3OmniMoeCausalTransConvNet(width, width, ratio, ratio), Qwen3OmniMoeConvNeXtBlock(width)]
            )
            for ratio in config.upsampling_ratios
        )
        convolutions = len(config.upsample_rates)
        channels = config.decoder_dim >> convolutions
        self.decoder = nn.ModuleList(
            [
                Qwen3OmniMoeCausalConvNet(width, config.decoder_dim, 7),
                *(Qwen3OmniMoeCode2WavDecoderBlock(config, index) for index in range(convolutions)),
                Qwen3OmniMoeSnakeBeta(channels),
                Qwen3OmniMoeCausalConvNet(channels, 1, 7),
            ]
        )
        for parent in list(self.modules()):
            for name, child in list(parent.named_children()):
                parent.add_module(name, self._continued(child))

    def _continued(self, layer: nn.Module) -> nn.Module:
        """A layer that continues where the chunk before ended, with the parameters of the one that is given."""
        match layer:
            case Qwen3OmniMoeCausalConvNet():
                return _CausalConv(layer, self._past)
            case Qwen3OmniMoeCausalTransConvNet():
                return _Upsampling(layer, self._past, trims_start=self._trims_start)
            case Qwen3OmniMoeSnakeBeta():
                return _SnakeBeta(layer)
            case _:
                return layer

    def forward(
        self, codes: torch.Tensor, position: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the next frames of a batch of utterances.

        Args:
            codes: i64 [batch, quantizers, frames].
            position: i64 [batch], frames before these.
            state: [batch, size], what the frames before left; None if these are the first.

        Returns:
            f32 samples [batch, time], and the state after these frames.
        """
        self._past.begin(state)
        hidden = self.pre_transformer(self.get_submodule(self._front)(codes), position).transpose(1, 2)
        for layer in (*(layer for stage in self.upsample for layer in cast("Any", stage)), *self.decoder):
            hidden = layer(hidden)
        return hidden.squeeze(1).float().clamp(-1, 1), self._past.end()
