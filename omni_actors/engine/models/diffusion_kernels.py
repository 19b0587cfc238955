"""The kernels of `diffusion_layers.py`, in Triton: what a layer computes between its products, in float32 inside."""

# Triton decides the types of its functions' arguments:
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton import next_power_of_2

__all__ = ["add_and_norm", "gate", "next_power_of_2", "norm_pixels", "rotate_heads"]


@triton.jit
def add_and_norm(
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
def rotate_heads(
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
def gate(given, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """silu of the first half of each row of `given` [rows, 2 * WIDTH] times the second, BLOCK values a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gates = tl.load(given + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(given + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (gates * tl.sigmoid(gates) * values).to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_pixels(given, weight, out, rows, factor, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
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
