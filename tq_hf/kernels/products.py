"""The decode kernel's two products: keys and queries, values and weights. See `decode.py` for which stand where."""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import chunk_runs, fp8_pairs, split_last4
from .pieces import block_count, block_offsets, lanes_first
from .tiles import chunk_int8, lane_words, part
from .warp import lane_of, lane_xor, multiply_fp16, multiply_int8, multiply_int8_by_bytes, permute_bytes, transpose

HIGH_BYTES = tl.constexpr(0x7531)
LOW_BYTES = tl.constexpr(0x6420)
MAGIC = tl.constexpr(0x4B400000)  # the bits of 1.5 * 2**23: added to an integer below 2**22, they make it a float


@triton.jit
def lane_column(lane, x: tl.constexpr, COLUMNS: tl.constexpr):
    """The number of a lane's column x, of those that it has scores of."""
    return lane % 4 if COLUMNS == 4 else lane // 4 + 8 * x


@triton.jit
def over_column(x, MAX: tl.constexpr, COLUMNS: tl.constexpr):
    """The maximum or sum over the lanes that have the same columns."""
    if COLUMNS == 4:
        for i in tl.static_range(3):
            y = lane_xor(x, 16 >> i)
            x = tl.maximum(x, y) if MAX else x + y
    else:
        for i in tl.static_range(2):
            y = lane_xor(x, 2 >> i)
            x = tl.maximum(x, y) if MAX else x + y
    return x


@triton.jit
def sum_columns(x, lane, COLUMNS: tl.constexpr):
    """Numbers of the columns that a lane has scores of (`lane_column`) to those of the columns that it has sums of: the same
    with 4 columns, else 8n + 2t and 8n + 2t + 1."""
    if COLUMNS == 4:
        return x
    else:
        first = lane % 4 * 8
        y = []
        for block in tl.static_range(COLUMNS // 8):
            y = y + [lane_of(x[block], first), lane_of(x[block], first + 4)]
        return y


@triton.jit
def load_operand(p_query, columns, L: tl.constexpr, COLUMNS: tl.constexpr):
    """The query as operands, a chunk after the other.

    With 4 columns, right ones of two words: lane 4g + t holds the high (even g) or low bytes of column g / 2. Else left ones
    of four: 8 columns have their high bytes above their low ones, 16 have an operand of each. fp16 queries have two products
    a chunk, the second half of whose rows nobody reads if there are 8 columns.
    """
    lane = tl.arange(0, 32)
    g = lane // 4
    OWN: tl.constexpr = (COLUMNS + 7) // 8
    loaded = []
    for x in tl.static_range(OWN):
        column = tl.minimum(g // 2 if COLUMNS == 4 else 8 * x + g, columns - 1)
        p = column * (L.key_padded // 2) + lane % 4 * (L.key_padded // 8)
        if L.large:
            blocks = []
            for b in tl.static_range(block_count(L.key_padded // 32)):
                at = block_offsets(p, 4, b, L.key_padded // 32, 4, 4)
                blocks = blocks + [lanes_first(tl.load(p_query + at))]
            loaded = loaded + lane_words(blocks, L.key_padded // 8, True)
        else:
            p = p_query + (p[:, None] + tl.arange(0, 4)[None, :])
            for c in tl.static_range(L.key_padded // 32):
                loaded = loaded + split_last4(tl.load(p + 4 * c))
    words = []
    for c in tl.static_range(L.key_padded // 32):
        a = part(loaded, 0, OWN)[4 * c : 4 * c + 4]
        b = part(loaded, OWN - 1, OWN)[4 * c : 4 * c + 4]
        if L.key_format == "fp8":
            words = words + (a if COLUMNS == 4 else [a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]])
        elif COLUMNS == 4:
            selector = tl.where(g % 2 == 0, HIGH_BYTES, LOW_BYTES)
            words = words + [permute_bytes(a[0], a[1], selector), permute_bytes(a[2], a[3], selector)]
        else:
            high = [permute_bytes(a[0], a[1], HIGH_BYTES), permute_bytes(a[2], a[3], HIGH_BYTES)]
            low = [permute_bytes(a[0], a[1], LOW_BYTES), permute_bytes(a[2], a[3], LOW_BYTES)]
            if OWN == 1:
                words = words + [high[0], low[0], high[1], low[1]]
            else:
                high2 = [permute_bytes(b[0], b[1], HIGH_BYTES), permute_bytes(b[2], b[3], HIGH_BYTES)]
                low2 = [permute_bytes(b[0], b[1], LOW_BYTES), permute_bytes(b[2], b[3], LOW_BYTES)]
                words = words + [high[0], high2[0], high[1], high2[1], low[0], low2[0], low[1], low2[1]]
    return words


@triton.jit
def half_sums(query, zero, L: tl.constexpr, COLUMNS: tl.constexpr):
    """What the 0.5 of the levels adds to a score, int32: half of the sum of the query, for each column of a lane."""
    OWN: tl.constexpr = (COLUMNS + 7) // 8
    ones = [zero + 0x01010101] * 4
    sums = [[zero] * 4] * OWN
    for c in tl.static_range(L.key_padded // 32):
        new = []
        for i in tl.static_range(OWN):
            if COLUMNS == 4:
                new = new + [multiply_int8(ones, query[2 * c : 2 * c + 2], sums[i])]
            else:
                q = query[4 * (OWN * c + i) : 4 * (OWN * c + i) + 4]
                new = new + [multiply_int8(q, ones[:2], sums[i])]
        sums = new
    if COLUMNS == 4:
        return [(sums[0][0] * 256 + sums[0][1]) >> 1]
    elif COLUMNS == 8:
        return [(sums[0][0] * 256 + sums[0][2]) >> 1]
    else:
        return [(sums[0][0] * 256 + sums[1][0]) >> 1, (sums[0][2] * 256 + sums[1][2]) >> 1]


@triton.jit
def int8_scores(words, table, query, bias, zero, L: tl.constexpr):
    """Products of keys and query, fp32, of 4 columns: those of a lane's four tokens."""
    products = [[zero, bias[0], zero, bias[0]]] * 2  # for both halves of the tokens
    for c in tl.static_range(L.key_padded // 32):
        x = chunk_int8(words, c, table, L.key_bits)
        new = []
        for i in tl.static_range(2):
            a = [x[4 * i], x[4 * i + 2], x[4 * i + 1], x[4 * i + 3]]
            new = new + [multiply_int8(a, query[2 * c : 2 * c + 2], products[i])]
        products = new
    scores = []
    for i in tl.static_range(2):
        for e in tl.static_range(2):
            scores = scores + [(products[i][2 * e] * 256 + products[i][2 * e + 1]).to(tl.float32)]
    return scores


@triton.jit
def fp8_scores(words, query, L: tl.constexpr, COLUMNS: tl.constexpr):
    """Products of fp8 keys and an fp16 query, in the order (token of the lane, column of the lane)."""
    OWN: tl.constexpr = (COLUMNS + 7) // 8
    products = [[tl.zeros([32], tl.float32)] * 4] * (2 if COLUMNS == 4 else 4)
    for c in tl.static_range(L.key_padded // 32):
        runs = chunk_runs(words, c, 8)  # two words each
        pairs = []
        for i in tl.static_range(8):
            pairs = pairs + fp8_pairs(runs[i])
        new = []
        for i in tl.static_range(len(products)):
            if COLUMNS == 4:
                x = pairs[8 * i : 8 * i + 8]
                product = multiply_fp16([x[0], x[4], x[1], x[5]], query[4 * c : 4 * c + 2], products[i])
                new = new + [multiply_fp16([x[2], x[6], x[3], x[7]], query[4 * c + 2 : 4 * c + 4], product)]
            else:
                x = pairs[4 * i : 4 * i + 4]
                product = multiply_fp16(query[8 * c : 8 * c + 4], x[:2], products[i])
                new = new + [multiply_fp16(query[8 * c + 4 : 8 * c + 8], x[2:], product)]
        products = new
    scores = []
    for i in tl.static_range(len(products)):
        for e in tl.static_range(2):
            for x in tl.static_range(OWN):
                scores = scores + [products[i][2 * e if COLUMNS == 4 else 2 * x + e]]
    return scores


@triton.jit
def weight_operand(weights, selector):
    """The weights of a group's tokens, 16-bit integers of 4 columns, as a right operand of two words."""
    rows = []
    for r in tl.static_range(4):  # the same in both columns: one will keep the high bytes, the other the low ones
        w = weights[r]
        rows = rows + [transpose(permute_bytes(w, w, 0x1010))]
    return [permute_bytes(rows[0], rows[1], selector), permute_bytes(rows[2], rows[3], selector)]


@triton.jit
def add_bytes(high, low):
    """256 * high + low of integers that came out of a product started with MAGIC, fp32."""
    high = high.to(tl.float32, bitcast=True) - (12582912.0 + 49152.0)
    return tl.fma(high, 256.0, low.to(tl.float32, bitcast=True))


@triton.jit
def add_int8_values(sums, decay, values, table, weights, magic, L: tl.constexpr, TILE: tl.constexpr):
    """sums * decay + the tile's values times integer weights, of 4 columns: sum i is that of dimension g * D/8 + i."""
    words = []
    for u in tl.static_range(TILE):
        words = words + lane_words(part(values, u, TILE), L.value_words, L.large)
    new = []
    for c in tl.static_range(L.value_padded // 32):
        levels = []
        for u in tl.static_range(TILE):
            levels = levels + chunk_int8(part(words, u, TILE), c, table, L.value_bits)
        for p in tl.static_range(2):
            x = magic
            for u in tl.static_range(TILE):
                x = multiply_int8_by_bytes(levels[8 * u + 4 * p : 8 * u + 4 * p + 4], part(weights, u, TILE), x)
            for e in tl.static_range(2):
                new = new + [tl.fma(sums[len(new)], decay, add_bytes(x[2 * e], x[2 * e + 1]))]
    return new
