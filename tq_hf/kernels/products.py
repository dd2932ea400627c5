"""The decode kernel's two products: keys by the query, values by the weights.

The right operands' numbers have 16 bits, a high and a low byte. See `decode.py` for where both stand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import chunk_runs, fp8_pairs, split_last4
from .tiles import chunk_int8, lane_words, part
from .warp import multiply_fp16, multiply_int8, multiply_int8_by_bytes, permute_bytes, transpose

HIGH_BYTES = tl.constexpr(0x7531)
LOW_BYTES = tl.constexpr(0x6420)
MAGIC = tl.constexpr(0x4B400000)  # the bits of 1.5 * 2**23: added to an integer below 2**22, they make it a float


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
