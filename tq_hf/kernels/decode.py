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
group or, where codes are narrow, the next as well, of the same page or of the next one: so much has to be on its way from
memory at any time.
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
from .packed import NOTHING
from .products import (
    HIGH_BYTES,
    LOW_BYTES,
    MAGIC,
    add_values,
    fp8_scores,
    half_sums,
    int8_scores,
    lane_column,
    load_operand,
    weight_operand,
)
from .query import QUERY_STEPS
from .splits import row_splits, slot_of
from .tiles import (
    field_words,
    lane_words,
    load_codes,
    load_fields,
    load_kept,
    load_means,
    load_pages,
    part,
    tile_groups,
)
from .warp import lane_xor, larger_halves, largest_of_warp, power_of_two, split_halves

MEMORY = tl.constexpr(40.0)  # a tile this many powers of two below the highest score gets no unit of its own


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
    PAGES: tl.constexpr = 2 if TILE > L.groups else 1  # of a tile
    SCALED: tl.constexpr = softcap is not None or (L.centered and PAGES > 1)  # scores before anything common to the tile
    i_h, slot, heads, slots = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4

    KEYS: tl.constexpr = 32 * L.key_words  # where the values start, and
    CODES: tl.constexpr = 32 * (L.key_words + L.value_words)  # the metadata
    starts, splits, tiles = row_splits(p_row_start, p_counters, batch, slots, L.page_bits, L.groups, TILE, LEAST, BATCH)
    i_b, start, i_s, n_s = slot_of(starts, splits, slot, BATCH)
    if i_b >= batch:
        if DEPENDENT:  # if no program has anything to do, the next kernel still depends on the ones before
            gdc_wait()
        return
    i_bh = i_b * heads + i_h
    entries = tl.load(p_counters + 2)
    first = start + i_s
    steps = tl.cdiv(tiles - first, n_s)
    p_pages = p_page_ids + i_b * stride_page_ids
    p_kept += i_b * capacity * L.groups
    pages = load_pages(p_pages, first, entries, steps > 0, L.group_bits, TILE)
    next_pages = load_pages(p_pages, first + n_s, entries, steps > 1, L.group_bits, TILE)
    p_head = p_pool + (i_h * L.page_words + L.header_words)
    p_groups = tile_groups(pages, [p_head] * TILE, p_head, heads, first, L, TILE)
    keys = load_codes(p_groups, 0, L.key_words)
    values = load_codes(p_groups, KEYS, L.value_words)
    fields = load_fields(p_groups, pages, CODES, L.fields)
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
    kept = load_kept(p_kept, first, pages, TILE)
    own_columns = []
    for x in tl.static_range(NX):
        own_columns = own_columns + [tl.minimum(lane_column(t, x, NX), columns - 1)]
    means = [tl.zeros([32], tl.float32)] * (len(pages) * NX)
    if L.centered:
        p_means += i_bh.to(tl.int64) * capacity * columns
        means = load_means(p_means, first, pages, columns, own_columns, L.group_bits, TILE)
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
        tile = first + (step + 1) * n_s  # the next one, which is loaded meanwhile
        p_groups = tile_groups(next_pages, p_groups, p_head, heads, tile, L, TILE)
        next_keys = load_codes(p_groups, 0, L.key_words)
        next_values = load_codes(p_groups, KEYS, L.value_words)

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
                    if SCALED:
                        y = tl.fma(y, slope[x], means[u % PAGES * NX + x])
                    if softcap is not None:  # tanh; overflow and underflow of the exponential give 1 and -1
                        y = softcap - 2 * softcap / (power_of_two(y * 2.8853900817779268) + 1)
                    scores = scores + [tl.where((bits & (1 << (8 * r))) != 0, y, float("-inf"))]
        exponent = largest_exponent(scale_words)
        keys = next_keys
        fields = load_fields(p_groups, next_pages, CODES, L.fields)
        kept = load_kept(p_kept, tile, next_pages, TILE)

        state = []
        decay = []
        integers = []
        for x in tl.static_range(NX):
            if SCALED:
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
            means = load_means(p_means, tile, next_pages, columns, own_columns, L.group_bits, TILE)
        next_pages = load_pages(p_pages, tile + n_s, entries, step + 2 < steps, L.group_bits, TILE)

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
