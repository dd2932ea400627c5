"""Exact tokens for the decode kernel: a program of one warp attends with eight columns to a block of 16 of them.

`exact.py` has the same for any number of columns, warps and dtypes. Both products are those of `rows.py`: scores come out
with the tokens 2t, 2t + 1, 8 + 2t and 9 + 2t of column g in lane 4g + t, which is how the second product takes weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .exact import token_blocks, token_positions, token_rows
from .packed import NOTHING
from .query import LOG2_E, column_rows
from .rows import add_lanes_of_four, load_run, multiply_halves, round_to_pairs, row_products, store_run
from .warp import join_halves, lane_xor, power_of_two

TAIL_TOKENS = tl.constexpr(16)


@triton.jit
def largest_of_four(x):
    """The maximum over the four lanes of a g."""
    x = tl.maximum(x, lane_xor(x, 1))
    return tl.maximum(x, lane_xor(x, 2))


@triton.jit
def attend_tail(
    p_query, p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start, p_counters, p_mask, p_output,
    p_stats, first_result, heads, i_h, i_b, i_c, block, blocks, columns, group, new, slots, sinks, query_offset, stride_qb,
    stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, mask_b, mask_k, scaling, softcap,
    L: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Columns 8 * i_c .. of row i_b and head i_h with a block of `exact.py`'s order.

    The result has number first_result + (i_b * heads + i_h) * blocks + block (`combine.combine`).
    """
    DTYPE: tl.constexpr = p_ring_key.dtype.element_ty
    KEYS: tl.constexpr = L.key_padded // 4  # of a lane, of each key
    VALUES: tl.constexpr = L.value_padded // 8  # of a lane, of each value
    i_bh = i_b * heads + i_h
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4
    column = 8 * i_c + g
    length = tl.load(p_counters)
    packed_end = tl.load(p_counters + 1)
    row_start = tl.load(p_row_start + i_b)
    p_rows = column_rows(p_query, i_b, i_h, column, columns, group, stride_qb, stride_qh, stride_qt)
    query = round_to_pairs(
        [x.to(tl.float32) for x in load_run(p_rows, t * KEYS, g >= 0, KEYS, L.key_dim, L.key_padded)], DTYPE
    )
    nothing = tl.zeros([32], tl.float32)
    in_sinks, is_new, first = token_blocks(block, sinks, slots, TAIL_TOKENS)
    first = (block - first) * TAIL_TOKENS
    scores = []
    values = []
    exists = []
    for half in tl.static_range(2):
        index = first + 8 * half + g
        _, live = token_positions(index, in_sinks, is_new, sinks, slots, new, length, packed_end, row_start)
        p_keys = token_rows(index, in_sinks, is_new, i_bh, i_b, i_h, sinks, slots, p_sink_key, p_ring_key, p_key, stride_kb,
                            stride_kh, stride_kt, L.key_dim)  # fmt: skip
        keys = load_run(p_keys, t * KEYS, live, KEYS, L.key_dim, L.key_padded)
        scores = scores + row_products(query, keys, [nothing] * 4, DTYPE)[:2]
        for e in tl.static_range(2):
            index = first + (8 * half + e) + 2 * t
            position, live = token_positions(index, in_sinks, is_new, sinks, slots, new, length, packed_end, row_start)
            p_values = token_rows(index, in_sinks, is_new, i_bh, i_b, i_h, sinks, slots, p_sink_value, p_ring_value, p_value,
                                  stride_vb, stride_vh, stride_vt, L.value_dim)  # fmt: skip
            values = values + [load_run(p_values, g * VALUES, live, VALUES, L.value_dim, L.value_padded)]
            if p_mask is not None:
                p_token = p_mask + (i_b.to(tl.int64) * mask_b + position.to(tl.int64) * mask_k)
                live = live & (tl.load(p_token, mask=live, other=0) != 0)
            if CAUSAL:
                live = live & (position <= length + query_offset + column // group)
            exists = exists + [live]
    powers = []
    highest = nothing + NOTHING
    for r in tl.static_range(4):
        y = scores[r] * scaling
        if softcap is not None:  # tanh; overflow and underflow of the exponential give 1 and -1
            y = softcap - 2 * softcap / (power_of_two(y * (2 * LOG2_E / softcap)) + 1)
        y = tl.where(exists[r], y * LOG2_E, float("-inf"))
        powers = powers + [y]
        highest = tl.maximum(highest, y)
    highest = largest_of_four(highest)
    weights = [power_of_two(y - highest) for y in powers]
    total = add_lanes_of_four((weights[0] + weights[1]) + (weights[2] + weights[3]))
    high = round_to_pairs(weights, DTYPE)
    if DTYPE == tl.bfloat16:  # eight bits of a weight are less than its output's rounding can hide
        rest = round_to_pairs([w - w.to(tl.bfloat16).to(tl.float32) for w in weights], DTYPE)
    even = []
    odd = []
    for i in tl.static_range(VALUES):
        pairs = [join_halves(values[0][i], values[1][i]), join_halves(values[2][i], values[3][i])]
        sums = multiply_halves([high[0], high[0], high[1], high[1]], pairs, [nothing] * 4, DTYPE)
        if DTYPE == tl.bfloat16:
            sums = multiply_halves([rest[0], rest[0], rest[1], rest[1]], pairs, sums, DTYPE)
        even = even + sums[:1]
        odd = odd + sums[1:2]
    row = (first_result + i_bh * blocks + block) * columns + column
    inside = column < columns
    tl.store(p_stats + 2 * row, highest, mask=inside & (t == 0))
    tl.store(p_stats + 2 * row + 1, total, mask=inside & (t == 0))
    store_run(p_output + (row.to(tl.int64) * L.value_padded + 2 * VALUES * t), even + odd, inside, tl.float32)
