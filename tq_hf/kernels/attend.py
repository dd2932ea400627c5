"""Launches attention over a packed layer: exact tokens and query preparation, packed pages, combination."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..layout import LANES, PageLayout
from ..rotation import hadamard_signs
from .combine import combine
from .decode import decode, int8_tables, steps
from .dequant import level_tables, page_spec
from .exact import attend_exact
from .extend import MEANS, extend, rotate_means
from .launch import cdiv, launch, power_of_two
from .packed import attend_packed
from .plan import plan

REGISTERS = 65536  # of a multiprocessor
# Columns of a program of the decode kernel, the sums of which are half of a lane's registers: up to 128 dimensions, beyond.
DECODE_COLUMNS, DECODE_COLUMNS_WIDE = 16, 8
# Its registers are capped, rather high: it takes more than it needs, to load earlier.
DECODE_REGISTERS = (168, 255)
DECODE_GROUPS = 2  # a split should have, to be worth its partial result
# Words of a lane and group up to which two groups make a tile, and up to which they do in splits of so many groups.
DECODE_WORDS, DECODE_WORDS_OF_LONG, DECODE_LONG = 24, 32, 24
PLAN_NUMBERS = 1 << 13  # of the mean keys that a program scores
# Programs of the packed kernel that the registers of a multiprocessor hold, by columns: 125 to 170 registers for 8 columns
# and dimensions up to 192, at most 215 for 256 (the wide ones), up to 245 for 16 columns.
PROGRAMS_PER_SM = {8: 12, 16: 8}
PROGRAMS_PER_SM_WIDE = 9
EXTEND_COLUMNS = 17  # from so many on, the extend kernel is faster than the packed one
EXTEND_MEMORY = 200 << 10  # bytes of shared memory of a multiprocessor from which on its large tiles fit
EXTEND_STAGES = 3  # tiles on their way, the present one included
MIN_TILES = 3  # tiles that a split of it should have
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
    batch, heads, slots_of_ring, _ = ring_key.shape
    device, rows = query.device, batch * heads
    columns, new, sinks = query.shape[2] * group, key.shape[2], sink_key.shape[2]
    packed = max_entries > 0

    per_query = mask is not None and mask.shape[2] > 1
    fast = packed and decodes(page, columns, scaling, per_query or causal_pages)
    wide = packed and not fast and extends(page, columns, scaling)
    block = _columns(columns, page)
    tile, registers, slots, even_splits = 1, 0, 0, 0
    if fast:
        tile, registers, slots = _decode_tile(batch, heads, columns, page, max_entries, device)
    elif wide:
        block, wide_tile, wide_warps, wide_registers = _extend_tile(columns, page, device)
        wave = REGISTERS // (32 * wide_warps * wide_registers) * _properties(device).multi_processor_count
        tiles = cdiv(max_entries * page.groups, wide_tile)
        even_splits = max(1, min(wave // (rows * cdiv(columns, block)), tiles // MIN_TILES))
    elif packed:
        even_splits = _packed_splits(rows, columns, page, max_entries, device)
    if not fast:
        slots = batch * even_splits
    exact_block, tokens, warps = _exact_tile(columns, page, query.dtype)
    blocks = cdiv(sinks, tokens) + cdiv(slots_of_ring, tokens) + cdiv(new, tokens)
    exact_splits = max(
        1, min(4 * _properties(device).multi_processor_count // (rows * cdiv(columns, exact_block)), blocks)
    )
    results = (heads * slots + rows * exact_splits) * columns
    sizes = (results * page.value_dim_padded, results * 2, rows * columns)
    floats = [cdiv(size, 4) * 4 for size in sizes]  # whole 16 bytes: all pointers stay aligned
    workspace = torch.empty(sum(floats), dtype=torch.float32, device=device)
    p_output, p_stats, p_factor = workspace.split(floats)
    p_rotated = p_plain = p_signs = p_kept = p_means = None
    if packed:
        shape = (rows, columns, page.key_dim_padded)
        p_rotated = torch.empty(shape, dtype=_query_dtype(page, fast, query.dtype), device=device)
        if page.rotates_keys:
            p_signs = _signs(page.key_dim_padded, device)
        if fast:
            p_kept = torch.empty(batch * max_entries * page.groups, dtype=torch.int32, device=device)
        if page.center_keys and fast:
            p_means = torch.empty(rows * max_entries * columns, dtype=torch.float32, device=device)
        elif page.center_keys and wide:
            p_means = torch.empty(rows * max_entries * page.key_dim_padded, dtype=torch.float16, device=device)
        elif page.center_keys:
            p_plain = torch.empty(shape, dtype=torch.float16, device=device)

    mask_strides = (0, 0, 0) if mask is None else tuple(mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 2, 3))
    key_block = power_of_two(page.key_dim_padded)
    value_block = power_of_two(page.value_dim_padded)
    # From here on each kernel may start before the one ahead of it has finished.
    overlap = fast and _properties(device).major >= 9
    early = {"launch_pdl": True} if overlap else {}
    if fast:
        entries_at_once = PLAN_NUMBERS // key_block
        launch(
            plan, (rows, cdiv(max_entries, entries_at_once)), {"num_warps": 4},
            (query, pool, page_ids, entries, row_start, counters, mask, p_kept, p_means, heads, columns, group, sinks,
             page_ids.stride(0), max_entries, *query.stride()[:3], mask_strides[0], mask_strides[2], scaling, softcap),
            DIM=page.key_dim, BLOCK=key_block, GROUPS=page.groups, PAGE_WORDS=page.page_words, ENTRIES=entries_at_once,
            AWAITED=overlap,
        )  # fmt: skip
    launch(
        attend_exact, (rows, exact_splits + packed, cdiv(columns, exact_block)), {"num_warps": warps, **early},
        (query, key, value, ring_key, ring_value, sink_key, sink_value, row_start, counters, balance, mask,
         p_signs, p_rotated, p_plain, p_factor, p_output, p_stats, heads, columns, group, new, slots_of_ring, sinks,
         exact_splits, heads * slots, query_offset, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
         *mask_strides, scaling, softcap),
        KEY_DIM=page.key_dim, KEY_PADDED=page.key_dim_padded, KEY_BLOCK=key_block, FP8=page.key_format == "fp8",
        VALUE_DIM=page.value_dim, VALUE_PADDED=page.value_dim_padded, VALUE_BLOCK=value_block, ROWS=exact_block,
        TOKENS=tokens, PER_QUERY=per_query, CAUSAL=causal, STAGES=4 // query.dtype.itemsize, CHAINED=overlap,
    )  # fmt: skip
    rotates = packed and page.rotates_values
    rotated = rotates and not (fast and value_block == page.value_dim_padded)  # what the combination has to rotate back
    softcap_exponent = None if softcap is None else softcap * 1.4426950408889634
    batch_block = 1 if batch == 1 else max(LANES, power_of_two(batch))
    sharing = {"LEAST": max(1, DECODE_GROUPS // tile), "BATCH": batch_block}
    if fast:
        assert p_rotated is not None
        launch(
            decode, (heads, slots), {"num_warps": 1, "maxnreg": registers, **early},
            (p_rotated.view(torch.int32), p_factor, pool, int8_tables(page, device), page_ids, row_start, counters,
             p_kept, p_means, p_output, p_stats, batch, columns, page_ids.stride(0), max_entries, *steps(page),
             softcap_exponent),
            L=page_spec(page), NX=lane_columns(columns), TILE=tile, **sharing, ROTATE_BACK=rotates and not rotated,
            DEPENDENT=overlap,
        )  # fmt: skip
    elif wide:
        if p_means is not None:
            launch(
                rotate_means, (rows, cdiv(max_entries, MEANS.value)),
                {"num_warps": 4} if _is_large(device) else {"num_warps": 4, "num_stages": 1},
                (pool, page_ids, counters, balance, p_signs, p_means, heads, page_ids.stride(0), max_entries),
                DIM=page.key_dim, PADDED=page.key_dim_padded, BLOCK=key_block, PAGE_WORDS=page.page_words,
            )  # fmt: skip
        launch(
            extend, (rows, even_splits, cdiv(columns, block)), {"num_warps": wide_warps, "maxnreg": wide_registers},
            (p_rotated, p_factor, pool, level_tables(page, device), None if p_means is None else p_means.view(torch.int64),
             page_ids, entries, row_start, counters, mask, p_output, p_stats, heads, columns, page_ids.stride(0),
             max_entries, sinks, group, query_offset, *mask_strides, softcap_exponent),
            L=page_spec(page), COLUMNS=block, TILE=wide_tile, PER_QUERY=per_query, CAUSAL=causal_pages,
            STAGES=EXTEND_STAGES,
        )  # fmt: skip
    elif packed:
        launch(
            attend_packed, (rows, even_splits, cdiv(columns, block)), {"num_warps": 1},
            (p_rotated, p_plain, p_factor, pool, level_tables(page, device), page_ids, entries, row_start, counters, mask,
             p_output, p_stats, heads, columns, page_ids.stride(0), sinks, group, query_offset, *mask_strides,
             softcap_exponent),
            L=page_spec(page), COLUMNS=block,
            VALUE_DTYPE=_TRITON_DTYPES[ring_value.dtype] if page.value_format == "raw" else tl.float16,
            PER_QUERY=per_query, CAUSAL=causal_pages, STAGES=1 + 2 * _buffers(page),
        )  # fmt: skip
    column_tile, split_tile, step = _combine_tile(rows, columns, value_block, rotated, device)
    launch(
        combine, (rows, cdiv(columns, column_tile), cdiv(page.value_dim, step)),
        {"num_warps": 8 if rotated or column_tile > 1 else 4, **early},
        (p_output, p_stats, _signs(page.value_dim_padded, device) if rotated else None, aux_sinks, row_start, counters, out,
         batch, heads, columns, group, slots, even_splits, exact_splits, out.stride(0), out.stride(1)),
        DIM=page.value_dim, PADDED=page.value_dim_padded, BLOCK=value_block, ROWS=column_tile, SPLITS=split_tile,
        STEP=step, PAGE_BITS=page.page_size.bit_length() - 1, GROUPS=page.groups, TILE=tile, **sharing, DEPENDENT=overlap,
    )  # fmt: skip


def _vectors(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the cache's dtype with contiguous vectors."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def decodes(page: PageLayout, columns: int, scaling: float, mask_by_query: bool) -> bool:
    """Whether the decode kernel takes this call; the extend kernel (`extends`) or the packed kernel takes all others.

    It takes few columns, codes whose levels stand on an 8-bit grid (fp8 keys as well), and masks that all queries share.
    """
    key = page.key_format == "fp8" or (page.key_format == "lloyd_max" and page.codebook == "int8_grid")
    value = page.value_bits <= 4 and (page.value_format == "min_max" or page.codebook == "int8_grid")
    wide = max(page.key_dim_padded, page.value_dim_padded) > 128
    few = columns <= (DECODE_COLUMNS_WIDE if wide else DECODE_COLUMNS)
    return key and value and few and not mask_by_query and scaling > 0


def extends(page: PageLayout, columns: int, scaling: float) -> bool:
    """Whether the extend kernel takes a call that the decode kernel does not take: many columns, and codes."""
    return columns >= EXTEND_COLUMNS and page.key_format != "raw" and page.value_format != "raw" and scaling > 0


def _is_large(device: torch.device) -> bool:
    """Whether the extend kernel's large tiles fit the shared memory."""
    return bool(_properties(device).shared_memory_per_multiprocessor >= EXTEND_MEMORY)


def _extend_tile(columns: int, page: PageLayout, device: torch.device) -> tuple[int, int, int, int]:
    """Columns and groups of a tile of the extend kernel, its warps, and the cap of its registers."""
    memory = _properties(device).shared_memory_per_multiprocessor
    if _is_large(device) and page.key_dim_padded + page.value_dim_padded <= 256:
        return (64, 2, 4, 168) if columns <= 64 else (128, 2, 8, 128)
    group = 64 * (page.key_dim_padded + page.value_dim_padded) + 4 * (EXTEND_STAGES - 1) * page.group_words
    return 64, 2 if 128 * page.key_dim_padded + 2 * group <= memory - 4096 else 1, 4, 255


def _query_dtype(page: PageLayout, fast: bool, dtype: torch.dtype) -> torch.dtype:
    """What a kernel multiplies packed keys with."""
    if page.key_format == "raw":
        return dtype
    return torch.int16 if fast and page.key_format == "lloyd_max" else torch.float16


def lane_columns(columns: int) -> int:
    """Columns that a lane of the decode kernel has."""
    return 1 if columns <= 4 else 2 if columns <= 8 else 4


def decode_registers(page: PageLayout, columns: int, tile: int) -> int:
    """The cap of the decode kernel's registers: the least that it fits into."""
    words = tile * (page.key_words_per_lane + page.value_words_per_lane)
    own = lane_columns(columns)
    sums = page.value_dim_padded // 8 * own
    query = page.key_dim_padded // 16 * (max(own, 2) if page.key_format == "fp8" else own)
    others = 10 + 38 * own
    return next((n for n in DECODE_REGISTERS if words + sums + query + others <= n), DECODE_REGISTERS[-1])


def _decode_tile(
    batch: int, heads: int, columns: int, page: PageLayout, max_entries: int, device: torch.device
) -> tuple[int, int, int]:
    """Groups of a tile of the decode kernel, its registers, and the slots of each head: one wave of programs."""
    groups, processors = max_entries * page.groups, _properties(device).multi_processor_count
    words = page.key_words_per_lane + page.value_words_per_lane
    tile = 1
    if decode_registers(page, columns, 2) == DECODE_REGISTERS[0]:
        is_long = batch * heads * groups * DECODE_REGISTERS[0] >= DECODE_LONG * (REGISTERS // 32) * processors
        tile = 2 if words <= DECODE_WORDS or (words <= DECODE_WORDS_OF_LONG and columns <= 4 and is_long) else 1
    registers = decode_registers(page, columns, tile)
    wave = REGISTERS // (32 * registers) * processors
    most = batch * cdiv(groups, max(tile, DECODE_GROUPS)) + batch
    return tile, registers, max(batch, min(wave // heads, most))


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
    wave = programs * _properties(device).multi_processor_count // (rows * cdiv(columns, block))
    return max(1, min(wave, max_entries * page.groups // MIN_GROUPS))


def _buffer_bytes(page: PageLayout) -> int:
    """Shared memory for a group, the page mean and the metadata being spread over all lanes."""
    spread = (page.key_dim_padded // 32 if page.center_keys else 0) + (len(page.metadata) + 1) // 2
    return 4 * (page.key_words + page.value_words + 128 * spread)


def _buffers(page: PageLayout) -> int:
    return 2 if _buffer_bytes(page) <= BUFFER_BYTES else 1


def _exact_tile(columns: int, page: PageLayout, dtype: torch.dtype) -> tuple[int, int, int]:
    """Columns, tokens and warps of a program of the exact kernel."""
    vector = power_of_two(max(page.key_dim_padded, page.value_dim_padded)) * dtype.itemsize
    most = 64 if dtype.itemsize == 2 else 32 if vector <= 512 else 16
    rows = 16 if columns <= 16 else most
    return (rows, 64, 4) if vector <= 256 else (rows, 32, 8)


def _queries_at_once(heads: int, page: PageLayout) -> int:
    """How many queries' partial results fit `WORKSPACE`: so many queries leave few splits, at most one wave of programs."""
    return max(64, WORKSPACE // (4 * heads * 2 * (page.value_dim_padded + page.value_dim)))


def _combine_tile(
    rows: int, columns: int, value_block: int, rotated: bool, device: torch.device
) -> tuple[int, int, int]:
    """Columns, splits and dimensions of a tile of the combining kernel."""
    step = min(128, value_block)
    if columns > 16:
        return 16, 4, step
    if rotated:
        return 1, 8192 // value_block, step
    # With few rows, as many programs as can be, each with all splits at once.
    if rows * columns * value_block <= 64 * _properties(device).multi_processor_count:
        return 1, 128, 32
    return 1, 32, min(64, value_block)


def prepare_tables(page: PageLayout, device: torch.device) -> None:
    """Make the constants that `attend` takes. Its first call may run inside a CUDA graph's memory pool (a static cache's
    first prompt does not attend to pages), which must not own what outlives the graph."""
    level_tables(page, device)
    if decodes(page, 1, 1.0, False):
        int8_tables(page, device)
    for rotates, dim in ((page.rotates_keys, page.key_dim_padded), (page.rotates_values, page.value_dim_padded)):
        if rotates:
            _signs(dim, device)


@lru_cache(maxsize=None)
def _signs(dim_padded: int, device: torch.device) -> Tensor:
    """The rotation as bf16 [block, block] of +-1 (exact), zero beyond `dim_padded`; a row is a rotated coordinate."""
    block = power_of_two(dim_padded)
    table = torch.zeros(block, block, dtype=torch.bfloat16, device="cpu")
    table[:dim_padded, :dim_padded] = hadamard_signs(dim_padded).to(torch.bfloat16)
    return table.to(device)


@lru_cache(maxsize=None)
def _properties(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device)
    # Triton's interpreter
    return SimpleNamespace(major=0, multi_processor_count=4, shared_memory_per_multiprocessor=1 << 17)
