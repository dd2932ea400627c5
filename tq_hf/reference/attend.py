"""Attention over a packed layer: an online softmax over tiles of its history, in fp32.

Keys are never rotated back: the query is balanced and rotated once, and a page's mean key adds one product a page. Rotated
values are summed in rotated coordinates and rotated back once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layout import PageLayout
from ..quantizer.conditioning import or_ones
from ..quantizer.rotation import rotate, unrotate
from ..quantizer.sketch import sketch
from .codec import PageContent, unpack_page
from .state import TILE_TOKENS, page_tiles

SCORE_ELEMENTS = 1 << 24  # 64 MB of fp32
NOTHING = -1e30  # the maximum of no scores: below any score, yet finite, so that differences stay numbers


@torch.no_grad()
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    page_ids: Tensor,
    entries: Tensor,
    row_start: Tensor,
    counters: Tensor,
    balance: Tensor | None,
    mask: Tensor | None,
    aux_sinks: Tensor | None,
    layout: str,
    scaling: float,
    softcap: float,
    causal: bool,
    max_entries: int,
) -> Tensor:
    """Attend to everything committed and to the new tokens `key` and `value`. The state is described in `tq_hf.ops`.

    Args:
        query: `[B, Hq, q, D]`, Hq a multiple of H; query i stands at position length + n - q + i.
        key, value: `[B, H, n, D]` and `[B, H, n, Dv]`, not committed yet; n may be 0.
        mask: bool or uint8 `[B or 1, 1, q or 1, >= length + n]`, nonzero to keep; None keeps all.
        aux_sinks: `[Hq]`, logits that take part in the softmax without a value, or None.
        layout: `PageLayout.name`.
        scaling: factor of the scores.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
        causal: whether a query sees no position after its own.
        max_entries: upper bound of the entries in use.

    Returns:
        `[B, q, Hq, Dv]` in the query's dtype; zeros for a query that has nothing to attend to.

    Raises:
        ValueError: more entries are in use than `max_entries`.
    """
    page = PageLayout.from_name(layout)
    length, packed_end, n_entries = counters.tolist()
    if n_entries > max_entries:
        raise ValueError(f"max_entries={max_entries} is too small: {n_entries} are in use. Pass an upper bound.")
    total, sinks, device = length + key.shape[2], sink_key.shape[2], query.device
    row_start = row_start.long()

    with torch.autocast(device.type, enabled=False):
        rows = _Rows(query, page, balance, key.shape[1], aux_sinks, mask, total, scaling, softcap, causal)
        for tile in page_tiles(pool, page_ids, entries, row_start + sinks, n_entries, page):
            content = _flat(unpack_page(tile.words, page, ring_key.dtype))
            rows.add(content, tile.positions.unsqueeze(0), tile.valid)
        rows.leave_packed(page)

        first = row_start.unsqueeze(1)
        at = first + torch.arange(sinks, dtype=torch.int64, device=device)
        rows.add(PageContent(sink_key.float(), sink_value.float()), at, at < length)

        at = torch.arange(min(packed_end, length), length, dtype=torch.int64, device=device).unsqueeze(0)
        slots = at.squeeze(0) % ring_key.shape[2]
        recent = PageContent(ring_key.index_select(2, slots).float(), ring_value.index_select(2, slots).float())
        rows.add(recent, at, at >= first + sinks)

        for start in range(0, key.shape[2], TILE_TOKENS):
            new = slice(start, start + TILE_TOKENS)
            content = PageContent(key[:, :, new].float(), value[:, :, new].float())
            at = torch.arange(length + start, length + start + content.key.shape[2], dtype=torch.int64, device=device)
            rows.add(content, at.unsqueeze(0), at.unsqueeze(0) >= first)
        return rows.result(query.dtype)


class _Rows:
    """The queries and what they have attended to so far: first packed tokens, then exact ones.

    Heads are grouped by the KV head they share: everything is `[B, H, q, G, ...]`, so that queries slice without a copy
    and a matrix product takes `q * G` rows a KV head.
    """

    def __init__(
        self,
        query: Tensor,
        page: PageLayout,
        balance: Tensor | None,
        kv_heads: int,
        aux_sinks: Tensor | None,
        mask: Tensor | None,
        total: int,
        scaling: float,
        softcap: float,
        causal: bool,
    ) -> None:
        grouped = query.unflatten(1, (kv_heads, -1)).transpose(2, 3)
        self.plain = grouped.float().contiguous() * scaling
        self.query = self.plain  # in the coordinates of the keys to come
        if balance is not None:
            self.query = self.plain / or_ones(balance)[:, :, None, None]
        if page.rotates_keys:
            self.query = rotate(self.query, page.key_dim_padded, page.rotation)
            if page.key_format == "qjl":
                self.query = torch.cat((self.query, sketch(self.query)), -1)
        elif page.key_dim_padded > page.key_dim:
            self.query = pad(self.plain, (0, page.key_dim_padded - page.key_dim))
        self.mask = mask
        self.softcap = softcap
        self.causal = causal
        self.first_position = total - query.shape[2]
        self.maximum = self.plain.new_full(self.plain.shape[:-1], NOTHING)
        self.denominator = torch.zeros_like(self.maximum)
        self.output = self.plain.new_zeros(*self.plain.shape[:-1], page.value_dim_padded)
        if aux_sinks is not None:
            self.maximum.copy_(aux_sinks.float().clamp_min(NOTHING).view(kv_heads, 1, -1))
            self.denominator.fill_(1)

    def leave_packed(self, page: PageLayout) -> None:
        """Go over from packed tokens to exact ones, to plain coordinates."""
        self.query = self.plain
        rotated = page.rotates_values
        plain = unrotate(self.output, page.value_dim, page.rotation) if rotated else self.output
        self.output = plain[..., : page.value_dim]

    def add(self, tokens: PageContent, positions: Tensor, valid: Tensor) -> None:
        """Attend to a tile.

        Args:
            tokens: keys and values `[B, H, T, ...]`.
            positions: int64 `[B or 1, T]`.
            valid: bool `[B, T]`; the other tokens may hold anything.
        """
        if not valid.any():
            return
        tokens = _silence(tokens, valid)
        batch, heads, queries, group, _ = self.query.shape
        step = max(1, SCORE_ELEMENTS // (batch * heads * group * valid.shape[1]))
        earliest = int(positions.min())
        for start in range(0, queries, step):
            chunk = slice(start, min(start + step, queries))
            if not self.causal or self.first_position + chunk.stop > earliest:
                self._add(tokens, chunk, self._keep(chunk, positions, valid))

    def _keep(self, chunk: slice, positions: Tensor, valid: Tensor) -> Tensor | None:
        """Which of the chunk's queries sees which token, `[B, q or 1, T]`; None if each sees all."""
        keep = valid.unsqueeze(1)
        if self.causal:
            own = torch.arange(chunk.start, chunk.stop, dtype=torch.int64, device=valid.device) + self.first_position
            keep = keep & (positions.unsqueeze(1) <= own.unsqueeze(1))
        if self.mask is not None:
            mask = self.mask[:, 0, chunk if self.mask.shape[2] > 1 else slice(None)]
            columns = positions.clamp(0, mask.shape[-1] - 1)
            if len(columns) == 1:
                mask = mask.index_select(-1, columns[0])
            else:
                index = columns.unsqueeze(1).expand(-1, mask.shape[1], -1)
                mask = mask.expand(len(columns), -1, -1).gather(-1, index)
            keep = keep & (mask != 0)
        return None if bool(keep.all()) else keep

    def _add(self, tokens: PageContent, chunk: slice, keep: Tensor | None) -> None:
        query = self.query[:, :, chunk]
        scores = query.flatten(2, 3) @ tokens.key.mT  # [B, H, q * G, T]
        if tokens.key_scale is not None:
            scores *= tokens.key_scale.unsqueeze(2)
        if tokens.key_mean is not None:
            means = self.plain[:, :, chunk].flatten(2, 3) @ tokens.key_mean.mT  # [B, H, q * G, pages]
            scores.unflatten(-1, (means.shape[-1], -1)).add_(means.unsqueeze(-1))
        if self.softcap > 0:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores = scores.unflatten(2, query.shape[2:4])
        if keep is not None:
            scores.masked_fill_(~keep[:, None, :, None], -torch.inf)

        before = self.maximum[:, :, chunk]
        maximum = torch.maximum(before, scores.amax(-1))
        weights = scores.sub_(maximum.unsqueeze(-1)).exp_()
        decay = (before - maximum).exp_()
        self.denominator[:, :, chunk].mul_(decay).add_(weights.sum(-1))
        output = self.output[:, :, chunk].mul_(decay.unsqueeze(-1))
        before.copy_(maximum)

        rows = weights.flatten(2, 3)
        if tokens.value_min is not None:
            output += (rows @ tokens.value_min.unsqueeze(-1)).unflatten(2, query.shape[2:4])
        if tokens.value_scale is not None:
            rows *= tokens.value_scale.unsqueeze(2)
        output += (rows @ tokens.value).unflatten(2, query.shape[2:4])

    def result(self, dtype: torch.dtype) -> Tensor:
        """`[B, q, Hq, Dv]`."""
        normal = self.output / self.denominator.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        if dtype == torch.float16:  # what a page holds of values close to fp16's limit may lie beyond it
            limit = torch.finfo(dtype).max
            normal = torch.where(normal.isinf(), normal, normal.clamp(-limit, limit))
        return normal.permute(0, 2, 1, 3, 4).flatten(2, 3).to(dtype).contiguous()


def _flat(pages: PageContent) -> PageContent:
    """Pages `[B, H, E, P, ...]` as one run of tokens `[B, H, E * P, ...]`."""

    def flat(field: Tensor | None) -> Tensor | None:
        return None if field is None else field.flatten(2, 3)

    return PageContent(
        pages.key.flatten(2, 3),
        pages.value.flatten(2, 3),
        flat(pages.key_scale),
        pages.key_mean,
        flat(pages.value_scale),
        flat(pages.value_min),
    )


def _silence(tokens: PageContent, valid: Tensor) -> PageContent:
    """Zero the values of tokens that are not valid: they may hold NaN, which a weight of 0 would not silence."""
    if valid.all():
        return tokens
    hidden = ~valid.unsqueeze(1)
    if tokens.value_scale is None:
        return replace(tokens, value=tokens.value.masked_fill(hidden.unsqueeze(-1), 0))
    minimum = tokens.value_min
    return replace(
        tokens,
        value_scale=tokens.value_scale.masked_fill(hidden, 0),
        value_min=None if minimum is None else minimum.masked_fill(hidden, 0),
    )
