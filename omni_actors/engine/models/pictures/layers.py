"""Layers that diffusion transformers have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

MOMENT_WAVES = 256  # values that a moment is expressed in


class RmsNorm(nn.Module):
    """Scales vectors to a root mean square of one, and each of their values by a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [..., width], scaled."""
        return F.rms_norm(tokens, self.weight.shape, self.weight, self.eps)


def gated(up: nn.Linear, down: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """A gated layer, of which `up` holds the gate and then what it lets through."""
    gate, values = up(tokens).chunk(2, -1)
    result: torch.Tensor = down(F.silu(gate) * values)
    return result


def waves(moments: torch.Tensor, scale: float) -> torch.Tensor:
    """Cosines and then sines of moments f32 [n] that are multiplied by `scale`: f32 [n, MOMENT_WAVES]."""
    half = MOMENT_WAVES // 2
    exponents = torch.arange(half, dtype=torch.float32, device=moments.device) / half
    angles = (moments * scale)[:, None] * torch.exp(-math.log(10000) * exponents)
    return torch.cat((angles.cos(), angles.sin()), -1)


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn pairs of neighbours in [tokens, heads, head_dim] by `rotation` f32 [tokens, head_dim / 2, 2] (cos, sin)."""
    even, odd = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation[:, None].unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(heads.dtype)


def rotation_at(
    positions: torch.Tensor, axes: Sequence[int], theta: float, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Cosines and sines f32 [tokens, head_dim / 2, 2] for positions i64 [tokens, axes] on the CPU.

    Args:
        axes: dimensions of a head that turn along each axis.
        theta: base of the frequencies.
        dtype: in which angles are computed.
    """
    parts = []
    for axis, dimensions in enumerate(axes):
        steps = torch.arange(0, dimensions, 2, dtype=dtype) / dimensions
        parts.append(torch.outer(positions[:, axis].to(dtype), theta**-steps).float())
    angles = torch.cat(parts, -1)
    return torch.stack((angles.cos(), angles.sin()), -1)
