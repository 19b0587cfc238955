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
    """Turn pairs of neighbours in [tokens, heads, head_dim] by what `rotation_at` gave for these tokens."""
    # Every value is made of itself and its neighbour, rather than pairs of pairs: so it compiles to one kernel with the
    # norm before it, over whole heads.
    cos, sin = rotation[:, None].unbind(2)
    own = heads.float()
    neighbours = own.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned: torch.Tensor = own * cos + neighbours * sin
    return turned.to(heads.dtype)


def rotation_at(
    positions: torch.Tensor, axes: Sequence[int], theta: float, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Factors f32 [tokens, 2, head_dim] for positions i64 [tokens, axes] on the CPU: of values and of their neighbours.

    Args:
        axes: dimensions of a head that turn along each axis.
        theta: base of the frequencies.
        dtype: in which angles are computed.
    """
    parts = []
    for axis, dimensions in enumerate(axes):
        steps = torch.arange(0, dimensions, 2, dtype=dtype) / dimensions
        # The rows and columns of a picture are few: cosines of all its tokens would take ten milliseconds.
        places, which = positions[:, axis].unique(return_inverse=True)
        angles = torch.outer(places.to(dtype), theta**-steps).float()
        cos, sin = angles.cos(), angles.sin()
        turns = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)), 1).flatten(2)
        parts.append(turns[which])
    return torch.cat(parts, -1)
