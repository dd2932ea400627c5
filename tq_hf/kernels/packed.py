"""Attention over packed pages: one program attends with a block of columns to every N-th group of a head's pages.

A *column* is a query of one of the GQA heads that share a KV head: column j is query j // G of head j % G. Tokens are the
rows of the products, so that few columns fill a tensor-core tile. Everything a tile needs stands in the lanes that loaded
it (`dequant.py`); with one warp a program, only the weights go from one lane to another between the two products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import fragment_order, key_tile, load_metadata, load_words, mean_tile, pin, value_tile

NOTHING = tl.constexpr(-1e30)  # the maximum of no scores: finite, so that differences stay numbers
WEIGHT = tl.constexpr(12.0)  # weights are scaled by 2 to this power, away from fp16's subnormals
UNWEIGHT = tl.constexpr(2.0**-12)
TINY = tl.constexpr(2.0**-24)


@triton.jit
def load_table(p_table):
    table = []
    for i in tl.static_range(4):
        table = table + [tl.load(p_table + 32 * i + tl.arange(0, 32))]
    return table


@triton.jit
def load_query(p_rows, columns, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """The queries' chunks [32, COLUMNS] as the key tiles' columns are ordered; `p_rows` [columns, PADDED]."""
    lane = tl.arange(0, 4 * COLUMNS)[:, None]  # as a tile's lanes: what a lane loads stays there
    column, t = lane // 4, lane % 4
    i = tl.arange(0, 8)[None, :]
    chunks = []
    for c in tl.static_range(PADDED // 32):
        x = tl.load(p_rows + (column * PADDED + t * (PADDED // 4) + 8 * c + i), mask=column < columns, other=0.0)
        chunks = chunks + [fragment_order(x.reshape(COLUMNS, 4, 8)).trans(1, 0)]
    return chunks


@triton.jit
def times_field(x, field):
    """x [32 tokens, COLUMNS] times a metadata field [4 (r), 8 (g), 4 (t)]: lane t of a row holds columns 8n + 2t + a."""
    y = x.reshape(4, 8, x.shape[1] // 8, 4, 2) * field[:, :, None, :, None]
    return y.reshape(32, x.shape[1])


@triton.jit
def times_lane(x, factor):
    """x [COLUMNS] times a factor [4 (t)] that all t have the same: `times_field` for columns."""
    return (x.reshape(x.shape[0] // 8, 4, 2) * factor[None, :, None]).reshape(x.shape[0])


@triton.jit
def mean_scores(p_mean, live, query, L: tl.constexpr, COLUMNS: tl.constexpr):
    """The queries times the page's mean key, the same for every token: [32, COLUMNS]."""
    total = tl.zeros([16, COLUMNS], tl.float32)
    for c in tl.static_range(L.key_padded // 32):
        total = tl.dot(mean_tile(p_mean, c, live, L.key_dim, L.key_padded), query[c], total)
    half, _ = tl.split(total.reshape(2, 8, COLUMNS).permute(1, 2, 0))  # all rows are equal
    return half[None, :, :].broadcast_to(4, 8, COLUMNS).reshape(32, COLUMNS)


@triton.jit(
    do_not_specialize=[
        "heads", "columns", "stride_page_ids", "sinks", "group", "query_offset", "mask_b", "mask_q", "mask_k",
    ]
)  # fmt: skip
def attend_packed(
    p_query, p_plain, p_factor, p_pool, p_tables, p_page_ids, p_entries, p_row_start, p_counters, p_mask, p_output, p_stats,
    heads, columns, stride_page_ids, sinks, group, query_offset, mask_b, mask_q, mask_k, softcap,
    L: tl.constexpr, COLUMNS: tl.constexpr, VALUE_DTYPE: tl.constexpr, PER_QUERY: tl.constexpr, CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, splits, column blocks), one warp each. Groups are copied ahead into (STAGES - 1) / 2 buffers: page ids,
    on which the groups' addresses depend, take the other half of the stages.

    Args:
        p_query: [B * H, columns, key_padded], rotated if the keys are, divided by a power of two.
        p_plain: fp16 [B * H, columns, key_padded], not rotated, for the page means; the same power of two.
        p_factor: fp32 [B * H, columns], what turns a product of `p_query` into a score in powers of two (with a softcap:
            into the argument of tanh).
        p_mask: keep mask, bytes; its row depends on the query if PER_QUERY. None keeps all.
        p_output, p_stats: of `combine.combine`; the results of this kernel come first.
        query_offset: position of query 0 minus the committed length.
    """
    CHUNKS: tl.constexpr = L.key_padded // 32
    VALUE_CHUNKS: tl.constexpr = L.value_padded // 32
    SCALE: tl.constexpr = 1 if L.key_format == "lloyd_max" else 0  # the value scale's place in the metadata
    i_bh, i_s, n_s = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i_b, i_h = i_bh // heads, i_bh % heads
    first_column = tl.program_id(2) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    inside = column < columns
    row = i_bh.to(tl.int64) * columns + first_column

    query = load_query(p_query + row * L.key_padded, columns - first_column, COLUMNS, L.key_padded)
    if L.centered:
        plain = load_query(p_plain + row * L.key_padded, columns - first_column, COLUMNS, L.key_padded)
    factor = tl.load(p_factor + row + tl.arange(0, COLUMNS), mask=inside, other=1.0)  # [COLUMNS]
    key_table = load_table(p_tables)
    value_table = key_table if L.same_table else load_table(p_tables + 128)
    first_position = tl.load(p_row_start + i_b) + sinks
    groups = tl.load(p_counters + 2) * L.groups
    if CAUSAL:
        position_of_query = tl.load(p_counters) + query_offset + column // group  # [COLUMNS]
    if p_mask is not None:
        mask_row = i_b.to(tl.int64) * mask_b

    token = tl.arange(0, 32)
    acc = []
    for _ in tl.static_range(VALUE_CHUNKS):
        acc = acc + [tl.zeros([32, COLUMNS], tl.float32)]
    maximum = tl.full([COLUMNS], NOTHING, tl.float32)
    # Sums over the tokens of a lane only, [8 (g), COLUMNS]: the lanes' sums are added up at the end.
    total = tl.zeros([8, COLUMNS], tl.float32)  # of the weights
    minima = tl.zeros([8, COLUMNS], tl.float32)  # of weight times value minimum
    unit = tl.full([4], TINY, tl.float32)  # the largest value scale so far, the same for each t; acc is in units of it
    for step in tl.range((groups - i_s + n_s - 1) // n_s, num_stages=STAGES):
        item = step * n_s + i_s
        entry = item // L.groups
        i_g = item % L.groups
        page = tl.load(p_page_ids + i_b * stride_page_ids + entry)
        start = tl.load(p_entries + 2 * entry)
        count = tl.load(p_entries + 2 * entry + 1)
        live = page >= 0
        p_page = p_pool + (page.to(tl.int64) * heads + i_h) * L.page_words
        p_group = p_page + L.header_words + i_g * L.group_words
        keys = load_words(p_group, live, L.key_words)
        values = load_words(p_group + 32 * L.key_words, live, L.value_words)
        metadata = load_metadata(p_group + 32 * (L.key_words + L.value_words), live, L.fields)

        scores = tl.zeros([32, COLUMNS], tl.float32)
        for c in tl.static_range(CHUNKS):
            scores = tl.dot(key_tile(keys, c, key_table, L, query[0].dtype), query[c], scores, input_precision="tf32x3")
        if L.key_format == "lloyd_max":
            scores = times_field(scores, metadata[0])
        if L.centered:
            scores += mean_scores(p_page, live, plain, L, COLUMNS)
        if softcap is not None:  # tanh; overflow and underflow of the exponential give 1 and -1
            scores = softcap - 2 * softcap / (tl.exp2(scores * (factor * 2.8853900817779268)[None, :]) + 1)

        offset = i_g * 32 + token
        keep = (offset < count) & (start + offset >= first_position) & live
        if p_mask is not None:
            p_token = p_mask + mask_row + (start + offset).to(tl.int64) * mask_k
            if PER_QUERY:
                p_each = p_token[:, None] + (column // group).to(tl.int64)[None, :] * mask_q
                keep = (tl.load(p_each, mask=keep[:, None] & inside[None, :], other=0) != 0) & keep[:, None]
            else:
                keep = (tl.load(p_token, mask=keep, other=0) != 0) & keep
        if CAUSAL:
            seen = (start + offset)[:, None] <= position_of_query[None, :]
            keep = seen & (keep if PER_QUERY else keep[:, None])
        elif not PER_QUERY:
            keep = keep[:, None]
        scores = tl.where(keep, scores, float("-inf"))  # [32, COLUMNS]

        slope = 1.0 if softcap is not None else factor
        before = maximum
        maximum = tl.maximum(maximum, tl.max(scores, 0))
        decay = tl.exp2((before - maximum) * slope)
        weights = tl.exp2(scores * slope - (maximum * slope - WEIGHT)[None, :])
        total = total * decay[None, :] + tl.sum(weights.reshape(4, 8, COLUMNS), 0)
        if L.value_format == "min_max":
            lowest = metadata[L.fields - 1]
            if L.value_bits <= 4:  # levels count from the middle of a value's range
                lowest += metadata[SCALE] * ((2**L.value_bits - 1) / 2)
            terms = times_field(weights, lowest)
            minima = minima * decay[None, :] + tl.sum(terms.reshape(4, 8, COLUMNS), 0)
        if L.value_format != "raw":
            scale = metadata[SCALE]
            largest = tl.maximum(unit, tl.max(tl.max(scale, 0), 0))  # [4]
            inverse = 1.0 / largest
            weights = times_field(weights, scale * inverse[None, None, :])
            decay = times_lane(decay, unit * inverse)
            unit = largest
        rounded = pin(weights.to(VALUE_DTYPE))
        if VALUE_DTYPE == tl.bfloat16:  # eight bits of a weight are less than its output's rounding can hide
            rest = pin((weights - rounded).to(VALUE_DTYPE))
        sums = []
        for c in tl.static_range(VALUE_CHUNKS):
            tile = value_tile(values, c, value_table, L, VALUE_DTYPE)
            x = tl.dot(tile, rounded, acc[c] * decay[None, :], input_precision="tf32x3")
            if VALUE_DTYPE == tl.bfloat16:
                x = tl.dot(tile, rest, x)
            sums = sums + [x]
        acc = sums

    minimum = tl.sum(minima, 0)
    if L.value_format != "raw":
        unit_of_column = times_lane(tl.full([COLUMNS], 1.0, tl.float32), unit)
    row = (i_bh.to(tl.int64) * n_s + i_s) * columns + column
    tl.store(p_stats + 2 * row, maximum * (1.0 if softcap is not None else factor), mask=inside)
    tl.store(p_stats + 2 * row + 1, tl.sum(total, 0) * UNWEIGHT, mask=inside)
    for c in tl.static_range(VALUE_CHUNKS):
        x = acc[c]
        if L.value_format != "raw":
            x = x * unit_of_column[None, :] + minimum[None, :]
        x *= UNWEIGHT
        dim = (token % 8) * (L.value_padded // 8) + 4 * c + token // 8
        tl.store(p_output + row[None, :] * L.value_padded + dim[:, None], x, mask=inside[None, :])
