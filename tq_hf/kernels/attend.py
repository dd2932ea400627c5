"""Attention over a packed layer: queries and pages are prepared, packed pages and exact tokens attended to, the results
combined. `schedule.py` says how."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import padded_dim
from .lanes import on_device
from .schedule import Schedule, schedule
from .workspace import view

WORKSPACE = 1 << 26  # bytes that partial results may take, before a chunk of queries goes in pieces
QUERIES = 64  # that go at once in any case
LOG2_E = 1.4426950408889634


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    page_ids: Tensor,
    entries: Tensor,
    row_start: Tensor,
    counters: Tensor,
    balance: Tensor | None,
    mask: Tensor | None,
    aux_sinks: Tensor | None,
    layout: str,
    scaling: float,
    softcap: float,
    causal: bool,
    max_entries: int,
) -> Tensor:
    """Attend to everything committed and to the new tokens `key` and `value`. The state is described in `tq_hf.ops`.

    Nothing is read back from the device, and grids depend on shapes and `max_entries` only, so that CUDA graphs can
    capture it. A product of 16-bit operands sums in fp32; fp32 models are multiplied as three TF32 products each.

    Args:
        query: [B, Hq, q, D], Hq a multiple of H; query i stands at position length + n - q + i.
        key, value: [B, H, n, D] and [B, H, n, Dv], not committed yet; n may be 0.
        mask: bool or uint8 [B or 1, 1, q or 1, >= length + n], nonzero to keep; None keeps all.
        aux_sinks: [Hq], logits that take part in the softmax without a value, or None.
        layout: `PageLayout.name`.
        scaling: factor of the scores.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
        causal: whether a query sees no position after its own.
        max_entries: upper bound of the entries in use.

    Returns:
        [B, q, Hq, Dv] in the query's dtype; zeros for a query that has nothing to attend to.
    """
    batch, query_heads, queries, _ = query.shape
    _, heads, ring_slots, value_dim = ring_value.shape
    out = query.new_empty(batch, queries, query_heads, value_dim)
    if out.numel() == 0:
        return out
    if pool.shape[0] == 0:
        max_entries = 0  # entries without a page, of padding: nothing is there to be read
    dtype, device, new, sinks = ring_key.dtype, query.device, key.shape[2], sink_key.shape[2]
    query, key, value = _vectors(query, dtype), _vectors(key, dtype), _vectors(value, dtype)
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    per_query = mask is not None and mask.shape[2] > 1
    aux_dtype = None if aux_sinks is None else aux_sinks.dtype
    step = queries
    if queries > QUERIES:
        step = min(queries, _queries_at_once(batch * query_heads, value_dim))
    with on_device(device):
        for start in range(0, queries, step):
            count = min(step, queries - start)
            part = slice(start, start + count)
            plan = schedule(
                layout, batch, heads, query_heads // heads, count, new, ring_slots, sinks, dtype, aux_dtype, out.dtype,
                device, max_entries, scaling > 0, per_query, causal and queries > 1, causal and queries - new > 1,
            )  # fmt: skip
            _attend(
                plan,
                query if count == queries else query[:, :, part],
                key,
                value,
                pool,
                (ring_key, ring_value, sink_key, sink_value),
                page_ids,
                entries,
                row_start,
                counters,
                balance,
                mask[:, :, part] if mask is not None and per_query else mask,
                aux_sinks,
                out if count == queries else out[:, part],
                float(scaling),
                float(softcap) if softcap > 0 else None,
                new - queries + start,
                max_entries,
            )
    return out


def _attend(
    plan: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    page_ids: Tensor,
    entries: Tensor,
    row_start: Tensor,
    counters: Tensor,
    balance: Tensor | None,
    mask: Tensor | None,
    aux_sinks: Tensor | None,
    out: Tensor,
    scaling: float,
    softcap: float | None,
    query_offset: int,
    max_entries: int,
) -> None:
    """`attend` for a part of the queries, the first of which stands at position length + query_offset."""
    batch, heads, ring_slots, _ = kept[0].shape
    columns, group, new, sinks = plan.columns, query.shape[1] // heads, key.shape[2], kept[2].shape[2]
    query_strides = query.stride()[:3]
    token_strides = (*key.stride()[:3], *value.stride()[:3])
    mask_b = mask_q = mask_k = 0
    if mask is not None:
        mask_b, mask_q, mask_k = (mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 2, 3))
    work = torch.empty(plan.floats, dtype=torch.float32, device=query.device)
    if plan.prepare is not None:
        plan.prepare(
            (query, pool, page_ids, entries, row_start, counters, balance, mask, plan.query_signs, work),
            (batch * heads, heads, columns, group, sinks, page_ids.stride(0), max_entries, *query_strides, mask_b, mask_k,
             plan.factor_at, plan.rotated_at, plan.plain_at, plan.kept_at, plan.means_at, plan.plans, scaling, softcap),
        )  # fmt: skip
    means = centre = None
    if plan.rotate_means is not None:
        means = view(work, plan.means_at, (batch * heads, max_entries, padded_dim(query.shape[3])), torch.float16)
        centre = view(work, plan.centre_at, (batch * heads, query.shape[3]), torch.float32)
        plan.rotate_means(
            (pool, page_ids, counters, balance, plan.means_signs, means, centre),
            (heads, page_ids.stride(0), max_entries),
        )  # fmt: skip
    if plan.exact is not None:
        plan.exact(
            (query, key, value, *kept, row_start, counters, mask, work),
            (heads, columns, group, new, ring_slots, sinks, plan.exact_splits, heads * plan.slots, query_offset,
             plan.stats_at, *query_strides, *token_strides, mask_b, mask_q, mask_k, scaling, softcap),
        )  # fmt: skip
    if plan.decode is not None:
        plan.decode(
            (query, key, value, *kept, pool, plan.tables, page_ids, row_start, counters, mask, work),
            (batch, columns, group, new, ring_slots, sinks, plan.exact_splits, plan.tail_programs, query_offset,
             page_ids.stride(0), max_entries, *query_strides, *token_strides, mask_b, mask_k, plan.stats_at, plan.factor_at,
             plan.rotated_at, plan.kept_at, plan.means_at, plan.key_step, plan.value_step, scaling, softcap),
        )  # fmt: skip
    elif plan.extend is not None or plan.packed is not None:
        shape = (batch * heads, columns, padded_dim(query.shape[3]))
        rotated = view(work, plan.rotated_at, shape, plan.query_dtype)
        factor = view(work, plan.factor_at, shape[:2], torch.float32)
        stats = view(work, plan.stats_at, (plan.factor_at - plan.stats_at, 4), torch.float32)
        exponent = None if softcap is None else softcap * LOG2_E
        if plan.extend is not None:
            words = None if means is None else means.view(torch.int64)
            plan.extend(
                (query, rotated, factor, pool, plan.tables, words, centre, page_ids, entries, row_start, counters, mask,
                 work, stats),
                (heads, columns, page_ids.stride(0), max_entries, sinks, group, query_offset, *query_strides, mask_b, mask_q,
                 mask_k, scaling, exponent),
            )  # fmt: skip
        elif plan.packed is not None:
            plain = view(work, plan.plain_at, shape, torch.float16) if plan.plain_at else None
            plan.packed(
                (rotated, plain, factor, pool, plan.tables, page_ids, entries, row_start, counters, mask, work, stats),
                (heads, columns, page_ids.stride(0), sinks, group, query_offset, mask_b, mask_q, mask_k, exponent),
            )  # fmt: skip
    plan.combine(
        (work, plan.value_signs, aux_sinks, row_start, counters, out),
        (batch, heads, columns, group, plan.slots, plan.even_splits, plan.exact_splits, plan.stats_at, out.stride(0),
         out.stride(1)),
    )  # fmt: skip


def _vectors(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the cache's dtype with contiguous vectors."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _queries_at_once(heads: int, value_dim: int) -> int:
    """How many queries' partial results fit `WORKSPACE`: so many queries leave few splits, at most one wave of programs."""
    return max(QUERIES, WORKSPACE // (4 * heads * 2 * (padded_dim(value_dim) + value_dim)))
