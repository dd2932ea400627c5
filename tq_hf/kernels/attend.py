"""Attention over a packed layer: queries and pages are prepared, packed pages and exact tokens attended to, the results
combined. `schedule.py` says how."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..layout import padded_dim
from .combine_and_append import joined
from .commit import calls_behind_packing
from .lanes import on_device
from .launch import Call, Chain
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
    recent_window: int | None = None,
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
        recent_window: commits the new token (n = 1), which makes no page due, behind attention; None commits nothing.

    Returns:
        [B, q, Hq, Dv] in the query's dtype; zeros for a query that has nothing to attend to.
    """
    batch, query_heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, query_heads, value.shape[3])
    if out.numel() == 0:
        return out
    if pool.shape[0] == 0:
        max_entries = 0  # entries without a page, of padding: nothing is there to be read
    dtype, device = ring_key.dtype, query.device
    query, query_strides = _vectors(query, dtype)
    key, key_strides = _vectors(key, dtype)
    value, value_strides = _vectors(value, dtype)
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    mask_strides = None if mask is None else _steps(mask)
    alike = (
        layout, key.shape, key_strides, value_strides, ring_value.shape, sink_key.shape[2], page_ids.stride(0), dtype,
        None if aux_sinks is None else aux_sinks.dtype, out.dtype, device, max_entries, scaling, softcap, causal,
        balance is not None,
    )  # fmt: skip
    given = (key, value, pool, ring_key, ring_value, sink_key, sink_value, page_ids, entries, row_start, counters)
    with on_device(device):
        if queries <= QUERIES:
            run = calls(query.shape, query_strides, 0, queries, mask_strides, *alike, recent_window)
            run(query, given, balance, mask, aux_sinks, out)
            return out
        step = min(queries, _queries_at_once(batch * query_heads, value.shape[3]))
        for start in range(0, queries, step):
            part = slice(start, start + step)
            some, seen = query[:, :, part], mask if mask is None or mask.shape[2] == 1 else mask[:, :, part]
            behind = recent_window if start + step >= queries else None  # once all have read the state
            run = calls(some.shape, query_strides, start, queries, mask_strides, *alike, behind)
            run(some, given, balance, seen, aux_sinks, out[:, part])
    return out


# What is handed to a chain, in this order; tensors of `OPTIONAL` may be missing.
NEW = ("query", "key", "value", "ring_key", "ring_value", "sink_key", "sink_value")
TENSORS = ("query", "key", "value", "pool", *NEW[3:], "page_ids", "entries", "row_start", "counters", "work", "out")
OPTIONAL = ("balance", "mask", "aux_sinks", "query_signs", "tables", "value_signs")
# What each of them takes.
PREPARE = ("query", "pool", "page_ids", "entries", "row_start", "counters", "balance", "mask", "query_signs", "work")
EXACT = (*NEW, "row_start", "counters", "mask", "work")
DECODE = (*NEW, "pool", "tables", "page_ids", "row_start", "counters", "mask", "work")
COMBINE = ("work", "value_signs", "aux_sinks", "row_start", "counters", "out")
APPEND = (*NEW[1:], "row_start", "counters")
COMBINE_AND_APPEND = ("work", "value_signs", "aux_sinks", "out", *APPEND)
ADVANCE = ("counters",)


@dataclass(frozen=True, slots=True)
class Chained:
    """The kernels of a call whose pages, if there are any, the decode kernel reads, with their numbers, by `plan`: for calls
    of the same shapes and strides, those of all layers, and of the steps until a page falls due."""

    plan: Schedule
    chain: Chain

    def __call__(
        self, query: Tensor, given: tuple[Tensor, ...], balance: Tensor | None, mask: Tensor | None,
        aux_sinks: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        """`attend` into `out` [B, q, Hq, Dv]. `given`: what all parts of a call's queries read, in `TENSORS`' order."""
        plan = self.plan
        work = torch.empty(plan.floats, dtype=torch.float32, device=out.device)
        optional = (balance, mask, aux_sinks, plan.query_signs, plan.tables, plan.value_signs)
        self.chain(query, *given, work, out, *[tensor for tensor in optional if tensor is not None])


@dataclass(frozen=True, slots=True)
class Apart:
    """The same for a call whose pages another kernel reads, which takes sections of the workspace as tensors."""

    plan: Schedule
    max_entries: int
    prepare: Call
    rotate_means: Call | None
    exact: Call
    pages: Call  # extend or packed
    combine: Call
    after: Chain | None  # over what all parts read

    def __call__(
        self, query: Tensor, given: tuple[Tensor, ...], balance: Tensor | None, mask: Tensor | None,
        aux_sinks: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        key, value, pool, ring_key, ring_value, sink_key, sink_value, page_ids, entries, row_start, counters = given
        plan, rows = self.plan, key.shape[0] * key.shape[1]
        work = torch.empty(plan.floats, dtype=torch.float32, device=out.device)
        self.prepare(query, pool, page_ids, entries, row_start, counters, balance, mask, plan.query_signs, work)
        means = centre = None
        if self.rotate_means is not None:
            means = view(work, plan.means_at, (rows, self.max_entries, padded_dim(query.shape[3])), torch.float16)
            centre = view(work, plan.centre_at, (rows, query.shape[3]), torch.float32)
            self.rotate_means(pool, page_ids, counters, balance, plan.means_signs, means, centre)
        self.exact(query, key, value, ring_key, ring_value, sink_key, sink_value, row_start, counters, mask, work)
        shape = (rows, plan.columns, padded_dim(query.shape[3]))
        rotated = view(work, plan.rotated_at, shape, plan.query_dtype)
        factor = view(work, plan.factor_at, shape[:2], torch.float32)
        stats = view(work, plan.stats_at, (plan.factor_at - plan.stats_at, 4), torch.float32)
        if plan.extend is not None:
            words = None if means is None else means.view(torch.int64)
            self.pages(
                query, rotated, factor, pool, plan.tables, words, centre, page_ids, entries, row_start, counters, mask,
                work, stats,
            )  # fmt: skip
        else:
            plain = view(work, plan.plain_at, shape, torch.float16) if plan.plain_at else None
            self.pages(rotated, plain, factor, pool, plan.tables, page_ids, entries, row_start, counters, mask, work, stats)
        self.combine(work, plan.value_signs, aux_sinks, row_start, counters, out)
        if self.after is not None:
            self.after(*given)


@lru_cache(maxsize=4096)
def calls(
    query_shape: tuple[int, ...],
    query_strides: tuple[int, ...],
    first: int,
    total: int,
    mask_strides: tuple[int, int, int] | None,
    layout: str,
    key_shape: tuple[int, ...],
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    ring_shape: tuple[int, ...],
    sinks: int,
    table_stride: int,
    dtype: torch.dtype,
    aux_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    device: torch.device,
    max_entries: int,
    scaling: float,
    softcap: float,
    causal: bool,
    is_balanced: bool,
    recent_window: int | None,
) -> Chained | Apart:
    """The kernels for a part of the `total` queries of a call, from the `first` one on; see `attend`."""
    batch, query_heads, queries, _ = query_shape
    _, heads, ring_slots, value_dim = ring_shape
    group, new = query_heads // heads, key_shape[2]
    early = total - first  # queries from here to the end
    mask_b, mask_q, mask_k = mask_strides or (0, 0, 0)
    plan = schedule(
        layout, batch, heads, group, queries, new, ring_slots, sinks, dtype, aux_dtype, out_dtype, device, max_entries,
        scaling > 0, mask_q > 0, causal and early > 1, causal and early - new > 1,
    )  # fmt: skip
    columns, offset = plan.columns, new - early
    scaling, cap = float(scaling), float(softcap) if softcap > 0 else None
    queries_at, tokens_at = query_strides[:3], (*key_strides[:3], *value_strides[:3])
    prepare = rotate_means = exact = decode = None
    if plan.prepare is not None:
        prepare = plan.prepare(
            batch * heads, heads, columns, group, sinks, table_stride, max_entries, *queries_at, mask_b, mask_k,
            plan.factor_at, plan.rotated_at, plan.plain_at, plan.kept_at, plan.means_at, plan.plans, scaling, cap,
        )  # fmt: skip
    if plan.exact is not None:
        exact = plan.exact(
            heads, columns, group, new, ring_slots, sinks, plan.exact_splits, heads * plan.slots, offset, plan.stats_at,
            *queries_at, *tokens_at, mask_b, mask_q, mask_k, scaling, cap,
        )  # fmt: skip
    if plan.decode is not None:
        decode = plan.decode(
            batch, columns, group, new, ring_slots, sinks, plan.exact_splits, plan.tail_programs, offset, table_stride,
            max_entries, *queries_at, *tokens_at, mask_b, mask_k, plan.stats_at, plan.factor_at, plan.rotated_at,
            plan.kept_at, plan.means_at, plan.key_step, plan.value_step, scaling, cap,
        )  # fmt: skip
    combine = plan.combine(
        batch, heads, columns, group, plan.slots, plan.even_splits, plan.exact_splits, plan.stats_at,
        total * query_heads * value_dim, query_heads * value_dim,
    )  # fmt: skip
    behind: tuple[tuple[Call | None, tuple[str, ...]], ...] = ()
    both = None
    if recent_window is not None:
        append, advance = calls_behind_packing(
            layout, key_shape, key_strides, value_strides, value_dim, dtype, device, sinks, recent_window, False
        )
        behind = (append, APPEND), (advance, ADVANCE)
        both = joined(combine, append)
    if plan.extend is None and plan.packed is None:
        signs = (plan.query_signs, plan.tables, plan.value_signs)
        are_there = (is_balanced, mask_strides is not None, aux_dtype is not None, *(each is not None for each in signs))
        names = (*TENSORS, *(name for name, is_there in zip(OPTIONAL, are_there) if is_there))
        end = ((combine, COMBINE), *behind) if both is None else ((both, COMBINE_AND_APPEND),)
        return Chained(plan, _chain(names, (prepare, PREPARE), (exact, EXACT), (decode, DECODE), *end))
    exponent = None if cap is None else cap * LOG2_E
    if plan.extend is not None:
        pages = plan.extend(
            heads, columns, table_stride, max_entries, sinks, group, offset, *queries_at, mask_b, mask_q, mask_k, scaling,
            exponent,
        )  # fmt: skip
    else:
        assert plan.packed is not None
        pages = plan.packed(heads, columns, table_stride, sinks, group, offset, mask_b, mask_q, mask_k, exponent)
    if plan.rotate_means is not None:
        rotate_means = plan.rotate_means(heads, table_stride, max_entries)
    assert prepare is not None and exact is not None
    after = _chain(TENSORS[1:-2], *behind) if behind else None
    return Apart(plan, max_entries, prepare, rotate_means, exact, pages, combine, after)


def _chain(names: tuple[str, ...], *kernels: tuple[Call | None, tuple[str, ...]]) -> Chain:
    """A chain over tensors of these names, of those calls that there are, each with the names of what it takes."""
    places: dict[str, int | None] = dict.fromkeys(OPTIONAL) | {name: i for i, name in enumerate(names)}
    return Chain([(call, [places[name] for name in takes]) for call, takes in kernels if call is not None])


def _steps(mask: Tensor) -> tuple[int, int, int]:
    """From a row, a query and a position of a mask [B or 1, 1, q or 1, kv] to the next; 0 where all share one."""
    rows, _, queries, positions = mask.shape
    by_row, _, by_query, by_position = mask.stride()
    return by_row if rows > 1 else 0, by_query if queries > 1 else 0, by_position if positions > 1 else 0


def _vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[int, ...]]:
    """`x` in the cache's dtype with contiguous vectors, and its strides."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    strides = x.stride()
    if strides[-1] != 1:
        x = x.contiguous()
        strides = x.stride()
    return x, strides


def _queries_at_once(heads: int, value_dim: int) -> int:
    """How many queries' partial results fit `WORKSPACE`: so many queries leave few splits, at most one wave of programs."""
    return max(QUERIES, WORKSPACE // (4 * heads * 2 * (padded_dim(value_dim) + value_dim)))
