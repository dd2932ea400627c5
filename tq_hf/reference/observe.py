"""Statistics for the balance of key channels (`tq_hf.quantizer.conditioning`), taken as tokens come in."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantizer.conditioning import ROUNDING, Partners, balance_factors


@torch.no_grad()
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
    """Before `commit` of the same tokens: for rows without factors, add up queries; where a first page is due, make them.

    In place: `query_energy`, then `balance`. Counted are the tokens from `row_start + sinks` to the recent window behind
    the row's first page, except those that `keep` leaves out, and keys and queries that are not finite.
    Energies are added token by token, so that chunks of any size give the same sums.

    Args:
        query: `[B, Hq, n, D]`, the queries at the new tokens' positions, or None if nobody has seen them.
        key: `[B, H, n, D]`, the tokens at positions length to length + n - 1.
        balance: fp32 `[B, H, D]`, zero for rows that have no factors yet.
        query_energy: fp32 `[B, H, D]`.
        partner, partner_share: int64 and fp32 `[D]`, of `conditioning.Partners`.
        keep: bool or uint8 `[B, >= length + n]`, or None for all.
        center_keys: whether pages keep a mean of their own; if not, keys are quantized as they are.
    """
    length, packed_end, _ = counters.tolist()
    end = length + key.shape[2]
    due_end = packed_end + max(0, end - packed_end - recent_window) // page_size * page_size
    for row, start in enumerate(row_start.tolist()):
        if balance[row].any():
            continue
        first = start + sinks
        # The first page with a token of this row ends behind `first`; pages end at packed_end + i * page_size.
        page_end = packed_end + page_size * max(1, -(-(first + 1 - packed_end) // page_size))
        last = min(end, page_end + recent_window)
        kept = None if keep is None else keep[row] != 0
        if query is not None:
            for position in range(max(length, first), last):
                if kept is None or kept[position]:
                    token = query[row, :, position - length].float().unflatten(0, (key.shape[1], -1))  # [H, G, D]
                    finite = token.isfinite().all(-1).all(-1)
                    query_energy[row] += token.square().sum(1).masked_fill(~finite.unsqueeze(-1), 0)
        if page_end > due_end:
            continue
        spread = torch.zeros_like(query_energy[row])
        key_energy = torch.zeros_like(spread[:, :1])
        for start in range(page_end - page_size, last, page_size):  # what a page's mean leaves is what is quantized
            at = torch.arange(max(start, first), min(start + page_size, last), device=key.device)
            kept_keys = ring_key[row].index_select(1, at[at < length] % ring_key.shape[2])
            keys = torch.cat((kept_keys, key[row].index_select(1, at[at >= length] - length)), 1).float()  # [H, T, D]
            counted = keys.isfinite().all(-1, keepdim=True)
            if kept is not None:
                counted &= kept[at, None]
            keys = keys.masked_fill(~counted, 0)
            key_energy += keys.square().sum((1, 2)).unsqueeze(-1)
            if center_keys:
                keys -= keys.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp_min(1)
            spread += keys.masked_fill(~counted, 0).square().sum(1)
        differ = spread.sum(-1, keepdim=True) > ROUNDING * key_energy  # keys that are all alike have no spread to balance
        balance[row] = balance_factors(query_energy[row], spread.masked_fill(~differ, 0), Partners(partner, partner_share))
