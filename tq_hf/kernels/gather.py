"""Reads the whole history back as dense tensors: for everything that is not this package's attention."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..layout import PageLayout
from .lanes import (
    block_dim,
    chunk_dims,
    code_levels,
    code_shift,
    constants,
    lane_word_offset,
    load_factors,
    metadata_offset,
    row_pointers,
    sign_shift,
    signs,
    warps,
)


@triton.jit
def load_chunk(p_codes, c, PADDED: tl.constexpr, BITS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """The codes of chunk c, int32 [32 tokens, 32 columns]."""
    WORDS: tl.constexpr = BITS * PADDED // 32
    token = tl.arange(0, 32)[:, None]
    n = tl.arange(0, 32)[None, :]
    if KEYS:
        lane = 4 * (token % 8) + n // 8
        r = token // 8 + 0 * n
        i = n % 8 + 0 * token
    else:
        lane = 4 * (n // 4) + token // 2 % 4
        r = n // 2 % 2 * 2 + token // 16
        i = n % 2 * 4 + token // 8 % 2 * 2 + token % 2
    if BITS == 4:
        word = tl.load(p_codes + lane_word_offset(lane, 4 * c + r, WORDS))
        magnitude = (word >> code_shift(i, 4)) & 7
        codes = tl.where((word >> sign_shift(i)) & 1 != 0, 7 - magnitude, 8 + magnitude)
    elif BITS == 3:
        shift = code_shift(i, 3)
        own = tl.load(p_codes + lane_word_offset(lane, 3 * c + tl.minimum(r, 2), WORDS))
        codes = (own >> shift) & 7
        spare = tl.zeros([32, 32], tl.int32)
        for w in tl.static_range(3):  # run 3 stands in the spare bits of the other runs' words
            word = tl.load(p_codes + lane_word_offset(lane, 3 * c + w + 0 * r, WORDS))
            spare |= ((word >> (shift + 3)) & 1) << w
        codes = tl.where(r == 3, spare, codes)
    elif BITS == 2:
        word = tl.load(p_codes + lane_word_offset(lane, 2 * c + r // 2, WORDS))
        codes = (word >> (code_shift(i, 2) + 2 * (r % 2))) & 3
    else:
        word = tl.load(p_codes + lane_word_offset(lane, (4 * c + r) * (BITS // 4) + i * BITS // 32, WORDS))
        codes = word >> code_shift(i, BITS)
        if BITS < 32:
            codes = codes & (2**BITS - 1)
    return codes


@triton.jit
def e4m3_value(code):
    """fp8 e4m3 (fn) codes without NaN to fp32."""
    exponent = (code >> 3) & 15
    normal = (((exponent + 120) << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, (code & 7).to(tl.float32) * 0.001953125, normal)
    return tl.where(code & 0x80 != 0, -magnitude, magnitude)


@triton.jit
def cast(x, p_out):
    """fp32 in the output's dtype. A scale may take a vector of large codes just past what fp16 holds."""
    if p_out.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(p_out.dtype.element_ty)


@triton.jit
def unpack_vectors(p_out, live, p_codes, p_metadata, p_mean, p_factors, p_signs, p_levels,
                   DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr,
                   FIELD: tl.constexpr, FIELDS: tl.constexpr, KEYS: tl.constexpr,
                   CENTERED: tl.constexpr):  # fmt: skip
    """Decodes one group into the rows `p_out`, [32] pointers, of which `live` are written."""
    CHUNKS: tl.constexpr = PADDED // 32
    token = tl.arange(0, 32)
    if FORMAT == "lloyd_max":
        scale = tl.load(p_metadata + metadata_offset(token, FIELD, FIELDS)).to(tl.float32)
        d = tl.arange(0, BLOCK)
        n = tl.arange(0, 32)
        x = tl.zeros([32, BLOCK], tl.float32)
        for c in range(CHUNKS):
            codes = load_chunk(p_codes, c, PADDED, BITS, KEYS)
            b_signs = tl.load(p_signs + c * BLOCK * 32 + d[None, :] * 32 + n[:, None])  # [32, BLOCK]
            x = tl.dot(tl.load(p_levels + codes), b_signs, x)
        x *= (scale * PADDED**-0.5)[:, None]
        if p_factors is not None:
            x = x / load_factors(p_factors, d, DIM)[None, :]
        if CENTERED:
            x += tl.load(p_mean + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        tl.store(p_out[:, None] + d[None, :], cast(x, p_out), mask=live[:, None] & (d < DIM)[None, :])
    else:
        if FORMAT == "min_max":
            step = tl.load(p_metadata + metadata_offset(token, FIELD, FIELDS)).to(tl.float32)
            minimum = tl.load(p_metadata + metadata_offset(token, FIELD + 1, FIELDS)).to(tl.float32)
        for c in range(CHUNKS):
            codes = load_chunk(p_codes, c, PADDED, BITS, KEYS)
            dims = chunk_dims(c, PADDED, KEYS)
            if FORMAT == "min_max":
                v = cast(codes.to(tl.float32) * step[:, None] + minimum[:, None], p_out)
            elif FORMAT == "fp8":
                v = cast(e4m3_value(codes), p_out)
            elif BITS == 16:
                v = codes.to(tl.int16).to(p_out.dtype.element_ty, bitcast=True)
            else:
                v = codes.to(tl.float32, bitcast=True)
            tl.store(p_out[:, None] + dims[None, :], v, mask=live[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=["out_length", "sinks", "stride_page_ids"])
def unpack_pages(
    p_out_key, p_out_value, p_pool, p_page_ids, p_entries, p_row_start, p_counters, p_balance,
    p_key_signs, p_key_levels, p_value_signs, p_value_levels, out_length, sinks, stride_page_ids,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, KEY_BLOCK: tl.constexpr, KEY_FORMAT: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_SCALE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_FORMAT: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_SCALE: tl.constexpr,
    FIELDS: tl.constexpr, CENTER_KEYS: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr, PAGE_WORDS: tl.constexpr,
    HEADER_WORDS: tl.constexpr, GROUP_WORDS: tl.constexpr, KEY_WORDS: tl.constexpr, VALUE_WORDS: tl.constexpr,
):  # fmt: skip
    """Grid (2 * GROUPS * entries, H, B): keys or values, group and entry; head; row."""
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    i_part = tl.program_id(0)
    i_group = i_part // 2 % GROUPS
    i_entry = i_part // (2 * GROUPS)
    if i_entry >= tl.load(p_counters + 2):
        return
    i_page = tl.load(p_page_ids + i_b * stride_page_ids + i_entry)
    start = tl.load(p_entries + 2 * i_entry)
    count = tl.load(p_entries + 2 * i_entry + 1)
    if (i_page < 0) | (i_group * 32 >= count):
        return
    heads = tl.num_programs(1)
    p_page = p_pool + (i_page.to(tl.int64) * heads + i_h) * PAGE_WORDS
    p_group = p_page + HEADER_WORDS + i_group * GROUP_WORDS
    p_metadata = (p_group + KEY_WORDS + VALUE_WORDS).to(tl.pointer_type(tl.float16))
    p_mean = p_page.to(tl.pointer_type(tl.float16))
    token = i_group * 32 + tl.arange(0, 32)
    position = start + token
    live = (token < count) & (position < out_length) & (position >= tl.load(p_row_start + i_b) + sinks)
    row = (i_b * heads + i_h).to(tl.int64) * out_length + position
    if i_part % 2 == 0:
        p_factors = None if p_balance is None else p_balance + (i_b * heads + i_h) * KEY_DIM
        unpack_vectors(
            p_out_key + row * KEY_DIM, live, p_group, p_metadata, p_mean, p_factors, p_key_signs, p_key_levels, KEY_DIM,
            KEY_PADDED, KEY_BLOCK, KEY_FORMAT, KEY_BITS, KEY_SCALE, FIELDS, True, CENTER_KEYS,
        )  # fmt: skip
    else:
        unpack_vectors(
            p_out_value + row * VALUE_DIM, live, p_group + KEY_WORDS, p_metadata, p_mean, None, p_value_signs,
            p_value_levels, VALUE_DIM, VALUE_PADDED, VALUE_BLOCK, VALUE_FORMAT, VALUE_BITS, VALUE_SCALE, FIELDS, False,
            False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["out_length", "slots", "sinks"])
def copy_exact(
    p_out_key, p_out_value, p_ring_key, p_ring_value, p_sink_key, p_sink_value, p_row_start, p_counters,
    out_length, slots, sinks, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(slots + sinks, ROWS), H, B): the tokens in the ring, then the sinks."""
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_start = tl.load(p_row_start + i_b)
    in_ring = i < slots
    slot = tl.where(in_ring, 0, i - slots)
    position = tl.where(in_ring, tl.load(p_counters + 1) + i, row_start + slot)
    live = (position < tl.load(p_counters)) & (position < out_length)
    live = live & tl.where(in_ring, position >= row_start + sinks, slot < sinks)
    head = (i_b * tl.num_programs(1) + i_h).to(tl.int64)
    ring = head * slots + position % slots
    sink = head * sinks + slot
    out = head * out_length + position
    d = tl.arange(0, KEY_BLOCK)
    mask = live[:, None] & (d < KEY_DIM)[None, :]
    p_exact = row_pointers(in_ring, p_ring_key + ring * KEY_DIM, p_sink_key + sink * KEY_DIM, d)
    tl.store(p_out_key + (out * KEY_DIM)[:, None] + d[None, :], tl.load(p_exact, mask=mask), mask=mask)
    d = tl.arange(0, VALUE_BLOCK)
    mask = live[:, None] & (d < VALUE_DIM)[None, :]
    p_exact = row_pointers(in_ring, p_ring_value + ring * VALUE_DIM, p_sink_value + sink * VALUE_DIM, d)
    tl.store(p_out_value + (out * VALUE_DIM)[:, None] + d[None, :], tl.load(p_exact, mask=mask), mask=mask)


def launch_unpack_pages(
    out_key: Tensor,
    out_value: Tensor,
    pool: Tensor,
    page_ids: Tensor,
    entries: Tensor,
    row_start: Tensor,
    counters: Tensor,
    balance: Tensor | None,
    layout: PageLayout,
    sinks: int,
) -> None:
    """Decodes every entry of the table into `out_key`, `out_value` [B, H, length, D / Dv], contiguous."""
    batch, heads, length, _ = out_key.shape
    signs_and_levels: list[Tensor | None] = []
    for keys, rotated, bits, dim in (
        (True, layout.rotates_keys, layout.key_bits, layout.key_dim_padded),
        (False, layout.rotates_values, layout.value_bits, layout.value_dim_padded),
    ):
        if rotated:
            signs_and_levels += [signs(dim, keys, pool.device), code_levels(bits, dim, layout.codebook, pool.device)]
        else:
            signs_and_levels += [None, None]
    # An entry holds at least one token: no more than `length` of them can matter.
    grid = (2 * layout.groups * min(entries.shape[0], length), heads, batch)
    unpack_pages[grid](
        out_key, out_value, pool, page_ids, entries, row_start, counters, balance, *signs_and_levels, length, sinks,
        page_ids.stride(0), **constants(layout), num_warps=warps(layout),
    )  # fmt: skip


def launch_copy_exact(
    out_key: Tensor,
    out_value: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    row_start: Tensor,
    counters: Tensor,
) -> None:
    """Copies ring and sinks into `out_key`, `out_value` [B, H, length, D / Dv]; all tensors contiguous."""
    batch, heads, length, key_dim = out_key.shape
    value_dim = out_value.shape[-1]
    slots, sinks = ring_key.shape[2], sink_key.shape[2]
    rows = 16
    copy_exact[(triton.cdiv(slots + sinks, rows), heads, batch)](
        out_key, out_value, ring_key, ring_value, sink_key, sink_value, row_start, counters, length, slots, sinks,
        KEY_DIM=key_dim, KEY_BLOCK=block_dim(key_dim), VALUE_DIM=value_dim, VALUE_BLOCK=block_dim(value_dim),
        ROWS=rows, num_warps=4,
    )  # fmt: skip
