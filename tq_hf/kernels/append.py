"""What a commit does besides packing: new tokens go into the ring and the sinks, then the counters advance."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .lanes import block_dim, row_pointers
from .launch import Call, cdiv, power_of_two, prepared

USUAL: dict[str, Any] = {"num_warps": 4}
ALONE = 1 << 13  # numbers of all keys of a token, up to which one program appends it
EARLY: dict[str, Any] = USUAL | {"launch_pdl": True}  # it may start before the kernel ahead of it has finished


@triton.jit(do_not_specialize=["n", "tail", "window", "sinks"])
def append_tokens(
    p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start, p_counters,
    n, tail, window, sinks, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    PAGE: tl.constexpr, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr, CHAINED: tl.constexpr, AWAITED: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(tail + sinks, ROWS), H, B): the last `tail` new tokens, which may stay in the ring, then the sink slots.

    Args:
        CHAINED: whether this kernel may start before the one ahead of it has read the ring.
        AWAITED: whether the next kernel may start before this one has finished, and waits for it.
    """
    if AWAITED:
        gdc_launch_dependents()
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    length = tl.load(p_counters)
    packed_end = tl.load(p_counters + 1)
    packed_end += tl.maximum(length + n - packed_end - window, 0) // PAGE * PAGE
    to_ring = i < tail
    slot = tl.where(to_ring, 0, i - tail)
    position = tl.where(to_ring, length + n - tail + i, tl.load(p_row_start + i_b) + slot)
    to_sink = (slot < sinks) & (position >= length) & (position < length + n)
    live = tl.where(to_ring, position >= packed_end, to_sink)
    index = (position - length).to(tl.int64)
    head = (i_b * tl.num_programs(1) + i_h).to(tl.int64)
    ring = head * (window + PAGE) + position % (window + PAGE)
    sink = head * sinks + slot
    d = tl.arange(0, KEY_BLOCK)
    key_mask = live[:, None] & (d < KEY_DIM)[None, :]
    p_new = p_key + (i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh + index * stride_kt)
    key = tl.load(p_new[:, None] + d[None, :], mask=key_mask)  # [ROWS, KEY_BLOCK]
    p_keys = row_pointers(to_ring, p_ring_key + ring * KEY_DIM, p_sink_key + sink * KEY_DIM, d)
    d = tl.arange(0, VALUE_BLOCK)
    value_mask = live[:, None] & (d < VALUE_DIM)[None, :]
    p_new = p_value + (i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh + index * stride_vt)
    value = tl.load(p_new[:, None] + d[None, :], mask=value_mask)  # [ROWS, VALUE_BLOCK]
    p_values = row_pointers(to_ring, p_ring_value + ring * VALUE_DIM, p_sink_value + sink * VALUE_DIM, d)
    if CHAINED:
        gdc_wait()
    tl.store(p_keys, key, mask=key_mask)
    tl.store(p_values, value, mask=value_mask)


@triton.jit(do_not_specialize=["n", "window"])
def advance_counters(p_counters, n, window, PAGE: tl.constexpr, CHAINED: tl.constexpr):
    """One program, after every kernel that reads the old counters; it may start before these have finished if CHAINED."""
    length = tl.load(p_counters) + n
    packed_end = tl.load(p_counters + 1)
    entries = tl.load(p_counters + 2)
    due = tl.maximum(length - packed_end - window, 0) // PAGE
    if CHAINED:
        gdc_wait()
    tl.store(p_counters, length)
    tl.store(p_counters + 1, packed_end + due * PAGE)
    tl.store(p_counters + 2, entries + due)


@triton.jit(do_not_specialize=["vectors", "heads", "window", "sinks"])
def append_token(
    p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start, p_counters,
    vectors, heads, window, sinks, stride_kb, stride_kh, stride_vb, stride_vh,
    PAGE: tl.constexpr, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VECTORS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program, which appends a single token of all rows and heads, `vectors` of them, and then advances the counters:
    a decode step is a launch less so.

    Args:
        CHAINED: as of `append_tokens`.
    """
    i = tl.arange(0, VECTORS)
    inside = i < vectors
    i_b, i_h = (i // heads).to(tl.int64), (i % heads).to(tl.int64)
    length = tl.load(p_counters)
    packed_end = tl.load(p_counters + 1)
    entries = tl.load(p_counters + 2)
    due = tl.maximum(length + 1 - packed_end - window, 0) // PAGE
    packed_end += due * PAGE
    slot = length - tl.load(p_row_start + i_b, mask=inside, other=0)
    to_ring = inside & (length >= packed_end)
    to_sink = inside & (slot >= 0) & (slot < sinks)
    ring = i.to(tl.int64) * (window + PAGE) + length % (window + PAGE)
    sink = i.to(tl.int64) * sinks + slot
    d = tl.arange(0, KEY_BLOCK)
    mask = (d < KEY_DIM)[None, :]
    key = tl.load((p_key + i_b * stride_kb + i_h * stride_kh)[:, None] + d[None, :], mask=inside[:, None] & mask)
    e = tl.arange(0, VALUE_BLOCK)
    value_mask = (e < VALUE_DIM)[None, :]
    value = tl.load((p_value + i_b * stride_vb + i_h * stride_vh)[:, None] + e[None, :], mask=inside[:, None] & value_mask)
    if CHAINED:
        gdc_wait()
    tl.store((p_ring_key + ring * KEY_DIM)[:, None] + d[None, :], key, mask=to_ring[:, None] & mask)
    tl.store((p_sink_key + sink * KEY_DIM)[:, None] + d[None, :], key, mask=to_sink[:, None] & mask)
    tl.store((p_ring_value + ring * VALUE_DIM)[:, None] + e[None, :], value, mask=to_ring[:, None] & value_mask)
    tl.store((p_sink_value + sink * VALUE_DIM)[:, None] + e[None, :], value, mask=to_sink[:, None] & value_mask)
    tl.debug_barrier()  # until all threads have read the counters
    tl.store(p_counters, length + 1)
    tl.store(p_counters + 1, packed_end)
    tl.store(p_counters + 2, entries + due)


def append_calls(
    key_shape: tuple[int, ...],
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    value_dim: int,
    dtype: torch.dtype,
    sinks: int,
    page_size: int,
    recent_window: int,
    after_packing: bool,
    overlap: bool,
) -> tuple[Call, Call | None]:
    """Steps 2 and 3 of `commit.commit`: one call for its `key`, `value`, rings, sinks, `row_start` and `counters`, and one
    for its `counters`, unless the first does that too.

    Args:
        after_packing: whether step 1 was launched.
        overlap: whether a step may start before the one ahead of it has finished.
    """
    batch, heads, n, key_dim = key_shape
    chained = after_packing and overlap
    dtypes = (*[dtype] * 6, torch.int32, torch.int32)
    sizes = {"PAGE": page_size, "KEY_DIM": key_dim, "KEY_BLOCK": block_dim(key_dim), "VALUE_DIM": value_dim,
             "VALUE_BLOCK": block_dim(value_dim)}  # fmt: skip
    vectors = power_of_two(batch * heads)
    if n == 1 and vectors * max(sizes["KEY_BLOCK"], sizes["VALUE_BLOCK"]) <= ALONE:
        both = prepared(
            append_token, (1,), EARLY if chained else USUAL, dtypes,
            (batch * heads, heads, recent_window, sinks, *key_strides[:2], *value_strides[:2]),
            **sizes, VECTORS=vectors, CHAINED=chained,
        )  # fmt: skip
        return both, None
    tail = min(n, recent_window + page_size)
    rows = 8 if tail + sinks <= 8 else 16
    append = prepared(
        append_tokens, (cdiv(tail + sinks, rows), heads, batch), EARLY if chained else USUAL, dtypes,
        (n, tail, recent_window, sinks, *key_strides[:3], *value_strides[:3]),
        **sizes, ROWS=rows, CHAINED=chained, AWAITED=overlap,
    )  # fmt: skip
    advance = prepared(
        advance_counters, (1,), EARLY if overlap else USUAL, (torch.int32,), (n, recent_window), PAGE=page_size,
        CHAINED=overlap,
    )  # fmt: skip
    return append, advance
