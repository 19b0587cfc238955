"""Layers that diffusion transformers have in common, and what they compute between their matrix products.

A step's tensors are larger than the device's caches, so what counts is how often each is read and written. PyTorch's
functions are the reference; Triton's interpreter runs the kernels (`fused`) on the CPU, where tests compare the two.
"""

# Triton decides the types of its functions' arguments:
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

MOMENT_WAVES = 256  # values that a moment is expressed in
FP8_MOST = torch.finfo(torch.float8_e4m3fn).max


def turned(
    qkv: torch.Tensor, heads: int, norm_q: nn.RMSNorm, norm_k: nn.RMSNorm, rotation: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [tokens, heads, head_dim] of a product; the first two are normed and turned."""
    query, key, value = qkv.unflatten(-1, (3 * heads, -1)).chunk(3, 1)
    return rotate(norm_q(query), rotation), rotate(norm_k(key), rotation), value


class AdaptedLinear(nn.Linear):
    """A product without a bias, to which LoRA adapters add once `load_adapters` has given it theirs.

    All of them lie side by side, so that a batch may have several: `down` is [ranks of all, in], `up` [out, ranks of
    all], and `adapter_of` i64 [ranks of all] says whose each of the ranks is.

    Attributes:
        scales: f32 [1, out] of weights in FP8; None if they are in the type of what is given.
        round: rounds what is given to FP8, as `rounded_rows`.
    """

    down: torch.Tensor | None = None
    up: torch.Tensor
    adapter_of: torch.Tensor
    scales: torch.Tensor | None = None

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)
        self.round = rounded_rows

    def quantize(self) -> None:
        """Keep the weights in FP8, with a scale for each output: half the memory, and faster products."""
        weight, scales = rounded_rows(self.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = scales.T.contiguous()

    def forward(self, given: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """The product [tokens, out]; `chosen` [tokens, adapters] is one for the adapter of a token, if it has one."""
        if self.scales is None:
            product = F.linear(given, self.weight)
        else:
            rounded, own = self.round(given)
            product = torch._scaled_mm(
                rounded, self.weight.T, own, self.scales, out_dtype=given.dtype, use_fast_accum=True
            )
        if chosen is None or self.down is None:
            return product
        return product + F.linear(F.linear(given, self.down) * chosen[:, self.adapter_of], self.up)


def rounded_rows(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, width] in FP8 (e4m3), and what to multiply each by: f32 [rows, 1]."""
    wide = given.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MOST
    return (wide / scales).to(torch.float8_e4m3fn), scales


class LayerWeights(nn.Module):
    """The weights of a transformer layer: attention whose queries and keys are normed, and a gated layer.

    Args:
        hidden: width of the gated layer.
        eps: of the norms of queries and keys.
    """

    def __init__(self, width: int, heads: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = AdaptedLinear(width, 3 * width)
        self.norm_q = nn.RMSNorm(width // heads, eps)
        self.norm_k = nn.RMSNorm(width // heads, eps)
        self.out = AdaptedLinear(width, width)
        self.up = AdaptedLinear(width, 2 * hidden)
        self.down = AdaptedLinear(hidden, width)

    def turned(
        self, normed: torch.Tensor, rotation: torch.Tensor, chosen: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of normed tokens, each [tokens, heads, head_dim]; the first two are turned."""
        return turned(self.qkv(normed, chosen), self.heads, self.norm_q, self.norm_k, rotation)

    def gated(self, tokens: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """The gated layer; `up` holds the gate, then the gated projection."""
        result: torch.Tensor = self.down(gate(self.up(tokens, chosen)), chosen)
        return result


class MomentEmbedding(nn.Module):
    """Moments f32 [n], multiplied by `scale`, as vectors [n, width] that modulations come from."""

    def __init__(self, hidden: int, width: int, scale: float, *, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(MOMENT_WAVES, hidden, bias=bias)
        self.outer = nn.Linear(hidden, width, bias=bias)
        self.scale = scale

    def forward(self, moments: torch.Tensor) -> torch.Tensor:
        """The vectors, in the type of the weights."""
        waved = waves(moments, self.scale).to(self.inner.weight.dtype)
        vectors: torch.Tensor = self.outer(F.silu(self.inner(waved)))
        return vectors


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


def grid(height: int, width: int, *before: int) -> torch.Tensor:
    """Positions i64 [tokens, axes] of a picture of a size: `before` along the first axes, then row and column."""
    rows, columns = torch.arange(height), torch.arange(width)
    return torch.cartesian_prod(*(torch.tensor([place]) for place in before), rows, columns)


def rotation_at(
    positions: torch.Tensor,
    axes: Sequence[int],
    theta: float,
    dtype: torch.dtype = torch.float64,
    *,
    rounded: bool = True,
) -> torch.Tensor:
    """Factors f32 [tokens, 2, head_dim] for positions i64 [tokens, axes] on the CPU: of values and of their neighbours.

    Args:
        axes: dimensions of a head that turn along each axis.
        theta: base of the frequencies.
        dtype: in which angles are computed.
        rounded: whether they are rounded to f32 before their cosines are.
    """
    parts = []
    for axis, dimensions in enumerate(axes):
        steps = torch.arange(0, dimensions, 2, dtype=dtype) / dimensions
        # The rows and columns of a picture are few: cosines of all its tokens would take ten milliseconds.
        places, which = positions[:, axis].unique(return_inverse=True)
        angles = torch.outer(places.to(dtype), theta**-steps)
        angles = angles.float() if rounded else angles
        cos, sin = angles.cos().float(), angles.sin().float()
        turns = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)), 1).flatten(2)
        parts.append(turns[which])
    return torch.cat(parts, -1)


BLOCK = 2048  # values that a program of `gate` computes
PIXEL_BLOCK = 4096  # values that a program of `norm_pixels` computes


def add_and_norm(
    tokens: torch.Tensor,
    branch: torch.Tensor | None,
    gates: torch.Tensor,
    scales: torch.Tensor,
    owner: torch.Tensor,
    shifts: torch.Tensor | None = None,
    *,
    eps: float,
    fused: bool,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [..., width] with `branch` times their sequences' rows of `gates` added, and their norm.

    The norm is multiplied by their sequences' rows of `scales` [sequences, width], and those of `shifts` are added, if
    there are any. Given tokens to which a branch is added are not to be used afterwards.

    Args:
        gates: its rows lie as far apart as those of `scales` and `shifts`.
        owner: i64 [...], the sequence of each; [rows, 1] for tokens [rows, n, width] whose rows have one sequence.
        dtype: of the norm, by default that of the tokens.
    """
    if not fused:
        if branch is not None:
            tokens = tokens + gates[owner] * branch
        normed = F.layer_norm(tokens, tokens.shape[-1:], eps=eps) * scales[owner]
        return tokens, (normed if shifts is None else normed + shifts[owner]).to(dtype or tokens.dtype)
    normed = torch.empty_like(tokens, dtype=dtype)
    width = tokens.shape[-1]
    rows, padded = tokens.numel() // width, triton.next_power_of_2(width)
    _add_and_norm[(rows,)](
        tokens, tokens if branch is None else branch, gates, scales, scales if shifts is None else shifts, owner,
        normed, scales.stride(0), eps, width, padded, rows // owner.numel(), branch is not None, shifts is not None,
        num_warps=min(8, max(1, padded // 256)),
    )  # fmt: skip
    return tokens, normed


def take_heads(
    qkv: torch.Tensor,
    norm_q: nn.RMSNorm,
    norm_k: nn.RMSNorm,
    rotation: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    fused: bool,
) -> torch.Tensor:
    """The queries [tokens, heads, head_width] of a product [tokens, 3 * heads * head_width].

    Args:
        rotation: as `rotation_at` gives it.
        slots: i64 [tokens]; the place of each token in `keys` and `values`, which are filled there.
    """
    _, heads, size = keys.shape
    if not fused:
        query, key, value = qkv.view(len(qkv), 3, heads, size).unbind(1)
        keys.index_copy_(0, slots, rotate(norm_k(key), rotation))
        values.index_copy_(0, slots, value)
        return rotate(norm_q(query), rotation)
    query = qkv.new_empty(len(qkv), heads, size)
    _rotate_heads[(len(qkv),)](
        qkv, norm_q.weight, norm_k.weight, rotation, slots, query, keys, values, norm_q.eps,
        heads, triton.next_power_of_2(heads), size, num_warps=8,
    )  # fmt: skip
    return query


def gate(given: torch.Tensor, *, fused: bool = False) -> torch.Tensor:
    """silu of the first half of each row times the second."""
    if not fused:
        gates, values = given.chunk(2, -1)
        return F.silu(gates) * values
    rows, width = given.shape[0], given.shape[1] // 2
    out = given.new_empty(rows, width)
    block = min(BLOCK, triton.next_power_of_2(width))
    _gate[(rows, -(-width // block))](given, out, width, block)
    return out


def norm_pixels(pixels: torch.Tensor, weight: torch.Tensor, factor: float) -> torch.Tensor:
    """silu of pixels [1, channels, height, width], channels last, at a length of one, times `factor` and `weight`."""
    out, channels = torch.empty_like(pixels), pixels.shape[1]
    rows, padded = pixels.numel() // channels, triton.next_power_of_2(channels)
    together = max(1, PIXEL_BLOCK // padded)
    _norm_pixels[(-(-rows // together),)](pixels, weight, out, rows, factor, channels, padded, together, num_warps=8)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# the kernels, in Triton; in float32 inside


@triton.jit
def _add_and_norm(
    tokens, branch, gates, scales, shifts, owner, out, stride, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    TOGETHER: tl.constexpr, ADDED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """A program for each token: its norm times its sequence's row of `scales` [sequences, WIDTH], to `out`.

    With ADDED, `branch` times the sequence's row of `gates` is added to `tokens` before, and stored there. With
    SHIFTED, that of `shifts` is added to the result. Rows of the three are `stride` apart; TOGETHER tokens have one
    owner.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    sequence = tl.load(owner + row // TOGETHER) * stride + column
    at = row * WIDTH + column
    value = tl.load(tokens + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        gate = tl.load(gates + sequence, mask=inside, other=0.0).to(tl.float32)
        value += gate * tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        value = value.to(tokens.dtype.element_ty)
        tl.store(tokens + at, value, mask=inside)
        value = value.to(tl.float32)  # the norm is that of what was stored
    mean = tl.sum(value, axis=0) / WIDTH
    apart = tl.where(inside, value - mean, 0.0)
    normed = apart * tl.rsqrt(tl.sum(apart * apart, axis=0) / WIDTH + eps)
    normed *= tl.load(scales + sequence, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        normed += tl.load(shifts + sequence, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(given, weight, cosines, sines, eps, inside, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Heads [HEADS, SIZE] at `given`, normed and turned."""
    value = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / SIZE + eps)[:, None] * weight[None, :]
    one, other = tl.split(tl.reshape(value, [HEADS, SIZE // 2, 2]))
    turned = tl.join(one * cosines - other * sines, other * cosines + one * sines)
    return tl.reshape(turned, [HEADS, SIZE])


@triton.jit
def _rotate_heads(
    qkv, norm_q, norm_k, rotation, slots, query, keys, values, eps,
    HEADS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program for each token: its queries, keys and values from `qkv` [tokens, 3, HEADS, SIZE].

    Queries and keys are normed and turned by `rotation` [tokens, 2, SIZE], of whose cosines and sines two neighbours
    have the same; keys and values go to the token's place of `slots`.
    """
    row = tl.program_id(0).to(tl.int64)
    head, inner, pair = tl.arange(0, PADDED), tl.arange(0, SIZE), tl.arange(0, SIZE // 2)
    inside = (head < HEADS)[:, None] & (inner < SIZE)[None, :]
    at = head[:, None] * SIZE + inner[None, :]
    cosines = tl.load(rotation + row * 2 * SIZE + 2 * pair)[None, :]
    sines = tl.load(rotation + row * 2 * SIZE + SIZE + 2 * pair + 1)[None, :]
    given = qkv + row * 3 * HEADS * SIZE + at
    place = tl.load(slots + row).to(tl.int64) * HEADS * SIZE + at
    weight = tl.load(norm_q + inner).to(tl.float32)
    turned = _rotated(given, weight, cosines, sines, eps, inside, PADDED, SIZE)
    tl.store(query + row * HEADS * SIZE + at, turned.to(query.dtype.element_ty), mask=inside)
    weight = tl.load(norm_k + inner).to(tl.float32)
    turned = _rotated(given + HEADS * SIZE, weight, cosines, sines, eps, inside, PADDED, SIZE)
    tl.store(keys + place, turned.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + place, tl.load(given + 2 * HEADS * SIZE, mask=inside, other=0.0), mask=inside)


@triton.jit
def _gate(given, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """silu of the first half of each row of `given` [rows, 2 * WIDTH] times the second, BLOCK values a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gates = tl.load(given + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(given + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (gates * tl.sigmoid(gates) * values).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_pixels(given, weight, out, rows, factor, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """silu of rows [rows, WIDTH] at a length of one, times `factor` and `weight`, ROWS of them a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    value = tl.load(given + at, mask=inside, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(value * value, axis=1)), 1e-12)
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) * factor
    value *= (1.0 / length)[:, None] * weights[None, :]
    tl.store(out + at, (value * tl.sigmoid(value)).to(out.dtype.element_ty), mask=inside)
