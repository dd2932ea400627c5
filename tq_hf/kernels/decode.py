"""Decode attention over packed pages at the speed of memory: at most 16 columns, one warp a program, no shared memory.

Both products multiply 8-bit integers. A code becomes the int8 x that its level is (x + 0.5) * delta of (`int8_grid`), by two
byte permutes for 8 codes; keys and values are the left operands of the same instruction. What stands on the right has 16
bits, as two bytes in two columns of the product or in two products:

    scores   = key levels [32 tokens, D] x query [D, 8]            query as 256 * high + low, both signed
    sums     = value levels [D, 32 tokens] x weights [32, 8]       weights as 256 * high + low, both unsigned

With up to 4 columns, column 2t of a product is the high part of column t and 2t + 1 the low one: lane 4g + t then holds
both, and the scores of column t (NX = 1 column a lane). With up to 8 there are two products, and the lane has columns 2t and
2t + 1 (NX = 2); with up to 16, two blocks of 8 columns are treated so (NX = 4).

Weights are relative to the highest score and the largest value scale of their tile's tokens, so that 16 bits lose nothing
of a flat tail; sums are kept in that unit too, and rescaled from tile to tile by the factor that online softmax takes
anyway.

Everything is a list of blocks [32], a register each; the loop is software-pipelined by hand, one tile ahead. A tile is one
group or, where codes are narrow, two groups of a page: so much has to be on its way from memory at any time.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..codebooks import int8_grid
from ..layout import LANES, PageLayout
from .dequant import chunk_runs, fp8_pairs, split_last4
from .packed import NOTHING
from .query import QUERY_STEPS
from .splits import row_splits, slot_of
from .warp import (
    lane_of_four,
    lane_xor,
    larger_halves,
    largest_of_warp,
    multiply_fp16,
    multiply_int8,
    multiply_int8_by_bytes,
    permute_bytes,
    power_of_two,
    split_halves,
    transpose,
)

MEMORY = tl.constexpr(40.0)  # a tile this many powers of two below the highest score gets no unit of its own
HIGH_BYTES = tl.constexpr(0x7531)
LOW_BYTES = tl.constexpr(0x6420)
MAGIC = tl.constexpr(0x4B400000)  # the bits of 1.5 * 2**23: added to an integer below 2**22, they make it a float


@triton.jit
def load_lane_words(p_codes, COUNT: tl.constexpr):
    """The COUNT words of each lane as blocks of four and what is left (`layout.lane_word_offset`)."""
    lane = tl.arange(0, 32)
    REST: tl.constexpr = COUNT % 4
    p = p_codes + (4 * lane[:, None] + tl.arange(0, 4)[None, :])
    blocks = []
    for quad in tl.static_range(COUNT // 4):
        blocks = blocks + [tl.load(p + 128 * quad)]
    if REST == 2:
        p = p_codes + (2 * lane[:, None] + tl.arange(0, 2)[None, :])
        blocks = blocks + [tl.load(p + 32 * (COUNT - 2))]
    else:
        for i in tl.static_range(REST):
            blocks = blocks + [tl.load(p_codes + REST * lane + (32 * (COUNT - REST) + i))]
    return blocks


@triton.jit
def lane_words(blocks, COUNT: tl.constexpr):
    """The blocks of `load_lane_words` as a list of words."""
    words = []
    for i in tl.static_range(COUNT // 4):
        words = words + split_last4(blocks[i])
    if COUNT % 4 == 2:
        x0, x1 = tl.split(blocks[COUNT // 4])
        words = words + [x0, x1]
    else:
        words = words + blocks[COUNT // 4 :]
    return words


@triton.jit
def load_codes(p_codes, GROUP_WORDS: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr):
    """`load_lane_words` for each group of a tile."""
    blocks = []
    for u in tl.static_range(TILE):
        blocks = blocks + load_lane_words(p_codes + u * GROUP_WORDS, COUNT)
    return blocks


@triton.jit
def part(values, u: tl.constexpr, TILE: tl.constexpr):
    """What belongs to group u in a list of a tile's."""
    SIZE: tl.constexpr = len(values) // TILE
    return values[u * SIZE : (u + 1) * SIZE]


@triton.jit
def load_fields(p_metadata, live, GROUP_WORDS: tl.constexpr, FIELDS: tl.constexpr, TILE: tl.constexpr):
    """The metadata of each group, every word in one lane of those that need it; zeros unless `live`."""
    lane = tl.arange(0, 32)
    words = []
    for u in tl.static_range(TILE):
        p = p_metadata + u * GROUP_WORDS
        if FIELDS > 1:  # [g][field][r]: lane 4g + t loads word t of its g
            words = words + [tl.load(p + lane, mask=live, other=0)]
        if FIELDS % 2 == 1:
            words = words + [tl.load(p + (16 * FIELDS - 16) + (lane // 4 * 2 + lane % 2), mask=live, other=0)]
    return words


@triton.jit
def load_kept(p_bits, live, TILE: tl.constexpr):
    """A word for each group with a bit for each token that counts."""
    words = []
    for u in tl.static_range(TILE):
        words = words + [tl.load(p_bits + u, mask=live, other=0)]
    return words


@triton.jit
def load_means(p_means, live, own_columns, NX: tl.constexpr):
    """The scores of a page's mean key for the columns of a lane."""
    scores = []
    for x in tl.static_range(NX):
        scores = scores + [tl.load(p_means + own_columns[x], mask=live, other=0.0)]
    return scores


@triton.jit
def field_words(words, FIELD: tl.constexpr, FIELDS: tl.constexpr):
    """A field of a lane's four tokens 8r + g: two words of two fp16."""
    if FIELDS == 1 or FIELD == 2:
        return [lane_of_four(words[len(words) - 1], 0), lane_of_four(words[len(words) - 1], 1)]
    else:
        return [lane_of_four(words[0], 2 * FIELD), lane_of_four(words[0], 2 * FIELD + 1)]


@triton.jit
def to_int8(run, table, BITS: tl.constexpr):
    """Eight codes to eight int8 in two words."""
    if BITS == 4:
        codes = run & 0x77777777
        # The sign bits stand at the tops of the bytes, those of the second half four bits lower; -1 - m is ~m.
        lower = run << 4
        return [
            permute_bytes(table[0], table[1], codes) ^ permute_bytes(run, run, 0xBA98),
            permute_bytes(table[0], table[1], codes >> 16) ^ permute_bytes(lower, lower, 0xBA98),
        ]
    else:
        codes = run & (0x77777777 if BITS == 3 else 0x33333333)
        return [permute_bytes(table[0], table[1], codes), permute_bytes(table[0], table[1], codes >> 16)]


@triton.jit
def chunk_int8(words, c: tl.constexpr, table, BITS: tl.constexpr):
    """Chunk c as eight words: first and second half of each of its four runs."""
    runs = chunk_runs(words, c, BITS)
    halves = []
    for r in tl.static_range(4):
        halves = halves + to_int8(runs[r], table, BITS)
    return halves


@triton.jit
def lane_column(t, x: tl.constexpr, NX: tl.constexpr):
    """The number of a lane's column x."""
    return t if NX == 1 else 8 * (x // 2) + 2 * t + x % 2


@triton.jit
def load_operand(p_query, columns, L: tl.constexpr, NX: tl.constexpr):
    """The query as right operands, one block of 8 columns after another: two words a chunk and product.

    With NX = 1, lane 4g + t holds the high (even g) or low bytes of column g / 2; else a block's first half are the high
    bytes of its column g, its second half the low ones. fp16 queries have two products a chunk instead.
    """
    lane = tl.arange(0, 32)
    g = lane // 4
    words = []
    for block in tl.static_range((NX + 1) // 2):
        column = tl.minimum(g // 2 if NX == 1 else 8 * block + g, columns - 1)
        p = column * (L.key_padded // 2) + lane % 4 * (L.key_padded // 8)
        p = p_query + (p[:, None] + tl.arange(0, 4)[None, :])
        first = []
        second = []
        for c in tl.static_range(L.key_padded // 32):
            x = split_last4(tl.load(p + 4 * c))
            if L.key_format == "fp8":
                first = first + x
            elif NX == 1:
                selector = tl.where(g % 2 == 0, HIGH_BYTES, LOW_BYTES)
                first = first + [permute_bytes(x[0], x[1], selector), permute_bytes(x[2], x[3], selector)]
            else:
                first = first + [permute_bytes(x[0], x[1], HIGH_BYTES), permute_bytes(x[2], x[3], HIGH_BYTES)]
                second = second + [permute_bytes(x[0], x[1], LOW_BYTES), permute_bytes(x[2], x[3], LOW_BYTES)]
        words = words + first + second
    return words


@triton.jit
def half_sums(query, zero, L: tl.constexpr, NX: tl.constexpr):
    """What the 0.5 of the levels adds to a score, int32: half of the sum of the query, for each column of a lane."""
    CHUNKS: tl.constexpr = L.key_padded // 32
    BLOCKS: tl.constexpr = (NX + 1) // 2
    ones = [zero + 0x01010101] * 4
    sums = []
    for block in tl.static_range(BLOCKS):
        q = part(query, block, BLOCKS)
        high = [zero] * 4
        low = [zero] * 4
        for c in tl.static_range(CHUNKS):
            high = multiply_int8(ones, q[2 * c : 2 * c + 2], high)
            if NX > 1:
                low = multiply_int8(ones, q[2 * (CHUNKS + c) : 2 * (CHUNKS + c) + 2], low)
        if NX == 1:
            sums = sums + [(high[0] * 256 + high[1]) >> 1]
        else:
            sums = sums + [(high[0] * 256 + low[0]) >> 1, (high[1] * 256 + low[1]) >> 1]
    return sums


@triton.jit
def int8_scores(words, table, query, bias, zero, L: tl.constexpr, NX: tl.constexpr):
    """Products of keys and query, fp32, in the order (r, x): token 8r + g, column x of the lane."""
    CHUNKS: tl.constexpr = L.key_padded // 32
    BLOCKS: tl.constexpr = (NX + 1) // 2
    lows = []  # of the two halves of the tokens and the blocks of columns; with NX = 1, high and low side by side
    for _ in tl.static_range(2):
        for block in tl.static_range(BLOCKS):
            if NX == 1:
                lows = lows + [[zero, bias[0], zero, bias[0]]]
            else:
                lows = lows + [[bias[2 * block], bias[2 * block + 1], bias[2 * block], bias[2 * block + 1]]]
    highs = [[zero] * 4] * (2 * BLOCKS)
    for c in tl.static_range(CHUNKS):
        x = chunk_int8(words, c, table, L.key_bits)
        new_lows = []
        new_highs = []
        for m in tl.static_range(2):
            a = [x[4 * m], x[4 * m + 2], x[4 * m + 1], x[4 * m + 3]]
            for block in tl.static_range(BLOCKS):
                q = part(query, block, BLOCKS)
                if NX == 1:
                    new_lows = new_lows + [multiply_int8(a, q[2 * c : 2 * c + 2], lows[m])]
                else:
                    new_highs = new_highs + [multiply_int8(a, q[2 * c : 2 * c + 2], highs[m * BLOCKS + block])]
                    q = q[2 * CHUNKS :]
                    new_lows = new_lows + [multiply_int8(a, q[2 * c : 2 * c + 2], lows[m * BLOCKS + block])]
        lows = new_lows
        if NX > 1:
            highs = new_highs
    scores = []
    for m in tl.static_range(2):
        for r in tl.static_range(2):
            for block in tl.static_range(BLOCKS):
                low = lows[m * BLOCKS + block]
                if NX == 1:
                    scores = scores + [(low[2 * r] * 256 + low[2 * r + 1]).to(tl.float32)]
                else:
                    high = highs[m * BLOCKS + block]
                    for e in tl.static_range(2):
                        scores = scores + [(high[2 * r + e] * 256 + low[2 * r + e]).to(tl.float32)]
    return scores


@triton.jit
def fp8_scores(words, query, L: tl.constexpr, NX: tl.constexpr):
    """`int8_scores` for fp8 keys, as fp16."""
    BLOCKS: tl.constexpr = (NX + 1) // 2
    zero = tl.zeros([32], tl.float32)
    products = [[zero] * 4] * (2 * BLOCKS)
    for c in tl.static_range(L.key_padded // 32):
        runs = chunk_runs(words, c, 8)  # two words each
        new = []
        for m in tl.static_range(2):
            pairs = []
            for h in tl.static_range(2):
                x = fp8_pairs(runs[4 * m + h])
                y = fp8_pairs(runs[4 * m + 2 + h])
                pairs = pairs + [x[0], y[0], x[1], y[1]]
            for block in tl.static_range(BLOCKS):
                q = part(query, block, BLOCKS)
                product = multiply_fp16(pairs[:4], q[4 * c : 4 * c + 2], products[m * BLOCKS + block])
                new = new + [multiply_fp16(pairs[4:], q[4 * c + 2 : 4 * c + 4], product)]
        products = new
    scores = []
    for m in tl.static_range(2):
        for r in tl.static_range(2):
            for x in tl.static_range(NX):
                scores = scores + [products[m * BLOCKS + x // 2][2 * r + x % 2]]
    return scores


@triton.jit
def largest_exponent(scale):
    """The least e, fp32 of at least -14, so that all value scales of the tile (words of two) are below 2**e."""
    x = scale[0]
    for i in tl.static_range(1, len(scale)):
        x = larger_halves(x, scale[i])
    x = largest_of_warp(tl.maximum(x & -65536, x << 16))  # fp16 of at least 0: their bits are ordered as they are
    return (x >> 26).to(tl.float32) - 14.0


@triton.jit
def over_groups(x, MAX: tl.constexpr):
    """The maximum or sum over the eight lanes of a t."""
    for i in tl.static_range(3):
        y = lane_xor(x, 16 >> i)
        x = tl.maximum(x, y) if MAX else x + y
    return x


@triton.jit
def weigh(scores, slope, offset, scale, exponent, highest, unit):
    """One step of the online softmax for a column.

    Args:
        scores: of a lane's tokens; -inf where a token does not count.
        slope, offset: score * slope + offset is in powers of two.
        scale: the tokens' value scales.
        exponent: of the largest one.
        highest: score so far, in powers of two.
        unit: sums are counted in units of 2**unit.

    Returns:
        highest, unit, the factor that brings earlier sums to the new unit, the weights, and the weights times value scales
        plus 2**23: integers of 16 bits in the low bits.
    """
    top = tl.maximum(tl.maximum(scores[0], scores[1]), tl.maximum(scores[2], scores[3]))
    for r in tl.static_range(4, len(scores), 2):
        top = tl.maximum(top, tl.maximum(scores[r], scores[r + 1]))
    top = tl.fma(over_groups(top, True), slope, offset)
    highest = tl.maximum(highest, top)
    now = tl.maximum(top, highest - MEMORY) + (exponent - 16.0)
    shift = offset - now
    weights = []
    products = []
    for r in tl.static_range(len(scores)):
        weight = power_of_two(tl.fma(scores[r], slope, shift))
        weights = weights + [weight]
        products = products + [tl.fma(weight, scale[r], 8388608.0).to(tl.int32, bitcast=True)]
    return [highest, now, power_of_two(unit - now)] + weights + products


@triton.jit
def weight_operand(weights, u: tl.constexpr, TILE: tl.constexpr, selector, NX: tl.constexpr):
    """Weights, 16 bits in the order (x, u, r), of group u as right operands: two words, or for each block of columns two for
    the high and two for the low bytes."""
    if NX == 1:  # the same in both columns, of which one will keep the high bytes and the other the low ones
        rows = []
        for r in tl.static_range(4):
            w = weights[4 * u + r]
            rows = rows + [transpose(permute_bytes(w, w, 0x1010))]
        return [permute_bytes(rows[0], rows[1], selector), permute_bytes(rows[2], rows[3], selector)]
    else:
        words = []
        for block in tl.static_range(NX // 2):
            rows = []
            for r in tl.static_range(4):
                w = weights[4 * (TILE * 2 * block + u) + r]
                rows = rows + [transpose(permute_bytes(w, weights[4 * (TILE * (2 * block + 1) + u) + r], 0x5410))]
            words = words + [permute_bytes(rows[0], rows[1], HIGH_BYTES), permute_bytes(rows[2], rows[3], HIGH_BYTES)]
            words = words + [permute_bytes(rows[0], rows[1], LOW_BYTES), permute_bytes(rows[2], rows[3], LOW_BYTES)]
        return words


@triton.jit
def add_bytes(high, low):
    """256 * high + low of integers that came out of a product started with MAGIC, fp32."""
    high = high.to(tl.float32, bitcast=True) - (12582912.0 + 49152.0)
    return tl.fma(high, 256.0, low.to(tl.float32, bitcast=True))


@triton.jit
def add_values(sums, decay, values, table, weights, magic, L: tl.constexpr, NX: tl.constexpr, TILE: tl.constexpr):
    """sums * decay + the tile's values times weights, in the order (dimension, x): dimension g * D/8 + the index."""
    words = []
    for u in tl.static_range(TILE):
        words = words + lane_words(part(values, u, TILE), L.value_words)
    new = []
    for c in tl.static_range(L.value_padded // 32):
        levels = []
        for u in tl.static_range(TILE):
            levels = levels + chunk_int8(part(words, u, TILE), c, table, L.value_bits)
        for p in tl.static_range(2):
            products = []
            for block in tl.static_range((NX + 1) // 2):
                first = magic
                second = magic
                for u in tl.static_range(TILE):
                    a = levels[8 * u + 4 * p : 8 * u + 4 * p + 4]
                    b = part(part(weights, u, TILE), block, (NX + 1) // 2)
                    first = multiply_int8_by_bytes(a, b[:2], first)
                    if NX > 1:
                        second = multiply_int8_by_bytes(a, b[2:], second)
                products = products + first + second
            for e in tl.static_range(2):
                if NX == 1:
                    new = new + [tl.fma(sums[len(new)], decay[0], add_bytes(products[2 * e], products[2 * e + 1]))]
                else:
                    for x in tl.static_range(NX):
                        block = products[8 * (x // 2) : 8 * (x // 2) + 8]  # high, then low bytes
                        product = add_bytes(block[2 * e + x % 2], block[4 + 2 * e + x % 2])
                        new = new + [tl.fma(sums[len(new)], decay[x], product)]
    return new


@triton.jit
def rotate_lanes(values, g):
    """Rotates a vector of a power of two of coordinates: lane 4g + t holds number g * len(values) + i as value i."""
    DIMS: tl.constexpr = len(values)
    for bit in tl.static_range(5):  # Sylvester's matrix is a product of matrices for each bit of the coordinate's number
        if 1 << bit < DIMS:
            new = []
            for i in tl.static_range(DIMS):
                if i & (1 << bit) == 0:
                    new = new + [values[i] + values[i + (1 << bit)]]
                else:
                    new = new + [values[i - (1 << bit)] - values[i]]
            values = new
    for bit in tl.static_range(3):
        sign = tl.where(g & (1 << bit) == 0, 1.0, -1.0)
        values = [tl.fma(v, sign, lane_xor(v, 4 << bit)) for v in values]
    return [v * (8 * DIMS) ** -0.5 for v in values]


@triton.jit(do_not_specialize=["batch", "columns", "stride_page_ids", "capacity"])
def decode(
    p_query, p_factor, p_pool, p_tables, p_page_ids, p_row_start, p_counters, p_kept, p_means, p_output, p_stats,
    batch, columns, stride_page_ids, capacity, key_step, value_step, softcap, L: tl.constexpr, NX: tl.constexpr,
    TILE: tl.constexpr, LEAST: tl.constexpr, BATCH: tl.constexpr, ROTATE_BACK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (H, slots), one warp each; `splits.py` says what a slot's program has to do.

    Args:
        p_query: int32 [B * H, columns, key_padded / 2]: two numbers a word, int16 (`query.encode`) or for fp8 keys fp16.
        p_factor: fp32 [B * H, columns], as for `packed.attend_packed`.
        p_tables: int32 [5, 32], `int8_tables`.
        p_kept: int32 [B, capacity * groups], a bit for each token that counts (`plan.py`).
        p_means: fp32 [B * H, capacity, columns], scores of the pages' mean keys in powers of two (`plan.py`), or None.
        p_output, p_stats: of `combine.combine`; the results of slots come first.
        capacity: entries that `p_kept` and `p_means` have room for.
        key_step, value_step: what the levels of keys and values are multiples of, plus half of it.
        TILE: groups of a tile, 1 or 2.
        LEAST, BATCH: of `splits.row_splits`.
        ROTATE_BACK: whether to leave rotated coordinates here, for dimensions that are powers of two.
        DEPENDENT: whether the program may start before the kernels that it depends on have finished.
    """
    SCALE: tl.constexpr = 1 if L.key_format == "lloyd_max" else 0  # the value scale's place in the metadata
    DIMS: tl.constexpr = L.value_padded // 8  # of a lane
    i_h, slot, heads, slots = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4

    TILES: tl.constexpr = L.groups // TILE  # of a page
    BITS: tl.constexpr = L.group_bits - TILE // 2
    starts, splits, tiles = row_splits(p_row_start, p_counters, batch, slots, L.page_bits, TILES, LEAST, BATCH)
    i_b, start, i_s, n_s = slot_of(starts, splits, slot, BATCH)
    if i_b >= batch:
        if DEPENDENT:  # if no program has anything to do, the next kernel still depends on the ones before
            gdc_wait()
        return
    i_bh = i_b * heads + i_h
    first = start + i_s
    steps = tl.cdiv(tiles - first, n_s)
    p_pages = p_page_ids + i_b * stride_page_ids
    p_bits = p_kept + i_b * capacity * L.groups
    page = tl.load(p_pages + (first >> BITS), mask=steps > 0, other=-1)
    next_page = tl.load(p_pages + ((first + n_s) >> BITS), mask=steps > 1, other=-1)
    live = page >= 0
    p_head = p_pool + (i_h * L.page_words + L.header_words)
    # Codes are read wherever there is no page as well: what of, does not matter, and loads without a condition are cheaper.
    page_offset = tl.maximum(page, 0).to(tl.int64) * heads * L.page_words
    p_tile = p_head + (page_offset + (first & (TILES - 1)) * (TILE * L.group_words))
    keys = load_codes(p_tile, L.group_words, L.key_words, TILE)
    values = load_codes(p_tile + 32 * L.key_words, L.group_words, L.value_words, TILE)
    fields = load_fields(p_tile + 32 * (L.key_words + L.value_words), live, L.group_words, L.fields, TILE)
    # A copy a lane: constants in uniform registers or in the code would be moved for each use.
    key_table = [tl.load(p_tables + lane), tl.load(p_tables + 32 + lane)]
    if L.same_table:
        value_table = key_table
    else:
        value_table = [tl.load(p_tables + 64 + lane), tl.load(p_tables + 96 + lane)]
    magic = [tl.load(p_tables + 128 + lane)] * 4
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    kept = load_kept(p_bits + first * TILE, live, TILE)
    own_columns = []
    for x in tl.static_range(NX):
        own_columns = own_columns + [tl.minimum(lane_column(t, x, NX), columns - 1)]
    means = [tl.zeros([32], tl.float32)] * NX
    if L.centered:
        p_mean = p_means + i_bh.to(tl.int64) * capacity * columns
        means = load_means(p_mean + (first >> BITS) * columns, live, own_columns, NX)
    zero = tl.zeros([32], tl.int32)
    row = i_bh.to(tl.int64) * columns
    query = load_operand(p_query + row * (L.key_padded // 2), columns, L, NX)
    slope = []
    for x in tl.static_range(NX):
        slope = slope + [tl.load(p_factor + row + own_columns[x]) * key_step]
    if L.key_format == "lloyd_max":
        bias = half_sums(query, zero, L, NX)
    selector = tl.where(g % 2 == 0, HIGH_BYTES, LOW_BYTES)

    nothing = tl.zeros([32], tl.float32)
    sums = [nothing] * (DIMS * NX)
    highest = [nothing + NOTHING] * NX
    unit = [nothing + NOTHING] * NX
    total = [nothing] * NX  # of the weights; these three of a lane's own tokens only
    scaled = [nothing] * NX  # of the weights times value scales
    minima = [nothing] * NX  # of the weights times value minima
    for step in tl.range(0, steps, num_stages=1):
        item = first + (step + 1) * n_s  # the next one, which is loaded meanwhile
        live = next_page >= 0
        page_offset = next_page.to(tl.int64) * heads * L.page_words
        p_next = p_head + (page_offset + (item & (TILES - 1)) * (TILE * L.group_words))
        p_tile = tl.where(live, p_next, p_tile)
        next_keys = load_codes(p_tile, L.group_words, L.key_words, TILE)
        next_values = load_codes(p_tile + 32 * L.key_words, L.group_words, L.value_words, TILE)

        scores = []
        scale = []
        scale_words = []
        minimum = []
        for u in tl.static_range(TILE):
            words = lane_words(part(keys, u, TILE), L.key_words)
            own = part(fields, u, TILE)
            if L.key_format == "lloyd_max":
                products = int8_scores(words, key_table, query, bias, zero, L, NX)
                pair = field_words(own, 0, L.fields)
                key_scale = split_halves(pair[0]) + split_halves(pair[1])
            else:
                products = fp8_scores(words, query, L, NX)
            pair = field_words(own, SCALE, L.fields)
            scale_words = scale_words + pair
            scale = scale + split_halves(pair[0]) + split_halves(pair[1])
            if L.value_format == "min_max":
                pair = field_words(own, L.fields - 1, L.fields)
                minimum = minimum + split_halves(pair[0]) + split_halves(pair[1])
            bits = kept[u] >> g
            for r in tl.static_range(4):
                for x in tl.static_range(NX):
                    y = products[r * NX + x]
                    if L.key_format == "lloyd_max":
                        y *= key_scale[r]
                    if softcap is not None:  # tanh; overflow and underflow of the exponential give 1 and -1
                        y = tl.fma(y, slope[x], means[x]) * 2.8853900817779268
                        y = softcap - 2 * softcap / (power_of_two(y) + 1)
                    scores = scores + [tl.where((bits & (1 << (8 * r))) != 0, y, float("-inf"))]
        exponent = largest_exponent(scale_words)
        keys = next_keys
        fields = load_fields(p_tile + 32 * (L.key_words + L.value_words), live, L.group_words, L.fields, TILE)
        kept = load_kept(p_bits + item * TILE, live, TILE)

        state = []
        decay = []
        integers = []
        for x in tl.static_range(NX):
            if softcap is not None:
                w = weigh(scores[x::NX], nothing + 1.0, nothing, scale, exponent, highest[x], unit[x])
            else:
                w = weigh(scores[x::NX], slope[x], means[x], scale, exponent, highest[x], unit[x])
            weights = w[3 : 3 + 4 * TILE]
            new_total = total[x] * w[2]
            new_scaled = scaled[x] * w[2]
            new_minima = minima[x]
            if L.value_format == "min_max":
                new_minima *= w[2]
            for r in tl.static_range(0, 4 * TILE, 2):
                new_total += weights[r] + weights[r + 1]
            for r in tl.static_range(4 * TILE):
                new_scaled = tl.fma(weights[r], scale[r], new_scaled)
                if L.value_format == "min_max":
                    new_minima = tl.fma(weights[r], minimum[r], new_minima)
            state = state + [w[0], w[1], new_total, new_scaled, new_minima]
            decay = decay + [w[2]]
            integers = integers + w[3 + 4 * TILE :]
        highest, unit, total, scaled, minima = state[0::5], state[1::5], state[2::5], state[3::5], state[4::5]
        if L.centered:
            means = load_means(p_mean + (item >> BITS) * columns, live, own_columns, NX)
        next_page = tl.load(p_pages + ((item + n_s) >> BITS), mask=step + 2 < steps, other=-1)

        operands = []
        for u in tl.static_range(TILE):
            operands = operands + weight_operand(integers, u, TILE, selector, NX)
        sums = add_values(sums, decay, values, value_table, operands, magic, L, NX, TILE)
        values = next_values

    row = (i_h.to(tl.int64) * slots + slot) * columns
    for x in tl.static_range(NX):
        column = lane_column(t, x, NX)
        inside = column < columns
        factor = power_of_two(unit[x] - highest[x])
        if L.value_format == "min_max":  # codes count from 0, not from the middle of the levels
            offset = over_groups(tl.fma(scaled[x], 2.0 ** (L.value_bits - 1), minima[x]), False) * factor
        else:
            offset = over_groups(scaled[x], False) * (factor * 0.5 * value_step)
            factor *= value_step
        weight = over_groups(total[x], False) * power_of_two(unit[x] - highest[x])
        p_stats_row = p_stats + 2 * (row + column)
        tl.store(p_stats_row, highest[x], mask=inside & (g == 0))
        tl.store(p_stats_row + 1, weight, mask=inside & (g == 0))
        vector = []
        for i in tl.static_range(DIMS):
            vector = vector + [tl.fma(sums[i * NX + x], factor, offset)]
        if ROTATE_BACK:
            vector = rotate_lanes(vector, g)
        p_row = p_output + ((row + column) * L.value_padded + g * DIMS)[:, None] + tl.arange(0, 4)[None, :]
        for i in tl.static_range(0, DIMS, 4):
            y = tl.join(tl.join(vector[i], vector[i + 2]), tl.join(vector[i + 1], vector[i + 3])).reshape(32, 4)
            tl.store(p_row + i, y, mask=inside[:, None])


@lru_cache(maxsize=None)
def int8_tables(layout: PageLayout, device: torch.device) -> Tensor:
    """The int8 of each code: of keys, then of values, eight bytes in two words; 4-bit codes, which have a sign of their own,
    have their magnitudes there. Then `MAGIC`. Int32 [5, 32]: each lane has its copy.
    """
    words = []
    for side in ("key", "value"):
        table = _int8_levels(layout, side)
        for four in (table[:4], table[4:]):
            words.append(int.from_bytes(bytes(x & 255 for x in four), "little", signed=False))
    words.append(MAGIC.value)
    return torch.tensor(words, dtype=torch.int64, device="cpu").to(torch.int32)[:, None].repeat(1, LANES).to(device)


@lru_cache(maxsize=None)
def steps(layout: PageLayout) -> tuple[float, float]:
    """What int8 levels and int16 queries count: the steps of keys and of values for `decode`."""
    key = int8_grid(layout.key_bits)[0] / QUERY_STEPS.value if layout.key_format == "lloyd_max" else 1.0
    return key, int8_grid(layout.value_bits)[0] if layout.value_format == "lloyd_max" else 1.0


def _int8_levels(layout: PageLayout, side: str) -> list[int]:
    """Eight entries: those of the codes that count up, repeated, or at 4 bits those of the magnitudes."""
    fmt, bits = getattr(layout, f"{side}_format"), getattr(layout, f"{side}_bits")
    if fmt == "fp8":
        return [0] * 8
    positive = list(int8_grid(bits)[1]) if fmt == "lloyd_max" else list(range(2 ** (bits - 1)))
    if bits == 4:
        return positive
    return ([-1 - m for m in reversed(positive)] + positive) * (4 // len(positive))
