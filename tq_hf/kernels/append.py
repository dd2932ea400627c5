"""What a commit does besides packing: new tokens go into the ring and the sinks, then the counters advance."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .lanes import block_dim, row_pointers
from .launch import cdiv, launch


@triton.jit(do_not_specialize=["n", "tail", "window", "sinks"])
def append_tokens(
    p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start, p_counters,
    n, tail, window, sinks, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    PAGE: tl.constexpr, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(tail + sinks, ROWS), H, B): the last `tail` new tokens, which may stay in the ring, then the sink slots."""
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
    mask = live[:, None] & (d < KEY_DIM)[None, :]
    p_new = p_key + (i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh + index * stride_kt)
    b_key = tl.load(p_new[:, None] + d[None, :], mask=mask)  # [ROWS, KEY_BLOCK]
    p_exact = row_pointers(to_ring, p_ring_key + ring * KEY_DIM, p_sink_key + sink * KEY_DIM, d)
    tl.store(p_exact, b_key, mask=mask)
    d = tl.arange(0, VALUE_BLOCK)
    mask = live[:, None] & (d < VALUE_DIM)[None, :]
    p_new = p_value + (i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh + index * stride_vt)
    b_value = tl.load(p_new[:, None] + d[None, :], mask=mask)  # [ROWS, VALUE_BLOCK]
    p_exact = row_pointers(to_ring, p_ring_value + ring * VALUE_DIM, p_sink_value + sink * VALUE_DIM, d)
    tl.store(p_exact, b_value, mask=mask)


@triton.jit(do_not_specialize=["n", "window"])
def advance_counters(p_counters, n, window, PAGE: tl.constexpr):
    """One program, after every kernel that reads the old counters."""
    length = tl.load(p_counters) + n
    packed_end = tl.load(p_counters + 1)
    due = tl.maximum(length - packed_end - window, 0) // PAGE
    tl.store(p_counters, length)
    tl.store(p_counters + 1, packed_end + due * PAGE)
    tl.store(p_counters + 2, tl.load(p_counters + 2) + due)


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
) -> None:
    """Step 2 of `commit.commit`, whose arguments these are; all but `key` and `value` contiguous."""
    batch, heads, n, key_dim = key.shape
    value_dim = value.shape[-1]
    sinks = sink_key.shape[2]
    tail = min(n, recent_window + page_size)
    rows = 8 if tail + sinks <= 8 else 16
    launch(
        append_tokens, (cdiv(tail + sinks, rows), heads, batch), {"num_warps": 4},
        (key, value, ring_key, ring_value, sink_key, sink_value, row_start, counters,
         n, tail, recent_window, sinks, *key.stride()[:3], *value.stride()[:3]),
        PAGE=page_size, KEY_DIM=key_dim, KEY_BLOCK=block_dim(key_dim), VALUE_DIM=value_dim,
        VALUE_BLOCK=block_dim(value_dim), ROWS=rows,
    )  # fmt: skip


def launch_advance_counters(counters: Tensor, n: int, page_size: int, recent_window: int) -> None:
    """Step 3 of `commit.commit`."""
    launch(advance_counters, (1,), {"num_warps": 1}, (counters, n, recent_window), PAGE=page_size)
