"""The fused operations of the vocoder: a Triton kernel for CUDA, and plain torch for everything else.

The kernels save memory traffic and launches, not arithmetic. Triton's interpreter runs them on the CPU, so the tests
compare both forms without a GPU.
"""

# Triton decides the types of its functions' arguments:
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

MIN_HALF_HEAD = 16  # the shortest inner dimension that Triton's matrix product takes
HIDDEN = -1e30  # a score that no softmax sees, and that is still finite


# ---------------------------------------------------------------------------------------------------------------------
# attention of a block over the blocks of its window


@triton.jit
def _rotate(first, second, cosine, sine):
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def _block_attention(
    qkv, left, keys, valid, cosines, sines, output, rows, softmax_scale,
    FRAMES: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, BACK: tl.constexpr,
    PADDED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    frame = tl.arange(0, PADDED)[:, None]
    half = tl.arange(0, HALF)[None, :]
    inside = frame < FRAMES
    width = 2 * HALF * HEADS

    here = qkv + (row * FRAMES + frame) * (3 * width) + head * 2 * HALF + half
    query_1 = tl.load(here, mask=inside, other=0.0)
    query_2 = tl.load(here + HALF, mask=inside, other=0.0)
    dtype = query_1.dtype
    if head == 0:  # the published model was trained with rotary positions on its first head only
        cosine = tl.load(cosines + (BACK * FRAMES + frame) * HALF + half, mask=inside, other=0.0)
        sine = tl.load(sines + (BACK * FRAMES + frame) * HALF + half, mask=inside, other=0.0)
        rotated_1, rotated_2 = _rotate(query_1.to(tl.float32), query_2.to(tl.float32), cosine, sine)
        query_1, query_2 = rotated_1.to(dtype), rotated_2.to(dtype)

    best = tl.full([PADDED], MASKED, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, 2 * HALF], tl.float32)
    column = tl.arange(0, 2 * HALF)[None, :]
    for place in tl.static_range(WINDOW):
        block = tl.load(keys + row * WINDOW + place).to(tl.int64)
        own = frame < tl.where((block >= 0) & (block < rows), FRAMES, 0)
        cached = frame < tl.where(block >= rows, FRAMES, 0)
        from_own = qkv + (block * FRAMES + frame) * (3 * width) + width + head * 2 * HALF
        from_left = left + ((block - rows) * FRAMES + frame) * (2 * width) + head * 2 * HALF
        key_1 = tl.load(from_own + half, mask=own, other=0.0) + tl.load(from_left + half, mask=cached, other=0.0)
        key_2 = tl.load(from_own + HALF + half, mask=own, other=0.0)
        key_2 += tl.load(from_left + HALF + half, mask=cached, other=0.0)
        value = tl.load(from_own + width + column, mask=own, other=0.0)
        value += tl.load(from_left + width + column, mask=cached, other=0.0)
        if head == 0:
            cosine = tl.load(cosines + (place * FRAMES + frame) * HALF + half, mask=inside, other=0.0)
            sine = tl.load(sines + (place * FRAMES + frame) * HALF + half, mask=inside, other=0.0)
            rotated_1, rotated_2 = _rotate(key_1.to(tl.float32), key_2.to(tl.float32), cosine, sine)
            key_1, key_2 = rotated_1.to(dtype), rotated_2.to(dtype)
        score = tl.dot(query_1, tl.trans(key_1), input_precision=PRECISION)
        score += tl.dot(query_2, tl.trans(key_2), input_precision=PRECISION)
        seen = tl.load(valid + row * WINDOW + place)
        score = tl.where(tl.arange(0, PADDED)[None, :] < seen, score * softmax_scale, MASKED)
        higher = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(dtype), value, input_precision=PRECISION)
        best = higher
    mixed = mixed / total[:, None]
    there = output + (row * FRAMES + frame) * width + head * 2 * HALF + column
    tl.store(there, mixed.to(dtype), mask=inside)


def block_attention(
    qkv: torch.Tensor,
    left: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    heads: int,
    *,
    back: int,
    precise: bool,
    fused: bool,
) -> torch.Tensor:
    """Attention of each block over the blocks of its window; returns [rows, frames, heads * head_dim].

    Args:
        qkv: [rows, frames, 3 * heads * head_dim], heads in half-split layout.
        left: [entries, frames, 2 * heads * head_dim], keys and values of blocks of earlier chunks.
        keys: i32 [rows, window], the blocks that a row sees: a block of `qkv` below `rows`, an entry of `left` from
            `rows` on, none if negative.
        valid: i32 [rows, window], number of real frames in each; 0 for none. A row sees at least one.
        rotary: cosines and sines f32 [window * frames, head_dim / 2] by position in the window.
        back: index of the row's own block in the window.
    """
    rows, frames, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    half, window = width // heads // 2, keys.shape[1]
    if fused:
        output = torch.empty((rows, frames, width), dtype=qkv.dtype, device=qkv.device)
        _block_attention[(rows, heads)](
            qkv, left, keys, valid, *rotary, output, rows, (2 * half) ** -0.5,
            FRAMES=frames, HEADS=heads, HALF=half, WINDOW=window, BACK=back, PADDED=triton.next_power_of_2(frames),
            PRECISION="ieee" if precise else "tf32", MASKED=HIDDEN, num_warps=2,
        )  # fmt: skip
        return output
    query = qkv[..., :width]
    if window > 1:
        key_value = torch.cat([qkv[..., width:], left])[keys.clamp(min=0)].flatten(1, 2)
    else:
        key_value = qkv[..., width:]

    def split(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(*tensor.shape[:-1], heads, -1).transpose(1, 2)

    query, key, value = split(query), split(key_value[..., :width]), split(key_value[..., width:])
    cosine, sine = rotary
    here = slice(back * frames, (back + 1) * frames)
    query, key = _rotate_first_head(query, cosine[here], sine[here]), _rotate_first_head(key, cosine, sine)
    mask = (torch.arange(frames, device=qkv.device) < valid[..., None]).view(rows, 1, 1, window * frames)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(1, 2).reshape(rows, frames, width)


def _rotate_first_head(tensor: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the first head of `tensor` [rows, heads, frames, head_dim], in half-split layout."""
    first, second = tensor[:, 0].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return torch.cat([rotated.to(tensor.dtype)[:, None], tensor[:, 1:]], dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# BigVGAN's activation: up by two, snake, down by two


@triton.jit
def _snake(value, alpha, share):
    # sin(angle) squared has the period pi; the rest is in [-pi/2, pi/2], where the series is off by at most 6e-8.
    angle = value * alpha
    turns = tl.floor(angle * 0.3183098861837907 + 0.5)
    rest = angle - turns * 3.140625
    rest = rest - turns * 9.67653589793e-4
    square = rest * rest
    series = 1.0 / 362880.0 - square * (1.0 / 39916800.0)
    series = -1.0 / 5040.0 + square * series
    series = 1.0 / 120.0 + square * series
    series = -1.0 / 6.0 + square * series
    sine = rest * (1.0 + square * series)
    return value + share * sine * sine


@triton.jit
def _sample(source, index, length, channels, channel, inside, missing):
    place = tl.minimum(tl.maximum(index, 0), length - 1)  # the edges are repeated
    return tl.load(source + place * channels + channel, mask=inside, other=0.0).to(tl.float32) + missing


@triton.jit(do_not_specialize=["length"])  # it varies from window to window, and a variant takes long to compile
def _anti_aliased_snake(
    source, output, offset, up, down, frequency, magnitude, length, channels, STEPS: tl.constexpr, LANES: tl.constexpr
):
    """Walk along the samples with one lane per channel, so that every intermediate value is computed once.

    At pair j the two samples 2j and 2j + 1 of the doubled rate are made from x[j - 3 .. j + 3]; output j - 3 needs the
    odd one of pair j - 6, both of the five pairs after it, and the even one of pair j.
    """
    first = tl.program_id(0) * STEPS
    channel = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = channel < channels
    line = tl.program_id(2).to(tl.int64) * length * channels
    source += line
    output += line
    alpha = tl.load(frequency + channel, mask=inside, other=0.0)
    share = tl.load(magnitude + channel, mask=inside, other=0.0)
    missing = tl.load(offset + channel, mask=inside, other=0.0)
    u0, u1, u2, u3 = tl.load(up), tl.load(up + 1), tl.load(up + 2), tl.load(up + 3)
    u4, u5, u6, u7 = tl.load(up + 4), tl.load(up + 5), tl.load(up + 6), tl.load(up + 7)
    u8, u9, u10, u11 = tl.load(up + 8), tl.load(up + 9), tl.load(up + 10), tl.load(up + 11)
    d0, d1, d2, d3 = tl.load(down), tl.load(down + 1), tl.load(down + 2), tl.load(down + 3)
    d4, d5, d6, d7 = tl.load(down + 4), tl.load(down + 5), tl.load(down + 6), tl.load(down + 7)
    d8, d9, d10, d11 = tl.load(down + 8), tl.load(down + 9), tl.load(down + 10), tl.load(down + 11)

    # The first sample of the doubled rate is repeated before itself.
    x0 = _sample(source, 0, length, channels, channel, inside, missing)
    head = (u5 + u7 + u9 + u11) * x0 + u3 * _sample(source, 1, length, channels, channel, inside, missing)
    head = _snake(2.0 * (head + u1 * _sample(source, 2, length, channels, channel, inside, missing)), alpha, share)

    x0 = _sample(source, first - 6, length, channels, channel, inside, missing)
    x1 = _sample(source, first - 5, length, channels, channel, inside, missing)
    x2 = _sample(source, first - 4, length, channels, channel, inside, missing)
    x3 = _sample(source, first - 3, length, channels, channel, inside, missing)
    x4 = _sample(source, first - 2, length, channels, channel, inside, missing)
    x5 = _sample(source, first - 1, length, channels, channel, inside, missing)
    # These values never reach a result, but each needs its own tensor: Triton's compiler (not its interpreter) takes
    # names that begin as the same value and are only assigned to one another for constants of the loop.
    o0, e1, o1 = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    e2, o2, e3 = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    o3, e4, o4 = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    e5, o5 = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    e6, o6 = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    for step in range(STEPS + 6):
        pair = first - 3 + step
        x6 = _sample(source, pair + 3, length, channels, channel, inside, missing)
        even = u1 * x5 + u3 * x4 + u5 * x3 + u7 * x2 + u9 * x1 + u11 * x0
        odd = u0 * x6 + u2 * x5 + u4 * x4 + u6 * x3 + u8 * x2 + u10 * x1
        even, odd = _snake(2.0 * even, alpha, share), _snake(2.0 * odd, alpha, share)
        even = tl.where(pair < 0, head, tl.where(pair >= length, o6, even))
        odd = tl.where(pair < 0, head, tl.where(pair >= length, o6, odd))
        o0, e1, o1, e2, o2, e3, o3 = o1, e2, o2, e3, o3, e4, o4
        e4, o4, e5, o5, e6, o6 = e5, o5, e6, o6, even, odd
        x0, x1, x2, x3, x4, x5 = x1, x2, x3, x4, x5, x6
        result = d0 * o0 + d1 * e1 + d2 * o1 + d3 * e2 + d4 * o2 + d5 * e3
        result += d6 * o3 + d7 * e4 + d8 * o4 + d9 * e5 + d10 * o5 + d11 * e6
        place = pair - 3
        wanted = channel < tl.where((place >= first) & (place < length), channels, 0)
        tl.store(output + place * channels + channel, result.to(output.dtype.element_ty), mask=wanted)


def anti_aliased_snake(
    hidden: torch.Tensor,
    offset: torch.Tensor,
    up_filter: torch.Tensor,
    down_filter: torch.Tensor,
    frequency: torch.Tensor,
    magnitude: torch.Tensor,
) -> torch.Tensor:
    """Apply BigVGAN's activation to `hidden` [batch, channels, 1, samples], channels last in memory, in one pass.

    `offset` f32 [channels] is added to `hidden` first: biases of convolutions, which need no pass of their own. Both
    filters are f32 [12]; `frequency` and `magnitude` f32 [channels] are the snake's exponentiated parameters.
    """
    batch, channels, _, length = hidden.shape
    hidden = hidden.contiguous(memory_format=torch.channels_last)
    output = torch.empty_like(hidden)
    lanes = min(128, max(32, triton.next_power_of_2(channels)))
    # As few samples per program as fill the device with warps: each program computes six pairs that are not used.
    steps = min(64, max(8, triton.next_power_of_2(hidden.numel() // (32 * 8192) + 1)))
    _anti_aliased_snake[(triton.cdiv(length, steps), triton.cdiv(channels, lanes), batch)](
        hidden, output, offset, up_filter, down_filter, frequency, magnitude, length, channels,
        STEPS=steps, LANES=lanes, num_warps=lanes // 32,
    )  # fmt: skip
    return output
