"""The codec decoder's transformer over frames. Attention reaches back over a window of frames."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from omni_actors.engine.models.codec_decoder.context import Context


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
