"""What a commit does besides packing: new tokens go into the ring and the sinks, then the counters advance."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .lanes import block_dim, row_pointers
from .launch import cdiv, launch

USUAL: dict[str, Any] = {"num_warps": 4}
EARLY: dict[str, Any] = USUAL | {"launch_pdl": True}  # it may start before the kernel ahead of it has finished


@triton.jit(do_not_specialize=["n", "tail", "window", "sinks"])
def append_tokens(
    p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start, p_counters,
    n, tail, window, sinks, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    PAGE: tl.constexpr, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr, AFTER_PACKING: tl.constexpr, AWAITED: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(tail + sinks, ROWS), H, B): the last `tail` new tokens, which may stay in the ring, then the sink slots.

    Args:
        AFTER_PACKING: whether this kernel may start before `store.pack_pages` has read the ring.
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
    if AFTER_PACKING:
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


def launch_append_tokens(
    key: Tensor,
    value: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    row_start: Tensor,
    counters: Tensor,
    page_size: int,
    recent_window: int,
    after_packing: bool,
    overlap: bool,
) -> None:
    """Step 2 of `commit.commit`, whose arguments these are; all but `key` and `value` contiguous.

    Args:
        after_packing: whether step 1 was launched.
        overlap: whether a step may start before the one ahead of it has finished.
    """
    _, heads, n, key_dim = key.shape
    value_dim = value.shape[-1]
    sinks = sink_key.shape[2]
    tail = min(n, recent_window + page_size)
    rows = 8 if tail + sinks <= 8 else 16
    chained = after_packing and overlap
    launch(
        append_tokens, (cdiv(tail + sinks, rows), heads, key.shape[0]), EARLY if chained else USUAL,
        (key, value, ring_key, ring_value, sink_key, sink_value, row_start, counters,
         n, tail, recent_window, sinks, *key.stride()[:3], *value.stride()[:3]),
        PAGE=page_size, KEY_DIM=key_dim, KEY_BLOCK=block_dim(key_dim), VALUE_DIM=value_dim,
        VALUE_BLOCK=block_dim(value_dim), ROWS=rows, AFTER_PACKING=chained, AWAITED=overlap,
    )  # fmt: skip


def launch_advance_counters(counters: Tensor, n: int, page_size: int, recent_window: int, overlap: bool) -> None:
    """Step 3 of `commit.commit`."""
    launch(
        advance_counters, (1,), EARLY if overlap else USUAL, (counters, n, recent_window), PAGE=page_size, CHAINED=overlap
    )  # fmt: skip
