"""Merges the partial results for a row and head and divides by the softmax's denominator.

Those of packed pages may hold sums in rotated coordinates, which are rotated back here; those of exact tokens are plain.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .dequant import INTERPRET
from .packed import NOTHING
from .query import LOG2_E
from .splits import row_splits, slots_of
from .workspace import section

FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def start_merge(ROWS: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr):
    """Nothing merged yet: for every SPLITS-th result the highest score, the sum of the weights and the values."""
    maximum = tl.full([ROWS, SPLITS], NOTHING, tl.float32)
    return maximum, tl.zeros([ROWS, SPLITS], tl.float32), tl.zeros([ROWS, SPLITS, N], tl.float32)


@triton.jit
def merge(merged, p_output, p_stats, first, count, other, others, columns, column, d, DIM: tl.constexpr,
          SPLITS: tl.constexpr):  # fmt: skip
    """Takes in `count` results from number `first` on, then `others` from number `other` on: dimensions d of the columns.

    Every SPLITS-th result has sums of its own until `end_merge`, so that no step waits for another's.
    """
    maximum, total, acc = merged
    for begin in range(0, count + others, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        number = tl.where(split < count, first + split, other + (split - count))
        row = number[None, :].to(tl.int64) * columns + column[:, None]
        valid = (split < count + others)[None, :] & (column < columns)[:, None]
        mask = valid[:, :, None] & (d < DIM)[None, None, :]
        x = tl.load(p_output + row[:, :, None] * DIM + d[None, None, :], mask=mask, other=0.0)
        their_maximum = tl.load(p_stats + 2 * row, mask=valid, other=NOTHING)
        their_total = tl.load(p_stats + 2 * row + 1, mask=valid, other=0.0)
        highest = tl.maximum(maximum, their_maximum)
        decay, scale = tl.exp2(maximum - highest), tl.exp2(their_maximum - highest)
        total = total * decay + their_total * scale
        acc = acc * decay[:, :, None] + x * scale[:, :, None]
        maximum = highest
    return maximum, total, acc


@triton.jit
def end_merge(merged):
    """The highest score and the sum of the weights [ROWS], and values [ROWS, N], relative to that score."""
    maximum, total, acc = merged
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


@triton.jit
def within_fp16(x):
    """fp32 x as fp16 shall hold it: what a page holds of values close to fp16's limit may lie beyond it, and stays finite.

    What is not finite comes of values that are not, and passes: comparisons with NaN are false.
    """
    is_beyond = (tl.abs(x) > FP16_MAX) & (tl.abs(x) < float("inf"))
    return tl.where(is_beyond, tl.where(x < 0, -FP16_MAX, FP16_MAX), x)


@triton.jit(
    do_not_specialize=[
        "batch", "heads", "columns", "group", "slots", "even_splits", "exact_splits", "stride_ob", "stride_oq", "stats_at",
    ]
)  # fmt: skip
def combine(
    p_output, p_signs, p_aux_sinks, p_row_start, p_counters, p_out,
    batch, heads, columns, group, slots, even_splits, exact_splits, stats_at, stride_ob, stride_oq,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    STEP: tl.constexpr, PAGE_BITS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
    BATCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, column blocks, cdiv(DIM, STEP)): STEP dimensions of ROWS columns.

    Args:
        p_output: fp32 [H * slots + B * H * exact_splits, columns, PADDED]: weighted sums of values. First come packed pages,
            slots (`splits.py`) or, if `even_splits` is not 0, so many splits of each row and head; then exact tokens.
        stats_at: where, 16 * stats_at bytes behind p_output, the results' fp32 [.., columns, 2] start: maximum of the scores
            in powers of two, sum of the weights.
        p_signs: bf16 [BLOCK, BLOCK], the sign of each rotated coordinate (row) in each dimension, if the results of packed
            pages are in rotated coordinates; else None.
        p_aux_sinks: [heads * group] logits, or None.
        p_out: [B, q, heads * group, DIM], the last two contiguous.
        PAGE_BITS, GROUPS, TILE, LEAST, BATCH: of `splits.row_splits`.
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
    first = i_bh * even_splits
    count = even_splits
    if (even_splits == 0) & (slots > 0):
        _, splits, _ = row_splits(p_row_start, p_counters, batch, slots, PAGE_BITS, GROUPS, TILE, LEAST, BATCH)
        begin, count = slots_of(splits, i_b, BATCH)
        first = i_h * slots + begin
    if DEPENDENT:
        gdc_wait()
    p_stats = section(p_output, stats_at, tl.float32)
    exact = heads * slots + i_bh * exact_splits
    merged = start_merge(ROWS, SPLITS, STEP)
    if p_signs is None:
        merged = merge(merged, p_output, p_stats, first, count, exact, exact_splits, columns, column, d, PADDED, SPLITS)
        highest, denominator, out = end_merge(merged)
    else:
        merged = merge(merged, p_output, p_stats, exact, exact_splits, 0, 0, columns, column, d, PADDED, SPLITS)
        highest, denominator, out = end_merge(merged)
        merged = start_merge(ROWS, SPLITS, BLOCK)
        merged = merge(merged, p_output, p_stats, first, count, 0, 0, columns, column, k, PADDED, SPLITS)
        rotated_highest, rotated_total, x = end_merge(merged)
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
    if p_out.dtype.element_ty == tl.float16:
        out = within_fp16(out)
    p_row = p_out + i_b.to(tl.int64) * stride_ob + (column // group).to(tl.int64) * stride_oq + head * DIM
    tl.store(p_row[:, None] + d[None, :], out.to(p_out.dtype.element_ty), mask=inside[:, None] & (d < DIM)[None, :])
