"""Statistics for the balance of key channels (`quantizer/conditioning.py`): a program a KV head, which leaves early once
it is known."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..quantizer.conditioning import KEY_FLOOR, QUERY_FLOOR, ROUNDING, SMALLEST
from .encode import split_last8
from .lanes import block_dim, keep_bytes, on_device, row_pointers
from .launch import launch, power_of_two
from .store import token_rows

LARGEST = tl.constexpr(3.4028234663852886e38)
KEY_SHARE = tl.constexpr(KEY_FLOOR)
QUERY_SHARE = tl.constexpr(QUERY_FLOOR)
LEAST = tl.constexpr(SMALLEST)
NOISE = tl.constexpr(ROUNDING)
TOKENS = tl.constexpr(8)  # loaded at once


@triton.jit
def counted_keys(start, first, last, source, p_keep, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The keys at positions start to start + 31, fp32, zero where they don't count, and which ones do."""
    token = tl.arange(0, 32)
    d = tl.arange(0, BLOCK)
    rows = token_rows(start, token, *source, DIM)
    position = start + token
    counts = (position >= first) & (position < last)
    if p_keep is not None:
        counts = counts & (tl.load(p_keep + position, mask=counts, other=0) != 0)
    x = tl.load(row_pointers(*rows, d), mask=counts[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)
    counts = counts & (tl.sum(x * 0.0, 1) == 0.0)  # infinities and NaN times zero are NaN
    return tl.where(counts[:, None], x, 0.0), counts


@triton.jit
def mixed(statistic, partner, share):
    """`conditioning.Partners.mix` for one head."""
    return statistic + share * (tl.gather(statistic, partner, 0) - statistic)


@triton.jit
def balance_factors(energy, spread, partner, share, d, DIM: tl.constexpr):
    """`conditioning.balance_factors` for one head, whose statistics are zero outside DIM."""
    energy_sum, spread_sum = tl.sum(energy, 0), tl.sum(spread, 0)
    known = (energy_sum > LEAST) & (energy_sum <= LARGEST) & (spread_sum > LEAST) & (spread_sum <= LARGEST)
    energy = mixed(energy * (DIM / tl.where(known, energy_sum, 1.0)), partner, share)
    spread = mixed(spread * (DIM / tl.where(known, spread_sum, 1.0)), partner, share)
    square = tl.sqrt((energy + QUERY_SHARE) / (spread + KEY_SHARE))
    mean = tl.sum(tl.where(d < DIM, energy / square, 0.0), 0) / DIM
    return tl.where(known, tl.sqrt(square * mean), 1.0)


@triton.jit(do_not_specialize=["n", "window", "sinks", "stride_keep"])
def observe_tokens(
    p_key, p_query, p_ring, p_row_start, p_counters, p_balance, p_energy, p_partner, p_share, p_keep, n, window, sinks,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_keep,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, PAGE: tl.constexpr, CENTERED: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1, H, B)."""
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    head = (i_b * tl.num_programs(1) + i_h) * DIM
    if tl.load(p_balance + head) != 0:
        return
    length = tl.load(p_counters)
    packed_end = tl.load(p_counters + 1)
    first = tl.load(p_row_start + i_b) + sinks
    # The row's first page is the one that ends behind `first`; it may not be due yet.
    page_end = packed_end + PAGE * tl.maximum(tl.cdiv(first + 1 - packed_end, PAGE), 1)
    last = tl.minimum(length + n, page_end + window)
    if p_keep is not None:
        p_keep += i_b.to(tl.int64) * stride_keep
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    energy = tl.load(p_energy + head + d, mask=inside, other=0.0)
    if p_query is not None:
        i_g = tl.arange(0, GROUP_BLOCK)
        p_heads = p_query + i_b.to(tl.int64) * stride_qb + (i_h * GROUP + i_g).to(tl.int64) * stride_qh
        p_heads = p_heads[None, :, None] + d[None, None, :]
        of_head = (i_g < GROUP)[None, :, None] & inside[None, None, :]
        for start in tl.range(tl.maximum(length, first), last, TOKENS, num_stages=3):
            position = start + tl.arange(0, TOKENS)
            counts = position < last
            p_tokens = p_heads + ((position - length).to(tl.int64) * stride_qt)[:, None, None]
            x = tl.load(p_tokens, mask=counts[:, None, None] & of_head, other=0.0).to(tl.float32)
            if p_keep is not None:
                counts = counts & (tl.load(p_keep + position, mask=counts, other=0) != 0)
            counts = counts & (tl.sum(tl.sum(x * 0.0, 2), 1) == 0.0)  # infinities and NaN times zero are NaN
            squares = tl.where(counts[:, None], tl.sum(x * x, 1), 0.0)  # [TOKENS, BLOCK]
            each = split_last8(squares.trans(1, 0))
            for i in tl.static_range(TOKENS):  # one by one: the sum is the same for all chunks
                energy += each[i]
    tl.store(p_energy + head + d, energy, mask=inside)
    if page_end + window > length + n:
        return
    p_head = p_key + (i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh)
    p_slots = p_ring + (i_b * tl.num_programs(1) + i_h).to(tl.int64) * (window + PAGE) * DIM
    source = (length, p_head, stride_kt, p_slots, window + PAGE)
    spread = tl.zeros([BLOCK], tl.float32)
    key_energy = tl.zeros([BLOCK], tl.float32)
    for block in range(page_end - PAGE, last, PAGE):  # what a page's mean leaves is what is quantized
        mean = tl.zeros([BLOCK], tl.float32)
        if CENTERED:
            count = 0
            for start in range(block, block + PAGE, 32):
                x, counts = counted_keys(start, first, last, source, p_keep, DIM, BLOCK)
                mean += tl.sum(x, 0)
                count += tl.sum(counts.to(tl.int32), 0)
            mean /= tl.maximum(count, 1)
        for start in range(block, block + PAGE, 32):
            x, counts = counted_keys(start, first, last, source, p_keep, DIM, BLOCK)
            key_energy += tl.sum(x * x, 0)
            x = tl.where(counts[:, None], x - mean[None, :], 0.0)
            spread += tl.sum(x * x, 0)
    differ = tl.sum(spread, 0) > tl.sum(key_energy, 0) * NOISE
    partner = tl.load(p_partner + d, mask=inside, other=0).to(tl.int32)
    share = tl.load(p_share + d, mask=inside, other=0.0)
    factors = balance_factors(energy, tl.where(differ, spread, 0.0), partner, share, d, DIM)
    tl.store(p_balance + head + d, factors, mask=inside)


def observe(
    query: Tensor | None,
    key: Tensor,
    ring_key: Tensor,
    row_start: Tensor,
    counters: Tensor,
    balance: Tensor,
    query_energy: Tensor,
    partner: Tensor,
    partner_share: Tensor,
    keep: Tensor | None,
    page_size: int,
    sinks: int,
    recent_window: int,
    center_keys: bool,
) -> None:
    """`tq_hf.reference.observe`, whose arguments these are, for tensors on a GPU; nothing waits for the device.

    `query` and `keep` may have any strides, `key` any but a contiguous last dim; the rest must be contiguous.
    """
    batch, heads, n, dim = key.shape
    if n == 0:
        return
    group = 1 if query is None else query.shape[1] // heads
    if query is not None and query.stride(-1) != 1:
        query = query.contiguous()
    keep = keep_bytes(keep)
    group_block, block = power_of_two(group), block_dim(dim)
    with on_device(key.device):
        launch(
            observe_tokens, (1, heads, batch), {"num_warps": max(4, min(16, group_block * block // 256))},
            (key, query, ring_key, row_start, counters, balance, query_energy, partner, partner_share, keep, n,
             recent_window, sinks,
             *((0, 0, 0) if query is None else query.stride()[:3]), *key.stride()[:3],
             0 if keep is None else keep.stride(0)),
            GROUP=group, GROUP_BLOCK=group_block, PAGE=page_size, CENTERED=center_keys, DIM=dim, BLOCK=block,
        )  # fmt: skip
