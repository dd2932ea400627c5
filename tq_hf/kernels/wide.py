"""The decode kernel's loop for 5 to 16 columns: queries are the left operand of scores, and weights are fp16.

    scores   = query [16, D] x key levels [D, 32 tokens]           8 columns with their high and low bytes, or 16 and two
    sums     = value levels [D, 32 tokens] x weights [32, 8]       fp16; two for 16 columns

Lane 4g + t then has the scores of columns g and g + 8 for eight tokens, which is where the second product wants their
weights. Sums stay in the product's accumulators: from tile to tile nothing is done to them but to add. They and the queries
need the registers, so tiles are copied ahead to shared memory, by Triton's pipeliner.

The unit that issues byte permutes and integers decides how long this takes, so:

- Levels of values are the fp16 numbers n * 2**-24 for n of 0 to 255. Their low byte is n, which one permute looks up for
  four codes; the high byte has a sign or nothing. 4-bit codes, whose signs stand at the tops of bytes, have n = 2m + 1 and a
  sign; others have n = x less the least x, and the sum of weights is taken off at the end.
- The softmax is an optimistic one: weights are taken in the unit as it is. Only if one becomes too large for fp16, the
  tile's highest score is looked for, and what has been added so far is rescaled.
- Tokens are masked only where a group has some that do not count.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .dequant import INTERPRET, chunk_runs, interleave, load_now
from .packed import NOTHING
from .products import fp8_scores, half_sums, lane_column, load_operand, over_column, sum_columns
from .query import LOG2_E
from .rows import store_sums, sums_of_lane
from .tiles import field_words, load_fields, load_pages, part, tile_groups, token_halves
from .warp import (
    high_half,
    largest_exponent,
    multiply_fp16,
    multiply_int8,
    pack_halves,
    permute_bytes,
    power_of_two,
)

STAGES = tl.constexpr(3)  # copies are two tiles ahead
TOO_LARGE = tl.constexpr(0x40004000)  # the bits of fp16 that numbers of at least 2, infinity and NaN have
ROOM = tl.constexpr(4.0)  # powers of two that weights may grow by before that, and one
LEVEL_UNIT = tl.constexpr(2.0**24)


@triton.jit
def code_bytes(run, table, BITS: tl.constexpr):
    """Eight codes to eight int8 in two words."""
    codes = run & (0x33333333 if BITS == 2 else 0x77777777)
    first = permute_bytes(table[0], table[1], codes)
    second = permute_bytes(table[0], table[1], high_half(codes, table[2]))
    if BITS == 4:  # The sign bits stand at the tops of the bytes, those of the second half four bits lower; -1 - m is ~m.
        lower = run << 4
        first ^= permute_bytes(run, run, 0xBA98)
        second ^= permute_bytes(lower, lower, 0xBA98)
    return [first, second]


@triton.jit
def hold(x):
    """x. What is handed on from one iteration to the next but one as it is, keeps Triton from pipelining a loop."""
    if INTERPRET:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def load_block(p_codes, QUADS: tl.constexpr, WIDTH: tl.constexpr):
    """QUADS times WIDTH words of each lane: [QUADS, 32, WIDTH]."""
    lane = tl.arange(0, 32)
    offset = 32 * WIDTH * tl.arange(0, QUADS)[:, None, None]
    offset += WIDTH * lane[None, :, None] + tl.arange(0, WIDTH)[None, None, :]
    return tl.load(p_codes + offset)


@triton.jit
def load_blocks(p_codes, COUNT: tl.constexpr):
    """The COUNT words of each lane (`layout.lane_word_offset`) as blocks, each of them one copy to shared memory."""
    QUADS: tl.constexpr = COUNT // 4
    blocks = []
    for bit in tl.static_range(5):
        if QUADS & (16 >> bit):
            blocks = blocks + [load_block(p_codes + 128 * (QUADS >> (5 - bit) << (5 - bit)), 16 >> bit, 4)]
    if COUNT % 4 == 2:
        blocks = blocks + [load_block(p_codes + 128 * QUADS, 1, 2)]
    else:
        for i in tl.static_range(COUNT % 4):
            blocks = blocks + [tl.load(p_codes + (128 * QUADS + i) + COUNT % 4 * tl.arange(0, 32))]
    return blocks


@triton.jit
def split_block(x):
    """[QUADS, 32, WIDTH] to a list of [32]."""
    COUNT: tl.constexpr = x.shape[0] * x.shape[2]
    parts = [x.permute(1, 0, 2).reshape(32, COUNT)]
    for bit in tl.static_range(6):
        if 1 << bit < COUNT:
            new = []
            for k in tl.static_range(1 << bit):
                a, b = tl.split(parts[k].reshape(32, 2, COUNT >> (bit + 1)).permute(0, 2, 1))
                new = new + [a, b]
            parts = new
    words = []
    for k in tl.static_range(COUNT):
        words = words + [parts[k].reshape(32)]
    return words


@triton.jit
def block_words(blocks):
    """The blocks of `load_blocks` as a list of words."""
    words = []
    for i in tl.static_range(len(blocks)):
        words = words + (split_block(blocks[i]) if len(blocks[i].shape) == 3 else [blocks[i]])
    return words


@triton.jit
def integer_scores(words, table, query, start, L: tl.constexpr, COLUMNS: tl.constexpr):
    """Products of keys and query, fp32, in the order (token of the lane, column of the lane). With int8 of at most 116 and
    256 dimensions, both parts are below 2**22, as `MAGIC` wants them.

    Args:
        start: `MAGIC`, and for each column of a lane `MAGIC` plus what the 0.5 of the levels adds.
    """
    OWN: tl.constexpr = (COLUMNS + 7) // 8
    if COLUMNS == 8:
        products = [[start[0], start[0], start[1], start[1]]] * 4  # for all quarters of the tokens
    else:
        products = [[start[0]] * 4, [start[1], start[1], start[2], start[2]]] * 4  # high and low
    for c in tl.static_range(L.key_padded // 32):
        runs = chunk_runs(words, c, L.key_bits)
        x = []
        for r in tl.static_range(4):
            x = x + code_bytes(runs[r], table, L.key_bits)
        new = []
        for i in tl.static_range(len(products)):
            q = query[4 * (OWN * c + i % OWN) : 4 * (OWN * c + i % OWN) + 4]
            new = new + [multiply_int8(q, x[2 * (i // OWN) : 2 * (i // OWN) + 2], products[i])]
        products = new
    scores = []
    for i in tl.static_range(4):
        for e in tl.static_range(2):
            for x in tl.static_range(OWN):
                if COLUMNS == 8:
                    high, low = products[i][e], products[i][2 + e]
                else:
                    high, low = products[2 * i][2 * x + e], products[2 * i + 1][2 * x + e]
                high = high.to(tl.float32, bitcast=True) - (12582912.0 + 49152.0)
                scores = scores + [tl.fma(high, 256.0, low.to(tl.float32, bitcast=True))]
    return scores


@triton.jit
def value_pairs(run, table, zero, BITS: tl.constexpr):
    """Eight codes to levels: four words of two fp16."""
    codes = run & (0x33333333 if BITS == 2 else 0x77777777)
    low = permute_bytes(table[0], table[1], codes)
    low2 = permute_bytes(table[0], table[1], high_half(codes, table[2]))
    high = zero
    high2 = zero
    if BITS == 4:
        high = run & -0x7F7F7F80
        high2 = (run << 4) & -0x7F7F7F80
    return [interleave(low, high, 0), interleave(low, high, 2), interleave(low2, high2, 0), interleave(low2, high2, 2)]


@triton.jit
def add_values(sums, words, table, zero, weights, L: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """sums plus the tile's values times weights, as products leave them: four for each pair of dimensions and block of 8
    columns."""
    new = []
    for c in tl.static_range(L.value_padded // 32):
        pairs = []
        for u in tl.static_range(TILE):
            runs = chunk_runs(part(words, u, TILE), c, L.value_bits)
            for r in tl.static_range(4):
                pairs = pairs + value_pairs(runs[r], table, zero, L.value_bits)
        for p in tl.static_range(2):
            for block in tl.static_range(BLOCKS):
                x = sums[4 * (BLOCKS * (2 * c + p) + block) : 4 * (BLOCKS * (2 * c + p) + block) + 4]
                for u in tl.static_range(TILE):
                    for h in tl.static_range(2):  # of the tokens
                        y = pairs[16 * u + 8 * p + 4 * h : 16 * u + 8 * p + 4 * h + 4]
                        b = part(part(weights, block, BLOCKS), u, TILE)[2 * h : 2 * h + 2]
                        x = multiply_fp16([y[0], y[2], y[1], y[3]], b, x)
                new = new + x
    return new


@triton.jit
def weigh(scores, slope, shift, scale, minimum, SCALED_SUM: tl.constexpr, MINIMA: tl.constexpr):
    """The weights of a column's tokens times value scales, as words of two fp16; then the sums of weights, and if they are
    wanted of weights times scales and of weights times minima."""
    weights = []
    for r in tl.static_range(len(scores)):
        weights = weights + [power_of_two(tl.fma(scores[r], slope, shift))]
    words = []
    total = weights[0] + weights[1]
    for r in tl.static_range(2, len(scores), 2):
        total += weights[r] + weights[r + 1]
    sums = [total]
    scaled = tl.zeros([32], tl.float32)
    for r in tl.static_range(0, len(scores), 2):
        low, high = weights[r] * scale[r], weights[r + 1] * scale[r + 1]
        words = words + [pack_halves(low, high)]
        scaled += low + high
    if SCALED_SUM:
        sums = sums + [scaled]
    if MINIMA:
        lowest = weights[0] * minimum[0]
        for r in tl.static_range(1, len(scores)):
            lowest = tl.fma(weights[r], minimum[r], lowest)
        sums = sums + [lowest]
    return words + sums


@triton.jit
def weigh_all(scores, slope, shift, scale, minimum, SCALED_SUM: tl.constexpr, MINIMA: tl.constexpr):
    """`weigh`'s words for each column of a lane, then its sums for each."""
    WORDS: tl.constexpr = len(scale) // 2
    words = []
    sums = []
    for x in tl.static_range(len(slope)):
        w = weigh(scores[x :: len(slope)], slope[x], shift[x], scale, minimum, SCALED_SUM, MINIMA)
        words = words + w[:WORDS]
        sums = sums + w[WORDS:]
    return words + sums


@triton.jit
def load_kept_and_means(p_kept, p_means, tile, entries, columns, own_columns, L: tl.constexpr, TILE: tl.constexpr):
    """For each group of a tile the bits of the tokens that count, and for each page the scores of its mean key for the
    columns of a lane. Beyond the last entry, anything."""
    PAGES: tl.constexpr = 2 if TILE > L.groups else 1
    kept = []
    for u in tl.static_range(TILE):
        kept = kept + [load_now(p_kept + tl.minimum(tile * TILE + u, entries * L.groups - 1))]
    means = []
    for u in tl.static_range(PAGES):
        entry = tl.minimum(tile * TILE // L.groups + u, entries - 1)
        for x in tl.static_range(len(own_columns)):
            mean = tl.zeros([32], tl.float32)
            if L.centered:
                mean = load_now(p_means + (entry * columns + own_columns[x])).to(tl.float32, bitcast=True)
            means = means + [mean]
    return kept, means


@triton.jit
def attend_wide(
    p_work, p_stats, p_tables, p_rotated, p_factor, p_head, p_pages, p_kept, p_means, heads, entries, first, n_s, steps,
    columns, result, key_step, value_step, softcap,
    L: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, ROTATE_BACK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The tiles first, first + n_s, ... of a row, for a program of `decode.decode`, whose arguments these are.

    Args:
        p_head: the codes of the head in page 0.
        p_pages, p_kept: the row's.
        p_rotated, p_factor, p_means: the row's and head's.
        result: the number of the program's first partial result.
    """
    SCALE: tl.constexpr = 1 if L.key_format == "lloyd_max" else 0  # the value scale's place in the metadata
    OWN: tl.constexpr = COLUMNS // 8  # columns that a lane has scores of, and blocks of columns that it has sums of
    DIMS: tl.constexpr = L.value_padded // 8
    PAGES: tl.constexpr = 2 if TILE > L.groups else 1
    SCALED: tl.constexpr = softcap is not None or (L.centered and PAGES > 1)  # scores before anything common to the tile
    MINIMA: tl.constexpr = L.value_format == "min_max"
    BIASED: tl.constexpr = L.value_bits != 4
    SUMS: tl.constexpr = 1 + BIASED + MINIMA
    KEYS: tl.constexpr = 32 * L.key_words  # where the values start, and
    CODES: tl.constexpr = 32 * (L.key_words + L.value_words)  # the metadata
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4
    zero = tl.zeros([32], tl.int32)
    nothing = tl.zeros([32], tl.float32)

    pages = load_pages(p_pages, first, entries, steps > 0, L.group_bits, TILE)
    next_pages = load_pages(p_pages, first + n_s, entries, steps > 1, L.group_bits, TILE)
    # A copy a lane: constants in uniform registers or in the code would be moved for each use.
    one = tl.load(p_tables + 256 + lane)  # twice, as fp16
    key_table = [tl.load(p_tables + lane), tl.load(p_tables + 32 + lane), one]
    value_table = [tl.load(p_tables + 160 + lane), tl.load(p_tables + 192 + lane), one]
    magic = tl.load(p_tables + 128 + lane)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    own_columns = []
    for x in tl.static_range(OWN):
        own_columns = own_columns + [tl.minimum(lane_column(lane, x, COLUMNS), columns - 1)]
    query = load_operand(p_rotated, columns, L, COLUMNS)
    slope = []
    for x in tl.static_range(OWN):
        slope = slope + [tl.load(p_factor + own_columns[x]) * key_step]
    start = [magic]
    if L.key_format == "lloyd_max":
        bias = half_sums(query, zero, L, COLUMNS)
        for x in tl.static_range(OWN):
            start = start + [magic + bias[x]]
    last = entries * L.groups - 1
    kept, means = load_kept_and_means(p_kept, p_means, first, entries, columns, own_columns, L, TILE)

    sums = [nothing] * (2 * DIMS * OWN)
    unit = [nothing + NOTHING] * OWN
    total = [nothing] * (OWN * SUMS)  # `weigh`'s sums, of a lane's own tokens only
    for step in tl.range(0, steps, num_stages=STAGES):
        tile = first + step * n_s
        p_groups = tile_groups(pages, [p_head] * TILE, p_head, heads, tile, L, TILE)
        keys = []
        for u in tl.static_range(TILE):
            keys = keys + load_blocks(p_groups[u], L.key_words)
        fields = load_fields(p_groups, pages, CODES, L.fields, COLUMNS)
        pages = []
        for u in tl.static_range(PAGES):
            pages = pages + [hold(next_pages[u])]
        next_pages = load_pages(p_pages, tile + 2 * n_s, entries, step + 2 < steps, L.group_bits, TILE)

        scores = []
        scale = []
        scale_words = []
        minimum = []
        for u in tl.static_range(TILE):
            words = block_words(part(keys, u, TILE))
            own = part(fields, u, TILE)
            if L.key_format == "lloyd_max":
                products = integer_scores(words, key_table, query, start, L, COLUMNS)
                key_scale = token_halves(field_words(own, 0, L.fields, COLUMNS))
            else:
                products = fp8_scores(words, query, L, COLUMNS)
            own_words = field_words(own, SCALE, L.fields, COLUMNS)
            scale_words = scale_words + own_words
            scale = scale + token_halves(own_words)
            if MINIMA:  # levels count from the middle of a value's range
                lowest = token_halves(field_words(own, L.fields - 1, L.fields, COLUMNS))
                for i in tl.static_range(8):
                    minimum = minimum + [tl.fma(scale[8 * u + i], (2**L.value_bits - 1) / 2, lowest[i])]
            for i in tl.static_range(8):
                for x in tl.static_range(OWN):
                    y = products[i * OWN + x]
                    if L.key_format == "lloyd_max":
                        y *= key_scale[i]
                    if SCALED:
                        y = tl.fma(y, slope[x], means[u % PAGES * OWN + x])
                    if softcap is not None:  # tanh; overflow and underflow of the exponential give 1 and -1
                        y = LOG2_E * (softcap - 2 * softcap / (power_of_two(y * (2 * LOG2_E)) + 1))
                    scores = scores + [y]
        whole = kept[0]
        if TILE == 2:
            whole = whole & kept[1]
            whole = tl.where(tile * TILE + 1 <= last, whole, 0)
        if whole != -1:
            masked = []
            for u in tl.static_range(TILE):
                bits = kept[u] >> (2 * t)
                if u == 1:
                    bits = tl.where(tile * TILE + 1 <= last, bits, 0)
                for i in tl.static_range(8):
                    live = (bits & (1 << (8 * (i // 2) + i % 2))) != 0
                    for x in tl.static_range(OWN):
                        masked = masked + [tl.where(live, scores[(8 * u + i) * OWN + x], float("-inf"))]
            scores = masked

        factor = [nothing + 1.0] * OWN if SCALED else slope
        offset = [nothing] * OWN if SCALED else means
        shift = []
        for x in tl.static_range(OWN):
            shift = shift + [offset[x] - unit[x]]
        weighed = weigh_all(scores, factor, shift, scale, minimum, BIASED, MINIMA)
        large = weighed[0]
        for i in tl.static_range(1, 4 * TILE * OWN):
            large = large | weighed[i]
        if tl.max(large & TOO_LARGE, 0) != 0:
            exponent = largest_exponent(scale_words)
            new_unit = []
            new_total = []
            decay = []
            shift = []
            for x in tl.static_range(OWN):
                top = scores[x]
                for i in tl.static_range(1, 8 * TILE):
                    top = tl.maximum(top, scores[i * OWN + x])
                top = tl.fma(over_column(top, True, COLUMNS), factor[x], offset[x])
                now = tl.maximum(unit[x], top + (exponent + ROOM))
                less = power_of_two(unit[x] - now)
                new_unit = new_unit + [now]
                decay = decay + [less]
                shift = shift + [offset[x] - now]
                for i in tl.static_range(SUMS):
                    new_total = new_total + [total[SUMS * x + i] * less]
            weighed = weigh_all(scores, factor, shift, scale, minimum, BIASED, MINIMA)
            unit = new_unit
            total = new_total
            decay = sum_columns(decay, lane, COLUMNS)
            new_sums = []
            for i in tl.static_range(len(sums)):
                new_sums = new_sums + [sums[i] * decay[i // 4 % OWN * 2 + i % 2]]
            sums = new_sums
        weights = weighed[: 4 * TILE * OWN]
        new_total = []
        for i in tl.static_range(OWN * SUMS):
            new_total = new_total + [total[i] + weighed[4 * TILE * OWN + i]]
        total = new_total
        # What the next tile needs, and values: no earlier than now, as they take registers.
        kept, means = load_kept_and_means(p_kept, p_means, tile + n_s, entries, columns, own_columns, L, TILE)
        words = []
        for u in tl.static_range(TILE):
            words = words + block_words(load_blocks(p_groups[u] + KEYS, L.value_words))
        sums = add_values(sums, words, value_table, zero, weights, L, OWN, TILE)

    offsets = []
    for x in tl.static_range(OWN):
        column = lane_column(lane, x, COLUMNS)
        mask = (column < columns) & (t == 0)
        tl.store(p_stats + 2 * (result + column), unit[x], mask=mask)
        tl.store(p_stats + 2 * (result + column) + 1, over_column(total[SUMS * x], False, COLUMNS), mask=mask)
        offset = nothing
        if BIASED:
            least = tl.load(p_tables + 224).to(tl.float32, bitcast=True)
            offset += over_column(total[SUMS * x + 1], False, COLUMNS) * (least * value_step)
        if MINIMA:
            offset += over_column(total[SUMS * x + SUMS - 1], False, COLUMNS)
        offsets = offsets + [offset]
    offsets = sum_columns(offsets, lane, COLUMNS)
    factor = value_step * (LEVEL_UNIT if BIASED else LEVEL_UNIT / 2)
    for x in tl.static_range(2 * OWN):
        column = 8 * (x // 2) + 2 * t + x % 2
        vector = []
        for d in tl.static_range(DIMS):
            y = sums[4 * (OWN * (d // 2) + x // 2) + 2 * (d % 2) + x % 2]
            vector = vector + [tl.fma(y, factor, offsets[x])]
        vector = sums_of_lane(vector, g, ROTATE_BACK, L.large)
        store_sums(p_work + ((result + column) * L.value_padded + g * DIMS), vector, column < columns, L.large)
