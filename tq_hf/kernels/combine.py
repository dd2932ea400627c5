"""Merges the partial results of all splits, rotates the packed part back and divides by the softmax's denominator."""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import INTERPRET
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
    """The highest score of each column: [ROWS]."""
    highest = tl.full([ROWS], NOTHING, tl.float32)
    for first in range(0, splits, SPLITS):
        maximum, _, _, _ = block_stats(p_stats, i_bh, first, splits, columns, column, SPLITS)
        highest = tl.maximum(highest, tl.max(maximum, 1))
    return highest


@triton.jit
def merge(p_output, p_stats, i_bh, splits, columns, column, highest, d, DIM: tl.constexpr, ROWS: tl.constexpr,
          SPLITS: tl.constexpr):  # fmt: skip
    """The splits' sums relative to the maximum `highest`: values in dimensions d, [ROWS, N], and weights, [ROWS]."""
    acc = tl.zeros([ROWS, d.shape[0]], tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    for first in range(0, splits, SPLITS):
        maximum, total, row, valid = block_stats(p_stats, i_bh, first, splits, columns, column, SPLITS)
        scale = tl.exp2(maximum - highest[:, None])  # [ROWS, SPLITS]
        denominator += tl.sum(scale * total, 1)
        mask = valid[:, :, None] & (d < DIM)[None, None, :]
        x = tl.load(p_output + row[:, :, None] * DIM + d[None, None, :], mask=mask, other=0.0)
        acc += tl.sum(x * scale[:, :, None], 1)
    return acc, denominator


@triton.jit
def rotate_back(x, p_signs, d, BLOCK: tl.constexpr):
    """x [ROWS, BLOCK] in rotated coordinates to dimensions d, [ROWS, N]."""
    ROWS: tl.constexpr = x.shape[0]
    k = tl.arange(0, BLOCK)
    signs = tl.load(p_signs + k[:, None] * BLOCK + d[None, :])  # [BLOCK, N]
    if ROWS < 16:  # the smallest product has 16 rows
        x = x.broadcast_to(16, BLOCK)
    if INTERPRET:  # it knows no bf16
        y = tl.dot(x, signs.to(tl.float32))
    else:
        high = x.to(tl.bfloat16)  # products with +-1 are exact, and two bf16 hold 16 bits of a value
        y = tl.dot(high, signs) + tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), signs)
    if ROWS < 16:
        y = tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, y, 0.0), 0)[None, :]
    return y


@triton.jit(do_not_specialize=["heads", "columns", "group", "splits", "exact_splits", "stride_ob", "stride_oq"])
def combine(
    p_packed, p_packed_stats, p_exact, p_exact_stats, p_signs, p_aux_sinks, p_out,
    heads, columns, group, splits, exact_splits, stride_ob, stride_oq, weight_shift,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, column blocks); the output is written STEP dimensions at a time.

    Args:
        p_packed, p_packed_stats: of `packed.attend_packed`, or None.
        p_exact, p_exact_stats: of `exact.attend_exact`.
        p_signs: bf16 [BLOCK, BLOCK], the sign of each rotated coordinate (row) in each dimension, or None.
        p_aux_sinks: [heads * group] logits, or None.
        p_out: [B, q, heads * group, DIM], the last two contiguous.
        weight_shift: the power of two by which packed weights are scaled.
    """
    i_bh = tl.program_id(0)
    i_b, i_h = i_bh // heads, i_bh % heads
    column = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    head = i_h * group + column % group
    inside = column < columns
    p_row = p_out + i_b.to(tl.int64) * stride_ob + (column // group).to(tl.int64) * stride_oq + head * DIM
    highest = split_maximum(p_exact_stats, i_bh, exact_splits, columns, column, ROWS, SPLITS)
    if p_packed is not None:
        highest = tl.maximum(highest, split_maximum(p_packed_stats, i_bh, splits, columns, column, ROWS, SPLITS))
    others = tl.zeros([ROWS], tl.float32)
    if p_aux_sinks is not None:
        aux = tl.load(p_aux_sinks + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, aux)
        others = tl.exp2(aux - highest)
    if p_signs is not None:
        k = tl.arange(0, BLOCK)
        rotated, packed_total = merge(p_packed, p_packed_stats, i_bh, splits, columns, column, highest + weight_shift, k,
                                      PADDED, ROWS, SPLITS)  # fmt: skip
        rotated *= PADDED**-0.5
    for first in range(0, DIM, STEP):
        d = first + tl.arange(0, STEP)
        out, denominator = merge(
            p_exact, p_exact_stats, i_bh, exact_splits, columns, column, highest, d, DIM, ROWS, SPLITS
        )
        denominator += others
        if p_packed is not None:
            if p_signs is not None:
                out += rotate_back(rotated, p_signs, d, BLOCK)
            else:
                x, packed_total = merge(p_packed, p_packed_stats, i_bh, splits, columns, column, highest + weight_shift, d,
                                        PADDED, ROWS, SPLITS)  # fmt: skip
                out += x
            denominator += packed_total
        out /= tl.where(denominator > 0, denominator, 1.0)[:, None]
        tl.store(p_row[:, None] + d[None, :], out.to(p_out.dtype.element_ty), mask=inside[:, None] & (d < DIM)[None, :])
