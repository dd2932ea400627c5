"""The state of a packed layer: writing tokens into it, walking through its pages, reading it back.

`tq_hf.ops` describes the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import PageLayout
from ..quantizer.conditioning import or_ones
from .codec import decode_page, encode_page

TILE_TOKENS = 1024
TILE_ELEMENTS = 1 << 21  # keys, or values, of a tile: 8 MB of fp32


@dataclass(frozen=True)
class PageTile:
    """Consecutive entries of the block table, with E entries of P tokens.

    Args:
        words: int32 `[B, H, E, page_words]`; whatever page 0 holds where a row has no page.
        positions: int64 `[E * P]`, increasing within an entry.
        valid: bool `[B, E * P]`: the tokens that exist.
    """

    words: Tensor
    positions: Tensor
    valid: Tensor


def page_tiles(
    pool: Tensor, page_ids: Tensor, entries: Tensor, first_packed: Tensor, n_entries: int, layout: PageLayout
) -> Iterator[PageTile]:
    """The packed history, as few pages at a time as keep an unpacked tile small.

    Args:
        first_packed: `[B]`, the first position of each row that pages may hold.
    """
    rows, heads, size = page_ids.shape[0], pool.shape[1], layout.page_size
    step = _pages_at_once(rows * heads, layout)
    offsets = torch.arange(size, dtype=torch.int64, device=pool.device)
    for i in range(0, n_entries, step):
        ids = page_ids[:, i : min(i + step, n_entries)]
        if not (ids >= 0).any():
            continue
        table = entries[i : i + ids.shape[1]].long()
        positions = (table[:, :1] + offsets).flatten()
        valid = (offsets < table[:, 1:]).flatten() & (positions >= first_packed.unsqueeze(1))
        valid &= (ids >= 0).repeat_interleave(size, 1)
        words = pool.index_select(0, ids.clamp_min(0).flatten()).unflatten(0, ids.shape).transpose(1, 2)
        yield PageTile(words, positions, valid)


@torch.no_grad()
def commit(
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
    flags: Tensor,
    keep: Tensor | None,
    layout: str,
    recent_window: int,
    max_due: int,
) -> None:
    """Append tokens: pack the pages that are due, keep the newest tokens and the sinks exact. In place.

    A page is due when all its tokens are older than `recent_window`; it takes its tokens from the ring and from `key`
    and `value`. Tokens before `row_start + S` are stored as zero vectors. Those that `keep` leaves out do not enter their
    page's mean, but are stored: a mask may hide now what a later one shows.

    Args:
        key, value: `[B, H, n, D]` and `[B, H, n, Dv]`, the tokens at positions length to length + n - 1.
        keep: bool or uint8 `[B, >= length + n]`, or None for all.
        layout: `PageLayout.name`.
        max_due: upper bound of the pages that this call packs.

    Raises:
        ValueError: more pages are due than `max_due`.
    """
    page = PageLayout.from_name(layout)
    length, packed_end, n_entries = counters.tolist()
    total = length + key.shape[2]
    due = max(0, (total - packed_end - recent_window) // page.page_size)
    if due > max_due:
        raise ValueError(f"max_due={max_due} is too small: {due} pages are due. Pass an upper bound of the pages due.")

    first_packed = row_start.long() + sink_key.shape[2]
    factors = None if balance is None else or_ones(balance).unsqueeze(2)  # [B, H, 1, D]
    step = _pages_at_once(key.shape[0] * key.shape[1], page)
    with torch.autocast(key.device.type, enabled=False):
        for i in range(0, due, step):
            count = min(step, due - i)
            ids = page_ids[:, n_entries + i : n_entries + i + count]
            stored = ids >= 0
            if not stored.any():
                continue
            start = packed_end + i * page.page_size
            end = start + count * page.page_size
            valid = torch.arange(start, end, dtype=torch.int64, device=key.device) >= first_packed.unsqueeze(1)
            averaged = None
            if keep is not None:
                averaged = (keep[:, start:end] != 0).unflatten(1, (count, page.page_size)).unsqueeze(1)
            words, raised = encode_page(
                _tokens(ring_key, key, length, start, end).unflatten(2, (count, page.page_size)),
                _tokens(ring_value, value, length, start, end).unflatten(2, (count, page.page_size)),
                valid.unflatten(1, (count, page.page_size)).unsqueeze(1),
                page,
                averaged,
                factors,
            )
            pool[ids[stored].long()] = words.transpose(1, 2)[stored]
            raised = raised.masked_fill(~stored.unsqueeze(1), 0)
            for bit in (1, 2, 4):
                flags |= (raised & bit).amax((0, 2))

    packed_end += due * page.page_size
    newest = max(packed_end, length)
    if newest < total:
        slots = torch.arange(newest, total, dtype=torch.int64, device=key.device) % ring_key.shape[2]
        ring_key.index_copy_(2, slots, key[:, :, newest - length :].to(ring_key.dtype))
        ring_value.index_copy_(2, slots, value[:, :, newest - length :].to(ring_value.dtype))

    row, slot, position = sink_slots(row_start, sink_key.shape[2], length, total)
    sink_key[row, :, slot] = key[row, :, position - length].to(sink_key.dtype)
    sink_value[row, :, slot] = value[row, :, position - length].to(sink_value.dtype)

    after = torch.tensor((total, packed_end, n_entries + due), dtype=counters.dtype, device=counters.device)
    counters.copy_(after)


@torch.no_grad()
def gather(
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
    layout: str,
    length: int,
) -> tuple[Tensor, Tensor]:
    """The first `length` positions as the model wrote them, as far as the format kept them.

    Returns:
        key `[B, H, length, D]` and value `[B, H, length, Dv]` in the model's dtype; zeros where a position holds
        nothing (padding, or beyond what was committed).
    """
    page = PageLayout.from_name(layout)
    committed, packed_end, n_entries = counters.tolist()
    end = min(length, committed)
    first_packed = row_start.long() + sink_key.shape[2]
    factors = None if balance is None else or_ones(balance).unsqueeze(2)
    batch, heads = ring_key.shape[:2]
    key = ring_key.new_zeros(batch, heads, length, ring_key.shape[3])
    value = ring_value.new_zeros(batch, heads, length, ring_value.shape[3])

    with torch.autocast(key.device.type, enabled=False):
        for tile in page_tiles(pool, page_ids, entries, first_packed, n_entries, page):
            used = tile.valid.any(0) & (tile.positions < end)
            where, hidden = tile.positions[used], ~tile.valid[:, None, used, None]
            decoded = decode_page(tile.words, page, ring_key.dtype, factors)
            for out, part in zip((key, value), decoded, strict=True):
                # A scale may take a vector of large codes just past what the model's dtype holds.
                limit = torch.finfo(out.dtype).max
                part = part.flatten(2, 3)[:, :, used].masked_fill(hidden, 0).clamp(-limit, limit)
                out.index_copy_(2, where, part.to(out.dtype))

    if packed_end < end:
        positions = torch.arange(packed_end, end, dtype=torch.int64, device=key.device)
        hidden = (positions < first_packed.unsqueeze(1))[:, None, :, None]
        for out, ring in ((key, ring_key), (value, ring_value)):
            recent = ring.index_select(2, positions % ring.shape[2])
            out[:, :, packed_end:end] = recent.masked_fill(hidden, 0)

    row, slot, position = sink_slots(row_start, sink_key.shape[2], 0, end)
    key[row, :, position] = sink_key[row, :, slot]
    value[row, :, position] = sink_value[row, :, slot]
    return key, value


def sink_slots(row_start: Tensor, sinks: int, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, slot and position, each int64 `[k]`, of the sinks whose positions lie in `start` to `end - 1`."""
    positions = row_start.long().unsqueeze(1) + torch.arange(sinks, dtype=torch.int64, device=row_start.device)
    row, slot = ((positions >= start) & (positions < end)).nonzero(as_tuple=True)
    return row, slot, positions[row, slot]


def _pages_at_once(heads: int, layout: PageLayout) -> int:
    """Pages of all `heads` (rows times heads) that one tile may hold; at least one."""
    key_parts = 2 if layout.key_format == "qjl" else 1
    widest = max(key_parts * layout.key_dim_padded, layout.value_dim_padded)
    tokens = min(TILE_TOKENS, TILE_ELEMENTS // (heads * widest))
    return max(1, tokens // layout.page_size)


def _tokens(ring: Tensor, new: Tensor, length: int, start: int, end: int) -> Tensor:
    """Positions `start` to `end - 1`, those before `length` from the ring: `[B, H, end - start, D]`."""
    split = min(max(start, length), end)
    slots = torch.arange(start, split, dtype=torch.int64, device=ring.device) % ring.shape[2]
    return torch.cat((ring.index_select(2, slots), new[:, :, split - length : end - length].to(ring.dtype)), 2)
