"""How an attention call is cut into programs: grids, tiles, constants and the workspace, by shapes, layout and device only.

A schedule is made once for calls that look alike; `attend.py` gives its launches their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..layout import LANES, PageLayout
from ..quantizer.rotation import hadamard_signs
from .combine import combine
from .decode import decode, int8_tables, steps
from .dequant import level_tables, page_spec
from .exact import attend_exact
from .extend import MEANS, extend, rotate_means
from .launch import Call, Grid, Launcher, Number, cdiv, power_of_two
from .packed import attend_packed
from .prepare import prepare
from .tail import TAIL_TOKENS
from .wide import STAGES
from .workspace import Sections

REGISTERS = 65536  # of a multiprocessor
# Columns of a program of the decode kernel, as many as a lane's registers hold sums of: up to 128 dimensions, beyond.
DECODE_COLUMNS, DECODE_COLUMNS_WIDE = 16, 8
# Its registers are capped, rather high: it takes more than it needs, to load earlier.
DECODE_REGISTERS = (168, 255)
DECODE_REST = 512  # bytes of shared memory that it takes for a group beside the group
PREPARE_REGISTERS = (168, 255)  # of a program that prepares: up to 128 dimensions, beyond
DECODE_GROUPS = 2  # a split should have, to be worth its partial result
# Words of a lane and group up to which two groups make a tile, and up to which they do in splits of so many groups.
DECODE_WORDS, DECODE_WORDS_OF_LONG, DECODE_LONG = 24, 32, 24
EXACT_PROGRAMS = 4  # of the exact kernel, a multiprocessor
TAIL_BLOCKS = 32  # up to so many blocks of exact tokens are attended to by the decode kernel
TAIL_GROUPS = 2  # of packed tokens take a program as long as a block of exact ones
TAIL_COLUMNS = 8  # of a program that does that, and of one that prepares
PLAN_NUMBERS = 1 << 12  # of the mean keys that a program scores
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
# Results that a program of the combining kernel takes in at once, the least dimensions of each, and their numbers: a warp's,
# and those of a program that rotates back.
COMBINE_SPLITS, COMBINE_DIMS, COMBINE_NUMBERS, COMBINE_NUMBERS_ROTATED = 256, 32, 1 << 11, 1 << 13
_TRITON_DTYPES = {
    torch.int16: tl.int16, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32
}  # fmt: skip


class Launch:
    """A kernel with all but its arguments: tensors, which have the same dtypes at every call, and numbers."""

    __slots__ = ("grid", "launcher")

    def __init__(self, kernel: Any, grid: Grid, options: dict[str, Any], constants: dict[str, Any]) -> None:
        self.grid, self.launcher = grid, Launcher(kernel, options, constants)

    def __call__(self, *numbers: Number) -> Call:
        """The kernel with its numbers: what its tensors are to be given to."""
        return Call(self.launcher, self.grid, numbers)


@dataclass(frozen=True)
class Schedule:
    """The launches of a call in their order, and what their arguments have to say of them.

    Attributes:
        prepare: if there are packed pages.
        exact: unless the decode kernel attends to exact tokens as well.
        rotate_means: for the extend kernel, if pages have mean keys.
        decode, extend, packed: one of them, if there are packed pages.
        floats: size of the workspace.
        stats_at, factor_at, rotated_at, plain_at, kept_at, means_at, centre_at: sections of it; partial results stand at 0.
        query_dtype: of the rotated queries.
        columns: queries of the heads that share a KV head.
        slots, even_splits, exact_splits: partial results (`combine.combine`), the last of the exact tokens.
        plans, tail_programs: programs for entries, of `prepare`, and for exact tokens, of `decode`.
        key_step, value_step: of `decode`.
        tables: of `decode`, `extend` or `packed`.
        query_signs, means_signs, value_signs: of `prepare`, `rotate_means` and `combine`.
    """

    prepare: Launch | None
    rotate_means: Launch | None
    exact: Launch | None
    decode: Launch | None
    extend: Launch | None
    packed: Launch | None
    combine: Launch
    floats: int
    stats_at: int
    factor_at: int
    rotated_at: int
    plain_at: int
    kept_at: int
    means_at: int
    centre_at: int
    query_dtype: torch.dtype
    columns: int
    slots: int
    even_splits: int
    exact_splits: int
    plans: int
    tail_programs: int
    key_step: float
    value_step: float
    tables: Tensor | None
    query_signs: Tensor | None
    means_signs: Tensor | None
    value_signs: Tensor | None


@lru_cache(maxsize=4096)
def schedule(
    layout: str,
    batch: int,
    heads: int,
    group: int,
    queries: int,
    new: int,
    ring_slots: int,
    sinks: int,
    dtype: torch.dtype,
    aux_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    device: torch.device,
    max_entries: int,
    positive: bool,
    per_query: bool,
    causal: bool,
    causal_pages: bool,
) -> Schedule:
    """The schedule of a call.

    Args:
        group: query heads a KV head.
        queries, new: tokens that ask, and tokens that are not committed yet.
        dtype, aux_dtype, out_dtype: of everything exact, of the logits without a value, and of the result. The last two
            decide nothing, but a launch has the same dtypes at every call.
        positive: whether scores have a positive factor.
        per_query: whether the mask differs from query to query.
        causal, causal_pages: whether tokens and packed pages are hidden from queries before them.
    """
    page = PageLayout.from_name(layout)
    rows, columns = batch * heads, queries * group
    processors = _properties(device).multi_processor_count
    packed = max_entries > 0
    fast = packed and decodes(page, columns, positive, per_query or causal_pages)
    wide = packed and not fast and extends(page, columns, positive)
    key_block, value_block = power_of_two(page.key_dim_padded), power_of_two(page.value_dim_padded)
    # Each kernel may start before the one ahead of it has finished.
    overlap = (fast or wide) and _properties(device).major >= 9
    early = {"launch_pdl": True} if overlap else {}

    # How packed pages and exact tokens are split.
    tail_blocks = _blocks(sinks, ring_slots, new, TAIL_TOKENS.value)
    has_tail = fast and dtype.itemsize == 2 and tail_blocks <= TAIL_BLOCKS
    tail_programs = batch * cdiv(columns, TAIL_COLUMNS) * tail_blocks if has_tail else 0
    tile, registers, slots, even_splits = 1, 0, 0, 0
    if fast:
        tile, registers, slots = _decode_tile(batch, heads, columns, page, max_entries, tail_programs, device)
    elif wide:
        wide_columns, wide_tile, wide_warps, wide_registers = _extend_tile(columns, page, device)
        wave = REGISTERS // (32 * wide_warps * wide_registers) * processors
        tiles = cdiv(max_entries * page.groups, wide_tile)
        even_splits = max(1, min(wave // (rows * cdiv(columns, wide_columns)), tiles // MIN_TILES))
    elif packed:
        even_splits = _packed_splits(rows, columns, page, max_entries, device)
    if not fast:
        slots = batch * even_splits
    exact_block, tokens, exact_warps = _exact_tile(columns, page, dtype)
    exact_programs = rows * cdiv(columns, exact_block)
    exact_splits = min(EXACT_PROGRAMS * processors // exact_programs, _blocks(sinks, ring_slots, new, tokens))
    exact_splits = tail_blocks if has_tail else max(1, exact_splits)

    # What the kernels hand on.
    query_dtype = _query_dtype(page, fast, dtype)
    sections = Sections()
    results = (heads * slots + rows * exact_splits) * columns
    sections.take(results * page.value_dim_padded, torch.float32)
    stats_at = sections.take(results * 2, torch.float32)
    factor_at = rotated_at = plain_at = kept_at = means_at = centre_at = 0
    if packed:
        factor_at = sections.take(rows * columns, torch.float32)
        rotated_at = sections.take(rows * columns * page.key_dim_padded, query_dtype)
    plain = packed and page.center_keys and not fast and not wide
    if plain:
        plain_at = sections.take(rows * columns * page.key_dim_padded, torch.float16)
    if fast:
        kept_at = sections.take(batch * max_entries * page.groups, torch.int32)
    if fast and page.center_keys:
        means_at = sections.take(rows * max_entries * columns, torch.float32)
    elif wide and page.center_keys:
        means_at = sections.take(rows * max_entries * page.key_dim_padded, torch.float16)
        centre_at = sections.take(rows * page.key_dim, torch.float32)

    prepare_launch = means_launch = exact_launch = decode_launch = extend_launch = packed_launch = None
    entries = PLAN_NUMBERS // max(key_block, PLAN_NUMBERS // LANES)
    plans = cdiv(max_entries, entries) if fast else 0
    if packed:
        prepare_launch = Launch(
            prepare, (rows + (batch if plans else 0), plans + page.key_dim_padded // 32, cdiv(columns, TAIL_COLUMNS)),
            {"num_warps": 1, "maxnreg": PREPARE_REGISTERS[key_block > 128], **early},
            {"DIM": page.key_dim, "PADDED": page.key_dim_padded, "DTYPE": _TRITON_DTYPES[query_dtype],
             "FP8": page.key_format == "fp8", "PLAIN": plain, "CENTERED": page.center_keys, "GROUPS": page.groups,
             "PAGE_WORDS": page.page_words, "ENTRIES": entries, "CHAINED": overlap},
        )  # fmt: skip
    if wide and page.center_keys:
        means_launch = Launch(
            rotate_means, (rows, cdiv(max_entries, MEANS.value), 1),
            {"num_warps": 4, "num_stages": 1, **early},
            {"DIM": page.key_dim, "PADDED": page.key_dim_padded, "BLOCK": key_block, "PAGE_WORDS": page.page_words,
             "CHAINED": overlap},
        )  # fmt: skip
    if not has_tail:
        exact_launch = Launch(
            attend_exact, (rows, exact_splits, cdiv(columns, exact_block)), {"num_warps": exact_warps, **early},
            {"KEY_DIM": page.key_dim, "KEY_BLOCK": key_block, "VALUE_DIM": page.value_dim,
             "VALUE_PADDED": page.value_dim_padded, "VALUE_BLOCK": value_block, "ROWS": exact_block, "TOKENS": tokens,
             "PER_QUERY": per_query, "CAUSAL": causal, "STAGES": 4 // dtype.itemsize, "CHAINED": overlap},
        )  # fmt: skip
    rotates = packed and page.rotates_values
    rotated = rotates and not (fast and value_block == page.value_dim_padded)  # what the combination has to rotate back
    sharing = {
        "LEAST": max(1, DECODE_GROUPS // tile),
        "BATCH": 1 if batch == 1 else max(LANES, power_of_two(batch)),
    }
    if fast:
        decode_launch = Launch(
            decode, (heads, slots + tail_programs, 1), {"num_warps": 1, "maxnreg": registers, **early},
            {"L": page_spec(page), "COLUMNS": decode_columns(columns), "TILE": tile, **sharing,
             "ROTATE_BACK": rotates and not rotated, "TAIL": has_tail, "CAUSAL": causal, "DEPENDENT": overlap},
        )  # fmt: skip
    elif wide:
        extend_launch = Launch(
            extend, (rows, even_splits, cdiv(columns, wide_columns)),
            {"num_warps": wide_warps, "maxnreg": wide_registers, **early},
            {"L": page_spec(page), "COLUMNS": wide_columns, "TILE": wide_tile, "PER_QUERY": per_query,
             "CAUSAL": causal_pages, "STAGES": EXTEND_STAGES, "DEPENDENT": overlap},
        )  # fmt: skip
    elif packed:
        block = _columns(columns, page)
        packed_launch = Launch(
            attend_packed, (rows, even_splits, cdiv(columns, block)), {"num_warps": 1},
            {"L": page_spec(page), "COLUMNS": block,
             "VALUE_DTYPE": _TRITON_DTYPES[dtype] if page.value_format == "raw" else tl.float16,
             "PER_QUERY": per_query, "CAUSAL": causal_pages, "STAGES": 1 + 2 * _buffers(page)},
        )  # fmt: skip
    most = (even_splits if even_splits else cdiv(slots, batch) + 1) + exact_splits
    column_tile, split_tile, step, warps = _combine_tile(columns, most, value_block, rotated)
    # Several lanes hold copies of a sum. A product that is contracted with the sum it goes into is rounded in one lane and
    # not in the next: their copies would differ in the last bit, and which one counts would be chance.
    combine_launch = Launch(
        combine, (rows, cdiv(columns, column_tile), cdiv(page.value_dim, step)),
        {"num_warps": warps, "enable_fp_fusion": False, **early},
        {"DIM": page.value_dim, "PADDED": page.value_dim_padded, "BLOCK": value_block, "ROWS": column_tile,
         "SPLITS": split_tile, "STEP": step, "PAGE_BITS": page.page_size.bit_length() - 1, "GROUPS": page.groups,
         "TILE": tile, **sharing, "DEPENDENT": overlap},
    )  # fmt: skip
    key_step, value_step = steps(page) if fast else (1.0, 1.0)
    return Schedule(
        prepare_launch,
        means_launch,
        exact_launch,
        decode_launch,
        extend_launch,
        packed_launch,
        combine_launch,
        sections.floats,
        stats_at,
        factor_at,
        rotated_at,
        plain_at,
        kept_at,
        means_at,
        centre_at,
        query_dtype,
        columns,
        slots,
        even_splits,
        exact_splits,
        plans,
        tail_programs,
        key_step,
        value_step,
        int8_tables(page, device) if fast else level_tables(page, device) if packed else None,
        _query_signs(page.key_dim_padded, device) if packed and page.rotates_keys else None,
        _block_signs(page.key_dim_padded, device) if means_launch is not None else None,
        _block_signs(page.value_dim_padded, device) if rotated else None,
    )


def decodes(page: PageLayout, columns: int, positive: bool, mask_by_query: bool) -> bool:
    """Whether the decode kernel takes this call; the extend kernel (`extends`) or the packed kernel takes all others.

    It takes few columns, codes whose levels stand on an 8-bit grid (fp8 keys as well), and masks that all queries share.
    """
    key = page.key_format == "fp8" or (page.key_format == "lloyd_max" and page.codebook == "int8_grid")
    value = page.value_bits <= 4 and (page.value_format == "min_max" or page.codebook == "int8_grid")
    wide = max(page.key_dim_padded, page.value_dim_padded) > 128
    few = columns <= (DECODE_COLUMNS_WIDE if wide else DECODE_COLUMNS)
    return key and value and few and not mask_by_query and positive


def extends(page: PageLayout, columns: int, positive: bool) -> bool:
    """Whether the extend kernel takes a call that the decode kernel does not take: many columns, and codes."""
    return columns >= EXTEND_COLUMNS and page.key_format != "raw" and page.value_format != "raw" and positive


def _is_large(device: torch.device) -> bool:
    """Whether the extend kernel's large tiles fit the shared memory."""
    return bool(_properties(device).shared_memory_per_multiprocessor >= EXTEND_MEMORY)


def _extend_tile(columns: int, page: PageLayout, device: torch.device) -> tuple[int, int, int, int]:
    """Columns and groups of a tile of the extend kernel, its warps, and the cap of its registers."""
    memory = _properties(device).shared_memory_per_multiprocessor
    if _is_large(device) and page.key_dim_padded + page.value_dim_padded <= 256:
        return (64, 2, 4, 168) if columns <= 64 else (128, 4, 8, 255)
    group = 64 * (page.key_dim_padded + page.value_dim_padded) + 4 * (EXTEND_STAGES - 1) * page.group_words
    return 64, 2 if 128 * page.key_dim_padded + 2 * group <= memory - 4096 else 1, 4, 255


def _query_dtype(page: PageLayout, fast: bool, dtype: torch.dtype) -> torch.dtype:
    """What a kernel multiplies packed keys with."""
    if page.key_format == "raw":
        return dtype
    return torch.int16 if fast and page.key_format == "lloyd_max" else torch.float16


def decode_columns(columns: int) -> int:
    """Columns of the decode kernel's products."""
    return 4 if columns <= 4 else 8 if columns <= 8 else 16


def decode_registers(page: PageLayout, columns: int, tile: int) -> int:
    """The cap of the decode kernel's registers: the least that it fits into."""
    if columns > 4:
        return DECODE_REGISTERS[0]  # tiles wait in shared memory
    words = tile * (page.key_words_per_lane + page.value_words_per_lane)
    query = page.key_dim_padded // (8 if page.key_format == "fp8" else 16)
    needed = words + page.value_dim_padded // 8 + query + 48
    return next((n for n in DECODE_REGISTERS if needed <= n), DECODE_REGISTERS[-1])


def _decode_tile(
    batch: int, heads: int, columns: int, page: PageLayout, max_entries: int, tail_programs: int, device: torch.device
) -> tuple[int, int, int]:
    """Groups of a tile of the decode kernel, its registers, and the slots of each head: one wave of programs, less what the
    programs of exact tokens need of it to be done as soon."""
    groups, processors = max_entries * page.groups, _properties(device).multi_processor_count
    words = page.key_words_per_lane + page.value_words_per_lane
    tile = 1
    if columns <= 8 and decode_registers(page, columns, 2) == DECODE_REGISTERS[0]:
        is_long = batch * heads * groups * DECODE_REGISTERS[0] >= DECODE_LONG * (REGISTERS // 32) * processors
        tile = 2 if words <= DECODE_WORDS or (words <= DECODE_WORDS_OF_LONG and columns <= 4 and is_long) else 1
    registers = decode_registers(page, columns, tile)
    programs = REGISTERS // (32 * registers)
    if columns > 4:
        copies = (STAGES.value - 1) * tile * (4 * page.group_words + DECODE_REST) + 1024
        programs = min(programs, _properties(device).shared_memory_per_multiprocessor // copies)
    wave = programs * processors
    most = batch * cdiv(groups, max(tile, DECODE_GROUPS)) + batch
    # Programs of exact tokens come last and follow each other in the places that slots leave.
    turns = max(1, int(batch * groups * heads / wave / TAIL_GROUPS))
    slots = (wave - cdiv(heads * tail_programs, turns)) // heads
    return tile, registers, max(batch, min(slots, most))


def _blocks(sinks: int, ring_slots: int, new: int, tokens: int) -> int:
    """Blocks of exact tokens."""
    return cdiv(sinks, tokens) + cdiv(ring_slots, tokens) + cdiv(new, tokens)


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


def _combine_tile(columns: int, results: int, value_block: int, rotated: bool) -> tuple[int, int, int, int]:
    """Columns, results and dimensions that a program of the combining kernel takes in at once, and its warps."""
    step = min(128, value_block)
    if columns > 16:
        return 16, 4, step, 8
    if rotated:
        return 1, COMBINE_NUMBERS_ROTATED // value_block, step, 8
    # All results at once, if they are not too many, and as few dimensions as are worth reading together.
    splits = max(LANES, min(COMBINE_SPLITS, power_of_two(results)))
    step = min(value_block, max(COMBINE_DIMS, COMBINE_NUMBERS // splits))
    return 1, splits, step, max(1, splits * step // COMBINE_NUMBERS)


def prepare_tables(page: PageLayout, device: torch.device) -> None:
    """Make the constants that `attend` takes. Its first call may run inside a CUDA graph's memory pool (a static cache's
    first prompt does not attend to pages), which must not own what outlives the graph."""
    level_tables(page, device)
    if decodes(page, 1, True, False):
        int8_tables(page, device)
    if page.rotates_keys:
        _query_signs(page.key_dim_padded, device)
        _block_signs(page.key_dim_padded, device)
    if page.rotates_values:
        _block_signs(page.value_dim_padded, device)


@lru_cache(maxsize=None)
def _query_signs(dim_padded: int, device: torch.device) -> Tensor:
    """The rotation as fp16 [dim_padded, dim_padded] of +-1 (exact); a row is a rotated coordinate."""
    return hadamard_signs(dim_padded).to(torch.float16).to(device)


@lru_cache(maxsize=None)
def _block_signs(dim_padded: int, device: torch.device) -> Tensor:
    """As `_query_signs`, bf16 [block, block], zero beyond `dim_padded`."""
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
