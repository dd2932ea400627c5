"""Decode attention over packed pages at the speed of memory: at most 16 columns, one warp a program.

Keys and queries are multiplied as 8-bit integers. A code becomes the int8 x that its level is (x + 0.5) * delta of
(`int8_grid`), by two byte permutes for 8 codes. Queries have 16 bits, as two bytes, 256 * high + low, both signed.

More than 4 columns have a loop of their own (`wide.py`). Here keys and values are the left operands, and weights are
integers as well, two unsigned bytes.

    scores   = key levels [32 tokens, D] x query [D, 8]
    sums     = value levels [D, 32 tokens] x weights [32, 8]

Column 2t of a product is the high part of column t and 2t + 1 the low one: lane 4g + t then holds both. Weights are
relative to the highest score and the largest value scale of their tile's tokens, so that 16 bits lose nothing of a flat
tail; sums are kept in that unit too, and rescaled from tile to tile by the factor that online softmax takes anyway. The loop
is software-pipelined by hand, one tile ahead, in registers.

Everything is a list of blocks [32], a register each. A tile is one group or, where codes are narrow, the next as well, of
the same page or of the next one: so much has to be on its way from memory at any time.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..layout import LANES, PageLayout
from ..quantizer.codebooks import int8_grid
from .packed import NOTHING
from .products import (
    HIGH_BYTES,
    LOW_BYTES,
    MAGIC,
    add_int8_values,
    fp8_scores,
    half_sums,
    int8_scores,
    lane_column,
    load_operand,
    over_column,
    weight_operand,
)
from .query import LOG2_E, QUERY_STEPS
from .rows import store_sums, sums_of_lane
from .splits import row_splits, slot_of
from .tail import attend_tail
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
    token_halves,
)
from .warp import largest_exponent, power_of_two
from .wide import attend_wide
from .workspace import section

MEMORY = tl.constexpr(40.0)  # a tile this many powers of two below the highest score gets no unit of its own


@triton.jit
def weigh(scores, slope, offset, scale, exponent, highest, unit, COLUMNS: tl.constexpr):
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
    top = tl.fma(over_column(top, True, COLUMNS), slope, offset)
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


@triton.jit(
    do_not_specialize=[
        "batch", "columns", "group", "new", "ring_slots", "sinks", "tail_blocks", "tail_programs", "query_offset",
        "stride_page_ids", "capacity", "mask_b", "mask_k", "stats_at", "factor_at", "rotated_at", "kept_at", "means_at",
    ]
)  # fmt: skip
def decode(
    p_query, p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_pool, p_tables, p_page_ids, p_row_start,
    p_counters, p_mask, p_work, batch, columns, group, new, ring_slots, sinks, tail_blocks, tail_programs, query_offset,
    stride_page_ids, capacity, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh,
    stride_vt, mask_b, mask_k, stats_at, factor_at, rotated_at, kept_at, means_at, key_step, value_step, scaling, softcap,
    L: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, BATCH: tl.constexpr,
    ROTATE_BACK: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (H, slots + tail_programs), one warp each; `splits.py` says what a slot's program has to do. The programs behind
    them attend to exact tokens (`tail.py`): tail_blocks for each row of the batch and 8 columns.

    Args:
        p_tables: int32 [9, 32], `int8_tables`.
        p_mask: keep mask, bytes, the same for all queries; None keeps all.
        p_work: fp32, and parts of it by where they start (in 16 bytes):
            0 and stats_at: of `combine.combine`; the results of slots come first, then those of exact tokens.
            factor_at: fp32 [B * H, columns], as for `packed.attend_packed`.
            rotated_at: int32 [B * H, columns, key_padded / 2]: two numbers a word, int16 (`query.encode`) or for fp8 keys
                fp16.
            kept_at: int32 [B, capacity * groups], a bit for each token that counts.
            means_at: where pages are centred, fp32 [B * H, capacity, columns], scores of their mean keys in powers of two.
        query_offset: position of query 0 minus the committed length.
        capacity: entries that there is room for.
        key_step, value_step: what the levels of keys and values are multiples of, plus half of it.
        TILE: groups of a tile, 1 or 2.
        LEAST, BATCH: of `splits.row_splits`.
        TAIL: whether there are programs for exact tokens; CAUSAL: whether these are hidden from the queries before them.
        ROTATE_BACK: whether to leave rotated coordinates here, for dimensions that are powers of two.
        DEPENDENT: whether the program may start before the kernels that it depends on have finished.
    """
    SCALE: tl.constexpr = 1 if L.key_format == "lloyd_max" else 0  # the value scale's place in the metadata
    DIMS: tl.constexpr = L.value_padded // 8  # a lane's dimensions, of which it has sums, and
    TOKENS: tl.constexpr = 4 * TILE  # its tokens of a tile
    PAGES: tl.constexpr = 2 if TILE > L.groups else 1  # of a tile
    SCALED: tl.constexpr = softcap is not None or (L.centered and PAGES > 1)  # scores before anything common to the tile
    i_h, heads = tl.program_id(0), tl.num_programs(0)
    slot, slots = tl.program_id(1), tl.num_programs(1) - tail_programs
    p_stats = section(p_work, stats_at, tl.float32)
    if TAIL and slot >= slots:
        if DEPENDENT:
            gdc_launch_dependents()
        i_s, row = (slot - slots) % tail_blocks, (slot - slots) // tail_blocks
        attend_tail(
            p_query, p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start, p_counters, p_mask,
            p_work, p_stats, heads * slots, heads, i_h, row % batch, row // batch, i_s, tail_blocks, columns, group, new,
            ring_slots, sinks, query_offset, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb,
            stride_vh, stride_vt, mask_b, mask_k, scaling, softcap, L, CAUSAL,
        )  # fmt: skip
        if DEPENDENT:
            gdc_wait()
        return
    lane = tl.arange(0, 32)
    g = lane // 4

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
    p_kept = section(p_work, kept_at, tl.int32) + i_b * capacity * L.groups
    p_head = p_pool + (i_h * L.page_words + L.header_words)
    row = i_bh.to(tl.int64) * columns
    p_rotated = section(p_work, rotated_at, tl.int32) + row * (L.key_padded // 2)
    p_factor = section(p_work, factor_at, tl.float32) + row
    p_means = section(p_work, means_at, tl.float32) + row * capacity
    result = (i_h.to(tl.int64) * slots + slot) * columns
    if COLUMNS > 4:
        attend_wide(
            p_work, p_stats, p_tables, p_rotated, p_factor, p_head, p_pages, p_kept, p_means, heads, entries, first, n_s,
            steps, columns, result, key_step, value_step, softcap, L, COLUMNS, TILE, ROTATE_BACK, DEPENDENT,
        )  # fmt: skip
        return
    pages = load_pages(p_pages, first, entries, steps > 0, L.group_bits, TILE)
    next_pages = load_pages(p_pages, first + n_s, entries, steps > 1, L.group_bits, TILE)
    p_groups = tile_groups(pages, [p_head] * TILE, p_head, heads, first, L, TILE)
    keys = load_codes(p_groups, 0, L.key_words, L.large)
    values = load_codes(p_groups, KEYS, L.value_words, L.large)
    fields = load_fields(p_groups, pages, CODES, L.fields, COLUMNS)
    # A copy a lane: constants in uniform registers or in the code would be moved for each use.
    zero = tl.zeros([32], tl.int32)
    key_table = [tl.load(p_tables + lane), tl.load(p_tables + 32 + lane)]
    value_table = key_table
    if not L.same_table:
        value_table = [tl.load(p_tables + 64 + lane), tl.load(p_tables + 96 + lane)]
    magic = [tl.load(p_tables + 128 + lane)] * 4
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    own_column = tl.minimum(lane_column(lane, 0, COLUMNS), columns - 1)
    means = [tl.zeros([32], tl.float32)] * len(pages)
    kept = load_kept(p_kept, first, pages, TILE)
    if L.centered:
        means = load_means(p_means, first, pages, columns, own_column, L.group_bits, TILE)
    query = load_operand(p_rotated, columns, L, COLUMNS)
    slope = tl.load(p_factor + own_column) * key_step
    if L.key_format == "lloyd_max":
        bias = half_sums(query, zero, L, COLUMNS)
    selector = tl.where(g % 2 == 0, HIGH_BYTES, LOW_BYTES)

    nothing = tl.zeros([32], tl.float32)
    sums = [nothing] * DIMS
    highest = nothing + NOTHING
    unit = nothing + NOTHING
    total = nothing  # of the weights; these three of a lane's own tokens only
    scaled = nothing  # of the weights times value scales
    minima = nothing  # of the weights times value minima
    for step in tl.range(0, steps, num_stages=1):
        tile = first + (step + 1) * n_s  # the next one, which is loaded meanwhile
        p_groups = tile_groups(next_pages, p_groups, p_head, heads, tile, L, TILE)
        next_keys = load_codes(p_groups, 0, L.key_words, L.large)
        next_values = load_codes(p_groups, KEYS, L.value_words, L.large)

        scores = []
        scale = []
        scale_words = []
        minimum = []
        for u in tl.static_range(TILE):
            words = lane_words(part(keys, u, TILE), L.key_words, L.large)
            own = part(fields, u, TILE)
            if L.key_format == "lloyd_max":
                products = int8_scores(words, key_table, query, bias, zero, L)
                key_scale = token_halves(field_words(own, 0, L.fields, COLUMNS))
            else:
                products = fp8_scores(words, query, L, COLUMNS)
            own_words = field_words(own, SCALE, L.fields, COLUMNS)
            scale_words = scale_words + own_words
            scale = scale + token_halves(own_words)
            if L.value_format == "min_max":
                minimum = minimum + token_halves(field_words(own, L.fields - 1, L.fields, COLUMNS))
            bits = kept[u] >> g
            for i in tl.static_range(4):
                y = products[i]
                if L.key_format == "lloyd_max":
                    y *= key_scale[i]
                if SCALED:
                    y = tl.fma(y, slope, means[u % PAGES])
                if softcap is not None:  # tanh; overflow and underflow of the exponential give 1 and -1
                    y = LOG2_E * (softcap - 2 * softcap / (power_of_two(y * (2 * LOG2_E)) + 1))
                scores = scores + [tl.where((bits & (1 << 8 * i)) != 0, y, float("-inf"))]
        exponent = largest_exponent(scale_words)
        keys = next_keys
        fields = load_fields(p_groups, next_pages, CODES, L.fields, COLUMNS)
        kept = load_kept(p_kept, tile, next_pages, TILE)

        factor = nothing + 1.0 if SCALED else slope
        shift = nothing if SCALED else means[0]
        w = weigh(scores, factor, shift, scale, exponent, highest, unit, COLUMNS)
        highest, unit, decay = w[0], w[1], w[2]
        weights = w[3 : 3 + TOKENS]
        total *= decay
        scaled *= decay
        for r in tl.static_range(0, TOKENS, 2):
            total += weights[r] + weights[r + 1]
        for r in tl.static_range(TOKENS):
            scaled = tl.fma(weights[r], scale[r], scaled)
        if L.value_format == "min_max":
            minima *= decay
            for r in tl.static_range(TOKENS):
                minima = tl.fma(weights[r], minimum[r], minima)
        if L.centered:
            means = load_means(p_means, tile, next_pages, columns, own_column, L.group_bits, TILE)
        next_pages = load_pages(p_pages, tile + n_s, entries, step + 2 < steps, L.group_bits, TILE)

        operands = []
        for u in tl.static_range(TILE):
            operands = operands + weight_operand(w[3 + TOKENS + 4 * u : 7 + TOKENS + 4 * u], selector)
        sums = add_int8_values(sums, decay, values, value_table, operands, magic, L, TILE)
        values = next_values

    column = lane_column(lane, 0, COLUMNS)
    mask = (column < columns) & (g == 0)
    factor = power_of_two(unit - highest)
    tl.store(p_stats + 2 * (result + column), highest, mask=mask)
    tl.store(p_stats + 2 * (result + column) + 1, over_column(total, False, COLUMNS) * factor, mask=mask)
    if L.value_format == "min_max":  # codes count from 0, not from the middle of the levels
        offset = over_column(tl.fma(scaled, 2.0 ** (L.value_bits - 1), minima), False, COLUMNS) * factor
    else:
        offset = over_column(scaled, False, COLUMNS) * (factor * 0.5 * value_step)
        factor *= value_step
    vector = [tl.fma(y, factor, offset) for y in sums]
    vector = sums_of_lane(vector, g, ROTATE_BACK, L.large)
    store_sums(p_work + ((result + column) * L.value_padded + g * DIMS), vector, column < columns, L.large)


@lru_cache(maxsize=None)
def int8_tables(layout: PageLayout, device: torch.device) -> Tensor:
    """The int8 of each code: of keys, then of values, eight bytes in two words; 4-bit codes, which have a sign of their own,
    have their magnitudes there. Then `MAGIC`, and for `wide.py` `_small_levels` and two fp16 ones. Int32 [9, 32]: each lane
    has its copy.
    """
    words = []
    for side in ("key", "value"):
        table = _int8_levels(layout, side)
        for four in (table[:4], table[4:]):
            words.append(int.from_bytes(bytes(x & 255 for x in four), "little", signed=False))
    words.append(MAGIC.value)
    words += [*_small_levels(layout), 0x3C003C00]
    return torch.tensor(words, dtype=torch.int64, device="cpu").to(torch.int32)[:, None].repeat(1, LANES).to(device)


def _small_levels(layout: PageLayout) -> list[int]:
    """The values' levels as bytes, for `wide.value_pairs`, in two words, and the level of byte 0 as fp32."""
    table = _int8_levels(layout, "value")
    least = min(table)
    table = [2 * m + 1 for m in table] if layout.value_bits == 4 else [x - least for x in table]
    words = [int.from_bytes(bytes(four), "little") for four in (table[:4], table[4:])]
    return [*words, *struct.unpack("i", struct.pack("f", least + 0.5))]


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
