"""Query preparation: what the packed kernel multiplies with codes instead of rotating keys back."""

from __future__ import annotations

import triton
import triton.language as tl

from .lanes import load_factors

LOG2_E = tl.constexpr(1.4426950408889634)
QUERY_STEPS = tl.constexpr(32512.0)  # int16 for 1: the high part is at most 127


@triton.jit
def power_of_two_above(x):
    """The power of two in (x, 2x] and its inverse, both exact; 1 for x = 0."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits > 0x08000000) & (bits < 0x76000000), bits + 0x00800000, 0x3F800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def encode(x, DTYPE: tl.constexpr):
    """Numbers of magnitude below 1 as DTYPE; as int16, in `QUERY_STEPS`, with a signed high and a signed low byte."""
    if DTYPE == tl.int16:
        n = tl.floor(x * QUERY_STEPS + 0.5).to(tl.int32)
        return (((n + 128) & -256) | (n & 255)).to(tl.int16)
    else:
        return x.to(DTYPE)


@triton.jit
def prepare_query(query, inside, p_factors, p_signs, p_rotated, p_plain, p_factor, scaling, softcap,
                  DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """Divides each query by a power of two above its norm, so that fp16 holds it, and rotates it if there are `p_signs`.

    With `p_factors`, what is rotated is divided by the balance of the key channels first.

    Args:
        query: [ROWS, BLOCK], zero beyond DIM.
        inside: [ROWS], which rows exist.
        p_factors: fp32 [DIM], zero while there are no factors (and no pages), or None.
        p_signs: bf16 [BLOCK, BLOCK], the sign of each input (column) in each rotated coordinate (row), or None.
        p_rotated, p_plain: pointers [ROWS] to the rows to write, PADDED values each; `p_plain` may be None.
        p_factor: pointers [ROWS]; `packed.attend_packed` says what they get.
    """
    x = query.to(tl.float32)
    d = tl.arange(0, BLOCK)
    squares = tl.sum(x * x, 1)
    balanced = x
    if p_factors is not None:
        balanced = x / load_factors(p_factors, d, DIM)[None, :]
        squares = tl.maximum(squares, tl.sum(balanced * balanced, 1))
    above, inverse = power_of_two_above(tl.sqrt(squares))
    factor = above * (scaling * LOG2_E if softcap is None else scaling / softcap)
    tl.store(p_factor, factor * 256 if FP8 else factor, mask=inside)
    store = inside[:, None] & (d < PADDED)[None, :]
    if p_plain is not None:
        tl.store(p_plain[:, None] + d[None, :], (x * inverse[:, None]).to(tl.float16), mask=store)
    balanced *= inverse[:, None]
    if p_signs is None:
        tl.store(p_rotated[:, None] + d[None, :], encode(balanced, p_rotated.dtype.element_ty), mask=store)
    else:
        high = balanced.to(tl.float16)  # with the rest, 22 bits of the query; products with signs are exact
        rest = (balanced - high.to(tl.float32)).to(tl.float16)
        for first in range(0, PADDED, 32):
            k = first + tl.arange(0, 32)
            signs = tl.load(p_signs + k[:, None] * BLOCK + d[None, :]).to(tl.float16).trans(1, 0)  # [BLOCK, 32]
            y = tl.dot(rest, signs, tl.dot(high, signs)) * PADDED**-0.5
            tl.store(p_rotated[:, None] + k[None, :], encode(y, p_rotated.dtype.element_ty), mask=inside[:, None])
