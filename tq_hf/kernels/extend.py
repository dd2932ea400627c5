"""Attention of many queries over packed pages: a tile of pages is dequantized once for a block of 64 or 128 columns.

A column is what it is in `packed.py`. Here columns are the rows of both products, as in FlashAttention, and a tile's keys
and values are fp16 operands that all warps of a program share:

    scores   = query [COLUMNS, D]        x keys [D, TOKENS]         keys = level * scale + mean of the page
    sums     = weights [COLUMNS, TOKENS] x values [TOKENS, D]       values = level * scale (+ minimum)

What a lane's word holds is a run of 8 numbers in shared memory: 8 dimensions of a token, or of a dimension 4 tokens and with
the next word 4 more. So tokens and dimensions stand in the order in which words hold them:

    token n        of a group is token 8 * (n // 2 % 4) + n // 8 * 2 + n % 2
    dimension n    of a value is g * D/8 + 4c + n % 4 with c = n // 32, g = n // 4 % 8
    dimension n    of a key is t * D/4 + 8c + n % 8, where n // 8 counts t between the bits of c (`key_dims`)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .dequant import INTERPRET, byte_pairs, fp8_pairs, half, level_pairs, load_now
from .lanes import lane_word_offset, load_factors
from .packed import NOTHING, UNWEIGHT, WEIGHT
from .query import LOG2_E

# Lloyd-Max levels are below 2.8, and the largest level of a range may be rounded up: a fourth is a number of fp16, whatever
# the scale of a fp16 model's vectors is.
FOURTH = tl.constexpr(0.25)
MEANS = tl.constexpr(64)  # pages whose mean keys a program rotates
SAMPLE = tl.constexpr(16)  # pages whose mean keys the centre is the mean of


# Dimensions of blocks are powers of two: a head's chunks are cut into pieces of 4, then of 2 and of 1.
@triton.constexpr_function
def pieces(chunks):
    """How many pieces so many chunks have."""
    return chunks // 4 + (chunks // 2 % 2) + chunks % 2


@triton.constexpr_function
def piece_size(i, chunks):
    """The chunks of piece i."""
    return 4 if i < chunks // 4 else chunks % 4 if chunks % 4 < 3 else 2 if i == chunks // 4 else 1


@triton.constexpr_function
def piece_start(i, chunks):
    """The first chunk of piece i."""
    return min(4 * i, chunks // 4 * 4 + chunks % 4 // 2 * 2) if i else 0


@triton.jit
def multiply_add(x, factor, offset):
    """x * factor + offset, all fp16, rounded once."""
    if INTERPRET:
        return (x.to(tl.float32) * factor.to(tl.float32) + offset.to(tl.float32)).to(tl.float16)
    else:
        x, factor = tl.broadcast(x, factor)
        x, offset = tl.broadcast(x, offset)
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, factor, offset], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def multiply(x, factor):
    """x * factor, both fp16."""
    if INTERPRET:
        return (x.to(tl.float32) * factor.to(tl.float32)).to(tl.float16)
    else:
        x, factor = tl.broadcast(x, factor)
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, factor], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def halves(words):
    """The two fp16 of each word, in one more dimension."""
    return tl.join(half(words, tl.float16), half(words >> 16, tl.float16))


@triton.jit
def four_halves(x):
    """The four fp16 of each int64, in two more dimensions."""
    return halves(tl.join(x.to(tl.int32), (x >> 32).to(tl.int32)))


@triton.jit
def own_word(p):
    """The word of this lane among 32. The compiler would keep a word that all lanes share in a uniform register, and move it
    to a vector register for each use."""
    if INTERPRET:
        return tl.load(p)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 l; .reg .b64 a; mov.u32 l, %laneid; mad.wide.u32 a, l, 4, $1; ld.global.b32 $0, [a]; }",
            "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def load_table(p_table):
    """Four words of `dequant.level_tables`, for a fourth of the levels: two less in each exponent."""
    table = [own_word(p_table), own_word(p_table + 32), own_word(p_table + 64), own_word(p_table + 96)]
    return table[:2] + [table[2] - 0x08080808, table[3] - 0x08080808]


@triton.jit
def load_runs(p_codes, live, first: tl.constexpr, CHUNKS: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """The words of some chunks of TILE groups, a run each (two words for 8 bits), zeros unless `live`.

    Args:
        p_codes, live: [TILE], of each group.

    Returns:
        int32 [TILE, CHUNKS, 8 (g), 4 (t), 4 (r)], for 8 bits with [2] behind it.
    """
    TILE: tl.constexpr = p_codes.shape[0]
    if BITS == 3:
        n = tl.arange(0, 32 * CHUNKS)
        words = []
        for w in tl.static_range(3):
            offset = lane_word_offset(n % 32, 3 * (first + n // 32) + w, WORDS)
            words = words + [tl.load(p_codes[:, None] + offset[None, :], mask=live[:, None], other=0)]
        last = ((words[0] >> 3) & 0x11111111) | ((words[1] >> 2) & 0x22222222) | ((words[2] >> 1) & 0x44444444)
        runs = tl.join(tl.join(words[0], words[2]), tl.join(words[1], last)).reshape(TILE, CHUNKS, 8, 4, 4)
    else:
        n = tl.arange(0, 32 * BITS * CHUNKS)
        x = tl.load(p_codes[:, None] + (32 * BITS * first + n)[None, :], mask=live[:, None], other=0)
        if BITS == 4:
            runs = x.reshape(TILE, CHUNKS, 8, 4, 4)
        elif BITS == 2:
            PART: tl.constexpr = 2 if CHUNKS > 1 else 1  # chunks of a 16-byte quad
            x = x.reshape(TILE, CHUNKS // PART, 32, PART, 2).permute(0, 1, 3, 2, 4)
            runs = tl.join(x, x >> 2).reshape(TILE, CHUNKS, 8, 4, 4)
        else:
            x = x.reshape(TILE, CHUNKS, 2, 32, 4).permute(0, 1, 3, 2, 4)
            runs = x.reshape(TILE, CHUNKS, 8, 4, 4, 2)
    return runs


@triton.jit
def run_values(runs, table, FORMAT: tl.constexpr, BITS: tl.constexpr):
    """A fourth of levels or bytes, or fp8 numbers times 2**-8, as fp16: [TILE, CHUNKS, 8 (g), 4 (t), 4 (r), 8 (i)]."""
    TILE: tl.constexpr = runs.shape[0]
    CHUNKS: tl.constexpr = runs.shape[1]
    if BITS <= 4:
        p = level_pairs(runs, table, BITS)
        pairs = tl.join(tl.join(p[0], p[2]), tl.join(p[1], p[3]))
    else:
        p = fp8_pairs(runs) if FORMAT == "fp8" else byte_pairs(runs, 0x5C005C00)
        pairs = tl.join(p[0], p[1])
    return halves(pairs).reshape(TILE, CHUNKS, 8, 4, 4, 8)


@triton.jit
def load_field(p_metadata, live, FIELD: tl.constexpr, FIELDS: tl.constexpr):
    """A metadata field of TILE groups, fp16 [TILE, 32] in the order of tokens, zeros unless `live`."""
    TILE: tl.constexpr = p_metadata.shape[0]
    g = tl.arange(0, 8)
    if FIELD % 2 == 0 and FIELD + 1 == FIELDS:
        offset = 16 * (FIELD // 2) + g
    else:
        offset = 16 * (FIELD // 2) + 2 * g + FIELD % 2
    x = tl.load(p_metadata.to(tl.pointer_type(tl.int64))[:, None] + offset[None, :], mask=live[:, None], other=0)
    return four_halves(x).reshape(TILE, 4, 2, 4).permute(0, 1, 3, 2).reshape(TILE, 32)


@triton.jit
def key_dims(n, first: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """Dimensions n of a tile of keys. In this order, lanes of different t write to different banks of shared memory."""
    PART: tl.constexpr = 2 if CHUNKS > 1 else 1
    chunk = first + n // (32 * PART) * PART + n // 8 % PART
    return n // (8 * PART) % 4 * (PADDED // 4) + 8 * chunk + n % 8


@triton.jit
def value_dims(first: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """The dimensions of a tile of values."""
    n = tl.arange(0, 32 * CHUNKS)
    return n // 4 % 8 * (PADDED // 8) + 4 * (first + n // 32) + n % 4


@triton.jit
def key_order(x):
    """[TILE, CHUNKS, 8 (g), 4 (t), 4 (r), 8 (i)] to [TILE, 32 tokens, dimensions]."""
    TILE: tl.constexpr = x.shape[0]
    CHUNKS: tl.constexpr = x.shape[1]
    PART: tl.constexpr = 2 if CHUNKS > 1 else 1
    x = x.reshape(TILE, CHUNKS // PART, PART, 4, 2, 4, 4, 8).permute(0, 3, 6, 4, 1, 5, 2, 7)
    return x.reshape(TILE, 32, 32 * CHUNKS)


@triton.jit
def value_order(x):
    """[TILE, CHUNKS, 8 (g), 4 (t), 4 (2p + h), 8 (4e + a)] to [dimensions, TILE, 32 tokens]."""
    TILE: tl.constexpr = x.shape[0]
    CHUNKS: tl.constexpr = x.shape[1]
    x = x.reshape(TILE, CHUNKS, 8, 4, 2, 2, 2, 4).permute(1, 2, 4, 6, 0, 3, 5, 7)
    return x.reshape(32 * CHUNKS, TILE, 32)


@triton.jit
def load_pages(p_page_ids, first, entries, COUNT: tl.constexpr):
    """The page ids of COUNT entries, -1 from number `entries` on."""
    pages = []
    for k in tl.static_range(COUNT):
        pages = pages + [tl.load(p_page_ids + first + k, mask=first + k < entries, other=-1)]
    return pages


@triton.jit
def load_keys(p_codes, p_metadata, p_mean, live, table, i: tl.constexpr, L: tl.constexpr):
    """Piece i of the keys of TILE groups: fp16 [TILE * 32 tokens, dimensions], a fourth of the keys if they are rotated.

    Args:
        p_codes, p_metadata, live: [TILE], of each group.
        p_mean: int64 [PAGES], each page's row of `rotate_means`, if keys are centred.
    """
    FORMAT: tl.constexpr = L.key_format
    FIRST: tl.constexpr = piece_start(i, L.key_padded // 32)
    CHUNKS: tl.constexpr = piece_size(i, L.key_padded // 32)
    TILE: tl.constexpr = live.shape[0]
    runs = load_runs(p_codes, live, FIRST, CHUNKS, L.key_bits, L.key_words)
    x = key_order(run_values(runs, table, FORMAT, L.key_bits))
    if FORMAT == "lloyd_max":
        scale = load_field(p_metadata, live, 0, L.fields)
        if L.centered:
            PAGES: tl.constexpr = p_mean.shape[0]
            four = 8 * FIRST + tl.arange(0, 8 * CHUNKS)
            mean = four_halves(tl.load(p_mean[:, None] + four[None, :])).reshape(PAGES, 1, 32 * CHUNKS)
            x = x.reshape(PAGES, TILE // PAGES * 32, 32 * CHUNKS)
            x = multiply_add(x, scale.reshape(PAGES, TILE // PAGES * 32, 1), mean)
        else:
            x = multiply(x, scale[:, :, None])
    return x.reshape(TILE * 32, 32 * CHUNKS)


@triton.jit
def load_values(p_codes, p_metadata, live, table, i: tl.constexpr, L: tl.constexpr):
    """Piece i of a fourth of the values: fp16 [dimensions, TILE * 32 tokens]."""
    FORMAT: tl.constexpr = L.value_format
    FIRST: tl.constexpr = piece_start(i, L.value_padded // 32)
    CHUNKS: tl.constexpr = piece_size(i, L.value_padded // 32)
    TILE: tl.constexpr = live.shape[0]
    BITS: tl.constexpr = L.value_bits
    runs = load_runs(p_codes, live, FIRST, CHUNKS, BITS, L.value_words)
    x = value_order(run_values(runs, table, FORMAT, BITS))
    scale = load_field(p_metadata, live, 1 if L.key_format == "lloyd_max" else 0, L.fields)
    if FORMAT == "min_max":
        lowest = load_field(p_metadata, live, L.fields - 1, L.fields).to(tl.float32)
        if BITS <= 4:  # levels count from the middle of a value's range
            lowest += scale.to(tl.float32) * ((2**BITS - 1) / 2)
        x = multiply_add(x, scale[None, :, :], (lowest * FOURTH).to(tl.float16)[None, :, :])
    else:
        x = multiply(x, scale[None, :, :])
    return x.reshape(32 * CHUNKS, TILE * 32)


@triton.jit(do_not_specialize=["heads", "stride_page_ids", "capacity"])
def rotate_means(
    p_pool, p_page_ids, p_counters, p_balance, p_signs, p_means, p_centre, heads, stride_page_ids, capacity,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PAGE_WORDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, cdiv(capacity, MEANS)): the mean keys of pages as the balanced and rotated keys have them, less what they
    have in common.

    Args:
        p_balance: fp32 [B * H, DIM], or None.
        p_signs: bf16 [BLOCK, BLOCK], the sign of each input (column) in each rotated coordinate (row).
        p_means: fp16 [B * H, capacity, PADDED], a fourth of the mean keys less the centre, in the order of `key_dims`,
            piece by piece.
        p_centre: fp32 [B * H, DIM], the mean of some pages' mean keys, as they are.
        CHAINED: whether this kernel runs beside `prepare.prepare`, and the next may start before this one has finished.
    """
    if CHAINED:
        gdc_launch_dependents()
    i_bh = tl.program_id(0)
    i_b, i_h = i_bh // heads, i_bh % heads
    entry = tl.program_id(1) * MEANS + tl.arange(0, MEANS)
    entries = tl.minimum(tl.load(p_counters + 2), capacity)
    exists = entry < entries
    page = tl.load(p_page_ids + i_b * stride_page_ids + entry, mask=exists, other=-1)
    d = tl.arange(0, BLOCK)
    p_mean = (p_pool + (page.to(tl.int64) * heads + i_h) * PAGE_WORDS).to(tl.pointer_type(tl.float16))
    mask = (page >= 0)[:, None] & (d < DIM)[None, :]
    mean = tl.load(p_mean[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    some = tl.arange(0, SAMPLE) * entries // SAMPLE
    sample = tl.load(p_page_ids + i_b * stride_page_ids + some, mask=entries > 0, other=-1)
    p_sample = (p_pool + (sample.to(tl.int64) * heads + i_h) * PAGE_WORDS).to(tl.pointer_type(tl.float16))
    sampled = (sample >= 0)[:, None] & (d < DIM)[None, :]
    centre = tl.sum(tl.load(p_sample[:, None] + d[None, :], mask=sampled, other=0.0).to(tl.float32), 0)
    centre /= tl.maximum(tl.sum((sample >= 0).to(tl.int32), 0), 1).to(tl.float32)
    tl.store(p_centre + i_bh.to(tl.int64) * DIM + d, centre, mask=(d < DIM) & (tl.program_id(1) == 0))
    mean -= centre[None, :]
    if p_balance is not None:
        mean *= load_factors(p_balance + i_bh.to(tl.int64) * DIM, d, DIM)[None, :]
    high = mean.to(tl.float16)
    rest = (mean - high.to(tl.float32)).to(tl.float16)
    p_row = p_means + (i_bh.to(tl.int64) * capacity + entry) * PADDED
    CHUNKS: tl.constexpr = PADDED // 32
    for i in tl.static_range(pieces(CHUNKS)):
        for first in range(0, 32 * piece_size(i, CHUNKS), 32):
            n = first + tl.arange(0, 32)
            k = key_dims(n, piece_start(i, CHUNKS), piece_size(i, CHUNKS), PADDED)
            signs = tl.load(p_signs + k[:, None] * BLOCK + d[None, :]).to(tl.float16).trans(1, 0)  # [BLOCK, 32]
            x = tl.dot(rest, signs, tl.dot(high, signs)) * (FOURTH * PADDED**-0.5)
            p_numbers = p_row[:, None] + (32 * piece_start(i, CHUNKS) + n)[None, :]
            tl.store(p_numbers, x.to(tl.float16), mask=exists[:, None])
    if CHAINED:  # the next kernel waits for this one only
        gdc_wait()


@triton.jit
def centre_scores(p_rows, p_centre, inside, DIM: tl.constexpr):
    """The products of columns and the centre, fp32 [COLUMNS].

    Args:
        p_rows: [COLUMNS], the queries as the model has them.
        p_centre: fp32 [DIM].
    """
    scores = tl.zeros(inside.shape, tl.float32)
    for first in range(0, DIM, 32):
        d = first + tl.arange(0, 32)
        query = tl.load(p_rows[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        centre = tl.load(p_centre + d, mask=d < DIM, other=0.0)
        scores += tl.sum(query.to(tl.float32) * centre[None, :], 1)
    return scores


@triton.jit(
    do_not_specialize=[
        "heads", "columns", "stride_page_ids", "capacity", "sinks", "group", "query_offset", "mask_b", "mask_q", "mask_k",
    ]
)  # fmt: skip
def extend(
    p_plain, p_query, p_factor, p_pool, p_tables, p_means, p_centre, p_page_ids, p_entries, p_row_start, p_counters, p_mask,
    p_output, p_stats,
    heads, columns, stride_page_ids, capacity, sinks, group, query_offset, stride_qb, stride_qh, stride_qt, mask_b, mask_q,
    mask_k, scaling, softcap,
    L: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, PER_QUERY: tl.constexpr, CAUSAL: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, splits, column blocks). A split takes every N-th tile of TILE groups.

    Args:
        p_plain: [B, H * group, q, D], the queries as the model has them; its strides are stride_q*.
        p_query: fp16 [B * H, columns, key_padded], rotated if the keys are, divided by a power of two.
        p_factor: fp32 [B * H, columns], what turns a product of `p_query` into a score in powers of two (with a softcap:
            into the argument of tanh).
        p_means, p_centre: of `rotate_means`, the former as int64 of four numbers, if keys are centred; else None.
        p_mask: keep mask, bytes; its row depends on the query if PER_QUERY. None keeps all.
        p_output, p_stats: of `combine.combine`; the results of this kernel come first.
        query_offset: position of query 0 minus the committed length.
        DEPENDENT: whether the program may start before the kernels that it depends on have finished, and the next kernel
            before this one has.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    TOKENS: tl.constexpr = 32 * TILE
    PAGES: tl.constexpr = TILE // L.groups if TILE > L.groups else 1  # that a tile has
    CHUNKS: tl.constexpr = L.key_padded // 32
    VALUE_CHUNKS: tl.constexpr = L.value_padded // 32
    KEY_FORMAT: tl.constexpr = L.key_format
    i_bh, i_s, n_s = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i_b, i_h = i_bh // heads, i_bh % heads
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    row = i_bh.to(tl.int64) * columns + column

    if DEPENDENT:
        gdc_wait()
    query = []
    for i in tl.static_range(pieces(CHUNKS)):
        n = tl.arange(0, 32 * piece_size(i, CHUNKS))
        d = key_dims(n, piece_start(i, CHUNKS), piece_size(i, CHUNKS), L.key_padded)
        x = tl.load(p_query + row[:, None] * L.key_padded + d[None, :], mask=inside[:, None], other=0.0)
        query = query + [x]
    factor = tl.load(p_factor + row, mask=inside, other=1.0)
    if KEY_FORMAT == "lloyd_max":
        factor *= 1 / FOURTH
    # What keys have in common would take bits from what they have not, so it is scored apart, the same for all.
    common = tl.zeros([COLUMNS], tl.float32)
    if L.centered:
        p_rows = p_plain + i_b.to(tl.int64) * stride_qb + (i_h * group + column % group).to(tl.int64) * stride_qh
        p_rows += (column // group).to(tl.int64) * stride_qt
        common = centre_scores(p_rows, p_centre + i_bh.to(tl.int64) * L.key_dim, inside, L.key_dim) * (scaling * LOG2_E)
    key_table = load_table(p_tables)
    value_table = key_table if L.same_table else load_table(p_tables + 128)
    row_start = tl.load(p_row_start + i_b)
    first_position = row_start + sinks
    entries = tl.load(p_counters + 2)
    if CAUSAL:
        position_of_query = tl.load(p_counters) + query_offset + column // group  # [COLUMNS]
    if p_mask is not None:
        p_keep = p_mask + i_b.to(tl.int64) * mask_b
    n = tl.arange(0, TOKENS)
    token = n // 32 * 32 + n // 2 % 4 * 8 + n // 8 % 4 * 2 + n % 2  # of the tile, number n

    acc = []
    for i in tl.static_range(pieces(VALUE_CHUNKS)):
        acc = acc + [tl.zeros([COLUMNS, 32 * piece_size(i, VALUE_CHUNKS)], tl.float32)]
    maximum = tl.full([COLUMNS], NOTHING, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    first_tile = (row_start >> L.page_bits) * L.groups // TILE  # before it, there is nothing but padding
    tiles = tl.cdiv(entries * L.groups, TILE)
    p_page_ids += i_b * stride_page_ids
    coming = load_pages(p_page_ids, (first_tile + i_s) * TILE // L.groups, entries, PAGES)
    for tile in tl.range(first_tile + i_s, tiles, n_s, num_stages=STAGES):
        pages = coming
        coming = load_pages(p_page_ids, (tile + n_s) * TILE // L.groups, entries, PAGES)
        part = tl.arange(0, TILE)  # of the tile: a group
        at = tl.zeros([TILE], tl.int64)
        live = tl.zeros([TILE], tl.int32)
        position = tl.zeros([TOKENS], tl.int32)
        end = tl.zeros([TOKENS], tl.int32)
        whole = True
        for k in tl.static_range(PAGES):
            page = pages[k]
            p_entry = p_entries + 2 * tl.minimum(tile * TILE // L.groups + k, entries - 1)
            start = load_now(p_entry)
            p_first = (page.to(tl.int64) * heads + i_h) * L.page_words + L.header_words
            p_first += tile * TILE % L.groups * L.group_words - k * (TILE // PAGES) * L.group_words
            stop = start + tl.where(page >= 0, load_now(p_entry + 1), 0)
            begin = start + tile * TILE % L.groups * 32
            whole = whole & (begin >= first_position) & (begin + TOKENS // PAGES <= stop)
            if PAGES == 1:
                at += p_first
                live += page + 1
                position = begin + token
                end += stop
            else:
                at = tl.where(part // (TILE // PAGES) == k, p_first, at)
                live = tl.where(part // (TILE // PAGES) == k, page + 1, live)
                of_it = token // (TOKENS // PAGES) == k
                position = tl.where(of_it, begin - k * (TOKENS // PAGES) + token, position)
                end = tl.where(of_it, stop, end)
        live = live > 0
        p_group = p_pool + at + part * L.group_words
        p_values = p_group + 32 * L.key_words
        p_metadata = p_values + 32 * L.value_words
        p_mean = p_means
        if L.centered:
            entry = tl.minimum(tile * TILE // L.groups + tl.arange(0, PAGES), entries - 1)
            p_mean += (i_bh.to(tl.int64) * capacity + entry) * (L.key_padded // 4)
        # Both operands before the first product: from there on, no warp waits for those of other columns.
        keys = []
        for i in tl.static_range(pieces(CHUNKS)):
            keys = keys + [load_keys(p_group, p_metadata, p_mean, live, key_table, i, L)]
        values = []
        for i in tl.static_range(pieces(VALUE_CHUNKS)):
            values = values + [load_values(p_values, p_metadata, live, value_table, i, L)]

        scores = tl.zeros([COLUMNS, TOKENS], tl.float32)
        for i in tl.static_range(pieces(CHUNKS)):
            scores = tl.dot(query[i], keys[i].trans(1, 0), scores)
        if softcap is not None:  # tanh; overflow and underflow of the exponential give 1 and -1
            scores = scores * factor[:, None] + (common / softcap)[:, None]
            scores = softcap - 2 * softcap / (tl.exp2(scores * (2 * LOG2_E)) + 1)

        if p_mask is not None or CAUSAL:
            keep = ((position >= first_position) & (position < end))[None, :]
            if p_mask is not None:
                p_token = (p_keep + position.to(tl.int64) * mask_k)[None, :]
                if PER_QUERY:
                    keep = keep & inside[:, None]
                    p_token = p_token + (column // group).to(tl.int64)[:, None] * mask_q
                keep = keep & (tl.load(p_token, mask=keep, other=0) != 0)
            if CAUSAL:
                keep = keep & (position[None, :] <= position_of_query[:, None])
            scores = tl.where(keep, scores, float("-inf"))
        elif not whole:
            keep = (position >= first_position) & (position < end)
            scores = tl.where(keep[None, :], scores, float("-inf"))

        slope = tl.full([COLUMNS], 1.0, tl.float32) if softcap is not None else factor
        before = maximum
        maximum = tl.maximum(maximum, tl.max(scores, 1))
        decay = tl.exp2((before - maximum) * slope)
        weights = tl.exp2(scores * slope[:, None] - (maximum * slope - WEIGHT)[:, None])
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(tl.float16)
        sums = []
        for i in tl.static_range(pieces(VALUE_CHUNKS)):
            sums = sums + [tl.dot(weights, values[i].trans(1, 0), acc[i] * decay[:, None])]
        acc = sums

    result = (i_bh.to(tl.int64) * n_s + i_s) * columns + column
    tl.store(p_stats + 2 * result, maximum if softcap is not None else maximum * factor + common, mask=inside)
    tl.store(p_stats + 2 * result + 1, total * UNWEIGHT, mask=inside)
    for i in tl.static_range(pieces(VALUE_CHUNKS)):
        x = acc[i] * (UNWEIGHT / FOURTH)
        d = value_dims(piece_start(i, VALUE_CHUNKS), piece_size(i, VALUE_CHUNKS), L.value_padded)
        tl.store(p_output + result[:, None] * L.value_padded + d[None, :], x, mask=inside[:, None])
