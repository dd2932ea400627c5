"""What the decode kernel wants to know of each entry before it reads its page: which tokens count, and the mean key's score.

A page's mean key is a row of fp16 among codes. Multiplied here, 64 pages to a product, it costs the decode kernel one number
a page and column; entry counts, row starts and padding masks become one bit a token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .query import LOG2_E, power_of_two_above

ROWS = tl.constexpr(16)  # columns of the smallest product


@triton.jit(
    do_not_specialize=["heads", "columns", "group", "sinks", "stride_page_ids", "capacity", "mask_b", "mask_k"]
)  # fmt: skip
def plan(
    p_query, p_pool, p_page_ids, p_entries, p_row_start, p_counters, p_mask, p_kept, p_means,
    heads, columns, group, sinks, stride_page_ids, capacity, stride_qb, stride_qh, stride_qt, mask_b, mask_k,
    scaling, softcap,
    DIM: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, PAGE_WORDS: tl.constexpr, ENTRIES: tl.constexpr,
    AWAITED: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, cdiv(capacity, ENTRIES)): ENTRIES entries of a row and head.

    Args:
        p_mask: keep mask, bytes, the same for all queries; None keeps all.
        p_kept, p_means: of `decode.decode`; the former is written by the programs of head 0.
        AWAITED: whether the next kernel may start before this one has finished, and waits for it.
    """
    if AWAITED:
        gdc_launch_dependents()
    i_bh = tl.program_id(0)
    i_b, i_h = i_bh // heads, i_bh % heads
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    exists = entry < tl.minimum(tl.load(p_counters + 2), capacity)
    page = tl.load(p_page_ids + i_b * stride_page_ids + entry, mask=entry < capacity, other=-1)
    page = tl.where(exists, page, -1)
    if p_means is not None:
        d = tl.arange(0, BLOCK)
        p_page = p_pool + (page.to(tl.int64) * heads + i_h) * PAGE_WORDS
        p_mean = p_page.to(tl.pointer_type(tl.float16))
        mean = tl.load(p_mean[:, None] + d[None, :], mask=(page >= 0)[:, None] & (d < DIM)[None, :], other=0.0)
        column = tl.arange(0, ROWS)
        inside = column < columns
        p_rows = p_query + i_b.to(tl.int64) * stride_qb + (i_h * group + column % group).to(tl.int64) * stride_qh
        p_rows += (column // group).to(tl.int64) * stride_qt
        query = tl.load(p_rows[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)
        above, inverse = power_of_two_above(tl.sqrt(tl.sum(query * query, 1)))
        factor = above * (scaling * LOG2_E if softcap is None else scaling / softcap)
        operand = (query * inverse[:, None]).to(tl.float16).trans(1, 0)
        scores = tl.dot(mean, operand) * factor[None, :]  # [ENTRIES, ROWS]
        row = i_bh.to(tl.int64) * capacity + entry
        tl.store(p_means + row[:, None] * columns + column[None, :], scores, mask=exists[:, None] & inside[None, :])
    if i_h == 0:
        first_position = tl.load(p_row_start + i_b) + sinks
        start = tl.load(p_entries + 2 * entry, mask=exists, other=0)
        count = tl.load(p_entries + 2 * entry + 1, mask=page >= 0, other=0)
        bit = tl.arange(0, 32)[None, :]
        for i_g in tl.static_range(GROUPS):
            token = 32 * i_g + bit
            position = start[:, None] + token
            keep = (token < count[:, None]) & (position >= first_position)  # [ENTRIES, 32]
            if p_mask is not None:
                p_token = p_mask + i_b.to(tl.int64) * mask_b + position.to(tl.int64) * mask_k
                keep = keep & (tl.load(p_token, mask=keep, other=0) != 0)
            p_word = p_kept + (i_b * capacity + entry) * GROUPS + i_g
            tl.store(p_word, tl.sum(keep.to(tl.int32) << bit, 1), mask=exists)
