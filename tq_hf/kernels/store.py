"""The store kernel: packs the pages that have become due.

A program packs the keys or the values of one 32-token group. It goes over the head in chunks of 32 columns (`lanes.py`):
rotate, quantize, pack and store a chunk, so only one chunk of rotated values is alive at a time and any multiple of 32
works as a head dimension. Norm, minimum and page mean need whole vectors, which are loaded first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..layout import PageLayout
from .lanes import (
    chunk_dims,
    code_shift,
    constants,
    lane_word_offset,
    load_factors,
    magnitude_cells,
    metadata_offset,
    row_pointers,
    sign_shift,
    signs,
    warps,
)

FP16_MAX = tl.constexpr(65504.0)
FP8_MAX = tl.constexpr(448.0)


@triton.jit
def token_rows(start, length, i_b, i_h, p_new, stride_b, stride_h, stride_t, p_ring, slots, DIM: tl.constexpr):
    """Where positions start to start + 31 are: which are committed, their pointers in the ring, and among the new tokens."""
    token = tl.arange(0, 32)
    p_first = p_new + (
        i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h + (start - length).to(tl.int64) * stride_t
    )
    slot = start % slots + token
    slot = tl.where(slot < slots, slot, slot - slots)
    p_head = p_ring + (i_b * tl.num_programs(1) + i_h).to(tl.int64) * slots * DIM
    return start + token < length, p_head + slot * DIM, p_first + token * stride_t


@triton.jit
def real_tokens(start, first, p_keep, keep_row):
    """Which of positions start to start + 31 hold tokens that count: neither padding nor sink, and kept."""
    position = start + tl.arange(0, 32)
    real = position >= first
    if p_keep is not None:
        real = real & (tl.load(p_keep + keep_row + position) != 0)
    return real


@triton.jit
def load_vectors(rows, real, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Vectors with zeros for those that do not count or are not finite, and which ones are left."""
    d = tl.arange(0, BLOCK)
    x = tl.load(row_pointers(*rows, d), mask=real[:, None] & (d < DIM)[None, :], other=0.0)  # [T, BLOCK]
    usable = real & (tl.sum(x.to(tl.float32) * 0.0, 1) == 0.0)  # infinities and NaN times zero are NaN
    return tl.where(usable[:, None], x.to(tl.float32), 0.0), usable


@triton.jit
def quantize(u, p_cells, HALF: tl.constexpr):
    """The Lloyd-Max cell of each value: its magnitude's index, its level's square times 2**17, and -1 or 0 for its sign.

    Comparisons and selects run at half the rate of multiply-adds, which is what `lanes.magnitude_cells` is made for: each
    boundary at or below the value adds a number that holds the steps of both results. One bit pattern less for negative
    values sends a value that stands on a boundary to the right cell on both sides of zero.
    """
    bits = u.to(tl.int32, bitcast=True)
    sign = bits >> 31
    v = ((bits & 0x7FFFFFFF) + sign).to(tl.float32, bitcast=True)
    cell = tl.full(u.shape, 0.0, tl.float32) + tl.load(p_cells + HALF)
    for m in tl.static_range(1, HALF):
        above = tl.minimum(tl.maximum(tl.fma(v, 1073741824.0, tl.load(p_cells + m)), 0.0), 1.0)  # 0 or 1
        cell = tl.fma(above, tl.load(p_cells + HALF + m), cell)
    cell = cell.to(tl.int32, bitcast=True)
    return (cell >> 20) & 7, cell & 0xFFFFF, sign


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
def saturate(x):
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)


@triton.jit
def normalizers(norm):
    """A power of two that brings vectors of this norm to 64..128, and what then divides by the norm.

    Then the fp16 operands of the tensor cores neither overflow nor vanish, and vectors in a 16-bit dtype keep all bits.
    """
    bounded = tl.maximum(norm, 1e-36)
    exponent = tl.minimum(bounded.to(tl.int32, bitcast=True) >> 23, 253)
    power = ((260 - exponent) << 23).to(tl.float32, bitcast=True)
    return power, 1.0 / (bounded * power)


@triton.jit
def store_chunk(p_codes, codes, c, PADDED: tl.constexpr, BITS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Packs the codes of chunk c, int32 [32 tokens, 32 columns], into lane words and stores them.

    4-bit codes are 3-bit magnitudes with the sign in bit 3.
    """
    WORDS: tl.constexpr = BITS * PADDED // 32
    # [g, t, r, i // 2, i % 2]: lane, run and code of a run. The words come out in the order in which they stand in memory.
    if KEYS:
        codes = codes.reshape(4, 8, 4, 4, 2).permute(1, 2, 0, 3, 4)  # token (r, g), column (t, i)
    else:  # token (h, a // 2, t, a % 2), column (g, p, e)
        codes = codes.reshape(2, 2, 4, 2, 8, 2, 2).permute(4, 2, 5, 0, 6, 1, 3).reshape(8, 4, 4, 4, 2)
    i = 2 * tl.arange(0, 4)[:, None] + tl.arange(0, 2)[None, :]  # [4, 2]
    lane = 4 * tl.arange(0, 8)[:, None, None] + tl.arange(0, 4)[None, :, None]  # [8, 4, 1]
    r = tl.arange(0, 4)[None, None, :]
    if BITS <= 4:
        if BITS == 4:
            fields = ((codes & 7) << code_shift(i, 4)) | ((codes >> 3) << sign_shift(i))
        else:
            fields = codes << code_shift(i, BITS)
        words = tl.sum(tl.sum(fields, 4), 3)  # [8, 4, 4]: a word a run
        if BITS == 4:
            tl.store(p_codes + lane_word_offset(lane, 4 * c + r, WORDS), words)
        elif BITS == 3:
            last = tl.sum(tl.where(r == 3, words, 0), 2)[:, :, None]
            words = words | (((last >> r) & 0x11111111) << 3)
            tl.store(p_codes + lane_word_offset(lane, 3 * c + r, WORDS), words, mask=(r < 3) & (lane >= 0))
        else:
            odd = tl.arange(0, 2)[None, None, None, :]
            words = tl.sum(words.reshape(8, 4, 2, 2) << (2 * odd), 3)  # [8, 4, 2]
            half = tl.arange(0, 2)[None, None, :]
            tl.store(p_codes + lane_word_offset(lane, 2 * c + half, WORDS), words)
    else:
        RUN_WORDS: tl.constexpr = BITS // 4
        fields = codes << code_shift(i, BITS)
        if BITS == 8:
            words = tl.sum(tl.sum(fields, 4).reshape(8, 4, 4, 2, 2), 4)
        elif BITS == 16:
            words = tl.sum(fields, 4)
        else:
            words = fields.reshape(8, 4, 4, 8)
        j = tl.arange(0, RUN_WORDS)[None, None, None, :]
        word = (4 * c + r[:, :, :, None]) * RUN_WORDS + j
        tl.store(p_codes + lane_word_offset(lane[:, :, :, None], word, WORDS), words)  # [8, 4, 4, RUN_WORDS]


@triton.jit
def pack_vectors(rows, x, usable, p_codes, p_metadata, p_signs, p_cells,
                 DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr,
                 FIELD: tl.constexpr, FIELDS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
                 FITTED: tl.constexpr):  # fmt: skip
    """Encodes one group: x, fp32 [32, BLOCK], where it is rotated or scaled, else the vectors at `rows` (`token_rows`).

    EXACT says that x, scaled by a power of two, is exact in fp16.

    Returns:
        Whether each token's metadata saturated fp16, or one of its coordinates fp8, [32].
    """
    CHUNKS: tl.constexpr = PADDED // 32
    token = tl.arange(0, 32)
    p_field = p_metadata + metadata_offset(token, FIELD, FIELDS)
    if FORMAT == "lloyd_max":
        HALF: tl.constexpr = 2 ** (BITS - 1)
        norm = tl.sqrt(tl.sum(x * x, 1))
        power, inverse = normalizers(norm)
        x *= power[:, None]
        operand = x.to(tl.float16)
        if not EXACT:  # 11 more bits of each coordinate, as further inputs of the same product
            rest = (x - operand.to(tl.float32)).to(tl.float16)
            is_rest = (tl.arange(0, 2) == 1)[None, :, None]
            operand = tl.where(is_rest, rest[:, None, :], operand[:, None, :]).reshape(32, 2 * BLOCK)
        squares = tl.zeros([32, 32], tl.int32)
        projection = tl.zeros([32, 32], tl.float32)
        k = tl.arange(0, BLOCK if EXACT else 2 * BLOCK)[:, None] % BLOCK
        n = tl.arange(0, 32)[None, :]
        for c in range(CHUNKS):
            y = tl.dot(operand, tl.load(p_signs + c * BLOCK * 32 + k * 32 + n))  # [32, 32]
            u = y * inverse[:, None]
            magnitude, square, sign = quantize(u, p_cells, HALF)
            squares += square
            if FITTED:
                projection += tl.abs(u) * tl.sqrt(square.to(tl.float32))
            if BITS == 4:
                codes = magnitude | (sign & 8)
            else:
                codes = magnitude ^ HALF ^ (sign & (2 * HALF - 1))
            store_chunk(p_codes, codes, c, PADDED, BITS, KEYS)
        scale = norm / tl.sqrt(tl.sum(squares, 1).to(tl.float32) * 7.62939453125e-06)  # 2**-17
        if FITTED:  # `layout.PageLayout.scale`
            unbiased = norm * (362.0386719675123 * PADDED**0.5) / tl.maximum(tl.sum(projection, 1), 1e-30)  # 2**8.5
            scale = tl.sqrt(scale * unbiased) if KEYS else unbiased
        saturated = ~(scale <= FP16_MAX)  # NaN as well: of a norm that overflows
        tl.store(p_field, tl.where(saturated, FP16_MAX, scale).to(tl.float16))
    else:
        if FORMAT == "min_max":
            TOP: tl.constexpr = 2**BITS - 1
            in_head = (tl.arange(0, BLOCK) < DIM)[None, :]
            low = tl.min(tl.where(in_head, x, float("inf")), 1)
            high = tl.max(tl.where(in_head, x, float("-inf")), 1)
            minimum = saturate(low).to(tl.float16)  # [32]
            step = tl.maximum(tl.div_rn(high - minimum.to(tl.float32), TOP * 1.0), 1e-8)
            saturated = (tl.abs(low) > FP16_MAX) | (step > FP16_MAX)
            scale = saturate(step).to(tl.float16)  # [32]
            tl.store(p_field, scale)
            tl.store(p_metadata + metadata_offset(token, FIELD + 1, FIELDS), minimum)
            origin = minimum.to(tl.float32)[:, None]
            divisor = tl.where(scale > 0, scale.to(tl.float32), float("inf"))[:, None]
        elif FORMAT == "fp8":
            saturated = tl.max(tl.abs(x), 1) > FP8_MAX
        else:
            saturated = token < 0
        for c in range(CHUNKS):
            dims = chunk_dims(c, PADDED, KEYS)
            # The vectors are loaded again, from L1: a block in registers cannot be indexed by column.
            inside = usable[:, None] & (dims < DIM)[None, :]
            v = tl.load(row_pointers(*rows, dims), mask=inside, other=0.0)  # [32, 32]
            if FORMAT == "min_max":
                steps = tl.floor(tl.div_rn(v.to(tl.float32) - origin, divisor) + 0.5)
                codes = tl.where(inside, tl.minimum(tl.maximum(steps, 0), TOP), 0).to(tl.int32)
                if BITS == 4:  # to a magnitude and a sign, as level codes - 7.5
                    codes = tl.where(codes < 8, 15 - codes, codes - 8)
            elif FORMAT == "fp8":
                codes = e4m3(v.to(tl.float32))
            elif BITS == 16:
                codes = v.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            else:
                codes = v.to(tl.int32, bitcast=True)
            store_chunk(p_codes, codes, c, PADDED, BITS, KEYS)
    return saturated


@triton.jit(do_not_specialize=["n", "window", "sinks", "stride_page_ids", "stride_keep"])
def pack_pages(
    p_key, p_value, p_ring_key, p_ring_value, p_pool, p_page_ids, p_row_start, p_counters, p_balance, p_flags, p_keep,
    p_key_signs, p_key_cells, p_value_signs, p_value_cells,
    n, window, sinks, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_page_ids, stride_keep,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, KEY_BLOCK: tl.constexpr, KEY_FORMAT: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_SCALE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_FORMAT: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_SCALE: tl.constexpr, FIELDS: tl.constexpr, FITTED: tl.constexpr,
    CENTER_KEYS: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr, PAGE_WORDS: tl.constexpr,
    HEADER_WORDS: tl.constexpr, GROUP_WORDS: tl.constexpr, KEY_WORDS: tl.constexpr, VALUE_WORDS: tl.constexpr,
):  # fmt: skip
    """Grid (2 * GROUPS * max_due, H, B): keys or values, group and due page; head; row."""
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    i_part = tl.program_id(0)
    i_group = i_part // 2 % GROUPS
    i_due = i_part // (2 * GROUPS)
    length = tl.load(p_counters)
    packed_end = tl.load(p_counters + 1)
    if i_due >= tl.maximum(length + n - packed_end - window, 0) // PAGE:
        return
    i_page = tl.load(p_page_ids + i_b * stride_page_ids + tl.load(p_counters + 2) + i_due)
    if i_page < 0:
        return
    p_page = p_pool + (i_page.to(tl.int64) * tl.num_programs(1) + i_h) * PAGE_WORDS
    p_group = p_page + HEADER_WORDS + i_group * GROUP_WORDS
    p_metadata = (p_group + KEY_WORDS + VALUE_WORDS).to(tl.pointer_type(tl.float16))
    start = packed_end + i_due * PAGE
    first = tl.load(p_row_start + i_b) + sinks
    slots = window + PAGE
    tile = start + i_group * 32
    keep_row = i_b.to(tl.int64) * stride_keep
    real = real_tokens(tile, first, None, keep_row)  # what the mask hides now, a later one may show: it is stored
    if i_part % 2 == 0:
        key_rows = token_rows(tile, length, i_b, i_h, p_key, stride_kb, stride_kh, stride_kt, p_ring_key, slots, KEY_DIM)
        if CENTER_KEYS:
            total = tl.zeros([32, KEY_BLOCK], tl.float32)
            count = 0
            for i in range(GROUPS):  # every group's program computes the mean, so that none waits for another
                other = start + i * 32
                other_rows = token_rows(
                    other, length, i_b, i_h, p_key, stride_kb, stride_kh, stride_kt, p_ring_key, slots, KEY_DIM
                )
                others, counted = load_vectors(
                    other_rows, real_tokens(other, first, p_keep, keep_row), KEY_DIM, KEY_BLOCK
                )
                total += others * (1.0 / PAGE)  # divided first, so that no sum of finite keys overflows
                count += tl.sum(counted.to(tl.int32), 0)
            mean = saturate(tl.sum(total, 0) * (PAGE / tl.maximum(count, 1))).to(tl.float16)  # [KEY_BLOCK]
            if i_group == 0:
                d = tl.arange(0, KEY_BLOCK)
                tl.store(p_page.to(tl.pointer_type(tl.float16)) + d, mean, mask=d < 2 * HEADER_WORDS)
        keys, usable = load_vectors(key_rows, real, KEY_DIM, KEY_BLOCK)
        if CENTER_KEYS:
            keys = tl.where(usable[:, None], keys - mean.to(tl.float32)[None, :], 0.0)
        if p_balance is not None:
            p_factors = p_balance + (i_b * tl.num_programs(1) + i_h) * KEY_DIM
            keys *= load_factors(p_factors, tl.arange(0, KEY_BLOCK), KEY_DIM)[None, :]
        saturated = pack_vectors(
            key_rows, keys, usable, p_group, p_metadata, p_key_signs, p_key_cells, KEY_DIM, KEY_PADDED, KEY_BLOCK,
            KEY_FORMAT, KEY_BITS, KEY_SCALE, FIELDS, True,
            p_key.dtype.element_ty != tl.float32 and not CENTER_KEYS and p_balance is None, FITTED,
        )  # fmt: skip
    else:
        value_rows = token_rows(
            tile, length, i_b, i_h, p_value, stride_vb, stride_vh, stride_vt, p_ring_value, slots, VALUE_DIM
        )
        values, usable = load_vectors(value_rows, real, VALUE_DIM, VALUE_BLOCK)
        saturated = pack_vectors(
            value_rows, values, usable, p_group + KEY_WORDS, p_metadata, p_value_signs, p_value_cells, VALUE_DIM,
            VALUE_PADDED, VALUE_BLOCK, VALUE_FORMAT, VALUE_BITS, VALUE_SCALE, FIELDS, False,
            p_value.dtype.element_ty != tl.float32, FITTED,
        )  # fmt: skip
    dropped = tl.max((real & ~usable).to(tl.int32), 0)
    flags = (dropped << (i_part % 2)) | (tl.max(saturated.to(tl.int32), 0) << 2)
    tl.atomic_or(p_flags + i_h, flags, mask=flags != 0, sem="relaxed")


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
    layout: PageLayout,
    sinks: int,
    recent_window: int,
    max_due: int,
) -> None:
    """Packs the pages that are due after `n` new tokens; step 1 of `commit.commit`, whose arguments these are.

    Everything but `key`, `value` (last dim contiguous), `page_ids` and `keep` (rows contiguous) must be contiguous.
    """
    batch, heads, n, _ = key.shape
    signs_and_cells: list[Tensor | None] = []
    for keys, rotated, bits, dim in (
        (True, layout.rotates_keys, layout.key_bits, layout.key_dim_padded),
        (False, layout.rotates_values, layout.value_bits, layout.value_dim_padded),
    ):
        if rotated:
            signs_and_cells += [signs(dim, keys, key.device), magnitude_cells(bits, dim, layout.codebook, key.device)]
        else:
            signs_and_cells += [None, None]
    pack_pages[(2 * layout.groups * max_due, heads, batch)](
        key, value, ring_key, ring_value, pool, page_ids, row_start, counters, balance, flags, keep, *signs_and_cells,
        n, recent_window, sinks, *key.stride()[:3], *value.stride()[:3], page_ids.stride(0),
        0 if keep is None else keep.stride(0), FITTED=layout.scale == "fitted", **constants(layout), num_warps=warps(layout),
    )  # fmt: skip
