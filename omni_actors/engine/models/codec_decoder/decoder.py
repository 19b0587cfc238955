"""The codec decoder's network: frames of codes in, samples out; each chunk continues where the one before ended.

Parameters have the names of the published checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN


class Context:
    """The past of a batch during one pass: each layer that looks back takes its part, in the order of the layers.

    Args:
        position: i64 [batch], frames before the chunk.
        state: [batch, size], what the chunks before left; None if these are the first.
    """

    def __init__(self, position: torch.Tensor, state: torch.Tensor | None) -> None:
        self.position = position
        self._state = state
        self._taken = 0
        self._left: list[torch.Tensor] = []

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

    def state(self) -> torch.Tensor:
        """[batch, size], what all layers left for the next chunk."""
        return torch.cat(self._left, dim=1)


DILATIONS = (1, 3, 9)


class CausalConv(nn.Module):
    """A convolution whose output depends on the past only: as many samples out as in."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self._past = (kernel - 1) * dilation

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, outputs, time]."""
        output: torch.Tensor = self.conv(context.join(chunk, self._past) if self._past else chunk)
        return output


class Upsampling(nn.Module):
    """A transposed convolution: each entry becomes `stride` samples, which may also depend on the entry before it.

    Args:
        kernel: `stride`, or twice as long for samples that also depend on the entry before.
        trims_start: whether the very first entry only serves as the past of the second, and becomes no samples.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, *, trims_start: bool = False) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self._overlap = kernel - stride
        self._trims_start = trims_start

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, outputs, stride * time], and `stride` samples less for a first chunk if the start is trimmed."""
        if not self._overlap:
            output: torch.Tensor = self.conv(chunk)
            return output
        output = self.conv(context.join(chunk, 1, zeros=not self._trims_start))
        return output[..., self._overlap : output.shape[-1] - self._overlap]


class SnakeBeta(nn.Module):
    """x + sin(x * exp(alpha))^2 / exp(beta), with an alpha and a beta per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, chunk: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        frequency = self.alpha.exp()[:, None]
        scale = (self.beta.exp() + 1e-9).reciprocal()[:, None]
        return torch.addcmul(chunk, scale, (chunk * frequency).sin_().square_())


class ConvNextBlock(nn.Module):
    """A depthwise convolution and two linear layers, around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """The same shape."""
        hidden = self.norm(self.dwconv(chunk, context).transpose(1, 2))
        hidden = self.gamma * self.pwconv2(self.act(self.pwconv1(hidden)))
        output: torch.Tensor = chunk + hidden.transpose(1, 2)
        return output


class ResidualUnit(nn.Module):
    """Two convolutions with their activations, around which the input is added."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, 7, dilation=dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """The same shape."""
        hidden: torch.Tensor = self.conv1(self.act1(chunk), context)
        hidden = self.conv2(self.act2(hidden), context)
        return chunk + hidden


class DecoderBlock(nn.Module):
    """Upsampling by `rate` to half the channels, and residual units of growing reach."""

    def __init__(self, channels: int, rate: int, *, trims_start: bool) -> None:
        super().__init__()
        upsampling = Upsampling(channels, channels // 2, 2 * rate, rate, trims_start=trims_start)
        units = [ResidualUnit(channels // 2, dilation) for dilation in DILATIONS]
        self.block = nn.ModuleList([SnakeBeta(channels), upsampling, *units])

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, channels / 2, rate * time]; see `Upsampling` for a first chunk."""
        activation, *layers = self.block
        chunk = activation(chunk)
        for layer in layers:
            chunk = layer(chunk, context)
        return chunk


@dataclass(frozen=True)
class TransformerSizes:
    """Sizes of the transformer, in the checkpoints' words.

    Args:
        hidden_size: width of a frame.
        head_dim: width of an attention head.
        sliding_window: frames that attention sees, the frame itself among them.
        rope_theta: base of the rotary positions.
        latent_dim: width of what comes in and goes out where it differs from `hidden_size`; 0 for no projections.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    attention_bias: bool
    rms_norm_eps: float
    sliding_window: int
    rope_theta: float
    latent_dim: int = 0


@dataclass(frozen=True)
class _Frames:
    """The rotary `cos` and `sin` [batch, 1, frames, head_dim] of a chunk's frames, and which frames each may see.

    `mask` is bool [batch, 1, frames, window - 1 + frames].
    """

    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor


class _RmsNorm(nn.Module):
    """RMSNorm that squares in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(hidden.dtype)


class _Scale(nn.Module):
    """A factor per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.scale * hidden


class _Attention(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        width, bias = sizes.hidden_size, sizes.attention_bias
        self._head_dim = sizes.head_dim
        self._past = sizes.sliding_window - 1
        self._grouped = sizes.num_key_value_heads != sizes.num_attention_heads
        self.q_proj = nn.Linear(width, sizes.num_attention_heads * sizes.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, sizes.num_key_value_heads * sizes.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, sizes.num_key_value_heads * sizes.head_dim, bias=bias)
        self.o_proj = nn.Linear(sizes.num_attention_heads * sizes.head_dim, width, bias=bias)

    def forward(self, hidden: torch.Tensor, frames: _Frames, context: Context) -> torch.Tensor:
        shape = (*hidden.shape[:2], -1, self._head_dim)
        query, key, value = (
            projection(hidden).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, frames), _rotate(key, frames)
        key = context.join(key, self._past, dim=2)
        value = context.join(value, self._past, dim=2)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=frames.mask, enable_gqa=self._grouped)
        output: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class _Mlp(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)
        self.act_fn = ACT2FN[sizes.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class _TransformerLayer(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.self_attn = _Attention(sizes)
        self.mlp = _Mlp(sizes)
        self.input_layernorm = _RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = _RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn_layer_scale = _Scale(sizes.hidden_size)
        self.mlp_layer_scale = _Scale(sizes.hidden_size)

    def forward(self, hidden: torch.Tensor, frames: _Frames, context: Context) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), frames, context)
        hidden = hidden + self.self_attn_layer_scale(attended)
        computed: torch.Tensor = self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(hidden)))
        return hidden + computed


class FrameTransformer(nn.Module):
    """[batch, frames, width] to the same; every frame sees the `sliding_window - 1` frames before it."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_TransformerLayer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = _RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        width, latent = sizes.hidden_size, sizes.latent_dim
        self.input_proj = nn.Linear(latent, width) if latent else nn.Identity()
        self.output_proj = nn.Linear(width, latent) if latent else nn.Identity()
        self._past = sizes.sliding_window - 1
        self._head_dim = sizes.head_dim
        self._rope_theta = sizes.rope_theta

    def forward(self, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        """The frames' hidden states after the last layer."""
        hidden = self.input_proj(hidden)
        frames = self._frames(hidden, context.position)
        for layer in self.layers:
            hidden = layer(hidden, frames, context)
        output: torch.Tensor = self.output_proj(self.norm(hidden))
        return output

    def _frames(self, hidden: torch.Tensor, position: torch.Tensor) -> _Frames:
        count = hidden.shape[1]
        offsets = torch.arange(-self._past, count, device=hidden.device)
        keys = position[:, None] + offsets
        queries = keys[:, self._past :, None]
        seen = keys[:, None, :]
        mask = (seen >= 0) & (seen <= queries) & (seen >= queries - self._past)
        even = torch.arange(0, self._head_dim, 2, dtype=torch.float32, device=hidden.device)
        # In float32 whatever the model's type: the angles of late frames need every digit.
        angles = queries.float() / self._rope_theta ** (even / self._head_dim)
        angles = torch.cat([angles, angles], -1)[:, None]
        return _Frames(angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype), mask[:, None])


def _rotate(heads: torch.Tensor, frames: _Frames) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * frames.cos + torch.cat([-second, first], -1) * frames.sin


@dataclass(frozen=True)
class CodecSizes:
    """Sizes of a codec decoder, in the checkpoints' words.

    Args:
        num_quantizers: codes of a frame.
        codebook_size: values that a code can have.
        upsampling_ratios: of frames, before the convolutions.
        upsample_rates: of the convolutions; each halves the channels, from `decoder_dim`.
        max_position_embeddings: frames of the longest utterance.
        trims_start: whether each convolution that upsamples leaves out the first entry; the sound is then shorter.
        sample_rate: samples per second.
    """

    num_quantizers: int
    codebook_size: int
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int
    max_position_embeddings: int
    transformer: TransformerSizes
    trims_start: bool
    sample_rate: int = 24_000

    @classmethod
    def of(cls, config: Any, *, rope_theta: float, latent_dim: int = 0, **own: Any) -> CodecSizes:
        """From a checkpoint's configuration of the decoder, and what such configurations leave open."""
        transformer = TransformerSizes(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            attention_bias=config.attention_bias,
            rms_norm_eps=config.rms_norm_eps,
            sliding_window=config.sliding_window,
            rope_theta=rope_theta,
            latent_dim=latent_dim,
        )
        return cls(
            num_quantizers=config.num_quantizers,
            codebook_size=config.codebook_size,
            upsampling_ratios=tuple(config.upsampling_ratios),
            upsample_rates=tuple(config.upsample_rates),
            decoder_dim=config.decoder_dim,
            max_position_embeddings=config.max_position_embeddings,
            transformer=transformer,
            **own,
        )

    @property
    def samples_per_frame(self) -> int:
        """Samples that a frame adds to the sound."""
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)

    @property
    def width(self) -> int:
        """Width of a frame between the transformer and the convolutions."""
        return self.transformer.latent_dim or self.transformer.hidden_size

    def samples(self, frames: int) -> int:
        """Length of the sound of `frames` frames."""
        length = frames * math.prod(self.upsampling_ratios)
        for rate in self.upsample_rates:
            length = max(0, length - self.trims_start) * rate
        return length

    @property
    def widest(self) -> int:
        """Elements per frame of the largest tensor between two layers."""
        largest, rate, channels = 0, math.prod(self.upsampling_ratios), self.decoder_dim
        for factor in self.upsample_rates:
            rate, channels = rate * factor, channels // 2
            largest = max(largest, rate * channels)
        return largest


class CodecDecoder(nn.Module):
    """Codes to sound, chunk after chunk.

    Args:
        front: turns codes [batch, quantizers, frames] and a `Context` into [batch, frames, width].
        front_name: its name in the checkpoint.
    """

    def __init__(self, sizes: CodecSizes, front: nn.Module, front_name: str) -> None:
        super().__init__()
        self.sizes = sizes
        self._front = front_name
        self.add_module(front_name, front)
        self.pre_transformer = FrameTransformer(sizes.transformer)
        width = sizes.width
        self.upsample = nn.ModuleList(
            nn.ModuleList([Upsampling(width, width, factor, factor), ConvNextBlock(width)])
            for factor in sizes.upsampling_ratios
        )
        channels = sizes.decoder_dim
        layers: list[nn.Module] = [CausalConv(sizes.width, channels, 7)]
        for rate in sizes.upsample_rates:
            layers.append(DecoderBlock(channels, rate, trims_start=sizes.trims_start))
            channels //= 2
        self.decoder = nn.ModuleList([*layers, SnakeBeta(channels), CausalConv(channels, 1, 7)])

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
        context = Context(position, state)
        hidden = self.get_submodule(self._front)(codes, context)
        hidden = self.pre_transformer(hidden, context).transpose(1, 2)
        for stage in self.upsample:
            for layer in cast(nn.ModuleList, stage):
                hidden = layer(hidden, context)
        for layer in self.decoder:
            hidden = layer(hidden) if isinstance(layer, SnakeBeta) else layer(hidden, context)
        return hidden.squeeze(1).float().clamp(-1, 1), context.state()
