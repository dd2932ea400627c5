"""What a cache must hold, as plainly as it can be said: every token that came in, and the pages that its rules make of them.

The model keeps all raw states and never forgets one. A page is what the reference codec makes of a row's own tokens, alone,
at the moment the page falls due; it is kept with the row, as words and decoded. Rows that share pages in a cache have the
same object here. Nothing of block tables, pools, rings or sliding origins is in it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tq_hf.layers.stock import contents
from tq_hf.layout import PageLayout
from tq_hf.quantizer.conditioning import or_ones, partners
from tq_hf.reference.codec import decode_page, encode_page
from tq_hf.reference.observe import observe


@dataclass(frozen=True)
class Page:
    """One row's page: words int32 `[H, page_words]`, and what they decode to, `[H, P, D]` and `[H, P, Dv]`."""

    words: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class New:
    """One layer's new tokens.

    Args:
        key, value: `[B, H, n, D / Dv]`.
        query: `[B, Hq, n, D]` where attention sees them.
        keep: bool `[B, length + n]`, what the layer's mask shows; None without a mask.
    """

    key: Tensor
    value: Tensor
    query: Tensor | None = None
    keep: Tensor | None = None


class LayerModel:
    """One layer's tokens and, where it is packed, its pages: `pages[i][row]`, None where a row has nothing to pack.

    Args:
        settings: its `TurboQuantConfig`; None for a layer of transformers' own.
    """

    def __init__(self, settings: Any, layout: PageLayout | None, rotary: Any, window: int | None) -> None:
        self.settings, self.layout, self.rotary, self.window = settings, layout, rotary, window
        self.key = self.value = torch.empty(0)
        self.pages: list[list[Page | None]] = []
        self.balance: Tensor | None = None
        self.energy: Tensor | None = None

    def begin(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key[:, :, :0], value[:, :, :0]
        if self.settings is not None and self.settings.balance_keys:
            self.balance, self.energy = (torch.zeros(*key.shape[:2], key.shape[3]) for _ in range(2))

    def copied(self) -> LayerModel:
        twin = copy.copy(self)
        twin.pages = [list(row) for row in self.pages]
        twin.balance, twin.energy = (None if t is None else t.clone() for t in (self.balance, self.energy))
        return twin

    def learn(self, new: New, starts: Sequence[int], packed_end: int) -> None:
        """Each row's balance of key channels, by the reference, from that row's own history."""
        if self.balance is None or self.energy is None:
            return
        length = self.key.shape[2]
        history = self.key if length else torch.zeros_like(new.key[:, :, :1])
        mixed = partners(self.rotary, self.key.shape[3], self.key.device)
        for row, start in enumerate(starts):
            one = slice(row, row + 1)
            observe(
                None if new.query is None else new.query[one],
                new.key[one],
                history[one],
                torch.tensor([start], dtype=torch.int32),
                torch.tensor([length, packed_end, 0], dtype=torch.int32),
                self.balance[one],
                self.energy[one],
                mixed.channel,
                mixed.share,
                None if new.keep is None else new.keep[one],
                self.settings.page_size,
                self.settings.sink_tokens,
                self.settings.recent_window,
                self.settings.center_keys,
            )

    def pack(self, row: int, first: int, row_start: int, keep: Tensor | None) -> Page:
        """The page of the tokens from position `first` on."""
        assert self.layout is not None
        span = slice(first, first + self.layout.page_size)
        valid = torch.arange(span.start, span.stop) >= row_start + self.settings.sink_tokens
        factors = None if self.balance is None else or_ones(self.balance[row])
        averaged = None if keep is None else keep[row : row + 1, span]
        tokens = (self.key[row, :, span], self.value[row, :, span])
        words, _ = encode_page(*tokens, valid[None], self.layout, averaged, factors)
        largest = torch.finfo(self.key.dtype).max
        decoded = decode_page(words, self.layout, self.key.dtype, factors)
        return Page(words, *(part.clamp(-largest, largest).to(self.key.dtype) for part in decoded))


class CacheModel:
    """All layers of a cache, which advance together."""

    def __init__(self, layers: list[LayerModel], page_size: int, recent_window: int, sinks: int, is_static: bool) -> None:
        self.layers = layers
        self.page_size, self.recent_window, self.sinks = page_size, recent_window, sinks
        self.is_static = is_static
        self.forget()

    def forget(self) -> None:
        self.length, self.packed_end = 0, self.sinks
        self.starts: list[int] = []  # of each row, the first position that is no padding
        self.spans: list[tuple[int, int]] = []  # positions of each page: the first, and how many
        self.hidden = torch.zeros(0, 0, dtype=torch.bool)  # [B, length]: what a mask hides
        self.states: dict[int, Tensor] = {}  # recurrent states by layer
        self.recording = False
        self.last_seen = 0  # the length at which sliding layers last forgot
        for layer in self.layers:
            layer.pages, layer.balance, layer.energy = [], None, None

    @property
    def rows(self) -> int:
        return len(self.starts)

    def copied(self) -> CacheModel:
        twin = copy.copy(self)
        twin.layers = [layer.copied() for layer in self.layers]
        twin.starts, twin.spans, twin.states = list(self.starts), list(self.spans), dict(self.states)
        return twin

    def forward(self, new: Sequence[New], hidden: Tensor, is_padding_seen: bool) -> None:
        """Take one forward pass's tokens in.

        Args:
            new: one a layer.
            hidden: bool `[B, n]`, those that masks hide.
            is_padding_seen: whether some attention function has had a mask.
        """
        batch, count = hidden.shape
        if not self.starts:
            self.starts = [0] * batch
            self.hidden = hidden[:, :0]
            for layer, tokens in zip(self.layers, new, strict=True):
                layer.begin(tokens.key, tokens.value)
        before, self.length = self.length, self.length + count
        if not self.recording:
            self.last_seen = before
        self.hidden = torch.cat([self.hidden, hidden], 1)
        # A static cache does not look at single tokens: where a row is all padding, the next one counts as its first.
        if is_padding_seen and (count > 1 or not before or not self.is_static):
            for row, start in enumerate(self.starts):
                shown = (~self.hidden[row]).nonzero().flatten().tolist()
                if start >= before:  # nothing but padding so far
                    self.starts[row] = shown[0] if shown else self.length
        due = max(0, (self.length - self.packed_end - self.recent_window) // self.page_size)
        for layer, tokens in zip(self.layers, new, strict=True):
            layer.learn(tokens, self.starts, self.packed_end)
            layer.key, layer.value = torch.cat([layer.key, tokens.key], 2), torch.cat([layer.value, tokens.value], 2)
            for first in range(self.packed_end, self.packed_end + due * self.page_size, self.page_size):
                if layer.layout is not None:
                    layer.pages.append(
                        [
                            layer.pack(row, first, start, tokens.keep)
                            if self.is_static or first + self.page_size > start + self.sinks
                            else None
                            for row, start in enumerate(self.starts)
                        ]
                    )
        for _ in range(due):
            self.spans.append((self.packed_end, self.page_size))
            self.packed_end += self.page_size

    def crop(self, tokens: int) -> None:
        had, self.length = len(self.spans), self.length - tokens
        if self.length < self.packed_end:
            self.spans = [(first, min(count, self.length - first)) for first, count in self.spans if first < self.length]
            self.packed_end = sum(self.spans[-1]) if self.spans else self.sinks
        self.starts = [min(start, self.length) for start in self.starts]
        self.hidden = self.hidden[:, : self.length]
        for layer in self.layers:
            layer.key, layer.value = layer.key[:, :, : self.length], layer.value[:, :, : self.length]
            del layer.pages[len(self.spans) :]
            if layer.balance is not None and not self.spans and (had or not self.length):
                layer.balance, layer.energy = torch.zeros_like(layer.balance), torch.zeros_like(layer.balance)
        self.last_seen = self.length

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows)
        self.starts = [self.starts[row] for row in rows]
        self.hidden = self.hidden[index]
        self.states = {i: state[index] for i, state in self.states.items()}
        for layer in self.layers:
            layer.key, layer.value = layer.key[index], layer.value[index]
            layer.pages = [[pages[row] for row in rows] for pages in layer.pages]
            if layer.balance is not None and layer.energy is not None:
                layer.balance, layer.energy = layer.balance[index], layer.energy[index]

    def content(self, layer: LayerModel) -> tuple[Tensor, Tensor]:
        """All keys and values of a packed layer `[B, H, length, D / Dv]`: padding is zero, sinks and recent tokens exact."""
        key, value = layer.key.clone(), layer.value.clone()
        for row, start in enumerate(self.starts):
            for (first, count), pages in zip(self.spans, layer.pages, strict=True):
                page, end = pages[row], first + count
                packed = max(first, min(start + self.sinks, end))
                if packed < end and page is not None:
                    key[row, :, packed:end] = page.key[:, packed - first : count]
                    value[row, :, packed:end] = page.value[:, packed - first : count]
            key[row, :, :start], value[row, :, :start] = 0, 0
        return key, value

    def first_seen(self, layer: LayerModel, length: int) -> int:
        """The first position that a query at `length` sees."""
        return 0 if layer.window is None else max(0, length - layer.window + 1)

    # -- against a cache -----------------------------------------------------------------------------------------------
    def check(self, cache: Any) -> None:
        """Assert that a cache holds this, byte for byte, as far as its layers have taken their tokens in."""
        assert len(cache.layers) == len(self.layers)
        for i, (layer, held) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if i in self.states:
                state = getattr(held, "state", held)
                assert torch.equal(state.recurrent_states[0], self.states[i]), f"recurrent state of layer {i}"
            if layer.layout is None:
                if hasattr(held, "keys") and layer.key.ndim == 4:
                    self._check_stock(layer, held)
                continue
            assert int(held.get_seq_length()) == self.length, f"layer {i}: {held.get_seq_length()} != {self.length}"
            if self.rows and held.is_initialized and held.pending is None:
                self._check_packed(layer, held)
            else:
                assert held.is_initialized or not self.length

    def _check_stock(self, layer: LayerModel, held: Any) -> None:
        if not self.length and not contents(held)[1]:
            return
        assert held.get_seq_length() == self.length
        first = self.first_seen(layer, self.length)
        for given, kept in ((layer.key, held.keys), (layer.value, held.values)):
            tail = given[:, :, first:]
            assert torch.equal(kept[:, :, kept.shape[2] - tail.shape[2] :], tail), "exact sliding layer"

    def _check_packed(self, layer: LayerModel, held: Any) -> None:
        table, origin = held.table, held.table.origin
        length, packed_end, used = held.counters.tolist()
        assert (length + origin, packed_end + origin) == (self.length, self.packed_end)
        spans = [(first + origin, count) for first, count in table.spans[:used]]
        assert spans == self.spans[len(self.spans) - len(spans) :]
        assert layer.window is not None or len(spans) == len(self.spans)
        starts = held.on_device.row_start.tolist()
        assert starts == [max(0, start - origin) for start in self.starts]
        assert held.flags.tolist() == [0] * held.kv_heads

        # Pages: the very bytes, of those that queries to come see; none that they stopped to see before the last tokens.
        seen, was_seen = self.first_seen(layer, self.length), self.first_seen(layer, self.last_seen)
        ids, words = [], []
        for entry, ((first, count), pages) in enumerate(zip(spans, layer.pages[len(self.spans) - len(spans) :])):
            for row, page in enumerate(pages):
                number = table.rows[row][entry]
                if number >= 0:
                    assert page is not None and first + count > was_seen, f"a page that nobody sees: {first}, row {row}"
                    ids.append(number)
                    words.append(page.words)
                else:
                    assert page is None or first + count <= seen, f"the page at {first} of row {row} is not there"
        if ids:
            assert torch.equal(held.pool[torch.tensor(ids)], torch.stack(words)), "packed bytes"

        positions = torch.arange(self.packed_end, max(self.packed_end, self.length))
        ring = held.ring_key.shape[2]
        for given, recent, sinks in (
            (layer.key, held.ring_key, held.sink_key),
            (layer.value, held.ring_value, held.sink_value),
        ):
            assert torch.equal(recent[:, :, (positions - origin) % ring], given[:, :, positions]), "recent tokens"
            for row, start in enumerate(self.starts):
                exact = given[row, :, start : start + self.sinks]
                if origin == 0:
                    assert torch.equal(sinks[row, :, : exact.shape[1]], exact), "first tokens"
        for mine, theirs in ((layer.balance, held.balance), (layer.energy, held.query_energy)):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs), "balance of key channels"

    def check_content(self, cache: Any) -> None:
        """Assert that what is read back is what pages and exact tokens say. Takes pending tokens in."""
        for layer, entry in zip(self.layers, cache, strict=True):
            if layer.layout is None or not self.rows or entry[0] is None:
                assert layer.layout is None or not self.length
                continue
            first = self.first_seen(layer, self.length)
            for mine, theirs in zip(self.content(layer), entry[:2], strict=True):
                assert torch.equal(mine[:, :, first:], theirs), "what is read back"
