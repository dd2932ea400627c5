"""The balance of key channels: what happens to keys before the rotation, besides the page mean.

A rotation spreads the quantizer's error evenly over a key's channels, but neither the keys' nor the queries' channels are
alike: in models with biased or normalized keys, few channels carry most of the energy, and the error of all others is made
at their scale. So keys are multiplied by a factor a channel, and queries divided by it, which leaves every score as it is:

    q . k  =  (q / a) . (a * (k - mean)) + q . mean

The expected squared error of a score is proportional to (sum_j E[q_j^2] / a_j^2) (sum_j a_j^2 var k_j), which is least where
a_j = (E[q_j^2] / var k_j)^(1/4). Decoding pays nothing for it: a query is prepared by a product anyway.

The factors belong to one sequence and KV head. Their statistics are those of the tokens that are there when the sequence's
first page falls due, sinks and padding left out: the page's own and the recent window's. The variance of keys is the one
around the mean of each `page_size` of them, as page means will leave it (around zero where pages keep no mean). The factors
are made at that moment and stay, since a written page never changes. So they don't depend on how the tokens came in chunks.
(Queries of rejected drafts before the first page do count: they are not known to be rejected when they are seen.)

But what was measured at the first positions is used at all later ones, and rotary embeddings turn channel j against its
partner j + D/2 as positions grow: energy that is in one of them here is in the other some thousand tokens on. Their sum
stays. So each channel's statistics are mixed with its partner's. Equal shares would forget the pairs that turn too slowly
to matter; with a quarter, the expected error at positions from 7,000 on is 0.76 of that without balance on SmolLM2-135M,
where unmixed factors make it 1.24 of it, and at the first thousand positions as much as theirs. On Qwen2.5-Coder-0.5B, whose
pairs turn slowly, it grows by 4 % there and falls by 3 % at 7,000. The packed cache of SmolLM2 with `tq2` has half the KL
at 8,192 tokens of WikiText-2 (0.046 for 0.091) and a little more at 2,048 (0.036 for 0.033). Where channels have other
partners, or none, all factors are a little nearer to each other than they should be.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_FLOOR = 1e-4  # share of the mean energy that every query channel counts for, and so
KEY_FLOOR = 0.05  # for the variance of keys, which so few tokens estimate poorly
SMALLEST = 1e-30  # sums below tell nothing: proportions would overflow
PARTNER_SHARE = 0.25  # of the channel half a head away in a channel's statistics; 0.5 would be their mean


def mixed_with_partner(statistic: Tensor) -> Tensor:
    """`[..., D]` with `PARTNER_SHARE` of each channel's half a head away, its partner in rotary embeddings."""
    partner = statistic.roll(statistic.shape[-1] // 2, -1)
    return statistic + PARTNER_SHARE * (partner - statistic)


def balance_factors(query_energy: Tensor, key_spread: Tensor) -> Tensor:
    """The factor of each key channel.

    Args:
        query_energy: fp32 `[..., D]`, proportional to E[q_j^2] over the query heads of a KV head, not centred; D is even.
        key_spread: fp32 `[..., D]`, proportional to var k_j.

    Returns:
        fp32 `[..., D]`, positive, scaled so that dividing by it leaves the queries' energy, mixed, as it is on average. All
        ones for a head whose energy or spread is next to zero or not finite (no query seen, a single token, overflow).
    """
    energy_sum, spread_sum = query_energy.sum(-1, keepdim=True), key_spread.sum(-1, keepdim=True)
    dim = query_energy.shape[-1]
    energy = mixed_with_partner(query_energy * (dim / energy_sum))
    spread = mixed_with_partner(key_spread * (dim / spread_sum))
    square = ((energy + QUERY_FLOOR) / (spread + KEY_FLOOR)).sqrt()
    factors = (square * (energy / square).mean(-1, keepdim=True)).sqrt()
    largest = torch.finfo(torch.float32).max
    known = (energy_sum > SMALLEST) & (energy_sum <= largest) & (spread_sum > SMALLEST) & (spread_sum <= largest)
    return torch.where(known, factors, 1.0)


def or_ones(balance: Tensor) -> Tensor:
    """A layer's `balance`, which is zero for rows that have no page yet, as factors that can be divided by."""
    return torch.where(balance == 0, 1.0, balance)
