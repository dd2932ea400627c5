"""Exact tokens for the decode kernel: a program of one warp attends with eight columns to a block of 16 of them.

`exact.py` has the same for any number of columns, warps and dtypes. Both products are those of `rows.py`: scores come out
with the tokens 2t, 2t + 1, 8 + 2t and 9 + 2t of column g in lane 4g + t, which is how the second product takes weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .exact import token_blocks, token_positions, token_rows
from .packed import NOTHING
from .pieces import block_count, block_offsets, lanes_first, of_lane, pair_words
from .query import LOG2_E, column_rows
from .rows import (
    add_lanes_of_four,
    load_blocks,
    load_pair_words,
    load_run,
    multiply_halves,
    round_to_pairs,
    row_products,
    store_run,
    word_products,
)
from .warp import join_halves, lane_xor, permute_bytes, power_of_two

TAIL_TOKENS = tl.constexpr(16)


@triton.jit
def largest_of_four(x):
    """The maximum over the four lanes of a g."""
    x = tl.maximum(x, lane_xor(x, 1))
    return tl.maximum(x, lane_xor(x, 2))


# The steps that go over dimensions: vectors are lists of numbers, or if they are long, blocks and lists of words.


@triton.jit
def load_query(p_rows, g, t, L: tl.constexpr, DTYPE: tl.constexpr):
    """The query of column g, as words of two numbers."""
    if L.large:
        return pair_words(load_blocks(p_rows, L.key_dim, L.key_padded), DTYPE)
    else:
        KEYS: tl.constexpr = L.key_padded // 4  # of a lane, of each key
        return round_to_pairs(
            [x.to(tl.float32) for x in load_run(p_rows, t * KEYS, g >= 0, KEYS, L.key_dim, L.key_padded)], DTYPE
        )


@triton.jit
def key_scores(query, p_keys, live, t, L: tl.constexpr, DTYPE: tl.constexpr):
    """Products of column g with the keys that lanes 4g point to, of rows 2t and 2t + 1."""
    if L.large:
        keys = load_pair_words(p_keys[:, None], live[:, None], L.key_dim, L.key_padded)
        y = word_products(query, keys, [tl.zeros([32, 1], tl.float32)] * 4, DTYPE)
        return [y[0].reshape(32), y[1].reshape(32)]
    else:
        KEYS: tl.constexpr = L.key_padded // 4
        keys = load_run(p_keys, t * KEYS, live, KEYS, L.key_dim, L.key_padded)
        return row_products(query, keys, [tl.zeros([32], tl.float32)] * 4, DTYPE)[:2]


@triton.jit
def value_offsets(offset, b: tl.constexpr, PADDED: tl.constexpr, SCALE: tl.constexpr):
    """Where block b of a lane's eighth of a value is: words of two numbers (SCALE = 1), or the numbers (SCALE = 2)."""
    # Whole blocks of 16 bytes, if there are as many in an eighth.
    WORDS: tl.constexpr = 4 if PADDED % 64 == 0 else 2
    SIZE: tl.constexpr = WORDS * SCALE
    return block_offsets(offset, SIZE, b, PADDED // 16 // WORDS, SIZE if SIZE < 4 else 4, SIZE)


@triton.jit
def load_values(p_values, live, g, L: tl.constexpr):
    """The lane's eighth of a value: a list of numbers, or blocks of words of two."""
    VALUES: tl.constexpr = L.value_padded // 8
    if L.large:
        p_words = p_values.to(tl.pointer_type(tl.int32))
        blocks = []
        for b in tl.static_range(block_count(VALUES // 8 if VALUES % 8 == 0 else VALUES // 4)):
            word = value_offsets(g * (VALUES // 2), b, L.value_padded, 1)
            mask = of_lane(live)
            if L.value_dim < L.value_padded:
                mask = mask & (word < L.value_dim // 2)
            x = lanes_first(tl.load(of_lane(p_words) + word, mask=mask, other=0))
            blocks = blocks + [x.reshape(32, x.shape[1] * x.shape[2])]
        return blocks
    else:
        return load_run(p_values, g * VALUES, live, VALUES, L.value_dim, L.value_padded)


@triton.jit
def weighted_sums(values, high, rest, L: tl.constexpr, DTYPE: tl.constexpr):
    """The values of four tokens of a lane, times weights (and for bf16 what rounding has left of them): for eighths 2t and
    2t + 1 of column g, one after the other, a list of numbers or for each block a pair of blocks.

    Args:
        high, rest: words of two weights of column g.
    """
    if L.large:
        sums = []
        for b in tl.static_range(len(values[0])):
            halves = []
            for h in tl.static_range(2):
                selector = 0x7632 if h else 0x5410
                pairs = [permute_bytes(values[0][b], values[1][b], selector),
                         permute_bytes(values[2][b], values[3][b], selector)]  # fmt: skip
                y = [tl.zeros(pairs[0].shape, tl.float32)] * 4
                a = [high[0][:, None], high[1][:, None]]
                y = multiply_halves([a[0], a[0], a[1], a[1]], pairs, y, DTYPE)
                if DTYPE == tl.bfloat16:
                    a = [rest[0][:, None], rest[1][:, None]]
                    y = multiply_halves([a[0], a[0], a[1], a[1]], pairs, y, DTYPE)
                halves = halves + y[:2]
            sums = sums + [tl.join(halves[0], halves[2]), tl.join(halves[1], halves[3])]
        return sums
    else:
        even = []
        odd = []
        nothing = tl.zeros([32], tl.float32)
        for i in tl.static_range(L.value_padded // 8):
            pairs = [join_halves(values[0][i], values[1][i]), join_halves(values[2][i], values[3][i])]
            sums = multiply_halves([high[0], high[0], high[1], high[1]], pairs, [nothing] * 4, DTYPE)
            if DTYPE == tl.bfloat16:
                sums = multiply_halves([rest[0], rest[0], rest[1], rest[1]], pairs, sums, DTYPE)
            even = even + sums[:1]
            odd = odd + sums[1:2]
        return even + odd


@triton.jit
def store_weighted(p_sums, sums, inside, L: tl.constexpr):
    """`weighted_sums` to where they belong, from a lane's pointer on."""
    if L.large:
        for i in tl.static_range(len(sums)):
            n = value_offsets(tl.zeros([32], tl.int32), i // 2, L.value_padded, 2) + i % 2 * (L.value_padded // 8)
            x = lanes_first(sums[i].reshape(lanes_first(n).shape))
            tl.store(of_lane(p_sums) + n, x, mask=of_lane(inside))
    else:
        store_run(p_sums, sums, inside, tl.float32)


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
    VALUES: tl.constexpr = L.value_padded // 8  # of a lane, of each value
    i_bh = i_b * heads + i_h
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4
    column = 8 * i_c + g
    length = tl.load(p_counters)
    packed_end = tl.load(p_counters + 1)
    row_start = tl.load(p_row_start + i_b)
    p_rows = column_rows(p_query, i_b, i_h, column, columns, group, stride_qb, stride_qh, stride_qt)
    query = load_query(p_rows, g, t, L, DTYPE)
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
        scores = scores + key_scores(query, p_keys, live, t, L, DTYPE)
        for e in tl.static_range(2):
            index = first + (8 * half + e) + 2 * t
            position, live = token_positions(index, in_sinks, is_new, sinks, slots, new, length, packed_end, row_start)
            p_values = token_rows(index, in_sinks, is_new, i_bh, i_b, i_h, sinks, slots, p_sink_value, p_ring_value, p_value,
                                  stride_vb, stride_vh, stride_vt, L.value_dim)  # fmt: skip
            values = values + [load_values(p_values, live, g, L)]
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
    rest = high
    if DTYPE == tl.bfloat16:  # eight bits of a weight are less than its output's rounding can hide
        rest = round_to_pairs([w - w.to(tl.bfloat16).to(tl.float32) for w in weights], DTYPE)
    sums = weighted_sums(values, high, rest, L, DTYPE)
    row = (first_result + i_bh * blocks + block) * columns + column
    inside = column < columns
    tl.store(p_stats + 2 * row, highest, mask=inside & (t == 0))
    tl.store(p_stats + 2 * row + 1, total, mask=inside & (t == 0))
    store_weighted(p_output + (row.to(tl.int64) * L.value_padded + 2 * VALUES * t), sums, inside, L)
