"""Layers with a sliding window, packed: pages are freed as they leave the window.

A query at position p sees positions p - window + 1 to p. Handles show what transformers' own layer shows: all positions
that the first of the new queries sees, and the new ones. Among these the model's mask says which query sees which.

What no query to come will see is forgotten, in three steps of growing size:

- a page that has left the window goes back to the allocator, its entry stays;
- where a whole ring of positions has left it, entries are dropped and the table's *origin* moves up. All positions in the
  state count from there, so that tables and masks stay as short as a window and the ops need not know. A ring, because a
  token's slot in it is its position modulo its size;
- where a pool has become too large (a long chunk, beams that were one prompt), what is left of it is copied.

Positions between the origin and the first that is shown get a column of zeros in the mask.

The first tokens of each row stay exact until they have left the window of all rows, when the origin first moves.

All sliding layers of a model share one table, which therefore only moves between forward passes, in the first `update` of
one. A long prompt isn't packed to be thrown away: pages that nobody will read get no number in the first place.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import TurboQuantConfig
from ..errors import is_out_of_memory
from ..pages.device import int32
from ..pages.edits import Crop
from ..pages.pool import NO_PAGE, while_alone
from ..pages.table import BlockTable
from ..quantizer.rotary import Rotary
from ..reporting.reports import LayerReport
from .full import TurboQuantLayer
from .packed_kv import Step


def packs_window(config: TurboQuantConfig, window: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether a sliding layer is packed: where that takes fewer bytes than transformers' own layer.

    The preset `raw` saves nothing and exists to test pages, so it packs whatever can be.

    Raises:
        ValueError: a head dimension or dtype that has no packed layout.
    """
    packed = window_bytes(config, window, key_dim, value_dim, dtype)
    if packed is None:
        return False
    is_raw = config.key_format == config.value_format == "raw"
    return is_raw or packed < (window - 1) * (key_dim + value_dim) * dtype.itemsize


def window_bytes(config: TurboQuantConfig, window: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> int | None:
    """Bytes a row and KV head that a packed sliding layer takes while decoding; transformers' own takes `window - 1` tokens.

    None for a window so short that tokens leave it before they are packed.

    Raises:
        ValueError: a head dimension or dtype that has no packed layout.
    """
    ring = config.recent_window + config.page_size
    if window < ring:
        return None
    layout = config.layout(key_dim, value_dim, dtype)
    pages = -(-(window - config.recent_window) // config.page_size)
    statistics = 2 * key_dim * torch.float32.itemsize if config.balance_keys else 0
    return pages * layout.page_words * 4 + ring * (key_dim + value_dim) * dtype.itemsize + statistics


class SlidingTable(BlockTable):
    """The block table of the sliding layers: one whose pages are freed at its lower end too.

    Args:
        full: the table of the cache's other layers, whose sizes this one takes.
        window: tokens that a query sees, its own among them; at least `recent_window + page_size`.
        shares_keys: whether layers read keys that another one has stored in the same forward pass (Gemma 3n): these must be
            there until it ends.

    Attributes:
        origin: the position that all others here and in the layers' state count from.
        kept_from: what is before this position, which counts from the sequence's start, may be lost.
        recording: whether nothing is to be forgotten until the next `crop`, which may take tokens back.
        layers: those that use this table, in the model's order. They hold the table, and it only knows them: a cache that is
            dropped must free its memory at once, not when the garbage collector finds a cycle.
    """

    def __init__(self, full: BlockTable, window: int, shares_keys: bool = False) -> None:
        self.full = full
        self.window = window
        self.shares_keys = shares_keys
        self._layers: list[ref[SlidingLayer]] = []
        super().__init__(full.page_size, full.sink_tokens, full.recent_window)

    @property
    def layers(self) -> list[SlidingLayer]:
        return [layer for known in self._layers if (layer := known()) is not None]

    def join(self, layer: SlidingLayer) -> None:
        """One more layer uses this table."""
        self._layers.append(ref(layer))

    def clear(self) -> None:
        self.sink_tokens = self.full.sink_tokens
        self.origin = self.kept_from = 0
        self.recording = False
        self._unneeded = self._released = 0
        self._announced = (-1, 0)  # the position that tokens were last announced from, and `kept_from` before that
        self._mask: tuple[Tensor | None, tuple[object, ...], Tensor] | None = None  # of a forward pass that is not over
        super().clear()

    def note_dense_read(self) -> None:
        self.full.note_dense_read()

    # -- what is needed ----------------------------------------------------------------------------------------------
    def first_seen(self, length: int) -> int:
        """The first position that a query at position `length` sees; negative where it sees all and would see more."""
        return length - self.window + 1

    def announce(self, start: int, new: int) -> None:
        """Say which tokens come in next, so that `reserve` gives no page to what no query will see."""
        if self.recording:
            self._unneeded = 0
            return
        if self._announced[0] != self.origin + start:
            self._announced = (self.origin + start, self.kept_from)
        self._unneeded = self.first_seen(start if self.shares_keys else start + new)
        if self._unneeded >= self.packed_end + self.page_size:
            self.kept_from = max(self.kept_from, self.origin + self._unneeded)

    def take_back(self, length: int) -> None:
        super().take_back(length)
        if self._announced[0] == self.origin + length:
            self.kept_from = self._announced[1]

    def _needs_page(self, end: int, row_start: int) -> bool:
        return end > self._unneeded and super()._needs_page(end, row_start)

    def can_read(self, step: Step) -> bool:
        """Whether all that the queries of a step see is still there."""
        return self.kept_from == 0 or step.origin + self.first_seen(step.start) >= self.kept_from

    def mask_from_origin(self, mask: Tensor | None, hidden: int, shown: int, layer: SlidingLayer) -> Tensor:
        """A mask over the `shown` positions (None keeps all) with zeros for the `hidden` ones before them.

        The layers of a forward pass have the same mask: what the first of them gets is kept up to the last of them.
        """
        version = None if mask is None or mask.is_inference() else mask._version
        asked = (hidden, shown, layer.device, version)
        if self._mask is not None and self._mask[0] is mask and self._mask[1] == asked:
            made = self._mask[2]
        else:
            whole = torch.ones(1, 1, 1, shown, dtype=torch.uint8, device=layer.device) if mask is None else mask
            made = pad(whole, (hidden, 0))
        is_kept = layer is not self._layers[-1]() and (mask is None or version is not None)  # else nobody knows of a change
        self._mask = (mask, asked, made) if is_kept else None
        return made

    # -- forgetting --------------------------------------------------------------------------------------------------
    @while_alone
    def advance(self, length: int, new: int) -> None:
        """Forget what no query from position `length` on sees, if all layers have come so far.

        Args:
            new: tokens that come next.
        """
        first = self.first_seen(length)
        ring = self.recent_window + self.page_size
        leaves = self._released < len(self.spans) and sum(self.spans[self._released]) <= first
        if self.recording or not (leaves or first >= ring) or not all(layer.holds(length) for layer in self.layers):
            return
        layers = self.layers
        for layer in layers:
            layer.flush()
        moves = first >= ring and first > self.latest_start + self.sink_tokens
        if not (leaves or moves):
            self.kept_from = max(self.kept_from, self.origin + first)
            return
        released = max(self._released, sum(start + count <= first for start, count in self.spans))
        shift = first // ring * ring if moves else 0
        dropped = sum(start + count <= shift for start, count in self.spans[:released])
        left = [[NO_PAGE] * (released - dropped) + row[released:] for row in self.rows or []]
        spans = [(start - shift, count) for start, count in self.spans[dropped:]]
        starts = [max(start - shift, 0) for start in self.row_starts]
        edit = self.edit(left, spans, starts, self.packed_end - shift)
        moved = [layer.at_origin(shift, dropped) for layer in layers] if moves else []
        with self.tearing():
            self.kept_from = max(self.kept_from, self.origin + first)
            self._released = released - dropped
            if moves:
                self.origin += shift
                self._padding_noted -= shift
                self.sink_tokens = 0
                for layer, state in zip(layers, moved, strict=True):
                    layer.move_origin(shift, *state)
            self.take(edit)
        self.pages.compact(to_come=self.pages_to_come(new) * len(self.rows or []))

    def pages_to_come(self, new: int) -> int:
        """Pages a row that a pool keeps room for when `new` tokens come next."""
        return min(new, self.window) // self.page_size + 2

    # -- edits -------------------------------------------------------------------------------------------------------
    def require_croppable(self, tokens_to_remove: int) -> None:
        """Refuse to crop to what is no more there, as transformers' sliding layers do.

        Raises:
            RuntimeError: the window is full and nothing was recorded, or not enough.
        """
        length = max(layer.get_seq_length() for layer in self.layers)
        if length < self.window:
            return
        if not self.recording:
            raise RuntimeError(
                f"crop({-tokens_to_remove}) after {length} tokens: layers with a sliding window of {self.window} have"
                " forgotten what a shorter history would see. Call cache.activate_past_recording() before the tokens"
                " that may be cropped."
            )
        kept = max(0, length - self.window + 1 - self.kept_from)
        if self.kept_from > 0 and tokens_to_remove > kept:
            raise RuntimeError(
                f"crop({-tokens_to_remove}) after {length} tokens: layers with a sliding window of {self.window} can take"
                f" back no more than {kept}, those that came after cache.activate_past_recording() or the last crop."
            )

    def make_crop(self, crop: Crop) -> None:
        super().make_crop(crop)
        self._released = min(self._released, len(self.spans))

    def finish_crop(self) -> None:
        """Forget what was recorded and is not needed any more; without memory for that, the next tokens do."""
        recorded, self.recording = self.recording, False
        try:
            self.advance(self.layers[0].get_seq_length() - self.origin, 1)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            self.recording = recorded

    # -- copies ------------------------------------------------------------------------------------------------------
    def fork_beside(self, full: BlockTable) -> SlidingTable:
        """A table of the same pages, beside the fork `full`, for forks of this one's layers."""
        twin = self.fork()
        twin.full, twin._layers = full, []
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> SlidingTable:
        twin = super().__deepcopy__(memo)
        twin.full, twin._layers = copy.deepcopy(self.full, memo), []
        return twin

    def __getstate__(self) -> dict[str, Any]:  # layers join again when they are there, and so they do in a deep copy
        return {**super().__getstate__(), "_layers": []}


class SlidingLayer(TurboQuantLayer):
    """A layer with a sliding window, packed. Its lengths and positions count from the table's origin."""

    is_sliding = True
    table: SlidingTable

    def __init__(self, config: TurboQuantConfig, table: SlidingTable, preset: str, rotary: Rotary | None = None) -> None:
        super().__init__(config, table, preset, rotary)
        table.join(self)
        self.sliding_window = table.window

    # -- transformers' contract --------------------------------------------------------------------------------------
    def activate_past_recording(self) -> None:
        """Forget nothing from now on until `crop`, which can take back what comes in between."""
        self.table.recording = True

    @property
    def record_past(self) -> bool:
        return self.table.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.table.recording = value

    def get_max_length(self) -> int:
        return self.table.window

    def get_seq_length(self) -> int:
        return self.table.origin + super().get_seq_length() if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.get_seq_length()
        return min(length, self.table.window - 1) + query_length, max(self.table.first_seen(length), 0)

    def visible_length(self, step: Step) -> int:
        return self._known_length(step) - self.hidden(step)

    def hidden(self, step: Step) -> int:
        """Positions from the table's origin on that the step's handles do not show."""
        return max(self.table.first_seen(step.origin + step.start), 0) - step.origin

    def holds(self, length: int) -> bool:
        """Whether it has so many tokens from the table's origin on, those included that are not committed yet."""
        return self.is_initialized and super().get_seq_length() == length

    # -- attention and storing ---------------------------------------------------------------------------------------
    def _make_way(self, new: int) -> None:
        self.table.advance(self.length, new)

    def _mask_to_read(self, step: Step, mask: Tensor | None) -> Tensor | None:
        """With zeros for what the step's handles do not show."""
        self._require_readable(step)
        hidden = self.hidden(step)
        return self.table.mask_from_origin(mask, hidden, self.visible_length(step), self) if hidden > 0 else mask

    def _gather(self, step: Step) -> tuple[Tensor, Tensor]:
        self._require_readable(step)
        hidden = self.hidden(step)
        key, value = super()._gather(step)
        return key[:, :, hidden:], value[:, :, hidden:]

    def unpacked(self) -> tuple[Tensor | None, Tensor | None]:
        """The keys and values that a next query sees, as transformers' own layer keeps them."""
        key, value = super().unpacked()
        if key is None or value is None:
            return None, None
        first = max(self.table.first_seen(self.length), 0)
        return key[:, :, first:], value[:, :, first:]

    def _require_readable(self, step: Step) -> None:
        self._require_newest(step)
        if step.committed and not self.table.can_read(step):
            raise RuntimeError(
                "these keys and values were read once, and what their queries see has left the sliding window since: read"
                " what cache.update() returned in one attention call."
            )

    def _announce(self, step: Step) -> None:
        self.table.announce(step.start, step.new)

    def _kept(self, step: Step, mask: Tensor) -> Tensor:
        keep, hidden = super()._kept(step, mask), self.hidden(step)
        return pad(keep, (hidden, 0)) if hidden > 0 else keep

    def _learns_balance(self) -> bool:
        return self.table.origin == 0 and super()._learns_balance()  # later every row has had its first page

    def fork(self, table: SlidingTable) -> SlidingLayer:  # type: ignore[override]
        twin: SlidingLayer = super().fork(table)
        table.join(twin)
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy, with a copied table
        self.__dict__.update(state)
        self.table.join(self)

    # -- edits that the table makes on all layers together -----------------------------------------------------------
    @torch.inference_mode(False)
    def at_origin(self, shift: int, dropped: int) -> tuple[Tensor, Tensor, Tensor]:
        """Counters and sinks for an origin `shift` positions further on, with so many entries less."""
        less = int32([shift, shift, dropped]).to(self.device)
        batch, heads = self.sink_key.shape[:2]
        sink_key = self.sink_key.new_empty(batch, heads, 0, self.key_dim)
        return self.counters - less, sink_key, self.sink_value.new_empty(batch, heads, 0, self.value_dim)

    def move_origin(self, shift: int, counters: Tensor, sink_key: Tensor, sink_value: Tensor) -> None:
        """Count from `shift` positions further on, in the state of `at_origin`; the sinks have left the window."""
        self.length -= shift
        self.packed_end -= shift
        self.counters, self.sink_key, self.sink_value = counters, sink_key, sink_value

    # -- reports -----------------------------------------------------------------------------------------------------
    def report(self, layer: int) -> LayerReport:
        """Tokens that are held; `bytes_bf16` is what transformers' own layer would hold in bfloat16."""
        whole = super().report(layer)
        if not self.is_initialized:
            return whole
        rows = self.table.batch_size or 0
        exact = rows * (self.length - self.packed_end + self.sink_key.shape[2])
        per_token = self.kv_heads * (self.key_dim + self.value_dim) * 2
        tokens = rows * min(self.get_seq_length(), self.table.window - 1)
        return LayerReport(layer, whole.kind, whole.packed_tokens, exact, whole.nbytes, tokens * per_token)
