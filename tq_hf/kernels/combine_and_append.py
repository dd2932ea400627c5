"""The end of a decode step in one launch: the results are combined, and beside that the new token is appended.

Nothing that combines reads what appending writes: where no page falls due, that is the ring, the sinks and the length.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from .append import append_token
from .combine import combine
from .launch import Call, Launcher

NUMBERS = 1 << 11  # of all keys of a token, that a warp appends


@triton.jit(
    do_not_specialize=[
        "batch", "heads", "columns", "group", "slots", "even_splits", "exact_splits", "stride_ob", "stride_oq", "stats_at",
        "window", "sinks",
    ]
)  # fmt: skip
def combine_and_append(
    p_output, p_signs, p_aux_sinks, p_out, p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start,
    p_counters,
    batch, heads, columns, group, slots, even_splits, exact_splits, stats_at, stride_ob, stride_oq, window, sinks,
    stride_kb, stride_kh, stride_vb, stride_vh,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    STEP: tl.constexpr, PAGE_BITS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
    BATCH: tl.constexpr, DEPENDENT: tl.constexpr, PAGE: tl.constexpr, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """The grid of `combine.combine` and one more in its first dimension, whose first program is `append.append_token`."""
    if tl.program_id(0) < batch * heads:
        combine(p_output, p_signs, p_aux_sinks, p_row_start, p_counters, p_out, batch, heads, columns, group, slots,
                even_splits, exact_splits, stats_at, stride_ob, stride_oq, DIM, PADDED, BLOCK, ROWS, SPLITS, STEP, PAGE_BITS,
                GROUPS, TILE, LEAST, BATCH, DEPENDENT)  # fmt: skip
    elif (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        append_token(p_key, p_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start, p_counters,
                     batch * heads, heads, window, sinks, stride_kb, stride_kh, stride_vb, stride_vh, PAGE, KEY_DIM,
                     KEY_BLOCK, VALUE_DIM, VALUE_BLOCK, VECTORS, DEPENDENT)  # fmt: skip


def joined(combination: Call, append: Call) -> Call | None:
    """One call for a `combine` and the call behind it, if that is an `append_token`; else None."""
    if append.launcher.kernel is not append_token:
        return None
    rows, blocks, parts = combination.grid
    launcher = _launcher(combination.launcher, append.launcher)
    return Call(launcher, (rows + 1, blocks, parts), (*combination.numbers, *append.numbers[2:]))


@lru_cache(maxsize=4096)
def _launcher(combination: Launcher, append: Launcher) -> Launcher:
    constants = {name: value for name, value in append.constants.items() if name != "CHAINED"}
    numbers = constants["VECTORS"] * max(constants["KEY_BLOCK"], constants["VALUE_BLOCK"])
    warps = max(combination.options["num_warps"], numbers // NUMBERS)
    return Launcher(combine_and_append, combination.options | {"num_warps": warps}, combination.constants | constants)
