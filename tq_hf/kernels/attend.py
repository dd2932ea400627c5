"""Launches attention over a packed layer: exact tokens and query preparation, packed pages, combination."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import PageLayout
from ..rotation import hadamard_signs
from .combine import combine
from .dequant import level_tables, page_spec
from .exact import attend_exact
from .packed import WEIGHT, attend_packed

# Programs of the packed kernel that the registers of a multiprocessor hold, by columns: 125 to 170 registers for 8 columns
# and dimensions up to 192, at most 215 for 256 (the wide ones), up to 245 for 16 columns.
PROGRAMS_PER_SM = {8: 12, 16: 8}
PROGRAMS_PER_SM_WIDE = 9
BUFFER_BYTES = 1 << 14  # groups larger than this are buffered once, not twice
MIN_GROUPS = 3  # groups a split should have, to be worth its partial result
WORKSPACE = 1 << 26  # bytes that partial results may take, before a chunk of queries goes in pieces
_TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


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
    page = PageLayout.from_name(layout)
    batch, query_heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, query_heads, page.value_dim)
    if out.numel() == 0:
        return out
    new = key.shape[2]
    dtype, key_heads = ring_key.dtype, ring_key.shape[1]
    query, key, value = (_vectors(x, dtype) for x in (query, key, value))
    state = (ring_key, ring_value, sink_key, sink_value, row_start, counters, balance)
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    step = _queries_at_once(batch * query_heads, page)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        for start in range(0, queries, step):
            part = slice(start, min(start + step, queries))
            _attend(
                query[:, :, part],
                key,
                value,
                pool,
                state,
                page_ids,
                entries,
                mask if mask is None or mask.shape[2] == 1 else mask[:, :, part],
                aux_sinks,
                out[:, part],
                page,
                scaling,
                softcap if softcap > 0 else None,
                causal and queries > 1,
                causal and queries - new > 1,
                new - queries + start,
                max_entries,
                query_heads // key_heads,
            )
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    state: tuple[Any, ...],
    page_ids: Tensor,
    entries: Tensor,
    mask: Tensor | None,
    aux_sinks: Tensor | None,
    out: Tensor,
    page: PageLayout,
    scaling: float,
    softcap: float | None,
    causal: bool,
    causal_pages: bool,
    query_offset: int,
    max_entries: int,
    group: int,
) -> None:
    """`attend` for a part of the queries, the first of which stands at position length + query_offset."""
    ring_key, ring_value, sink_key, sink_value, row_start, counters, balance = state
    batch, heads, slots, _ = ring_key.shape
    device, rows = query.device, batch * heads
    columns, new, sinks = query.shape[2] * group, key.shape[2], sink_key.shape[2]
    packed = max_entries > 0

    block = _columns(columns, page)
    splits = _packed_splits(rows, columns, page, max_entries, device) if packed else 0
    exact_block, tokens, warps = _exact_tile(columns, page, query.dtype)
    blocks = triton.cdiv(sinks, tokens) + triton.cdiv(slots, tokens) + triton.cdiv(new, tokens)
    exact_splits = max(
        1, min(4 * _properties(device).multi_processor_count // (rows * triton.cdiv(columns, exact_block)), blocks)
    )
    sizes = (splits * page.value_dim_padded, splits * 2, exact_splits * page.value_dim, exact_splits * 2, 1)
    floats = [triton.cdiv(rows * columns * size, 4) * 4 for size in sizes]  # whole 16 bytes: all pointers stay aligned
    workspace = torch.empty(sum(floats), dtype=torch.float32, device=device)
    p_output, p_stats, p_exact, p_exact_stats, p_factor = workspace.split(floats)
    p_rotated = p_plain = p_signs = None
    if packed:
        raw = page.key_format == "raw"
        shape = (rows, columns, page.key_dim_padded)
        p_rotated = torch.empty(shape, dtype=query.dtype if raw else torch.float16, device=device)
        p_plain = torch.empty(shape, dtype=torch.float16, device=device) if page.center_keys else None
        if page.rotates_keys:
            p_signs = _signs(page.key_dim_padded, device)

    per_query = mask is not None and mask.shape[2] > 1
    mask_strides = (0, 0, 0) if mask is None else tuple(mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 2, 3))
    attend_exact[(rows, exact_splits + packed, triton.cdiv(columns, exact_block))](
        query, key, value, ring_key, ring_value, sink_key, sink_value, row_start, counters, balance, mask,
        p_signs, p_rotated, p_plain, p_factor, p_exact, p_exact_stats,
        heads, columns, group, new, slots, sinks, exact_splits, query_offset, *query.stride()[:3], *key.stride()[:3],
        *value.stride()[:3], *mask_strides, scaling, softcap,
        KEY_DIM=page.key_dim, KEY_PADDED=page.key_dim_padded, KEY_BLOCK=triton.next_power_of_2(page.key_dim_padded),
        FP8=page.key_format == "fp8", VALUE_DIM=page.value_dim, VALUE_BLOCK=triton.next_power_of_2(page.value_dim_padded),
        ROWS=exact_block, TOKENS=tokens, PER_QUERY=per_query, CAUSAL=causal, STAGES=4 // query.dtype.itemsize,
        num_warps=warps,
    )  # fmt: skip
    if packed:
        attend_packed[(rows, splits, triton.cdiv(columns, block))](
            p_rotated, p_plain, p_factor, pool, level_tables(page, device), page_ids, entries, row_start, counters, mask,
            p_output, p_stats, heads, columns, page_ids.stride(0), sinks, group, query_offset, *mask_strides,
            None if softcap is None else softcap * 1.4426950408889634,
            L=page_spec(page), COLUMNS=block,
            VALUE_DTYPE=_TRITON_DTYPES[ring_value.dtype] if page.value_format == "raw" else tl.float16,
            PER_QUERY=per_query, CAUSAL=causal_pages, STAGES=1 + 2 * _buffers(page), num_warps=1,
        )  # fmt: skip
    combine_rows = 1 if columns <= 16 else 16
    value_block = triton.next_power_of_2(page.value_dim_padded)
    combine[(rows, triton.cdiv(columns, combine_rows))](
        p_output if packed else None, p_stats, p_exact, p_exact_stats,
        _signs(page.value_dim_padded, device) if packed and page.rotates_values else None,
        aux_sinks, out, heads, columns, group, splits, exact_splits, out.stride(0), out.stride(1), WEIGHT.value,
        DIM=page.value_dim, PADDED=page.value_dim_padded, BLOCK=value_block, ROWS=combine_rows,
        SPLITS=64 // combine_rows, STEP=min(128, value_block), num_warps=8,
    )  # fmt: skip


def _vectors(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the cache's dtype with contiguous vectors."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _columns(columns: int, page: PageLayout) -> int:
    """Columns of a program of the packed kernel: 16 where they fit the registers."""
    return 16 if columns > 8 and page.key_dim_padded + page.value_dim_padded <= 320 else 8


def _packed_splits(rows: int, columns: int, page: PageLayout, max_entries: int, device: torch.device) -> int:
    """Splits of each row's pages: one wave of programs, but none with too little to do."""
    block = _columns(columns, page)
    wide = page.key_dim_padded + page.value_dim_padded > 384
    shared_memory = _buffers(page) * _buffer_bytes(page) + 1024
    programs = min(
        PROGRAMS_PER_SM_WIDE if wide else PROGRAMS_PER_SM[block],
        _properties(device).shared_memory_per_multiprocessor // shared_memory,
    )
    wave = programs * _properties(device).multi_processor_count // (rows * triton.cdiv(columns, block))
    return max(1, min(wave, max_entries * page.groups // MIN_GROUPS))


def _buffer_bytes(page: PageLayout) -> int:
    """Shared memory for a group, the page mean and the metadata being spread over all lanes."""
    spread = (page.key_dim_padded // 32 if page.center_keys else 0) + (len(page.metadata) + 1) // 2
    return 4 * (page.key_words + page.value_words + 128 * spread)


def _buffers(page: PageLayout) -> int:
    return 2 if _buffer_bytes(page) <= BUFFER_BYTES else 1


def _exact_tile(columns: int, page: PageLayout, dtype: torch.dtype) -> tuple[int, int, int]:
    """Columns, tokens and warps of a program of the exact kernel."""
    vector = triton.next_power_of_2(max(page.key_dim_padded, page.value_dim_padded)) * dtype.itemsize
    most = 64 if dtype.itemsize == 2 else 32 if vector <= 512 else 16
    rows = 16 if columns <= 16 else most
    return (rows, 64, 4) if vector <= 256 else (rows, 32, 8)


def _queries_at_once(heads: int, page: PageLayout) -> int:
    """How many queries' partial results fit `WORKSPACE`: so many queries leave few splits, at most one wave of programs."""
    return max(64, WORKSPACE // (4 * heads * 2 * (page.value_dim_padded + page.value_dim)))


def prepare_tables(page: PageLayout, device: torch.device) -> None:
    """Make the constants that `attend` takes. Its first call may run inside a CUDA graph's memory pool (a static cache's
    first prompt does not attend to pages), which must not own what outlives the graph."""
    level_tables(page, device)
    for rotates, dim in ((page.rotates_keys, page.key_dim_padded), (page.rotates_values, page.value_dim_padded)):
        if rotates:
            _signs(dim, device)


@lru_cache(maxsize=None)
def _signs(dim_padded: int, device: torch.device) -> Tensor:
    """The rotation as bf16 [block, block] of +-1 (exact), zero beyond `dim_padded`; a row is a rotated coordinate."""
    block = triton.next_power_of_2(dim_padded)
    table = torch.zeros(block, block, dtype=torch.bfloat16, device="cpu")
    table[:dim_padded, :dim_padded] = hadamard_signs(dim_padded).to(torch.bfloat16)
    return table.to(device)


@lru_cache(maxsize=None)
def _properties(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device)
    return SimpleNamespace(multi_processor_count=4, shared_memory_per_multiprocessor=1 << 17)  # Triton's interpreter
