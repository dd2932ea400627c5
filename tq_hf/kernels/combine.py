"""Merges the partial results of all splits and divides by the softmax's denominator.

The first of a row's splits may hold sums in rotated coordinates, which are rotated back here; the others are plain.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .dequant import INTERPRET
from .packed import NOTHING
from .query import LOG2_E


@triton.jit
def merge(p_output, p_stats, i_bh, first_split, end_split, splits, columns, column, d, DIM: tl.constexpr,
          ROWS: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Splits `first_split` to `end_split` as one: the highest score and the sum of the weights [ROWS], and values in
    dimensions d, [ROWS, N], relative to that score.

    Every SPLITS-th split has sums of its own until the end, so that no step waits for another's.
    """
    maximum = tl.full([ROWS, SPLITS], NOTHING, tl.float32)
    total = tl.zeros([ROWS, SPLITS], tl.float32)
    acc = tl.zeros([ROWS, SPLITS, d.shape[0]], tl.float32)
    for first in range(first_split, end_split, SPLITS):
        split = first + tl.arange(0, SPLITS)
        row = (i_bh.to(tl.int64) * splits + split)[None, :] * columns + column[:, None]
        valid = (split < end_split)[None, :] & (column < columns)[:, None]
        x = tl.load(
            p_output + row[:, :, None] * DIM + d[None, None, :], mask=valid[:, :, None] & (d < DIM)[None, None, :], other=0.0
        )
        their_maximum = tl.load(p_stats + 2 * row, mask=valid, other=NOTHING)
        their_total = tl.load(p_stats + 2 * row + 1, mask=valid, other=0.0)
        highest = tl.maximum(maximum, their_maximum)
        decay, scale = tl.exp2(maximum - highest), tl.exp2(their_maximum - highest)
        total = total * decay + their_total * scale
        acc = acc * decay[:, :, None] + x * scale[:, :, None]
        maximum = highest
    highest = tl.max(maximum, 1)
    scale = tl.exp2(maximum - highest[:, None])
    return highest, tl.sum(total * scale, 1), tl.sum(acc * scale[:, :, None], 1)


@triton.jit
def rotate_back(x, signs):
    """x [ROWS, BLOCK] in rotated coordinates to the dimensions of signs, [BLOCK, N]."""
    ROWS: tl.constexpr = x.shape[0]
    if ROWS < 16:  # the smallest product has 16 rows
        x = x.broadcast_to(16, x.shape[1])
    if INTERPRET:  # it knows no bf16
        y = tl.dot(x, signs.to(tl.float32))
    else:
        high = x.to(tl.bfloat16)  # products with +-1 are exact, and two bf16 hold 16 bits of a value
        y = tl.dot(high, signs) + tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), signs)
    if ROWS < 16:
        y = tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, y, 0.0), 0)[None, :]
    return y


@triton.jit(do_not_specialize=["heads", "columns", "group", "rotated_splits", "splits", "stride_ob", "stride_oq"])
def combine(
    p_output, p_stats, p_signs, p_aux_sinks, p_out,
    heads, columns, group, rotated_splits, splits, stride_ob, stride_oq,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, column blocks, cdiv(DIM, STEP)): STEP dimensions of ROWS columns.

    Args:
        p_output: fp32 [B * H, splits, columns, PADDED]: weighted sums of values.
        p_stats: fp32 [B * H, splits, columns, 2]: maximum of the scores in powers of two, sum of the weights.
        p_signs: bf16 [BLOCK, BLOCK], the sign of each rotated coordinate (row) in each dimension; None if no split is
            rotated.
        p_aux_sinks: [heads * group] logits, or None.
        p_out: [B, q, heads * group, DIM], the last two contiguous.
        rotated_splits: how many splits come first that hold rotated coordinates.
        DEPENDENT: whether the program may start before the kernels that it depends on have finished.
    """
    i_bh = tl.program_id(0)
    i_b, i_h = i_bh // heads, i_bh % heads
    column = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(2) * STEP + tl.arange(0, STEP)
    head = i_h * group + column % group
    inside = column < columns
    k = tl.arange(0, BLOCK)
    if p_signs is not None:
        signs = tl.load(p_signs + k[:, None] * BLOCK + d[None, :])  # [BLOCK, STEP]
    if DEPENDENT:
        gdc_wait()
    highest, denominator, out = merge(p_output, p_stats, i_bh, rotated_splits, splits, splits, columns, column, d, PADDED,
                                      ROWS, SPLITS)  # fmt: skip
    if p_signs is not None:
        rotated_highest, rotated_total, x = merge(p_output, p_stats, i_bh, 0, rotated_splits, splits, columns, column, k,
                                                  PADDED, ROWS, SPLITS)  # fmt: skip
        before = highest
        highest = tl.maximum(before, rotated_highest)
        decay, scale = tl.exp2(before - highest), tl.exp2(rotated_highest - highest)
        denominator = denominator * decay + rotated_total * scale
        out = out * decay[:, None] + rotate_back(x * PADDED**-0.5, signs) * scale[:, None]
    if p_aux_sinks is not None:
        aux = tl.load(p_aux_sinks + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        before = highest
        highest = tl.maximum(before, aux)
        decay = tl.exp2(before - highest)
        denominator = denominator * decay + tl.exp2(aux - highest)
        out *= decay[:, None]
    out /= tl.where(denominator > 0, denominator, 1.0)[:, None]
    p_row = p_out + i_b.to(tl.int64) * stride_ob + (column // group).to(tl.int64) * stride_oq + head * DIM
    tl.store(p_row[:, None] + d[None, :], out.to(p_out.dtype.element_ty), mask=inside[:, None] & (d < DIM)[None, :])
