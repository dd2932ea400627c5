"""Merges the partial results of all splits, rotates the packed part back and divides by the softmax's denominator."""

from __future__ import annotations

import triton
import triton.language as tl

from .packed import NOTHING
from .query import LOG2_E


@triton.jit
def block_stats(p_stats, i_bh, first_split, splits, columns, column, SPLITS: tl.constexpr):
    """Maxima and sums of a block of splits: [ROWS, SPLITS] each."""
    split = first_split + tl.arange(0, SPLITS)
    row = (i_bh.to(tl.int64) * splits + split)[None, :] * columns + column[:, None]
    valid = (split < splits)[None, :] & (column < columns)[:, None]
    maximum = tl.load(p_stats + 2 * row, mask=valid, other=NOTHING)
    total = tl.load(p_stats + 2 * row + 1, mask=valid, other=0.0)
    return maximum, total, row, valid


@triton.jit
def split_maximum(p_stats, i_bh, splits, columns, column, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    highest = tl.full([ROWS], NOTHING, tl.float32)
    for first in range(0, splits, SPLITS):
        maximum, _, _, _ = block_stats(p_stats, i_bh, first, splits, columns, column, SPLITS)
        highest = tl.maximum(highest, tl.max(maximum, 1))
    return highest


@triton.jit
def merge(p_output, p_stats, i_bh, splits, columns, column, highest, DIM: tl.constexpr, BLOCK: tl.constexpr,
          ROWS: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """The sums of the splits relative to the maximum `highest`: values [ROWS, BLOCK] and weights [ROWS]."""
    d = tl.arange(0, BLOCK)[None, None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    for first in range(0, splits, SPLITS):
        maximum, total, row, valid = block_stats(p_stats, i_bh, first, splits, columns, column, SPLITS)
        scale = tl.exp2(maximum - highest[:, None])  # [ROWS, SPLITS]
        denominator += tl.sum(scale * total, 1)
        x = tl.load(p_output + row[:, :, None] * DIM + d, mask=valid[:, :, None] & (d < DIM), other=0.0)
        acc += tl.sum(x * scale[:, :, None], 1)
    return acc, denominator


@triton.jit(do_not_specialize=["heads", "columns", "group", "splits", "exact_splits", "stride_ob", "stride_oq"])
def combine(
    p_packed, p_packed_stats, p_exact, p_exact_stats, p_signs, p_aux_sinks, p_out,
    heads, columns, group, splits, exact_splits, stride_ob, stride_oq, weight_shift,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (column blocks, B * H).

    Args:
        p_packed, p_packed_stats: of `packed.attend_packed`, or None.
        p_exact, p_exact_stats: of `exact.attend_exact`.
        p_signs: bf16 [BLOCK, BLOCK], row k what rotated coordinate k adds to each dimension; None if nothing is rotated.
        p_aux_sinks: fp32 [heads * group] logits, or None.
        p_out: [B, q, heads * group, DIM], the last two contiguous.
        weight_shift: the power of two by which packed weights are scaled.
    """
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // heads, i_bh % heads
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = i_h * group + column % group
    inside = column < columns
    highest = split_maximum(p_exact_stats, i_bh, exact_splits, columns, column, ROWS, SPLITS)
    if p_packed is not None:
        highest = tl.maximum(highest, split_maximum(p_packed_stats, i_bh, splits, columns, column, ROWS, SPLITS))
    if p_aux_sinks is not None:
        aux = tl.load(p_aux_sinks + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, aux)
    out, denominator = merge(p_exact, p_exact_stats, i_bh, exact_splits, columns, column, highest, DIM, BLOCK, ROWS, SPLITS)
    if p_packed is not None:
        x, total = merge(p_packed, p_packed_stats, i_bh, splits, columns, column, highest + weight_shift, PADDED, BLOCK,
                         ROWS, SPLITS)  # fmt: skip
        denominator += total
        if p_signs is not None:
            k = tl.arange(0, BLOCK)
            signs = tl.load(p_signs + k[:, None] * BLOCK + k[None, :])  # [BLOCK, BLOCK]
            x *= PADDED**-0.5
            if ROWS < 16:  # the smallest product has 16 rows
                x = x.broadcast_to(16, BLOCK)
            high = x.to(tl.bfloat16)  # products with +-1 are exact: two bf16 hold 16 bits of a value
            y = tl.dot(high, signs) + tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), signs)
            if ROWS < 16:
                y = tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, y, 0.0), 0)[None, :]
            x = y
        out += x
    if p_aux_sinks is not None:
        denominator += tl.exp2(aux - highest)
    out /= tl.where(denominator > 0, denominator, 1.0)[:, None]
    d = tl.arange(0, BLOCK)
    p_row = p_out + i_b.to(tl.int64) * stride_ob + (column // group).to(tl.int64) * stride_oq + head * DIM
    tl.store(p_row[:, None] + d[None, :], out.to(p_out.dtype.element_ty), mask=inside[:, None] & (d < DIM)[None, :])
