"""The fused operations of the vocoder: a Triton kernel for CUDA and the same in plain torch for everything else.

The kernels save memory traffic and launches, not arithmetic. Triton's interpreter runs them on the CPU, so the tests
compare both forms without a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

EPSILON = 1e-6
MIN_HALF_HEAD = 16  # the shortest inner dimension that Triton's matrix product takes
HIDDEN = -1e30  # a score that no softmax sees, and that is still finite


# ---------------------------------------------------------------------------------------------------------------------
# residual += gate * update; layer norm; scale and shift


@triton.jit
def _modulated_norm(
    residual, update, gate, scale, shift, slot, output, modulation_stride, width, eps,
    FRAMES: tl.constexpr, HAS_UPDATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = tl.load(slot + row // FRAMES) * modulation_stride + column
    value = tl.load(residual + row * width + column, mask=inside, other=0.0)
    if HAS_UPDATE:
        added = tl.load(update + row * width + column, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(gate + place, mask=inside, other=0.0) * added
        tl.store(residual + row * width + column, value, mask=inside)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    scaled = centred / deviation * (1.0 + tl.load(scale + place, mask=inside, other=0.0))
    scaled += tl.load(shift + place, mask=inside, other=0.0)
    tl.store(output + row * width + column, scaled.to(output.dtype.element_ty), mask=inside)


def modulated_norm(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    slot: torch.Tensor,
    dtype: torch.dtype,
    *,
    fused: bool,
) -> torch.Tensor:
    """`residual += gate * update` in place; then its layer norm, `* (1 + scale) + shift`, in `dtype`.

    Shapes: `residual` f32 and `update` [rows, frames, width]; `gate`, `scale`, `shift` f32 [slots, width], views with
    one stride; `slot` i64 [rows] says which of them a row takes.
    """
    if not fused:
        if update is not None:
            residual += gate[slot][:, None] * update
        normed = F.layer_norm(residual, residual.shape[-1:], eps=EPSILON)
        return (normed * (1 + scale[slot][:, None]) + shift[slot][:, None]).to(dtype)
    rows, frames, width = residual.shape
    output = torch.empty_like(residual, dtype=dtype)
    _modulated_norm[(rows * frames,)](
        residual, residual if update is None else update, scale if gate is None else gate, scale, shift, slot, output,
        scale.stride(0), width, EPSILON,
        FRAMES=frames, HAS_UPDATE=update is not None, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return output


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
    """Attention of each block over the blocks of its window; the result is [rows, frames, heads * head_dim].

    Args:
        qkv: [rows, frames, 3 * heads * head_dim], heads in half-split layout.
        left: [entries, frames, 2 * heads * head_dim], keys and values of blocks of earlier chunks.
        keys: i32 [rows, window], the blocks that a row sees: below `rows` one of `qkv`, from `rows` on one of `left`,
            negative none.
        valid: i32 [rows, window], how many frames of each are real; 0 for none. A row sees at least one.
        rotary: cosines and sines f32 [window * frames, head_dim / 2] by position in the window.
        back: which block of the window is the row's own.
    """
    rows, frames, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    half, window = width // heads // 2, keys.shape[1]
    if not fused:
        return _block_attention_torch(qkv, left, keys, valid, rotary, heads, back)
    output = torch.empty((rows, frames, width), dtype=qkv.dtype, device=qkv.device)
    _block_attention[(rows, heads)](
        qkv, left, keys, valid, *rotary, output, rows, (2 * half) ** -0.5,
        FRAMES=frames, HEADS=heads, HALF=half, WINDOW=window, BACK=back, PADDED=triton.next_power_of_2(frames),
        PRECISION="ieee" if precise else "tf32", MASKED=HIDDEN, num_warps=2,
    )  # fmt: skip
    return output


def _block_attention_torch(
    qkv: torch.Tensor,
    left: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    heads: int,
    back: int,
) -> torch.Tensor:
    rows, frames, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    window = keys.shape[1]
    query = qkv[..., :width]
    if window > 1:
        key_value = torch.cat([qkv[..., width:], left])[keys.clamp(min=0)].flatten(1, 2)
    else:
        key_value = qkv[..., width:]

    def split(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)

    query, key, value = split(query), split(key_value[..., :width]), split(key_value[..., width:])
    cosine, sine = rotary
    here = slice(back * frames, (back + 1) * frames)
    query, key = _rotate_first_head(query, cosine[here], sine[here]), _rotate_first_head(key, cosine, sine)
    mask = (torch.arange(frames, device=qkv.device) < valid[..., None]).view(rows, 1, 1, window * frames)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(1, 2).reshape(rows, frames, width)


def _rotate_first_head(tensor: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """The first head of `tensor` [rows, heads, frames, head_dim], half-split layout, rotated."""
    first, second = tensor[:, 0].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return torch.cat([rotated.to(tensor.dtype)[:, None], tensor[:, 1:]], dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# BigVGAN's activation: up by two, snake, down by two


@triton.jit
def _anti_aliased_snake(
    source, output, up_filter, down_filter, frequency, magnitude, length, channels, BLOCK: tl.constexpr
):
    line = tl.program_id(0).to(tl.int64)
    channel = line % channels
    sample = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    alpha = tl.load(frequency + channel)
    share = tl.load(magnitude + channel)
    result = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(12):
        fine = tl.minimum(tl.maximum(2 * sample + tap - 5, 0), 2 * length - 1)  # edges are repeated
        coarse, odd = fine // 2, fine % 2
        raised = tl.zeros([BLOCK], tl.float32)
        for index in tl.static_range(6):
            place = tl.minimum(tl.maximum(coarse + odd + (2 - index), 0), length - 1)
            weight = tl.where(odd == 1, tl.load(up_filter + 2 * index), tl.load(up_filter + 2 * index + 1))
            raised += weight * tl.load(source + line * length + place).to(tl.float32)
        raised *= 2.0
        # sin(angle) squared has the period pi; the rest lies in [-pi/2, pi/2], where the series errs by 6e-8.
        angle = raised * alpha
        turns = tl.floor(angle * 0.3183098861837907 + 0.5)
        rest = angle - turns * 3.140625
        rest = rest - turns * 9.67653589793e-4
        square = rest * rest
        series = 1.0 / 362880.0 - square * (1.0 / 39916800.0)
        series = -1.0 / 5040.0 + square * series
        series = 1.0 / 120.0 + square * series
        series = -1.0 / 6.0 + square * series
        sine = rest * (1.0 + square * series)
        result += tl.load(down_filter + tap) * (raised + share * sine * sine)
    tl.store(output + line * length + sample, result.to(output.dtype.element_ty), mask=sample < length)


def anti_aliased_snake(
    hidden: torch.Tensor,
    up_filter: torch.Tensor,
    down_filter: torch.Tensor,
    frequency: torch.Tensor,
    magnitude: torch.Tensor,
) -> torch.Tensor:
    """BigVGAN's activation of `hidden` [batch, channels, samples] in one pass over memory.

    Both filters are f32 [12]; `frequency` and `magnitude` f32 [channels] are the snake's parameters, exponentiated.
    """
    batch, channels, length = hidden.shape
    hidden = hidden.contiguous()
    output = torch.empty_like(hidden)
    block = min(1024, max(128, triton.next_power_of_2(length)))
    _anti_aliased_snake[(batch * channels, triton.cdiv(length, block))](
        hidden, output, up_filter, down_filter, frequency, magnitude, length, channels, BLOCK=block
    )
    return output
