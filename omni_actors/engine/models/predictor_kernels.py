"""The kernels of `fused_predictor`, in Triton. Rows between the layers, norms and rotations are float32."""

# Triton decides the types of its functions' arguments:
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

PLAIN, GATED, ROW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what a product makes; see `product`


# ---------------------------------------------------------------------------------------------------------------------
# rows and products


@triton.jit
def _put_row(value, x, weighted, squares, norm, row, column, inside, WIDTH: tl.constexpr):
    """Store a whole row f32 [columns] as the input of a layer: itself, times the norm's weights, its square sum."""
    tl.store(x + row * WIDTH + column, value, mask=inside)
    scaled = value * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(weighted + row * WIDTH + column, scaled.to(weighted.dtype.element_ty), mask=inside)
    tl.store(squares + row, tl.sum(value * value, axis=0))


@triton.jit
def enter(given, x, weighted, squares, norm, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Take rows of `given` as the input of the first layer."""
    row = tl.program_id(0)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    value = tl.load(given + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    _put_row(value, x, weighted, squares, norm, row, column, inside, WIDTH)


@triton.jit
def _weights(weight, at, column, K: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """A tile of `weight` [N, K] from column `at` on, as `_multiply` takes it."""
    if LINES == 1:
        return tl.load(weight + column[:, None] * K + at + tl.arange(0, PARTS * DEPTH)[None, :])
    elif PARTS == 1:
        return tl.load(weight + column[None, :] * K + at + tl.arange(0, DEPTH)[:, None])
    else:
        inner = tl.arange(0, PARTS)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, :, None]
        return tl.load(weight + column[None, None, :] * K + at + inner)


@triton.jit
def _rows(given, at, rows, line, K: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """A tile of `given` [rows, K] from column `at` on, as `_multiply` takes it."""
    if LINES == 1:
        return tl.load(given + tl.program_id(1) * K + at + tl.arange(0, PARTS * DEPTH)).to(tl.float32)
    elif PARTS == 1:
        return tl.load(
            given + line[:, None] * K + at + tl.arange(0, DEPTH)[None, :], mask=line[:, None] < rows, other=0
        )
    else:
        inner = tl.arange(0, PARTS)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
        return tl.load(given + line[None, :, None] * K + at + inner, mask=line[None, :, None] < rows, other=0)


@triton.jit
def _multiply(total, read, tile, LINES: tl.constexpr):
    """Add a tile's products to `total`, which `_summed` ends."""
    if LINES == 1:
        return total + tile.to(tl.float32) * read[None, :]
    else:
        return tl.dot(read, tile, total, input_precision="ieee")


@triton.jit
def _nothing(COLUMNS: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """The `total` that `_multiply` begins with."""
    if LINES == 1:
        return tl.zeros([COLUMNS, PARTS * DEPTH], tl.float32)
    elif PARTS == 1:
        return tl.zeros([LINES, COLUMNS], tl.float32)
    else:
        return tl.zeros([PARTS, LINES, COLUMNS], tl.float32)


@triton.jit
def _summed(total, LINES: tl.constexpr, PARTS: tl.constexpr):
    """[LINES, COLUMNS]."""
    if LINES == 1:
        return tl.sum(total, axis=1)[None, :]
    elif PARTS == 1:
        return total
    else:
        return tl.sum(total, axis=0)


# Numbers that vary: a variant of a kernel for each kind of them takes long to compile.
@triton.jit(do_not_specialize=["rows"])
def product(
    given, weight, squares_in, bias, x, weighted, squares_out, norm, out, rows, eps,
    K: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, COLUMNS: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`given` [rows, K] times the transpose of `weight` [N, K], in tiles of COLUMNS columns.

    With TILES > 0 the rows of `given` await their norm, whose sums of squares `squares_in` [TILES, rows] has.

    KIND: PLAIN stores the product to `out`; GATED has a `weight` [2 N, K] and stores silu(first half) * second half;
    ROW makes the input of a layer: with ADDED it is added to `x`. As `_put_row` for its columns.

    With LINES = 1 there is a program for each row, and no matrix unit is used. For a few rows the inner dimension is
    split into PARTS, one for each warp, that are summed last: the chain of products would be long otherwise.
    """
    first = tl.program_id(0) * COLUMNS
    column = tl.arange(0, COLUMNS)
    line = tl.arange(0, LINES) + tl.program_id(1) * LINES
    inside = line < rows
    STRETCH: tl.constexpr = PARTS * DEPTH
    total = _nothing(COLUMNS, LINES, PARTS, DEPTH)
    if KIND == GATED:
        total_up = _nothing(COLUMNS, LINES, PARTS, DEPTH)
    # Without matrix units the loop is unrolled; else Triton's compiler turns it into a pipeline.
    for at in (tl.static_range if LINES == 1 else range)(0, K, STRETCH):
        read = _rows(given, at, rows, line, K, LINES, PARTS, DEPTH)
        tile = _weights(weight, at, first + column, K, LINES, PARTS, DEPTH)
        total = _multiply(total, read, tile, LINES)
        if KIND == GATED:
            tile_up = _weights(weight + N * K, at, first + column, K, LINES, PARTS, DEPTH)
            total_up = _multiply(total_up, read, tile_up, LINES)
    result = _summed(total, LINES, PARTS)
    if KIND == GATED:
        up = _summed(total_up, LINES, PARTS)
    if TILES > 0:
        PADDED: tl.constexpr = triton.next_power_of_2(TILES)
        index = tl.arange(0, PADDED)
        parts = tl.load(
            squares_in + index[:, None] * rows + line[None, :],
            mask=(index[:, None] < TILES) & inside[None, :],
            other=0.0,
        )
        scale = tl.rsqrt(tl.sum(parts, axis=0) / K + eps)
        result *= scale[:, None]
        if KIND == GATED:
            up *= scale[:, None]
    here = line[:, None] * N + first + column[None, :]
    if BIASED:
        result += tl.load(bias + first + column).to(tl.float32)[None, :]
    if KIND == ROW:
        if ADDED:
            result += tl.load(x + here, mask=inside[:, None], other=0.0)
        tl.store(x + here, result, mask=inside[:, None])
        scaled = result * tl.load(norm + first + column).to(tl.float32)[None, :]
        tl.store(weighted + here, scaled.to(weighted.dtype.element_ty), mask=inside[:, None])
        tl.store(squares_out + tl.program_id(0) * rows + line, tl.sum(result * result, axis=1), mask=inside)
    else:
        if KIND == GATED:
            result = result / (1.0 + tl.exp(-result)) * up
        tl.store(out + here, result.to(out.dtype.element_ty), mask=inside[:, None])


# ---------------------------------------------------------------------------------------------------------------------
# attention of one position


@triton.jit
def _normed_and_turned(head, weight, cosine, sine, half, eps, HALF: tl.constexpr):
    """Both halves f32 [HALF] of a head after its norm and rotation."""
    low, high = tl.load(head + half).to(tl.float32), tl.load(head + HALF + half).to(tl.float32)
    scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / (2 * HALF) + eps)
    low *= scale * tl.load(weight + half).to(tl.float32)
    high *= scale * tl.load(weight + HALF + half).to(tl.float32)
    turned = low * tl.load(cosine + half) + high * tl.load(sine + half)
    return turned, high * tl.load(cosine + HALF + half) + low * tl.load(sine + HALF + half)


@triton.jit
def _with_new(cache, place, new, seen, position, half):
    """Rows f32 [SEEN, HALF] of a cache, with the one of this position, which the cache may not have yet."""
    earlier = tl.load(cache + place + half[None, :], mask=seen[:, None] < position, other=0.0)
    return tl.where(seen[:, None] == position, new[None, :], earlier).to(tl.float32)


@triton.jit(do_not_specialize=["position"])
def attention(
    qkv, keys, values, weight, cosines, sines, out, position, eps, softmax_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, POSITIONS: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Norm, rotation, and attention of one position of a frame, for one head of the queries.

    `keys` and `values` [rows, KV_HEADS, POSITIONS, 2 HALF] hold the earlier positions and get this one. SEEN are the
    positions, padded to a power of two.
    """
    SIZE: tl.constexpr = 2 * HALF
    row, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    half, seen = tl.arange(0, HALF), tl.arange(0, SEEN)
    line = qkv + row * ((HEADS + 2 * KV_HEADS) * SIZE)
    cosine, sine = cosines + position * SIZE, sines + position * SIZE
    query_low, query_high = _normed_and_turned(line + head * SIZE, weight + head * SIZE, cosine, sine, half, eps, HALF)
    at = (HEADS + kv_head) * SIZE
    key_low, key_high = _normed_and_turned(line + at, weight + at, cosine, sine, half, eps, HALF)
    at += KV_HEADS * SIZE
    value_low, value_high = tl.load(line + at + half), tl.load(line + at + HALF + half)
    dtype = value_low.dtype
    key_low, key_high = key_low.to(dtype), key_high.to(dtype)

    cached = (row * KV_HEADS + kv_head) * (POSITIONS * SIZE)
    place = cached + seen[:, None] * SIZE
    scores = tl.sum(_with_new(keys, place, key_low, seen, position, half) * query_low[None, :], axis=1)
    scores += tl.sum(_with_new(keys, place + HALF, key_high, seen, position, half) * query_high[None, :], axis=1)
    largest = tl.max(tl.where(seen <= position, scores, -float("inf")), axis=0)
    shares = tl.where(seen <= position, tl.exp((scores - largest) * softmax_scale), 0.0)
    shares /= tl.sum(shares, axis=0)
    mixed_low = tl.sum(_with_new(values, place, value_low, seen, position, half) * shares[:, None], axis=0)
    mixed_high = tl.sum(_with_new(values, place + HALF, value_high, seen, position, half) * shares[:, None], axis=0)
    to = out + (row * HEADS + head) * SIZE
    tl.store(to + half, mixed_low.to(dtype))
    tl.store(to + HALF + half, mixed_high.to(dtype))
    if head % (HEADS // KV_HEADS) == 0:
        here = cached + position * SIZE
        tl.store(keys + here + half, key_low)
        tl.store(keys + here + HALF + half, key_high)
        tl.store(values + here + half, value_low)
        tl.store(values + here + HALF + half, value_high)


# ---------------------------------------------------------------------------------------------------------------------
# the draw of a code


@triton.jit
def _scrambled(x):
    """`code_predictor._scrambled` of u32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, frame, group, code):
    """`code_predictor.gumbel_noise` of codes i32; seed and frame are i64."""
    key = _scrambled((seed & 0xFFFFFFFF).to(tl.uint32))
    key = _scrambled(key ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    key = _scrambled(key ^ (frame & 0xFFFFFFFF).to(tl.uint32))
    key = _scrambled(key ^ group.to(tl.uint32))
    bits = _scrambled(key ^ _scrambled(code.to(tl.uint32)))
    uniform = ((bits >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-8  # 2 ** -24
    return -tl.log(-tl.log(uniform))


@triton.jit
def _largest_ones(value, inside, COUNT: tl.constexpr):
    """Whether each value is one of the COUNT largest; equal ones are in together.

    Searches the bits of the smallest one of them, two at a time, from the highest on, until they tell it from the rest.
    """
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)  # in the order of the values
    ordered = tl.where(inside, ordered, 0)
    digit = tl.arange(0, 4).to(tl.uint32)
    least = tl.sum(digit, axis=0) * 0
    count, shift = COUNT + 1, 30
    while (count > COUNT) & (shift >= 0):
        tried = least + (digit << shift)
        reached = tl.sum((ordered[:, None] >= tried[None, :]).to(tl.int32), axis=0)
        enough = reached >= COUNT
        least += (tl.sum(enough.to(tl.int32), axis=0) - 1).to(tl.uint32) << shift
        count = tl.min(tl.where(enough, reached, 2147483647), axis=0)
        shift -= 2
    return inside & (ordered >= least)


@triton.jit(do_not_specialize=["group"])
def draw(
    logits, seeds, frames, greedy, group, codes, table, total, summed, x, weighted, squares, norm, temperature, top_p,
    VOCABULARY: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr, LAST: tl.constexpr, PROJECTED: tl.constexpr,
):  # fmt: skip
    """Draw a code, add its embedding to the frame's sum, and make it the next input.

    A value is drawn with its noise from the TOP_K largest. If the likelier ones together have a share of `top_p`, it
    and all that are less likely are out, and the rest is drawn from again.
    """
    row = tl.program_id(0)
    code = tl.arange(0, PADDED)
    inside = code < VOCABULARY
    value = tl.load(logits + row * VOCABULARY + code, mask=inside, other=-float("inf"))
    likeliest = tl.argmax(value, axis=0)
    value /= temperature
    kept = _largest_ones(value, inside, TOP_K)
    mass = tl.where(kept, tl.exp(value - tl.max(value, axis=0)), 0.0)
    allowed = top_p * tl.sum(mass, axis=0)
    noise = _gumbel(tl.load(seeds + row), tl.load(frames + row), group, code)
    noisy = tl.where(kept, value + noise, -float("inf"))
    drawn = tl.argmax(noisy, axis=0)
    chosen = tl.sum(tl.where(code == drawn, value, 0.0), axis=0)
    while tl.sum(tl.where(value > chosen, mass, 0.0), axis=0) >= allowed:
        noisy = tl.where(value > chosen, noisy, -float("inf"))
        drawn = tl.argmax(noisy, axis=0)
        chosen = tl.sum(tl.where(code == drawn, value, 0.0), axis=0)
    drawn = tl.where(tl.load(greedy + row) != 0, likeliest, drawn)
    tl.store(codes + row * (GROUPS - 1) + group, drawn.to(tl.int64))

    column = tl.arange(0, PADDED_WIDTH)
    within = column < WIDTH
    embedded = tl.load(table + drawn.to(tl.int64) * WIDTH + column, mask=within, other=0.0)
    there = total + row * WIDTH + column
    added = tl.load(there, mask=within, other=0.0) + embedded.to(tl.float32)
    if LAST:
        tl.store(summed + row * WIDTH + column, added.to(summed.dtype.element_ty), mask=within)
    else:
        tl.store(there, added, mask=within)
        if PROJECTED:
            tl.store(weighted + row * WIDTH + column, embedded, mask=within)
        else:
            _put_row(embedded.to(tl.float32), x, weighted, squares, norm, row, column, within, WIDTH)
