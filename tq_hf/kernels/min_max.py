"""Encodes vectors that are not rotated, between their least and largest coordinate: a warp a group, in registers.

Lane 4g + t has tokens 8r + g, r in 0..3, and of each the dimensions whose codes `encode.py` has in that lane, which are
n * D/8 + 4c + i for n = 2t and 2t + 1, chunks c and i in 0..3. They are D/4 neighbours in memory, in *quads* of four: chunk
c takes quad c of both n. So the codes change lanes and become words as those of rotated values do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import split_last4
from .encode import FP16_MAX, join4, run_words, split_last8, store_chunk_words, value_runs
from .lanes import metadata_offset
from .pieces import CHOICES_ARE_ALIGNED, lanes_first, load_width, of_lane, of_piece
from .warp import add_toward_zero, extreme, transpose

UNITS = tl.constexpr(8388608.0)  # 2**23: numbers from here to its double are integers, which their lowest bits hold
UNITS_BITS = tl.constexpr(0x4B000000)
# Takes off what `UNITS_BITS` of four codes come to in a word of nibbles: those of the last two are shifted out of it.
NIBBLE_BITS = tl.constexpr(0x05000000)


@triton.jit
def saturate(x):
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)


@triton.jit
def of_tokens(x, kind: tl.constexpr):
    """The least or the largest of a token's numbers, [32, 4, 4] to [32, 4]: the same in the lanes that share g."""
    if kind == "min":
        y = tl.min(tl.min(x, 2).reshape(8, 4, 4), 1)
    else:
        y = tl.max(tl.max(x, 2).reshape(8, 4, 4), 1)
    return y[:, None, :].broadcast_to(8, 4, 4).reshape(32, 4)


@triton.jit
def group_tokens():
    """The numbers of a lane's tokens, as blocks have them that are loaded (`pieces.py`)."""
    return 8 * of_piece(tl.arange(0, 4)) + of_lane(tl.arange(0, 32) // 4)


@triton.jit
def quad_dims(q: tl.constexpr, PADDED: tl.constexpr):
    """The dimensions of a lane's quad q, [32, 1, 4]."""
    return (tl.arange(0, 32) % 4 * (PADDED // 4) + 4 * q)[:, None, None] + tl.arange(0, 4)[None, None, :]


@triton.jit
def load_quads(in_first, p_first, p_second, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """The D/16 quads of a lane's tokens, [32, 4 tokens, 4] each, of the model's dtype.

    Args:
        in_first, p_first, p_second: `token_rows` of `group_tokens`.
        real: as many tokens, for others than which zeros are loaded; as for dimensions from DIM on.
    """
    WIDTH: tl.constexpr = load_width(p_first.dtype.element_ty)
    quads = []
    for m in tl.static_range(PADDED // 4 // WIDTH):
        d = of_lane(tl.arange(0, 32) % 4 * (PADDED // 4) + WIDTH * m) + tl.arange(0, WIDTH)[None, None, :]
        mask = real if DIM == PADDED else real & (d < DIM)
        if CHOICES_ARE_ALIGNED:
            p = tl.where(in_first, p_first + d, p_second + d)
            x = tl.load(p, mask=mask, other=0.0, eviction_policy="evict_first")
        else:
            x = tl.load(p_first + d, mask=mask & in_first, other=0.0, eviction_policy="evict_first")
            x = tl.load(p_second + d, mask=mask & ~in_first, other=x, eviction_policy="evict_first")
        x = lanes_first(x)
        if WIDTH == 8:
            first, second = tl.split(x.reshape(32, 4, 2, 4).permute(0, 1, 3, 2))
            quads = quads + [first, second]
        else:
            quads = quads + [x]
    return quads


@triton.jit
def bounds(quads, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Least and largest coordinate of a lane's tokens, fp32, and whether all are finite; [32, 4] each.

    Least and largest mean nothing where some coordinate is NaN.
    """
    low = quads[0]
    high = quads[0]
    highest = tl.full(low.shape, float("inf"), tl.float32).to(low.dtype)  # the interpreter has no constants in bf16
    lowest = tl.full(low.shape, float("-inf"), tl.float32).to(low.dtype)
    for q in tl.static_range(len(quads)):
        if DIM == PADDED:
            low = extreme(low, quads[q], "min")
            high = extreme(high, quads[q], "max")
        else:
            inside = quad_dims(q, PADDED) < DIM
            least = tl.where(inside, quads[q], highest)
            largest = tl.where(inside, quads[q], lowest)
            low = extreme(low, least, "min") if q > 0 else least
            high = extreme(high, largest, "max") if q > 0 else largest
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    finite = (low > float("-inf")) & (high < float("inf"))  # of NaN, both are false
    return of_tokens(low, "min"), of_tokens(high, "max"), of_tokens(finite.to(tl.int32), "min") != 0


@triton.jit
def quantize_quad(x, origin, scale, inverse, q: tl.constexpr, TOP: tl.constexpr, DIM: tl.constexpr,
                  PADDED: tl.constexpr):  # fmt: skip
    """The codes of a quad, int32 with `UNITS_BITS` added to each."""
    x = x.to(tl.float32) - origin
    # As x / scale rounds: what the product with the rounded inverse misses is exact in fp32, for a scale has 11 bits, and
    # no quotient by one is closer to the middle of two numbers than 2**-36 of it, a thousand times what the sum is off.
    steps = x * inverse
    steps = tl.fma(tl.fma(steps, -scale, x), inverse, steps)
    steps = tl.minimum(tl.maximum(steps + 0.5, 0.0), TOP * 1.0)  # 0 for NaN, which only vectors have that are left out
    if DIM != PADDED:
        steps = tl.where(quad_dims(q, PADDED) < DIM, steps, 0.0)
    units = add_toward_zero(steps, tl.full([32, 4, 4], UNITS, tl.float32))
    return units.to(tl.int32, bitcast=True)


@triton.jit
def nibble_words(first, second, BITS: tl.constexpr):
    """The codes of two quads of a chunk as nibbles, four [32] (`encode.signed_codes`): those of i = 0, 1 of both, then the
    others."""
    codes = split_last4((first + (second << 8)).reshape(128, 4))  # apart, not by a sum, whose layout Triton would choose
    word = codes[0] + (codes[1] << 4) + (codes[2] << 16) + (codes[3] << 20) + NIBBLE_BITS
    if BITS == 4:  # a magnitude and a sign, as level codes - 7.5
        lower = ~(word | 0x77777777)
        word = word ^ ~0x77777777 ^ (lower - ((lower >> 3) & 0x11111111))
    return split_last4(word.reshape(32, 4))


@triton.jit
def store_bytes(p_codes, c: tl.constexpr, first, second):
    """Stores chunk c of 8-bit codes."""
    # The codes of tokens 2h and 2h + 1 of a lane make 16 bits, for i = 2p + e.
    even, odd = tl.split((first + (second << 16)).reshape(32, 2, 2, 4).permute(0, 1, 3, 2))
    x = split_last8((even + (odd << 8) - UNITS_BITS).reshape(32, 8))
    lane = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    for p in tl.static_range(2):  # a word for each h and e
        words = join4(transpose(x[2 * p]), transpose(x[2 * p + 1]), transpose(x[2 * p + 4]), transpose(x[2 * p + 5]))
        tl.store(p_codes + (128 * (2 * c + p) + lane), words)


@triton.jit
def encode_min_max(quads, real, p_codes, p_metadata, DIM: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr,
                   FIELD: tl.constexpr, FIELDS: tl.constexpr):  # fmt: skip
    """Quantizes and stores a group of values.

    Args:
        quads: of a lane's tokens (`load_quads`).
        real: [32, 4], the tokens that were loaded.
        p_codes: int32, where the group's value codes start.
        p_metadata: fp16, where the group's metadata start; the scales are field FIELD of FIELDS, the minima the next.

    Returns:
        Whether any real vector was lost for not being finite, and whether any scale or minimum saturated fp16; int32.
    """
    CHUNKS: tl.constexpr = PADDED // 32
    TOP: tl.constexpr = 2**BITS - 1
    low, high, is_finite = bounds(quads, DIM, PADDED)
    usable = real & is_finite
    low = tl.where(usable, low, 0.0)
    minimum = saturate(low).to(tl.float16)
    step = tl.maximum(tl.div_rn(tl.where(usable, high, 0.0) - minimum.to(tl.float32), TOP * 1.0), 1e-8)
    scale = saturate(step).to(tl.float16)
    lane = tl.arange(0, 32)[:, None]
    token = 8 * tl.arange(0, 4)[None, :] + lane // 4
    tl.store(p_metadata + metadata_offset(token, FIELD, FIELDS), scale, mask=lane % 4 == 0)
    tl.store(p_metadata + metadata_offset(token, FIELD + 1, FIELDS), minimum, mask=lane % 4 == 0)
    known = usable & (scale > 0)
    divisor = tl.where(known, scale.to(tl.float32), 1.0)
    inverse = tl.where(known, tl.div_rn(1.0, divisor), 0.0)  # with which all codes are zero
    numbers = minimum.to(tl.float32)[:, :, None], divisor[:, :, None], inverse[:, :, None]
    for c in tl.static_range(CHUNKS):
        first = quantize_quad(quads[c], *numbers, c, TOP, DIM, PADDED)
        second = quantize_quad(quads[CHUNKS + c], *numbers, CHUNKS + c, TOP, DIM, PADDED)
        if BITS == 8:
            store_bytes(p_codes, c, first, second)
        else:
            runs = value_runs(nibble_words(first, second, BITS))
            store_chunk_words(p_codes, c, run_words(runs, BITS, False), CHUNKS)
    lost = tl.max(tl.max((real & ~is_finite).to(tl.int32), 1), 0)
    saturated = ((tl.abs(low) > FP16_MAX) | (step > FP16_MAX)).to(tl.int32)
    return lost, tl.max(tl.max(saturated, 1), 0)
