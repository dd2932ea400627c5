"""The outlier split: some channels of a head at one more bit, quantize-dequantize only.

Source: TurboQuant, https://arxiv.org/abs/2504.19874: outlier and other channels are two vectors, each rotated and scaled
by itself, so that 2 and 3 bits mix to 2.5. Here half of the channels are outliers, chosen once a sequence. The vectors go
through the same codec as packed pages; a page in this form is never laid out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tq_hf.config import TurboQuantConfig
from tq_hf.layout import MIN_HEAD_DIM, PageLayout, padded_dim
from tq_hf.quantizer.conditioning import Partners, balance_factors
from tq_hf.reference.codec import decode_page, encode_page

SCALE_BYTES = 2  # fp16


@dataclass(frozen=True)
class Split:
    """Which sides have outlier channels at one more bit than the config says."""

    keys: bool
    values: bool


@dataclass(frozen=True)
class Conditioning:
    """What is known of a sequence's channels when its first page is packed. Constant from then on.

    Attributes:
        balance: fp32 [B, H, 1, 1, D], factor of the centred keys; None for none.
        key_order, value_order: int64 [B, H, 1, 1, D / Dv], the channels, outliers first.
    """

    balance: Tensor | None
    key_order: Tensor
    value_order: Tensor


def condition(
    query_energy: Tensor, key: Tensor, value: Tensor, partners: Partners, config: TurboQuantConfig
) -> Conditioning:
    """Channel statistics of a sequence's first tokens.

    Args:
        query_energy: fp32 [B, H, D], the sum of squares of the queries that read a KV head.
        key, value: [B, H, n, D / Dv].
        partners: of the keys' channels.
        config: whether keys are centred, by pages of which size, and balanced (`tq_hf.quantizer.conditioning`).
    """
    if config.center_keys:
        key_spread = torch.stack([_spread(page) for page in key.float().split(config.page_size, 2)]).sum(0)
    else:
        key_spread = key.float().square().sum(2)
    value_spread = _spread(value.float())
    balance = balance_factors(query_energy, key_spread, partners)[:, :, None, None] if config.balance_keys else None
    importance = query_energy * key_spread
    key_order, value_order = (x.argsort(-1, descending=True)[:, :, None, None] for x in (importance, value_spread))
    return Conditioning(balance, key_order, value_order)


def _spread(vectors: Tensor) -> Tensor:
    """[B, H, n, D]: the sum over n of the squared distance from the mean, [B, H, D]."""
    return (vectors - vectors.mean(2, keepdim=True)).square().sum(2)


def pages_as_read(
    key: Tensor, value: Tensor, known: Conditioning, config: TurboQuantConfig, split: Split
) -> tuple[Tensor, Tensor]:
    """What attention would read of packed pages.

    Args:
        key, value: [B, H, pages, P, D / Dv]; config.page_size is P.

    Returns:
        Both as fp32.
    """
    key, value = key.float(), value.float()
    mean = key.mean(-2, keepdim=True).half().float() if config.center_keys else torch.zeros_like(key[..., :1, :])
    centred = key - mean
    if known.balance is not None:
        centred = centred * known.balance
    centred = _as_read(centred, config.key_bits, config, known.key_order if split.keys else None, is_key=True)
    if known.balance is not None:
        centred = centred / known.balance
    order = known.value_order if split.values else None
    return centred + mean, _as_read(value, config.value_bits, config, order, is_key=False)


def bytes_per_token(key_dim: int, value_dim: int, config: TurboQuantConfig, split: Split) -> float:
    """Bytes of a token and KV head in a page of this form, its header (the mean key) included."""
    header = 2 * key_dim / config.page_size if config.center_keys else 0.0
    sides = ((key_dim, config.key_bits, split.keys), (value_dim, config.value_bits, split.values))
    vectors = [part for dim, bits, is_split in sides for part in _parts(dim, bits, is_split)]
    return header + sum(bits * padded_dim(dim) / 8 + SCALE_BYTES for dim, bits in vectors)


def _parts(dim: int, bits: int, is_split: bool) -> list[tuple[int, int]]:
    """(dimension, bits) of the vectors that one vector is stored as, outliers first."""
    return [(dim // 2, bits + 1), (dim - dim // 2, bits)] if is_split else [(dim, bits)]


def _as_read(vectors: Tensor, bits: int, config: TurboQuantConfig, order: Tensor | None, is_key: bool) -> Tensor:
    """Vectors [..., P, D] after quantization; `order` [..., 1, D] tells the outlier channels, None: no split."""
    if order is None:
        return _through_codec(vectors, bits, config, is_key)
    order = order.expand(vectors.shape)
    parts = vectors.gather(-1, order).split([dim for dim, _ in _parts(vectors.shape[-1], bits, True)], dim=-1)
    read = [_through_codec(part, b, config, is_key) for part, (_, b) in zip(parts, _parts(vectors.shape[-1], bits, True))]
    return torch.empty_like(vectors).scatter_(-1, order, torch.cat(read, dim=-1))


def _through_codec(vectors: Tensor, bits: int, config: TurboQuantConfig, is_key: bool) -> Tensor:
    """Vectors [..., P, d] as the keys, or values, of packed pages that neither centre nor balance."""
    dim = vectors.shape[-1]
    layout = PageLayout(
        key_dim=dim if is_key else MIN_HEAD_DIM,
        value_dim=MIN_HEAD_DIM if is_key else dim,
        page_size=config.page_size,
        key_format="lloyd_max",
        key_bits=bits if is_key else 2,
        value_format="lloyd_max",
        value_bits=2 if is_key else bits,
        center_keys=False,
        codebook=config.codebook,
        scale=config.scale,
    )
    vectors = vectors.contiguous()
    everything = torch.ones(vectors.shape[:-1], dtype=torch.bool, device=vectors.device)
    unused = vectors.new_zeros(*vectors.shape[:-1], MIN_HEAD_DIM)  # a page has both
    words, _ = encode_page(*((vectors, unused) if is_key else (unused, vectors)), everything, layout)
    return decode_page(words, layout, vectors.dtype)[0 if is_key else 1]
