"""Products of eight columns and of rows that lie in memory as vectors do, by one warp and without shared memory.

    columns [8, D] x rows [8, D]^T      16-bit numbers, sums in fp32

In which order a product adds up does not matter, as long as both operands agree: lane 4g + t takes numbers t * D/4 to
(t + 1) * D/4 of column g and of row g, so that it reads runs of memory. Everything is a list of blocks [32], a register
each, as in `warp.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import join_all
from .pieces import (
    LANES_SECOND,
    as_pieces,
    block_count,
    block_offsets,
    block_size,
    lanes_first,
    load_width,
    of_lane,
    of_piece,
    split_pieces,
)
from .warp import join_halves, lane_xor, multiply_bf16, multiply_fp16, rotate_block, rotate_lanes, round_to_pair


@triton.jit
def split_last8(x):
    """[32, 8] to a list of eight [32]."""
    even, odd = tl.split(x.reshape(32, 2, 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    x0, x4 = tl.split(a)
    x1, x5 = tl.split(b)
    x2, x6 = tl.split(c)
    x3, x7 = tl.split(d)
    return [x0, x1, x2, x3, x4, x5, x6, x7]


@triton.jit
def load_run(p_rows, d, live, COUNT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Numbers d .. d + COUNT - 1 of a lane's row, as a list; zeros beyond DIM and where the row is not `live`.

    Args:
        p_rows, d, live: [32].
        COUNT: a multiple of 4.
    """
    values = []
    for first in tl.static_range(0, COUNT, 8):
        if COUNT - first >= 8:
            at = (d[:, None] + first) + tl.arange(0, 8)[None, :]
        else:
            at = (d[:, None] + first) + tl.arange(0, 4)[None, :]
        mask = live[:, None].broadcast_to(at.shape)
        if DIM < PADDED:
            mask = mask & (at < DIM)
        x = tl.load(p_rows[:, None] + at, mask=mask, other=0.0)
        if COUNT - first >= 8:
            values = values + split_last8(x)
        else:
            even, odd = tl.split(x.reshape(32, 2, 2))
            x0, x2 = tl.split(even)
            x1, x3 = tl.split(odd)
            values = values + [x0, x1, x2, x3]
    return values


@triton.jit
def store_run(p_rows, values, mask, DTYPE: tl.constexpr):
    """Store a lane's list of numbers, a multiple of 4, from its pointer on."""
    p = p_rows[:, None] + tl.arange(0, 4)[None, :]
    for i in tl.static_range(0, len(values), 4):
        x = tl.join(tl.join(values[i], values[i + 2]), tl.join(values[i + 1], values[i + 3])).reshape(32, 4)
        tl.store(p + i, x.to(DTYPE), mask=mask[:, None])


@triton.jit
def sums_of_lane(values, g, ROTATE: tl.constexpr, LARGE: tl.constexpr):
    """A lane's list of up to 32 numbers, or what `rotate_lanes` makes of it, for `store_sums`: as it is, or if LARGE as
    blocks (`pieces.py`)."""
    if LARGE:
        blocks = []
        for bit in tl.static_range(4):
            if len(values) & (32 >> bit):
                x = join_all(values[len(values) >> (6 - bit) << (6 - bit) :][: 32 >> bit]).reshape(32, 32 >> bit)
                if ROTATE:
                    x = rotate_block(x, g)
                blocks = blocks + [x]
        return blocks
    else:
        return rotate_lanes(values, g) if ROTATE else values


@triton.jit
def store_sums(p_rows, sums, mask, LARGE: tl.constexpr):
    """Store what `sums_of_lane` returns from a lane's pointer on, fp32."""
    if LARGE:
        p = of_lane(p_rows)
        for b in tl.static_range(len(sums)):
            n = 4 * of_piece(tl.arange(0, sums[b].shape[1] // 4)) + tl.arange(0, 4)[None, None, :]
            tl.store(p + n, lanes_first(sums[b].reshape(32, sums[b].shape[1] // 4, 4)), mask=of_lane(mask))
            p += sums[b].shape[1]
    else:
        store_run(p_rows, sums, mask, tl.float32)


@triton.jit
def add_lanes_of_four(x):
    """The sum over the four lanes of a g."""
    x += lane_xor(x, 1)
    return x + lane_xor(x, 2)


@triton.jit
def sum_of_squares(blocks):
    """Of what the four lanes of a g hold in blocks of pieces."""
    total = tl.zeros([32], tl.float32)
    for b in tl.static_range(len(blocks)):
        total += tl.sum(tl.sum(blocks[b] * blocks[b], 2), 1)
    return add_lanes_of_four(total)


@triton.jit
def round_to_pairs(values, DTYPE: tl.constexpr):
    """A list of fp32 as words of two fp16 or bf16."""
    words = []
    for i in tl.static_range(0, len(values), 2):
        words = words + [round_to_pair(values[i], values[i + 1], DTYPE)]
    return words


@triton.jit
def run_dims(b: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """The dimensions of block b of a lane's pieces."""
    return block_offsets(tl.arange(0, 32) % 4 * (PADDED // 4), 8, b, PADDED // 32, WIDTH)


@triton.jit
def load_blocks(p_rows, DIM: tl.constexpr, PADDED: tl.constexpr):
    """What a lane takes of its row, in blocks of pieces (`pieces.py`), fp32; zeros beyond DIM.

    Args:
        p_rows: [32].
    """
    WIDTH: tl.constexpr = load_width(p_rows.dtype.element_ty)
    blocks = []
    for b in tl.static_range(block_count(PADDED // 32)):
        d = run_dims(b, PADDED, WIDTH)
        if DIM < PADDED:
            x = tl.load(of_lane(p_rows) + d, mask=d < DIM, other=0.0)
        else:
            x = tl.load(of_lane(p_rows) + d)
        blocks = blocks + [as_pieces(x).to(tl.float32)]
    return blocks


@triton.jit
def load_pair_words(p_rows, live, DIM: tl.constexpr, PADDED: tl.constexpr):
    """What a lane takes of some rows of 16-bit numbers, as a list of words of two, [32, ROWS]; zeros beyond DIM and where a
    row is not `live`.

    Args:
        p_rows, live: [32, ROWS].
    """
    ROWS: tl.constexpr = p_rows.shape[1]
    p_words = p_rows.to(tl.pointer_type(tl.int32))
    p_words = tl.trans(p_words)[:, None, :, None] if LANES_SECOND else p_words[:, :, None, None]
    live = tl.trans(live)[:, None, :, None] if LANES_SECOND else live[:, :, None, None]
    words = []
    for b in tl.static_range(block_count(PADDED // 32)):
        word = block_offsets(tl.arange(0, 32) % 4 * (PADDED // 8), 4, b, PADDED // 32, 4, 4)
        word = word[None, :, :, :] if LANES_SECOND else word[:, None, :, :]
        x = tl.load(p_words + word, mask=live & (word < DIM // 2) if DIM < PADDED else live, other=0)
        x = x.permute(2, 1, 3, 0) if LANES_SECOND else x.permute(0, 2, 3, 1)  # [32, pieces, 4, ROWS]
        words = words + split_pieces(x.reshape(32, 4 * block_size(b, PADDED // 32), ROWS))
    return words


@triton.jit
def multiply_halves(a, b, c, DTYPE: tl.constexpr):
    """`multiply_fp16` or `multiply_bf16`."""
    if DTYPE == tl.bfloat16:
        return multiply_bf16(a, b, c)
    else:
        return multiply_fp16(a, b, c)


@triton.jit
def row_products(columns, rows, sums, DTYPE: tl.constexpr):
    """sums + columns times rows.

    Args:
        columns: words of the lane's numbers of column g.
        rows: the lane's numbers of row g, 16 bits each.
        sums: four fp32, the first two of which are those of column g with rows 2t and 2t + 1. (The others would be those of
            eight more columns.)
    """
    for i in tl.static_range(0, len(rows), 4):
        a = [columns[i // 2], columns[i // 2], columns[i // 2 + 1], columns[i // 2 + 1]]
        b = [join_halves(rows[i], rows[i + 1]), join_halves(rows[i + 2], rows[i + 3])]
        sums = multiply_halves(a, b, sums, DTYPE)
    return sums


@triton.jit
def word_products(columns, rows, sums, DTYPE: tl.constexpr):
    """`row_products` with several rows g.

    Args:
        columns: `pieces.pair_words` of column g, of DTYPE.
        rows: `load_pair_words`.
        sums: four fp32 [32, ROWS].
    """
    for i in tl.static_range(0, len(rows), 2):
        a = [columns[i], columns[i], columns[i + 1], columns[i + 1]]
        sums = multiply_halves(a, rows[i : i + 2], sums, DTYPE)
    return sums
