"""What comes before packed pages are read: the queries that their codes are multiplied with, and for the decode kernel what
it wants to know of each entry: which tokens count, and the mean key's score.

A page's mean key is a row of fp16 among codes. Multiplied here, it costs the decode kernel one number a page and column;
entry counts, row starts and padding masks become one bit a token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .lanes import load_factors
from .pieces import as_pieces, lanes_first, of_lane, of_piece, pair_words
from .query import LOG2_E, column_rows, encode, power_of_two_above
from .rows import load_blocks, load_pair_words, run_dims, sum_of_squares, word_products
from .workspace import section


@triton.jit
def prepare_query(p_rows, p_factors, p_signs, p_rotated, p_plain, p_factor, part, inside, scaling, softcap,
                  DIM: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """Divides each query by a power of two above its norm, so that fp16 holds it, and rotates it if there are `p_signs`.

    With `p_factors`, what is rotated is divided by the balance of the key channels first.

    Args:
        p_rows: [32], pointers to the query of column g, for lane 4g + t.
        p_factors: fp32 [DIM], zero while there are no factors (and no pages), or None.
        p_signs: fp16 [PADDED, PADDED], the sign of each input (column) in each rotated coordinate (row), or None.
        p_rotated, p_plain: [32], pointers to the rows to write, PADDED values each; `p_plain` may be None.
        p_factor: [32]; `packed.attend_packed` says what it gets.
        part: which 32 coordinates to write.
        inside: [32], whether the column exists.
    """
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4
    DTYPE: tl.constexpr = p_rotated.dtype.element_ty
    own_dims = (32 * part + 8 * t)[:, None] + tl.arange(0, 8)[None, :]
    # No store comes before the last load, which could not pass it.
    query = load_blocks(p_rows, DIM, PADDED)
    if p_plain is not None or p_signs is None:
        own = tl.load(p_rows[:, None] + own_dims, mask=own_dims < DIM, other=0.0).to(tl.float32)
    squares = sum_of_squares(query)
    if p_factors is not None:
        balanced = []
        for b in tl.static_range(len(query)):
            balanced = balanced + [query[b] / as_pieces(load_factors(p_factors, run_dims(b, PADDED, 4), DIM))]
        squares = tl.maximum(squares, sum_of_squares(balanced))
        query = balanced
    above, inverse = power_of_two_above(tl.sqrt(squares))
    factor = above * (scaling * LOG2_E if softcap is None else scaling / softcap)
    if p_signs is None:
        rotated = own * inverse[:, None]
    else:
        rest = []
        for b in tl.static_range(len(query)):
            x = query[b] * inverse[:, None, None]
            query = query[:b] + [x] + query[b + 1 :]
            rest = rest + [x - x.to(tl.float16).to(tl.float32)]
        i = tl.arange(0, 4)[None, :]
        p_sign_rows = p_signs + ((32 * part + 4 * g)[:, None] + i) * PADDED
        signs = load_pair_words(p_sign_rows, (g >= 0)[:, None] & (i >= 0), PADDED, PADDED)
        # With the rest, 22 bits of the query; products with signs are exact.
        y = word_products(pair_words(rest, tl.float16), signs, [tl.zeros([32, 4], tl.float32)] * 4, tl.float16)
        y = word_products(pair_words(query, tl.float16), signs, y, tl.float16)
        rotated = tl.join(y[0], y[1]).permute(0, 2, 1).reshape(32, 8) * PADDED**-0.5
    tl.store(p_rotated[:, None] + own_dims, encode(rotated, DTYPE), mask=inside[:, None])
    if p_plain is not None:
        tl.store(p_plain[:, None] + own_dims, (own * inverse[:, None]).to(tl.float16), mask=inside[:, None])
    tl.store(p_factor, factor * 256 if FP8 else factor, mask=inside & (t == 0) & (part == 0))


@triton.jit
def score_means(p_rows, p_pool, p_page_ids, p_means, column, columns, heads, i_h, capacity, entries, first, scaling, softcap,
                DIM: tl.constexpr, PADDED: tl.constexpr, PAGE_WORDS: tl.constexpr, ENTRIES: tl.constexpr):  # fmt: skip
    """Scores of the mean keys of ENTRIES entries from `first` on, for a row and head.

    Args:
        p_rows, column: [32], the query and the number of column g, for lane 4g + t.
        p_means: fp32 [capacity, columns].
    """
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4
    block = of_piece(8 * tl.arange(0, ENTRIES // 8))  # of 8 entries
    entry = first + (block + of_lane(g))
    page = tl.load(p_page_ids + entry, mask=entry < tl.minimum(entries, capacity), other=-1)
    page = lanes_first(page).reshape(32, ENTRIES // 8)
    query = load_blocks(p_rows, DIM, PADDED)
    p_mean = (p_pool + (page.to(tl.int64) * heads + i_h) * PAGE_WORDS).to(tl.pointer_type(tl.float16))
    means = load_pair_words(p_mean, page >= 0, DIM, PADDED)
    above, inverse = power_of_two_above(tl.sqrt(sum_of_squares(query)))
    factor = above * (scaling * LOG2_E if softcap is None else scaling / softcap)
    scaled = []
    for b in tl.static_range(len(query)):
        scaled = scaled + [query[b] * inverse[:, None, None]]
    nothing = tl.zeros([32, ENTRIES // 8], tl.float32)
    y = word_products(pair_words(scaled, tl.float16), means, [nothing] * 4, tl.float16)
    scores = tl.join(y[0], y[1]) * factor[:, None, None]  # of entries 2t and 2t + 1 of a block
    entry = first + (block + of_lane(2 * t)) + tl.arange(0, 2)[None, None, :]
    mask = (entry < entries) & of_lane(column < columns)
    tl.store(p_means + (entry * columns + of_lane(column)), lanes_first(scores), mask=mask)


@triton.jit
def low_bits(count):
    """The lowest `count` bits, of at most 32."""
    return tl.where(count >= 32, -1, (1 << tl.maximum(tl.minimum(count, 31), 0)) - 1)


@triton.jit
def write_kept(p_kept, p_page_ids, p_entries, p_mask, mask_k, first_position, entries, first, GROUPS: tl.constexpr,
               ENTRIES: tl.constexpr):  # fmt: skip
    """The tokens that count of ENTRIES entries from `first` on, for a row: those that its page holds, from `first_position`
    on, that the mask keeps (bytes at positions times mask_k, or None)."""
    entry = first + tl.arange(0, ENTRIES)
    exists = entry < entries
    page = tl.load(p_page_ids + entry, mask=exists, other=-1)
    start = tl.load(p_entries + 2 * entry, mask=exists, other=0)
    count = tl.load(p_entries + 2 * entry + 1, mask=exists, other=0)
    count = tl.where(page >= 0, count, 0)
    for i_g in tl.static_range(GROUPS):
        kept = low_bits(count - 32 * i_g) & ~low_bits(first_position - start - 32 * i_g)
        if p_mask is not None:
            bit = tl.arange(0, 32)[None, :]
            is_kept = ((kept[:, None] >> bit) & 1) != 0
            p_token = p_mask + (start[:, None] + (32 * i_g + bit)).to(tl.int64) * mask_k
            kept = tl.sum((tl.load(p_token, mask=is_kept, other=0) != 0).to(tl.int32) << bit, 1)
        tl.store(p_kept + (entry * GROUPS + i_g), kept, mask=exists)


@triton.jit(
    do_not_specialize=[
        "rows", "heads", "columns", "group", "sinks", "stride_page_ids", "capacity", "mask_b", "mask_k", "factor_at",
        "rotated_at", "plain_at", "kept_at", "means_at", "plans",
    ]
)  # fmt: skip
def prepare(
    p_query, p_pool, p_page_ids, p_entries, p_row_start, p_counters, p_balance, p_mask, p_signs, p_work,
    rows, heads, columns, group, sinks, stride_page_ids, capacity, stride_qb, stride_qh, stride_qt, mask_b, mask_k,
    factor_at, rotated_at, plain_at, kept_at, means_at, plans, scaling, softcap,
    DIM: tl.constexpr, PADDED: tl.constexpr, DTYPE: tl.constexpr, FP8: tl.constexpr, PLAIN: tl.constexpr,
    CENTERED: tl.constexpr, GROUPS: tl.constexpr, PAGE_WORDS: tl.constexpr, ENTRIES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, plans + PADDED / 32, blocks of 8 columns), one warp each. Of each of the `rows` = B * H, the first `plans`
    programs score the means of ENTRIES entries each, the others take 32 coordinates of the queries each. If `plans` is not
    0, there are B more rows, which say what tokens count.

    Args:
        p_mask: keep mask, bytes, the same for all queries; None keeps all.
        p_work: fp32, and parts of it by where they start (in 16 bytes):
            factor_at: fp32 [B * H, columns], of `packed.attend_packed`.
            rotated_at: DTYPE [B * H, columns, PADDED], of `decode.decode` or `packed.attend_packed`.
            plain_at: if PLAIN, fp16 [B * H, columns, PADDED], of `packed.attend_packed`.
            kept_at, means_at: of `decode.decode`.
        CENTERED: whether pages have mean keys.
        CHAINED: whether the program may start before what is ahead of it has finished, and the next kernel before this one
            has. That one may read the cache at once: nothing here lets it start while tokens are still being committed.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    i_bh, i_p = tl.program_id(0), tl.program_id(1)
    first = i_p * ENTRIES
    if i_bh >= rows:
        if (i_p < plans) & (tl.program_id(2) == 0):
            i_b = i_bh - rows
            p_kept = section(p_work, kept_at, tl.int32) + i_b * capacity * GROUPS
            p_row_mask = None if p_mask is None else p_mask + i_b.to(tl.int64) * mask_b
            write_kept(p_kept, p_page_ids + i_b * stride_page_ids, p_entries, p_row_mask, mask_k,
                       tl.load(p_row_start + i_b) + sinks, tl.minimum(tl.load(p_counters + 2), capacity), first, GROUPS,
                       ENTRIES)  # fmt: skip
        return
    i_b, i_h = i_bh // heads, i_bh % heads
    lane = tl.arange(0, 32)
    column = tl.program_id(2) * 8 + lane // 4
    p_rows = column_rows(p_query, i_b, i_h, column, columns, group, stride_qb, stride_qh, stride_qt)
    if i_p >= plans:
        row = i_bh.to(tl.int64) * columns + column
        p_rotated = section(p_work, rotated_at, DTYPE) + row * PADDED
        p_plain = section(p_work, plain_at, tl.float16) + row * PADDED if PLAIN else None
        p_factors = None if p_balance is None else p_balance + i_bh.to(tl.int64) * DIM
        prepare_query(p_rows, p_factors, p_signs, p_rotated, p_plain, section(p_work, factor_at, tl.float32) + row,
                      i_p - plans, column < columns, scaling, softcap, DIM, PADDED, FP8)  # fmt: skip
    elif CENTERED:
        p_means = section(p_work, means_at, tl.float32) + i_bh.to(tl.int64) * capacity * columns
        score_means(p_rows, p_pool, p_page_ids + i_b * stride_page_ids, p_means, column, columns, heads, i_h, capacity,
                    tl.load(p_counters + 2), first, scaling, softcap, DIM, PADDED, PAGE_WORDS, ENTRIES)  # fmt: skip
