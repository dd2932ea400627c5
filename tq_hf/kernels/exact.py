"""Attention over the exact tokens: the sinks, those in the ring and the new ones.

Blocks of them go round-robin to the splits: blocks of sinks first, then of the ring's slots, then of new tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .packed import NOTHING
from .query import LOG2_E
from .workspace import section


@triton.jit
def token_rows(index, in_sinks, is_new, i_bh, i_b, i_h, sinks, slots, p_sink, p_ring, p_new, stride_b, stride_h, stride_t,
               DIM: tl.constexpr):  # fmt: skip
    """Pointers to the vectors of a block of exact tokens.

    The block's kind chooses a base pointer and a stride: Triton 3.9 takes the vectors behind a choice of pointers for each
    token as not aligned.
    """
    p_own = p_new + (i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h)
    p_kept = tl.where(in_sinks, p_sink + i_bh.to(tl.int64) * sinks * DIM, p_ring + i_bh.to(tl.int64) * slots * DIM)
    return tl.where(is_new, p_own, p_kept) + index.to(tl.int64) * tl.where(is_new, stride_t, DIM)


@triton.jit
def token_blocks(block, sinks, slots, TOKENS: tl.constexpr):
    """Whether a block is one of sinks, whether it is one of new tokens, and the first block of its kind."""
    sink_blocks = tl.cdiv(sinks, TOKENS)
    kept_blocks = sink_blocks + tl.cdiv(slots, TOKENS)
    in_sinks = block < sink_blocks
    is_new = block >= kept_blocks
    return in_sinks, is_new, tl.where(in_sinks, 0, tl.where(is_new, kept_blocks, sink_blocks))


@triton.jit
def token_positions(index, in_sinks, is_new, sinks, slots, new, length, packed_end, row_start):
    """The positions of a block's tokens, and which of them are tokens. What is kept are committed tokens, the ring's without
    the sinks; padding is nowhere a token."""
    slot_position = packed_end + (index + slots - packed_end % slots) % slots
    position = tl.where(in_sinks, row_start + index, tl.where(is_new, length + index, slot_position))
    first_position = row_start + tl.where(in_sinks | is_new, 0, sinks)
    end = tl.where(is_new, length + new, length)
    exists = index < tl.where(in_sinks, sinks, tl.where(is_new, new, slots))
    return position, exists & (position >= first_position) & (position < end)


# Strides are specialized for 16-byte loads: whether a model's vectors are aligned does not change from call to call.
@triton.jit(
    do_not_specialize=[
        "heads", "columns", "group", "new", "slots", "sinks", "splits", "query_offset", "mask_b", "mask_q", "mask_k",
        "first_result", "stats_at",
    ]
)  # fmt: skip
def attend_exact(
    p_query, p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start, p_counters, p_mask, p_output,
    heads, columns, group, new, slots, sinks, splits, first_result, query_offset, stats_at, stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, mask_b, mask_q, mask_k, scaling, softcap,
    KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, PER_QUERY: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, splits, column blocks).

    Args:
        p_mask: keep mask, bytes; its row depends on the query if PER_QUERY. None keeps all.
        p_output, stats_at: of `combine.combine`; the results of this kernel begin with number `first_result`.
        query_offset: position of query 0 minus the committed length.
        CHAINED: whether this kernel runs beside `prepare.prepare`, and the next may start before this one has finished.
    """
    if CHAINED:
        gdc_launch_dependents()
    i_bh, i_s = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // heads, i_bh % heads
    first_column = tl.program_id(2) * ROWS
    column = first_column + tl.arange(0, ROWS)
    inside = column < columns
    i_q = column // group
    d = tl.arange(0, KEY_BLOCK)
    p_rows = p_query + i_b.to(tl.int64) * stride_qb + (i_h * group + column % group).to(tl.int64) * stride_qh
    p_rows += i_q.to(tl.int64) * stride_qt
    query = tl.load(p_rows[:, None] + d[None, :], mask=inside[:, None] & (d < KEY_DIM)[None, :], other=0.0)
    length = tl.load(p_counters)
    packed_end = tl.load(p_counters + 1)
    row_start = tl.load(p_row_start + i_b)
    seen = new
    if CAUSAL:
        last_query = tl.minimum(first_column + ROWS, columns) - 1
        seen = tl.minimum(new, tl.maximum(query_offset + last_query // group + 1, 0))
    kept_blocks = tl.cdiv(sinks, TOKENS) + tl.cdiv(slots, TOKENS)
    e = tl.arange(0, VALUE_BLOCK)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    maximum = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for block in tl.range(i_s, kept_blocks + tl.cdiv(seen, TOKENS), splits, num_stages=STAGES):
        in_sinks, is_new, first = token_blocks(block, sinks, slots, TOKENS)
        index = (block - first) * TOKENS + tl.arange(0, TOKENS)
        position, exists = token_positions(index, in_sinks, is_new, sinks, slots, seen, length, packed_end, row_start)
        p_keys = token_rows(index, in_sinks, is_new, i_bh, i_b, i_h, sinks, slots, p_sink_key, p_ring_key, p_key,
                            stride_kb, stride_kh, stride_kt, KEY_DIM)  # fmt: skip
        key = tl.load(p_keys[:, None] + d[None, :], mask=exists[:, None] & (d < KEY_DIM)[None, :], other=0.0)
        p_values = token_rows(index, in_sinks, is_new, i_bh, i_b, i_h, sinks, slots, p_sink_value, p_ring_value, p_value,
                              stride_vb, stride_vh, stride_vt, VALUE_DIM)  # fmt: skip
        value = tl.load(p_values[:, None] + e[None, :], mask=exists[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
        scores = tl.dot(query, key.trans(1, 0), input_precision="tf32x3") * scaling  # [ROWS, TOKENS]
        if softcap is not None:  # tanh; overflow and underflow of the exponential give 1 and -1
            scores = softcap - 2 * softcap / (tl.exp2(scores * (2 * LOG2_E / softcap)) + 1)
        keep = exists[None, :] & inside[:, None]
        if CAUSAL:
            keep = keep & (position[None, :] <= (length + query_offset + i_q)[:, None])
        if p_mask is not None:
            p_token = p_mask + (i_b.to(tl.int64) * mask_b + position.to(tl.int64) * mask_k)
            if PER_QUERY:
                p_each = p_token[None, :] + i_q.to(tl.int64)[:, None] * mask_q
                keep = keep & (tl.load(p_each, mask=keep, other=0) != 0)
            else:
                keep = keep & (tl.load(p_token, mask=exists, other=0) != 0)[None, :]
        scores = tl.where(keep, scores * LOG2_E, float("-inf"))
        before = maximum
        maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - maximum[:, None])
        decay = tl.exp2(before - maximum)
        total = total * decay + tl.sum(weights, 1)
        rounded = weights.to(value.dtype)
        acc = tl.dot(rounded, value, acc * decay[:, None], input_precision="tf32x3")
        if value.dtype == tl.bfloat16:  # eight bits of a weight are less than its output's rounding can hide
            acc = tl.dot((weights - rounded).to(tl.bfloat16), value, acc)
    row = (first_result + i_bh.to(tl.int64) * splits + i_s) * columns + column
    p_stats = section(p_output, stats_at, tl.float32)
    tl.store(p_stats + 2 * row, maximum, mask=inside)
    tl.store(p_stats + 2 * row + 1, total, mask=inside)
    p_sums = p_output + row[:, None] * VALUE_PADDED + e[None, :]
    tl.store(p_sums, acc, mask=inside[:, None] & (e < VALUE_PADDED)[None, :])
    if CHAINED:  # the next kernel waits for this one only
        gdc_wait()
