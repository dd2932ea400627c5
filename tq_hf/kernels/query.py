"""Queries as the kernels take them: what multiplies codes, instead of rotating keys back."""

from __future__ import annotations

import triton
import triton.language as tl

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
def column_rows(p_query, i_b, i_h, column, columns, group, stride_b, stride_h, stride_t):
    """Pointers to the queries of a block of columns of a row and head (those beyond the last column: to that)."""
    column = tl.minimum(column, columns - 1)
    p_head = p_query + (i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * group * stride_h)
    return p_head + ((column % group).to(tl.int64) * stride_h + (column // group).to(tl.int64) * stride_t)
