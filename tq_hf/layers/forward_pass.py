"""Whether all layers of a cache hold the same tokens, and how they come to do so again.

transformers' models update a cache layer by layer. Where a forward pass ends early (out of memory, an interrupt), some
layers hold its tokens and others do not, and the next pass would go on from there without a sign. A cache is not told that a
pass has ended. It sees the next one begin, when a layer gets tokens again that had some in this one: there it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from ..pages.table import BlockTable
from .checks import UNEVEN
from .full import TurboQuantLayer
from .hybrid import HybridLayer
from .stock import all_or_nothing

if TYPE_CHECKING:
    from ..cache import TurboQuantCache

ATTENTION = ("attention",)  # the state of a layer that keys and values are for; a linear one has several, by name and number
RESET = "Call cache.reset(), or go on from a fork or a file of an earlier state."
# Transformers' own that every forward pass updates; the first two tell on the host how many tokens they hold.
COUNTING = (DynamicLayer, DynamicSlidingWindowLayer)
STATIC = (StaticLayer, StaticSlidingWindowLayer)
IF_NOTHING_FAILED = (
    "If nothing has failed: all layers take a forward pass's tokens before any takes more, and a model that has fewer"
    " layers than its config says needs a cache of a config with as many (num_hidden_layers)."
)


class Change:
    """How far an edit of a cache is."""

    has_begun = False
    kept: list[Any]  # what stock layers were

    def begin(self) -> None:
        """All that can fail has been done. Packed layers change from here on: if that ends halfway, only `reset` helps."""
        self.has_begun = True
        self.kept.clear()


class ForwardPass:
    """The updates that a cache has got in the newest forward pass, and edits that were interrupted.

    Packed layers of a growing cache say themselves how many tokens they hold, and give back those of an update that fails;
    of a static one, it is known which were updated. Of transformers' own layers, whose states may tell nothing, a state
    counts as updated when a model has asked for the update, or for the state, which some models write in place.

    Attributes:
        seen: the updates, each a layer and which of its states.
        stock: the layers of transformers' own (or such parts of hybrid ones) among them.
        looked_at: layers whose states a model could have written in place before anything else was updated, with these
            states and copies of what they were: where they are the same when the next pass begins, somebody has only looked.
        start: tokens that the cache held before (dynamic mode).
        expected: `stock` of the first forward pass, and so of each; None until one is over.
        has_failed: whether an update of this pass has failed.
        has_gaps: whether layers were updated in compiled code, which is not seen here: one that is not, in the same forward
            pass, does not begin another.
        unfinished: the edit of the whole cache that was interrupted while it was put into effect.
    """

    def __init__(self) -> None:
        self.seen: set[object] = set()
        self.stock: set[int] = set()
        self.looked_at: list[tuple[int, Tensor, Tensor]] = []
        self.start = 0
        self.expected: set[int] | None = None
        self.unfinished: str | None = None
        self.has_failed = self.has_gaps = False

    def enter(self, cache: TurboQuantCache, layer_idx: int, state: tuple[object, ...]) -> None:
        """Called before a layer is updated.

        Raises:
            RuntimeError: another forward pass has not reached all layers.
        """
        is_attention = state is ATTENTION
        update = layer_idx if is_attention else (layer_idx, *state)
        goes_back = self.looked_at and layer_idx < self.looked_at[-1][0]  # after somebody has looked at a later layer
        if not self.seen or update in self.seen or goes_back:
            self._begin(cache, layer_idx)
        is_stock = not is_attention or layer_idx not in cache.packed_indices
        if is_stock and layer_idx > cache.last_packed:
            self._require_expected(layer_idx)
        self.seen.add(update)  # first: an interrupt between the two leaves a pass in which nothing has changed
        if is_stock:
            self.stock.add(layer_idx)

    def _require_expected(self, layer_idx: int) -> None:
        """Refuse a layer behind the last packed one that no forward pass has come to, since the first ended before it."""
        # They are one set where somebody has read the cache before the first pass came to its last layers.
        known = None if self.expected is self.stock else self.expected
        if known is not None and layer_idx not in known:
            raise RuntimeError(f"an earlier forward pass ended before it came to layer {layer_idx}. {RESET}")

    def look(self, cache: TurboQuantCache, layer_idx: int, state: tuple[object, ...], held: Tensor) -> None:
        """Called before a model gets a state that it may write in place, and update by name after that.

        Raises:
            RuntimeError: as of `enter`.
        """
        if (layer_idx, *state) in self.seen:  # by a pass that ended early: nobody updates first and then looks
            self._begin(cache, layer_idx)
        self.enter(cache, layer_idx, (*state, "in place"))
        if len(self.seen) == len(self.looked_at) + 1:
            self.looked_at.append((layer_idx, held, held.clone()))

    def _begin(self, cache: TurboQuantCache, layer_idx: int) -> None:
        """Another forward pass comes to its first layer, but for layers in compiled code."""
        if (self.seen or self.has_failed) and not self.has_gaps:
            self.require_over(cache)
        self._forget_updates()
        self.has_failed = False
        self.has_gaps = self.has_gaps and layer_idx > 0  # those before it may be compiled, and have had their tokens
        if cache.table.is_static:
            for layer in cache.packed_layers:
                layer.has_dropped = False
        else:
            self.start = min((int(layer.get_seq_length()) for layer in _counting(cache)), default=0)

    def _forget_updates(self) -> None:
        self.seen, self.stock, self.looked_at = set(), set(), []

    def leave(self, layer_idx: int) -> None:
        """A layer's update failed: a packed one has refused its tokens, or was interrupted once it had them, which the next
        pass looks at. One of transformers' own may have changed all the same."""
        self.has_failed = True
        if layer_idx not in self.stock:
            self.seen.discard(layer_idx)

    @contextmanager
    def edit(self, name: str, stock: Sequence[Any]) -> Iterator[Change]:
        """Around an edit of the whole cache. What fails before `Change.begin` has changed nothing.

        Args:
            stock: transformers' own layers, which are put back then; they may have changed before.
        """
        change = Change()
        self.unfinished = name
        try:
            with all_or_nothing(stock) as change.kept:
                yield change
        except BaseException:
            if not change.has_begun:
                self.unfinished = None
            raise
        self.forget()

    def forget(self) -> None:
        """There is no forward pass any more that might not be over."""
        self._forget_updates()
        self.unfinished, self.has_failed = None, False

    # -- did it reach all layers? --------------------------------------------------------------------------------------
    def require_over(self, cache: TurboQuantCache) -> None:
        """Make sure that all layers hold the same tokens, and give back pages that were reserved for others.

        Raises:
            RuntimeError: saying which layers do not, and what to do.
        """
        if not self.is_over(cache):
            self._require_mendable(cache)
            raise RuntimeError(
                f"{self._seen_so_far(cache)}. Call cache.crop({self.start - longest(cache)}) to take them back, which leaves"
                f" {self.start} tokens in all layers, or cache.reset(). {IF_NOTHING_FAILED}"
            )
        self.finish(cache)

    def finish(self, cache: TurboQuantCache) -> None:
        """What is left to do once `is_over` has said so."""
        if self._has_come(cache):
            if self.seen and not self.has_gaps and self.expected is None:
                self.expected = self.stock
        elif not cache.table.is_static:
            _drop_reserved(cache.packed_layers)

    def require_even(self, cache: TurboQuantCache) -> dict[TurboQuantLayer, list[int]]:
        """As `require_over`, of the lengths that a static cache has on its device; for edits, which read them anyway.

        Returns:
            The counters of a static cache's layers that hold something.

        Raises:
            RuntimeError: packed layers hold different tokens.
        """
        if not cache.table.is_static:
            return {}
        counters = _counters_of([layer for layer in cache.packed_layers if layer.is_initialized])
        lengths = set()
        for layer in cache.packed_layers:
            held = counters[layer][0] if layer in counters else 0
            lengths.add(held + (0 if layer.pending is None else layer.pending.new))
        if len(lengths) > 1:
            raise RuntimeError(UNEVEN)
        return counters

    def is_over(self, cache: TurboQuantCache) -> bool:
        """Whether all layers have got the tokens of the newest forward pass, or none has."""
        if self.unfinished is not None or any(table.is_torn for table in cache.tables):
            return False
        if any(cache.layers[i].is_torn for i in cache.packed_indices):
            return False
        if not cache.table.is_static and len({layer.get_seq_length() for layer in _counting(cache)}) > 1:
            return False
        if len(self.looked_at) == len(self.seen) and all(torch.equal(held, was) for _, held, was in self.looked_at):
            self._forget_updates()
        if not self.seen or self.has_gaps:
            return True
        if any(isinstance(cache.layers[i], (DynamicLayer, StaticLayer)) and i not in self.seen for i in self.stock):
            return False  # a state, but not its layer's attention
        if not self._has_come(cache):
            return not self.stock
        if cache.table.is_static:
            stock = {i for i, layer in enumerate(cache.layers) if type(layer) in STATIC and i not in cache.idle}
            if not (stock <= self.stock and all(self._holds(cache, i) for i in cache.packed_indices)):
                return False
        return self.expected is None or self.expected <= self.stock

    def _has_come(self, cache: TurboQuantCache) -> bool:
        """Whether layers that tell have got tokens of this pass; where none does, tokens may have come."""
        if cache.table.is_static:
            return any(self._holds(cache, i) for i in cache.packed_indices) or not cache.packed_indices
        return next((layer.get_seq_length() != self.start for layer in _counting(cache)), True)

    def _holds(self, cache: TurboQuantCache, layer_idx: int) -> bool:
        """Whether a packed layer holds tokens of this pass, or has ended halfway."""
        layer = cache.layers[layer_idx]
        if cache.table.is_static:  # whose lengths are on the device
            return layer.is_torn or (layer_idx in self.seen and not layer.has_dropped)
        return layer.is_torn or bool(layer.get_seq_length() > self.start)

    def _seen_so_far(self, cache: TurboQuantCache) -> str:
        ahead = f"{_listed(self._ahead(cache))} of {len(cache.layers)}"
        return f"the last forward pass ended early, by an error or an interrupt: only {ahead} hold its tokens"

    def _ahead(self, cache: TurboQuantCache) -> list[int]:
        """The layers that hold tokens of a forward pass that is not over."""

        return [
            i for i in range(len(cache.layers)) if i in self.stock or (i in cache.packed_indices and self._holds(cache, i))
        ]

    # -- mending -------------------------------------------------------------------------------------------------------
    def _require_mendable(self, cache: TurboQuantCache) -> None:
        """Raise `RuntimeError` where `mend` cannot bring the layers together again."""
        if self.unfinished is not None:
            raise RuntimeError(f"{self.unfinished} of this cache was interrupted, and not all layers have changed. {RESET}")
        if any(table.is_torn for table in cache.tables):
            raise RuntimeError(f"a change of this cache's block table was interrupted. {RESET}")
        lost = self._seen_so_far(cache)
        if cache.table.is_static:
            raise RuntimeError(f"{lost}. A static cache cannot take them back: call cache.reset(). {IF_NOTHING_FAILED}")
        for i in self._ahead(cache):
            layer = cache.layers[i]
            if i in self.stock and (isinstance(layer, HybridLayer) or type(layer) is not DynamicLayer):
                raise RuntimeError(f"{lost}. Layer {i}, a {type(layer).__name__}, cannot give them back. {RESET}")
            if i not in self.stock and not layer.can_take_back(self.start):
                raise RuntimeError(f"{lost}. Layer {i} cannot give them back any more. {RESET} {IF_NOTHING_FAILED}")

    def mend(self, cache: TurboQuantCache, tokens_to_remove: int) -> None:
        """Take back the tokens of a forward pass that is not over, as `is_over` says.

        Args:
            tokens_to_remove: what `crop` is asked to remove from the layers that hold most.

        Raises:
            RuntimeError: they cannot be taken back. Nothing is changed then.
            ValueError: these are not the tokens to remove. Nor then.
        """
        self._require_mendable(cache)
        extra = longest(cache) - self.start
        if tokens_to_remove != extra:
            raise ValueError(
                f"crop({-tokens_to_remove}): the last forward pass ended early, and only some layers hold its {extra}"
                f" tokens. Call cache.crop({-extra}) to remove these from there, before all layers are cropped."
            )
        for i in self._ahead(cache):
            layer = cache.layers[i]
            if isinstance(layer, TurboQuantLayer):
                layer.take_back()
            else:
                layer.keys, layer.values = _first(layer.keys, self.start), _first(layer.values, self.start)
        self.forget()


def _drop_reserved(layers: Sequence[TurboQuantLayer]) -> None:
    """Give back the entries that a forward pass reserved whose layers have all taken back its tokens."""
    packed_ends: dict[BlockTable, int] = {}
    for layer in layers:
        if layer.is_initialized and layer.packed_end > packed_ends.get(layer.table, -1):
            packed_ends[layer.table] = layer.packed_end
    for table, packed_end in packed_ends.items():
        if table.packed_end > packed_end:
            table.drop_entries(packed_end)


def _counters_of(layers: Sequence[TurboQuantLayer]) -> dict[TurboQuantLayer, list[int]]:
    """What `counters` of each layer are. Each device is waited for once, not once a layer."""
    by_device: dict[torch.device, list[TurboQuantLayer]] = {}
    for layer in layers:
        by_device.setdefault(layer.device, []).append(layer)
    read: dict[TurboQuantLayer, list[int]] = {}
    for held in by_device.values():
        read |= zip(held, torch.stack([layer.counters for layer in held]).tolist(), strict=True)
    return read


def _counting(cache: TurboQuantCache) -> Iterator[Any]:
    """The layers that tell on the host how many tokens they hold (dynamic mode)."""
    for i, layer in enumerate(cache.layers):
        if i in cache.packed_indices or (type(layer) in COUNTING and i not in cache.idle):
            yield layer


def longest(cache: TurboQuantCache) -> int:
    """Tokens in the layer that holds most of them (dynamic mode)."""
    return max(
        (int(layer.get_seq_length()) for layer in cache.layers if hasattr(layer, "get_seq_length")),
        default=0,
    )


def _first(states: Tensor | None, tokens: int) -> Any:
    return states if states is None or states.ndim != 4 else states[:, :, :tokens]


def _listed(layers: list[int]) -> str:
    """Such as "layer 0", or "layers 0, 1, 4"."""
    return f"layer{'s' * (len(layers) > 1)} {', '.join(str(i) for i in layers)}"
