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

But what was measured at the first positions is used at all later ones, and rotary embeddings turn a channel against its
partner as positions grow: energy that is in one of them here is in the other some hundred or thousand tokens on, as soon as
their frequency has it, and pairs of low frequency never get there. The expected energy at a distance d is

    cos^2(f d) E_j + sin^2(f d) E_partner

in radians f a position, and averaged over the distances in a context of N tokens, the partner's share is
(1 - sinc(2 f N)) / 2: one half for pairs that turn often, none for those that stay. So each channel's statistics are mixed
with its partner's, by the mean of that share over the contexts in `HORIZONS`. On SmolLM2-135M the expected error of scores
at positions from 7,000 on is 0.70 of that without balance, where unmixed factors make it 1.21 of it and those that know what
comes 0.61; at the first thousand positions it is 0.64 of it, as with unmixed ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .rotary import Rotary

QUERY_FLOOR = 1e-4  # share of the mean energy that every query channel counts for, and so
KEY_FLOOR = 0.05  # for the variance of keys, which so few tokens estimate poorly
SMALLEST = 1e-30  # sums below tell nothing: proportions would overflow
ROUNDING = 1e-10  # share of the keys' energy below which their spread is what subtracting the mean left of fp32's digits
HORIZONS = (2048, 8192, 32768)  # contexts, in tokens, that factors are made for alike


@dataclass(frozen=True)
class Partners:
    """What statistics of channels become at the distances that factors are made for.

    Attributes:
        channel: int64 `[D]`, each channel's partner.
        share: fp32 `[D]`, 0 to 0.5, the part of the partner's statistic in its own.
    """

    channel: Tensor
    share: Tensor

    def mix(self, statistic: Tensor) -> Tensor:
        """`[..., D]`, fp32, with each channel's share of its partner."""
        return statistic + self.share * (statistic[..., self.channel] - statistic)


def partners(rotary: Rotary | None, dim: int, device: torch.device) -> Partners:
    """Of a head of `dim` channels; without rotary embeddings every statistic stays as it is.

    Every layer of a new cache asks for its own, while a GPU is reading the prompt: nothing waits for it here.
    """
    kept = _partners(rotary, dim)
    channel, share = (each.to(device, non_blocking=True, copy=True) for each in (kept.channel, kept.share))
    return Partners(channel, share)


@lru_cache(maxsize=64)
def _partners(rotary: Rotary | None, dim: int) -> Partners:
    """In host memory, where they stay."""
    channel, frequency = (rotary or Rotary((), interleaved=False)).pairs(dim)
    horizons = torch.tensor(HORIZONS, device="cpu")[:, None]
    return Partners(channel, (1 - torch.sinc(2 / math.pi * horizons * frequency).mean(0)) / 2)


def balance_factors(query_energy: Tensor, key_spread: Tensor, partners: Partners) -> Tensor:
    """The factor of each key channel.

    Args:
        query_energy: fp32 `[..., D]`, proportional to E[q_j^2] over the query heads of a KV head, not centred; D is even.
        key_spread: fp32 `[..., D]`, proportional to var k_j.
        partners: of the channels.

    Returns:
        fp32 `[..., D]`, positive, scaled so that dividing by it leaves the queries' energy, mixed, as it is on average. All
        ones for a head whose energy or spread is next to zero or not finite (no query seen, a single token, overflow).
    """
    energy_sum, spread_sum = query_energy.sum(-1, keepdim=True), key_spread.sum(-1, keepdim=True)
    dim = query_energy.shape[-1]
    energy = partners.mix(query_energy * (dim / energy_sum))
    spread = partners.mix(key_spread * (dim / spread_sum))
    square = ((energy + QUERY_FLOOR) / (spread + KEY_FLOOR)).sqrt()
    factors = (square * (energy / square).mean(-1, keepdim=True)).sqrt()
    largest = torch.finfo(torch.float32).max
    known = (energy_sum > SMALLEST) & (energy_sum <= largest) & (spread_sum > SMALLEST) & (spread_sum <= largest)
    return torch.where(known, factors, 1.0)


def or_ones(balance: Tensor) -> Tensor:
    """A layer's `balance`, which is zero for rows that have no page yet, as factors that can be divided by."""
    return torch.where(balance == 0, 1.0, balance)
