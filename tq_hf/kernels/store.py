"""The store kernel: packs the pages that have become due.

A program, one warp, packs the keys or the values of one 32-token group. What is rotated is encoded in registers
(`encode.py`), as are values between their least and largest coordinate (`min_max.py`). Other formats go over the head in
chunks of 32 columns (`lanes.py`): load, quantize, pack and store a chunk.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ..layout import PageLayout
from .dequant import PageSpec, page_spec
from .encode import (
    encode,
    lane_tokens,
    magnitude_cells,
    operand_words,
    rotation_fragments,
    token_bits,
)
from .lanes import chunk_dims, code_shift, lane_word_offset, load_factors, row_pointers
from .launch import launch
from .min_max import encode_min_max, group_tokens, load_quads, saturate
from .pieces import as_pieces, lanes_first
from .token_pieces import (
    add_tokens,
    load_pieces,
    not_finite,
    over_tokens,
    piece_blocks,
    piece_dims,
    to_dims,
)

FP8_MAX = tl.constexpr(448.0)
# Of a thread, up to 128 dimensions, for a few words on the stack: a multiprocessor runs 12 programs at once, as each quarter
# of it has room for three (up to 168 registers).
REGISTERS = 144


@triton.jit
def token_rows(start, token, length, p_new, stride, p_ring, slots, DIM: tl.constexpr):
    """Where positions start + token of a head are, token a block of 0 to 31: which are committed, their pointers in the
    head's ring, and among its new tokens."""
    slot = start % slots + token
    slot = tl.where(slot < slots, slot, slot - slots)
    p_first = p_new + (start - length).to(tl.int64) * stride
    return start + token < length, p_ring + slot * DIM, p_first + token * stride


@triton.jit
def load_group(start, first, source, p_keep, bits, eviction: tl.constexpr, DIM: tl.constexpr, PIECES: tl.constexpr,
               LARGE: tl.constexpr):  # fmt: skip
    """The vectors at positions start to start + 31, as `encode.py` has them: those from `first` on that the mask keeps, if
    there is one, and that have a bit set; zeros for others. And which these are.

    `source`: the arguments of `token_rows` from `length` to `slots`.
    """
    vectors = []
    loaded = []
    for r in tl.static_range(4):
        token = 8 * r + tl.arange(0, 32) // 4
        real = (start + token >= first) & ((bits >> token) & 1 != 0)
        if p_keep is not None:
            real = real & (tl.load(p_keep + start + token, mask=real, other=0) != 0)
        vectors = vectors + load_pieces(*token_rows(start, token, *source, DIM), real, eviction, DIM, PIECES, LARGE)
        loaded = loaded + [real]
    return vectors, loaded


@triton.jit
def survey(rows, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Least and largest coordinate of each vector, and which vectors are real and finite; [32] each."""
    low = tl.full([32], float("inf"), tl.float32)
    high = tl.full([32], float("-inf"), tl.float32)
    zeros = tl.zeros([32], tl.float32)
    for c in range(PADDED // 32):
        d = 32 * c + tl.arange(0, 32)
        inside = real[:, None] & (d < DIM)[None, :]
        x = tl.load(row_pointers(*rows, d), mask=inside, other=0.0).to(tl.float32)
        zeros += tl.sum(x * 0.0, 1)  # infinities and NaN times zero are NaN
        low = tl.minimum(low, tl.min(tl.where(inside, x, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(inside, x, float("-inf")), 1))
    usable = real & (zeros == 0.0)
    return tl.where(usable, low, 0.0), tl.where(usable, high, 0.0), usable


@triton.jit
def finite_norms(norms, rows, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """The norms of a lane's tokens with zeros for vectors that are not finite, and whether any real one of `rows` is such.

    Of the norm zero, vectors decode to zeros whatever their codes are; and the products that made these keep rows apart, so
    that other tokens have seen nothing of them.
    """
    _, _, usable = survey(rows, real, DIM, PADDED)
    finite = lane_tokens(token_bits(usable))
    kept = []
    for r in tl.static_range(4):
        kept = kept + [tl.where(finite[r], norms[r], 0.0)]
    return kept, tl.max((real & ~usable).to(tl.int32), 0)


@triton.jit
def e4m3(x):
    """The fp8 e4m3 (fn) code of finite fp32 values: to nearest even, saturating at 448. In integers, for any GPU."""
    magnitude = tl.minimum(tl.abs(x), FP8_MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9, which is the last bit of numbers next to 2**14: the addition rounds.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0.015625, subnormal, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def store_chunk(p_codes, codes, c, PADDED: tl.constexpr, BITS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Packs the codes of chunk c, int32 [32 tokens, 32 columns] of 8 bits or more, into lane words and stores them."""
    WORDS: tl.constexpr = BITS * PADDED // 32
    RUN_WORDS: tl.constexpr = BITS // 4
    # [g, t, r, i // 2, i % 2]: lane, run and code of a run. The words come out in the order in which they stand in memory.
    if KEYS:
        codes = codes.reshape(4, 8, 4, 4, 2).permute(1, 2, 0, 3, 4)  # token (r, g), column (t, i)
    else:  # token (h, a // 2, t, a % 2), column (g, p, e)
        codes = codes.reshape(2, 2, 4, 2, 8, 2, 2).permute(4, 2, 5, 0, 6, 1, 3).reshape(8, 4, 4, 4, 2)
    i = 2 * tl.arange(0, 4)[:, None] + tl.arange(0, 2)[None, :]  # [4, 2]
    lane = 4 * tl.arange(0, 8)[:, None, None, None] + tl.arange(0, 4)[None, :, None, None]  # [8, 4, 1, 1]
    r = tl.arange(0, 4)[None, None, :, None]
    fields = codes << code_shift(i, BITS)
    if BITS == 8:
        words = tl.sum(tl.sum(fields, 4).reshape(8, 4, 4, 2, 2), 4)
    elif BITS == 16:
        words = tl.sum(fields, 4)
    else:
        words = fields.reshape(8, 4, 4, 8)
    word = (4 * c + r) * RUN_WORDS + tl.arange(0, RUN_WORDS)[None, None, None, :]
    tl.store(p_codes + lane_word_offset(lane, word, WORDS), words)  # [8, 4, 4, RUN_WORDS]


@triton.jit
def pack_plain(rows, real, p_codes, L: tl.constexpr, KEYS: tl.constexpr):
    """Stores the group of vectors at `rows` (`token_rows`) in a format without metadata.

    Returns:
        Whether any real vector was lost for not being finite, and whether coordinates saturated fp8.
    """
    DIM: tl.constexpr = L.key_dim if KEYS else L.value_dim
    PADDED: tl.constexpr = L.key_padded if KEYS else L.value_padded
    FORMAT: tl.constexpr = L.key_format if KEYS else L.value_format
    BITS: tl.constexpr = L.key_bits if KEYS else L.value_bits
    low, high, usable = survey(rows, real, DIM, PADDED)
    for c in range(PADDED // 32):
        dims = chunk_dims(c, PADDED, KEYS)
        # The vectors are loaded again, from L1: a block in registers cannot be indexed by column.
        inside = usable[:, None] & (dims < DIM)[None, :]
        v = tl.load(row_pointers(*rows, dims), mask=inside, other=0.0)  # [32, 32]
        if FORMAT == "fp8":
            codes = e4m3(v.to(tl.float32))
        elif BITS == 16:
            codes = v.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        else:
            codes = v.to(tl.int32, bitcast=True)
        store_chunk(p_codes, codes, c, PADDED, BITS, KEYS)
    saturated = 0
    if FORMAT == "fp8":
        saturated = tl.max((tl.maximum(high, -low) > FP8_MAX).to(tl.int32), 0)
    return tl.max((real & ~usable).to(tl.int32), 0), saturated


@triton.jit
def pack_min_max(start, first, source, p_codes, p_metadata, L: tl.constexpr):
    """Encodes the group of values from start on between each one's least and largest coordinate.

    Returns:
        As `encode_min_max`.
    """
    token = group_tokens()
    real = start + token >= first
    rows = token_rows(start, token, *source, L.value_dim)
    quads = load_quads(*rows, real, L.value_dim, L.value_padded)
    real = lanes_first(real).reshape(32, 4)
    FIELD: tl.constexpr = 1 if L.key_format == "lloyd_max" else 0  # no other keys have metadata
    return encode_min_max(quads, real, p_codes, p_metadata, L.value_dim, L.value_padded, L.value_bits, FIELD, L.fields)


@triton.jit
def page_sum(start, first, source, p_keep, only_finite: tl.constexpr, L: tl.constexpr):
    """The sum of a page's keys over the page size, in pieces, and the number of keys in it: those that the mask keeps, or
    all. Unless `only_finite`, a key that is not spoils the sum."""
    PIECES: tl.constexpr = L.key_padded // 32
    total = []
    for b in tl.static_range(piece_blocks(PIECES, L.large)):
        total = total + [tl.zeros(as_pieces(piece_dims(b, PIECES, 8, L.large)).shape, tl.float32)]
    count = tl.zeros([32], tl.int32)
    token = tl.arange(0, 32)
    for i in range(L.groups):
        tile = start + 32 * i
        bits = -1
        if only_finite:
            rows = token_rows(tile, token, *source, L.key_dim)
            bits = token_bits(survey(rows, tile + token >= first, L.key_dim, L.key_padded)[2])
        keys, counted = load_group(tile, first, source, p_keep, bits, "evict_last", L.key_dim, PIECES, L.large)
        total = add_tokens(total, keys, 1.0 / (32 * L.groups))  # divided first: no sum of finite keys overflows
        for r in tl.static_range(4):
            count += counted[r].to(tl.int32)
    return over_tokens(total), tl.sum(count, 0) // 4


@triton.jit
def page_mean(start, first, source, p_keep, L: tl.constexpr):
    """The mean of a page's keys as its header has it, in pieces, fp32."""
    total, count = page_sum(start, first, source, p_keep, False, L)
    if not_finite(total):
        total, count = page_sum(start, first, source, p_keep, True, L)
    share = 32 * L.groups / tl.maximum(count, 1)
    mean = []
    for b in tl.static_range(len(total)):
        mean = mean + [saturate(total[b] * share).to(tl.float16).to(tl.float32)]
    return mean


@triton.jit
def store_mean(p_page, mean, L: tl.constexpr):
    PIECES: tl.constexpr = L.key_padded // 32
    for b in tl.static_range(len(mean)):
        d = piece_dims(b, PIECES, 8, L.large)
        mask = to_dims(tl.arange(0, 32) < 4, d) & (d < 2 * L.header_words)
        x = lanes_first(mean[b]) if L.large else mean[b]
        tl.store(p_page.to(tl.pointer_type(tl.float16)) + d, x.to(tl.float16), mask=mask)


@triton.jit
def page_factors(p_factors, L: tl.constexpr):
    """A head's channel factors, in pieces."""
    PIECES: tl.constexpr = L.key_padded // 32
    factors = []
    for b in tl.static_range(piece_blocks(PIECES, L.large)):
        factors = factors + [as_pieces(load_factors(p_factors, piece_dims(b, PIECES, 4, L.large), L.key_dim))]
    return factors


@triton.jit
def pack_rotated(rows, start, first, source, mean, factors, p_codes, p_metadata, p_fragments, p_cells,
                 L: tl.constexpr, KEYS: tl.constexpr, FITTED: tl.constexpr):  # fmt: skip
    """Encodes the group of vectors from start on, less the mean and times the factors unless these are None.

    Args:
        rows: where they are, of `token_rows`.

    Returns:
        As `pack_plain`.
    """
    DIM: tl.constexpr = L.key_dim if KEYS else L.value_dim
    PADDED: tl.constexpr = L.key_padded if KEYS else L.value_padded
    BITS: tl.constexpr = L.key_bits if KEYS else L.value_bits
    FIELD: tl.constexpr = 0 if KEYS or L.key_format != "lloyd_max" else 1
    vectors, real = load_group(start, first, source, None, -1, "evict_first", DIM, PADDED // 32, L.large)
    words, norms, overflow = operand_words(vectors, real, mean, factors)
    lost = 0
    if overflow:  # as vectors are not finite, or only as they are large
        norms, lost = finite_norms(norms, rows, start + tl.arange(0, 32) >= first, DIM, PADDED)
    saturated = encode(words, norms, p_codes, p_metadata, p_fragments, p_cells, PADDED, BITS, FIELD, L.fields, KEYS,
                       FITTED, L.large)  # fmt: skip
    return lost, saturated


@triton.jit(do_not_specialize=["heads", "n", "window", "sinks", "stride_page_ids", "stride_keep"])
def pack_pages(
    p_key, p_value, p_ring_key, p_ring_value, p_pool, p_page_ids, p_row_start, p_counters, p_balance, p_flags, p_keep,
    p_key_fragments, p_key_cells, p_value_fragments, p_value_cells,
    heads, n, window, sinks, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_page_ids, stride_keep,
    L: tl.constexpr, FITTED: tl.constexpr, AWAITED: tl.constexpr,
):  # fmt: skip
    """Grid (H * groups * max_due * 2, B): head, group, due page, keys or values; row. What stands side by side in memory,
    the heads' vectors of a token, is read at about the same time. Keys, which take longer, come first, and together: the
    two sides share no code.

    AWAITED: whether the next kernel may start before this one has finished, and waits for it.
    """
    if AWAITED:
        gdc_launch_dependents()
    i_b = tl.program_id(1)
    i_h = tl.program_id(0) % heads
    of_side = tl.num_programs(0) // 2
    i_side = tl.program_id(0) // of_side
    i_part = tl.program_id(0) % of_side // heads
    i_group = i_part % L.groups
    i_due = i_part // L.groups
    PAGE: tl.constexpr = 32 * L.groups
    length = tl.load(p_counters)
    packed_end = tl.load(p_counters + 1)
    if i_due >= tl.maximum(length + n - packed_end - window, 0) // PAGE:
        return
    i_page = tl.load(p_page_ids + i_b * stride_page_ids + tl.load(p_counters + 2) + i_due)
    if i_page < 0:
        return
    p_page = p_pool + (i_page.to(tl.int64) * heads + i_h) * L.page_words
    p_codes = p_page + L.header_words + i_group * L.group_words
    p_metadata = (p_codes + L.key_words * 32 + L.value_words * 32).to(tl.pointer_type(tl.float16))
    start = packed_end + i_due * PAGE
    first = tl.load(p_row_start + i_b) + sinks  # what a mask hides now, a later one may show: it is stored
    tile = start + i_group * 32
    token = tl.arange(0, 32)
    ring = (i_b * heads + i_h).to(tl.int64) * (window + PAGE)
    if i_side == 0:
        p_keys = p_key + (i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh)
        keys = (length, p_keys, stride_kt, p_ring_key + ring * L.key_dim, window + PAGE)
        rows = token_rows(tile, token, *keys, L.key_dim)
        if L.key_format == "lloyd_max":
            mean = None
            if L.centered:
                p_kept = None if p_keep is None else p_keep + i_b.to(tl.int64) * stride_keep
                mean = page_mean(start, first, keys, p_kept, L)
                if i_group == 0:
                    store_mean(p_page, mean, L)
            factors = None
            if p_balance is not None:
                factors = page_factors(p_balance + (i_b * heads + i_h) * L.key_dim, L)
            lost, saturated = pack_rotated(rows, tile, first, keys, mean, factors, p_codes, p_metadata,
                                           p_key_fragments, p_key_cells, L, True, FITTED)  # fmt: skip
        else:
            lost, saturated = pack_plain(rows, tile + token >= first, p_codes, L, True)
    else:
        p_value_codes = p_codes + 32 * L.key_words
        p_values = p_value + (i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh)
        values = (length, p_values, stride_vt, p_ring_value + ring * L.value_dim, window + PAGE)
        rows = token_rows(tile, token, *values, L.value_dim)
        if L.value_format == "lloyd_max":
            lost, saturated = pack_rotated(rows, tile, first, values, None, None, p_value_codes, p_metadata,
                                           p_value_fragments, p_value_cells, L, False, FITTED)  # fmt: skip
        elif L.value_format == "min_max":
            lost, saturated = pack_min_max(tile, first, values, p_value_codes, p_metadata, L)
        else:
            lost, saturated = pack_plain(rows, tile + token >= first, p_value_codes, L, False)
    flags = (lost << i_side) | (saturated << 2)
    tl.atomic_or(p_flags + i_h, flags, mask=flags != 0, sem="relaxed")


class Packing(NamedTuple):
    """What every launch of `pack_pages` takes for a layout on a device."""

    spec: PageSpec
    fitted: bool
    options: dict[str, int]
    tables: tuple[Tensor | None, ...]
    """The constants of `encode.encode` for keys, then for values; None for what is not rotated."""


@lru_cache(maxsize=None)
def packing(layout: PageLayout, device: torch.device) -> Packing:
    tables: list[Tensor | None] = []
    for keys, rotated, bits, dim in (
        (True, layout.rotates_keys, layout.key_bits, layout.key_dim_padded),
        (False, layout.rotates_values, layout.value_bits, layout.value_dim_padded),
    ):
        if rotated:
            tables += [rotation_fragments(dim, keys, device), magnitude_cells(bits, dim, layout.codebook, device)]
        else:
            tables += [None, None]
    options = {"num_warps": 1}
    if max(layout.key_dim_padded, layout.value_dim_padded) <= 128:
        options["maxnreg"] = REGISTERS
    return Packing(page_spec(layout), layout.scale == "fitted", options, tuple(tables))


def launch_pack_pages(
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    page_ids: Tensor,
    row_start: Tensor,
    counters: Tensor,
    balance: Tensor | None,
    flags: Tensor,
    keep: Tensor | None,
    packing: Packing,
    sinks: int,
    recent_window: int,
    max_due: int,
    overlap: bool,
) -> None:
    """Packs the pages that are due after `n` new tokens; step 1 of `commit.commit`, whose arguments these are.

    Everything but `key`, `value` (last dim contiguous), `page_ids` and `keep` (rows contiguous) must be contiguous.
    `overlap`: whether the next step may start before this one has finished.
    """
    batch, heads, n, _ = key.shape
    launch(
        pack_pages, (heads * 2 * packing.spec.groups * max_due, batch), packing.options,
        (key, value, ring_key, ring_value, pool, page_ids, row_start, counters, balance, flags, keep, *packing.tables,
         heads, n, recent_window, sinks, *key.stride()[:3], *value.stride()[:3], page_ids.stride(0),
         0 if keep is None else keep.stride(0)),
        L=packing.spec, FITTED=packing.fitted, AWAITED=overlap,
    )  # fmt: skip
