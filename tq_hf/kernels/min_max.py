"""Encodes vectors that are not rotated, between their least and largest coordinate: a warp a group, in registers.

Lane 4g + t has tokens 8r + g, r in 0..3, and of each the dimensions whose codes `encode.py` has in that lane: n * D/8 + 4c + i
for n = 2t and 2t + 1, chunks c and i in 0..3. They are D/4 neighbours in memory, in *quads* of four: chunk c takes quad c of
both n. So the codes change lanes and become words as those of rotated values do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import split_last4
from .encode import join4, run_words, store_chunk_words, value_runs
from .lanes import metadata_offset
from .warp import add_toward_zero, lane_of_four, transpose

FP16_MAX = tl.constexpr(65504.0)
UNITS = tl.constexpr(8388608.0)  # 2**23: numbers from here to its double are integers, which their lowest bits hold
UNITS_BITS = tl.constexpr(0x4B000000)
NIBBLE_BITS = tl.constexpr(0x05000000)  # what takes `UNITS_BITS` off a word of nibbles: those of the last two codes stay in it


@triton.jit
def saturate(x):
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)


@triton.jit
def of_four(x, kind: tl.constexpr):
    """The least, the largest or the sum [32] over the four lanes that share g, in each of them."""
    x = x.reshape(8, 4)
    if kind == "min":
        y = tl.min(x, 1)
    elif kind == "max":
        y = tl.max(x, 1)
    else:
        y = tl.sum(x, 1)
    return y[:, None].broadcast_to(8, 4).reshape(32)


@triton.jit
def own_token(x):
    """Of four [32], one for each token of a lane 4g + t, that of token 8t + g."""
    t = tl.arange(0, 32) % 4
    return tl.where(t < 2, tl.where(t == 0, x[0], x[1]), tl.where(t == 2, x[2], x[3]))


@triton.jit
def quad_dims(q: tl.constexpr, PADDED: tl.constexpr):
    """The dimensions of a lane's quad q, [32, 4]."""
    return (tl.arange(0, 32) % 4 * (PADDED // 4) + 4 * q)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def load_quads(is_new, p_new, p_ring, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """The quads of one token a lane (`store.token_rows`); zeros unless `real`, and from DIM on."""
    quads = []
    for m in tl.static_range(PADDED // 32):
        d = (tl.arange(0, 32) % 4 * (PADDED // 4) + 8 * m)[:, None] + tl.arange(0, 8)[None, :]
        mask = real[:, None] if DIM == PADDED else real[:, None] & (d < DIM)
        p = tl.where(is_new[:, None], p_new[:, None] + d, p_ring[:, None] + d)
        x = tl.load(p, mask=mask, other=0.0, eviction_policy="evict_first")
        first, second = tl.split(x.reshape(32, 2, 4).permute(0, 2, 1))
        quads = quads + [first, second]
    return quads


@triton.jit
def bounds(quads, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Least and largest coordinate of one token a lane, and whether all are finite; [32] each."""
    low = tl.full([32, 4], float("inf"), tl.float32)
    high = tl.full([32, 4], float("-inf"), tl.float32)
    zeros = tl.zeros([32, 4], tl.float32)
    for q in tl.static_range(len(quads)):
        x = quads[q].to(tl.float32)
        zeros += x * 0.0  # infinities and NaN times zero are NaN
        if DIM == PADDED:
            low = tl.minimum(low, x)
            high = tl.maximum(high, x)
        else:
            inside = quad_dims(q, PADDED) < DIM
            low = tl.minimum(low, tl.where(inside, x, float("inf")))
            high = tl.maximum(high, tl.where(inside, x, float("-inf")))
    return of_four(tl.min(low, 1), "min"), of_four(tl.max(high, 1), "max"), of_four(tl.sum(zeros, 1), "sum") == 0.0


@triton.jit
def quantize_quad(x, origin, scale, inverse, inside, TOP: tl.constexpr):
    """The codes of a quad as four [32], each with `UNITS_BITS` added."""
    x = x.to(tl.float32) - origin[:, None]
    # As x / scale rounds: what the product with the rounded inverse misses is exact in fp32, for a scale has 11 bits, and
    # no quotient by one comes as close to the middle of two numbers as the correction is off.
    steps = x * inverse[:, None]
    steps = tl.fma(tl.fma(steps, -scale[:, None], x), inverse[:, None], steps)
    steps = tl.minimum(tl.maximum(steps + 0.5, 0.0), TOP * 1.0)  # 0 for NaN, which only vectors have that are left out
    if inside is not None:
        steps = tl.where(inside, steps, 0.0)
    units = add_toward_zero(steps, tl.full([32, 4], UNITS, tl.float32))
    return split_last4(units.to(tl.int32, bitcast=True))


@triton.jit
def nibble_word(first, second, BITS: tl.constexpr):
    """The codes of a token's two quads of a chunk as nibbles (`encode.signed_codes`): those of i = 0, 1 of both, then the
    others."""
    codes = [second[3], second[2], first[3], first[2], second[1], second[0], first[1], first[0]]
    word = codes[0]
    for i in tl.static_range(1, 8):
        word = (word << 4) + codes[i]
    word += NIBBLE_BITS
    if BITS == 4:  # a magnitude and a sign, as level codes - 7.5
        lower = ~(word | 0x77777777)
        word = word ^ ~0x77777777 ^ (lower - ((lower >> 3) & 0x11111111))
    return word


@triton.jit
def store_bytes(p_codes, c: tl.constexpr, first, second):
    """Stores chunk c of 8-bit codes: for each token r four [32] of either quad."""
    words = []
    for p in tl.static_range(2):
        for h in tl.static_range(2):
            for e in tl.static_range(2):
                x = first[8 * h + 2 * p + e] + (first[8 * h + 4 + 2 * p + e] << 8)
                x += (second[8 * h + 2 * p + e] << 16) + (second[8 * h + 4 + 2 * p + e] << 24)
                words = words + [transpose(x - UNITS_BITS)]
    lane = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    for half in tl.static_range(2):
        w = words[4 * half : 4 * half + 4]
        tl.store(p_codes + (128 * (2 * c + half) + lane), join4(w[0], w[1], w[2], w[3]))


@triton.jit
def encode_min_max(quads, real, p_codes, p_metadata, DIM: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr,
                   FIELD: tl.constexpr, FIELDS: tl.constexpr):  # fmt: skip
    """Quantizes and stores a group of values.

    Args:
        quads: for each token r of a lane, those of `load_quads`.
        real: four [32], the tokens that were loaded.

    Returns:
        Whether any real vector was lost for not being finite, and whether any scale or minimum saturated fp16.
    """
    CHUNKS: tl.constexpr = PADDED // 32
    TOP: tl.constexpr = 2**BITS - 1
    lows = []
    highs = []
    finite = []
    lost = tl.zeros([32], tl.int32)
    for r in tl.static_range(4):
        low, high, is_finite = bounds(quads[2 * CHUNKS * r : 2 * CHUNKS * (r + 1)], DIM, PADDED)
        usable = real[r] & is_finite
        lost |= (real[r] & ~is_finite).to(tl.int32)
        lows = lows + [tl.where(usable, low, 0.0)]
        highs = highs + [tl.where(usable, high, 0.0)]
        finite = finite + [is_finite.to(tl.int32)]
    # Numbers of a token are found by one lane of four.
    low = own_token(lows)
    minimum = saturate(low).to(tl.float16)
    origin = minimum.to(tl.float32)
    step = tl.maximum(tl.div_rn(own_token(highs) - origin, TOP * 1.0), 1e-8)
    saturated = (tl.abs(low) > FP16_MAX) | (step > FP16_MAX)
    scale = saturate(step).to(tl.float16)
    token = tl.arange(0, 32) % 4 * 8 + tl.arange(0, 32) // 4
    tl.store(p_metadata + metadata_offset(token, FIELD, FIELDS), scale)
    tl.store(p_metadata + metadata_offset(token, FIELD + 1, FIELDS), minimum)
    known = (scale > 0) & (own_token(finite) != 0)
    divisor = tl.where(known, scale.to(tl.float32), 1.0)
    inverse = tl.where(known, tl.div_rn(1.0, divisor), 0.0)  # with which all codes are zero
    for c in tl.static_range(CHUNKS):
        first = []
        second = []
        for r in tl.static_range(4):
            number = lane_of_four(origin, r), lane_of_four(divisor, r), lane_of_four(inverse, r)
            inside = [None, None]
            if DIM != PADDED:
                inside = [quad_dims(c, PADDED) < DIM, quad_dims(CHUNKS + c, PADDED) < DIM]
            first = first + quantize_quad(quads[2 * CHUNKS * r + c], *number, inside[0], TOP)
            second = second + quantize_quad(quads[2 * CHUNKS * r + CHUNKS + c], *number, inside[1], TOP)
        if BITS == 8:
            store_bytes(p_codes, c, first, second)
        else:
            codes = []
            for r in tl.static_range(4):
                codes = codes + [nibble_word(first[4 * r : 4 * r + 4], second[4 * r : 4 * r + 4], BITS)]
            store_chunk_words(p_codes, c, run_words(value_runs(codes), BITS, False), CHUNKS)
    return tl.max(lost, 0), tl.max(saturated.to(tl.int32), 0)
