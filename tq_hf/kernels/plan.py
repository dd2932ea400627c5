"""What the decode kernel wants to know of each entry before it reads its page: which tokens count, and the mean key's score.

A page's mean key is a row of fp16 among codes. Multiplied here, 64 pages to a product, it costs the decode kernel one number
a page and column; entry counts, row starts and padding masks become one bit a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .query import LOG2_E, power_of_two_above


@triton.jit
def plan_entries(
    query, column, inside, i_plan, plans, i_b, i_h, heads, columns, capacity, first_position, p_pool, p_pages, p_entries,
    p_counters, p_mask, mask_k, p_kept, p_means, scaling, softcap,
    CENTERED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, PAGE_WORDS: tl.constexpr,
    ENTRIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every `plans`-th tile of ENTRIES entries of a row and head, from the `i_plan`-th one on.

    Args:
        query: [ROWS, BLOCK], zero beyond DIM, of the columns `column` [ROWS], of which those `inside` exist.
        first_position: of the row's packed tokens.
        p_pages: page ids of the row; `p_mask`, its keep mask, bytes, or None.
        p_kept, p_means: of `decode.decode`, from their start; the heads share the work on `p_kept`.
    """
    entries = tl.minimum(tl.load(p_counters + 2), capacity)
    if CENTERED:
        x = query.to(tl.float32)
        above, inverse = power_of_two_above(tl.sqrt(tl.sum(x * x, 1)))
        factor = above * (scaling * LOG2_E if softcap is None else scaling / softcap)
        operand = (x * inverse[:, None]).to(tl.float16).trans(1, 0)
        d = tl.arange(0, BLOCK)
    for tile in tl.range(i_plan, tl.cdiv(entries, ENTRIES), plans, num_stages=STAGES):
        entry = tile * ENTRIES + tl.arange(0, ENTRIES)
        exists = entry < entries
        page = tl.load(p_pages + entry, mask=exists, other=-1)
        if CENTERED:
            p_page = p_pool + (page.to(tl.int64) * heads + i_h) * PAGE_WORDS
            p_mean = p_page.to(tl.pointer_type(tl.float16))
            mean = tl.load(p_mean[:, None] + d[None, :], mask=(page >= 0)[:, None] & (d < DIM)[None, :], other=0.0)
            scores = tl.dot(mean, operand) * factor[None, :]  # [ENTRIES, ROWS]
            row = (i_b * heads + i_h).to(tl.int64) * capacity + entry
            tl.store(p_means + row[:, None] * columns + column[None, :], scores, mask=exists[:, None] & inside[None, :])
        if tile % heads == i_h:
            start = tl.load(p_entries + 2 * entry, mask=exists, other=0)
            count = tl.load(p_entries + 2 * entry + 1, mask=exists & (page >= 0), other=0)
            for i_g in tl.static_range(GROUPS):
                bit = tl.arange(0, 32)[None, :]
                position = start[:, None] + (32 * i_g + bit)
                keep = (32 * i_g + bit < count[:, None]) & (position >= first_position)  # [ENTRIES, 32]
                if p_mask is not None:
                    keep = keep & (tl.load(p_mask + position.to(tl.int64) * mask_k, mask=keep, other=0) != 0)
                p_word = p_kept + (i_b * capacity + entry) * GROUPS + i_g
                tl.store(p_word, tl.sum(keep.to(tl.int32) << bit, 1), mask=exists)
