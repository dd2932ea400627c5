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
from transformers.cache_utils import DynamicLayer

from ..pages.table import BlockTable
from .checks import UNEVEN
from .full import TurboQuantLayer
from .hybrid import HybridLayer
from .stock import all_or_nothing

if TYPE_CHECKING:
    from ..cache import TurboQuantCache

ATTENTION = ("attention",)  # the state of a layer that keys and values are for; a linear one has several, by name and number
RESET = "Call cache.reset(), or go on from a fork or a file of an earlier state."


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

    Packed layers say themselves how many tokens they hold, and give back those of an update that fails. Of transformers' own
    layers, whose states may tell nothing, a state counts as updated when a model has asked for the update, or for the state,
    which some models write in place.

    Attributes:
        seen: the updates, each a layer and which of its states.
        start: tokens that the cache held before.
        stock: the layers of transformers' own (or such parts of hybrid ones) among them.
        expected: the same of the layers behind the last packed one, in earlier forward passes; by whether these had a single
            token, for which models may have other code.
        has_failed: whether an update of this pass has failed.
        has_gaps: whether layers were updated in compiled code, which is not seen here: one that is not, in the same forward
            pass, does not begin another.
        unfinished: the edit of the whole cache that was interrupted while it was put into effect.
    """

    def __init__(self) -> None:
        self.seen: set[object] = set()
        self.start = 0
        self.stock: set[int] = set()
        self.expected: dict[bool, set[int]] = {}
        self.unfinished: str | None = None
        self.has_failed = self.has_gaps = False

    def enter(self, cache: TurboQuantCache, layer_idx: int, state: tuple[object, ...]) -> None:
        """Called before a layer is updated.

        Raises:
            RuntimeError: another forward pass has not reached all layers.
        """
        update = _update(layer_idx, state)
        if not self.seen or update in self.seen:
            self._begin(cache)
        is_stock = state is not ATTENTION or layer_idx not in cache.packed_indices
        is_late = is_stock and layer_idx > cache.last_packed and bool(self.expected)
        if is_late and layer_idx not in set().union(*self.expected.values()):
            raise RuntimeError(f"an earlier forward pass ended before it came to layer {layer_idx}. {RESET}")
        self.seen.add(update)  # first: an interrupt between the two leaves a pass in which nothing has changed
        if is_stock:
            self.stock.add(layer_idx)

    def _begin(self, cache: TurboQuantCache) -> None:
        """Another forward pass comes to its first layer."""
        is_static = cache.table.is_static
        if (self.seen or self.has_failed) and not self.has_gaps:
            self.require_over(cache)
        self.has_failed = self.has_gaps = False
        if self.seen:
            if not is_static and cache.last_packed + 1 < len(cache.layers):
                self.expected[self._is_one_token(cache)] = {i for i in self.stock if i > cache.last_packed}
            self.seen, self.stock = set(), set()
        if not is_static:
            packed = cache.packed_layers
            self.start = int(packed[0].get_seq_length()) if packed else longest(cache)

    def leave(self, layer_idx: int) -> None:
        """A layer's update failed: a packed one has refused its tokens, or was interrupted once it had them, which the next
        pass looks at. One of transformers' own may have changed all the same."""
        self.has_failed = True
        if layer_idx not in self.stock:
            self.seen.discard(_update(layer_idx, ATTENTION))

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
        self.seen, self.stock, self.unfinished, self.has_failed = set(), set(), None, False

    # -- did it reach all layers? --------------------------------------------------------------------------------------
    def require_over(self, cache: TurboQuantCache) -> None:
        """Make sure that all layers hold the same tokens, and give back pages that were reserved for others.

        Raises:
            RuntimeError: saying which layers do not, and what to do.
        """
        if self.is_over(cache):
            self.finish(cache)
            return
        self._require_mendable(cache)
        ahead = f"{_listed(self._ahead(cache))} of {len(cache.layers)}"
        raise RuntimeError(
            f"the last forward pass ended early, by an error or an interrupt: only {ahead} hold its tokens. Call"
            f" cache.crop({self.start - longest(cache)}) to take them back, which leaves {self.start} tokens in all layers,"
            " or cache.reset()."
        )

    @staticmethod
    def finish(cache: TurboQuantCache) -> None:
        """What is left to do once `is_over` has said so: give back pages reserved for tokens that no layer has kept."""
        if not cache.table.is_static:
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
        layers, is_static = cache.packed_layers, cache.table.is_static
        lengths = set()
        for layer in layers:
            if layer.is_torn:
                return False
            if not is_static:  # otherwise they are on the device: `TurboQuantLayer` compares them there
                lengths.add(layer.get_seq_length())
        if is_static:
            return True
        if len(lengths) > 1:
            return False
        if lengths == {self.start}:
            return not self.stock
        return not (self.seen and self.expected) or self.expected.get(self._is_one_token(cache), set()) <= self.stock

    def _is_one_token(self, cache: TurboQuantCache) -> bool:
        return longest(cache) - self.start == 1

    def _ahead(self, cache: TurboQuantCache) -> list[int]:
        """The layers that hold tokens of a forward pass that is not over."""

        def is_ahead(i: int, layer: Any) -> bool:
            if i in self.stock or not isinstance(layer, TurboQuantLayer):
                return i in self.stock
            return layer.is_torn or bool(layer.get_seq_length() > self.start)

        return [i for i, layer in enumerate(cache.layers) if is_ahead(i, layer)]

    # -- mending -------------------------------------------------------------------------------------------------------
    def _require_mendable(self, cache: TurboQuantCache) -> None:
        """Raise `RuntimeError` where `mend` cannot bring the layers together again."""
        if self.unfinished is not None:
            raise RuntimeError(f"{self.unfinished} of this cache was interrupted, and not all layers have changed. {RESET}")
        if any(table.is_torn for table in cache.tables):
            raise RuntimeError(f"a change of this cache's block table was interrupted. {RESET}")
        if cache.table.is_static:
            raise RuntimeError(UNEVEN)
        lost = "the last forward pass ended early, by an error or an interrupt, and not all layers hold its tokens"
        for i in self._ahead(cache):
            layer = cache.layers[i]
            if i in self.stock and (isinstance(layer, HybridLayer) or type(layer) is not DynamicLayer):
                raise RuntimeError(f"{lost}. Layer {i}, a {type(layer).__name__}, cannot give them back. {RESET}")
            if i not in self.stock and not layer.can_take_back(self.start):
                raise RuntimeError(f"{lost}. Layer {i} cannot give them back any more. {RESET}")

    def mend(self, cache: TurboQuantCache, tokens_to_remove: int) -> int:
        """Take back the tokens of a forward pass that is not over.

        Args:
            cache: whose forward pass this is; `is_over` says that it is not.
            tokens_to_remove: what `crop` is asked to remove from the layers that hold most.

        Returns:
            The tokens that remain to be removed.

        Raises:
            RuntimeError: they cannot be taken back.
            ValueError: fewer are to be removed.
        """
        self._require_mendable(cache)
        extra = longest(cache) - self.start
        if tokens_to_remove < extra:
            raise ValueError(
                f"crop({-tokens_to_remove}): the last forward pass ended early, and only some layers hold its {extra}"
                " tokens: remove at least these."
            )
        for i in self._ahead(cache):
            layer = cache.layers[i]
            if isinstance(layer, TurboQuantLayer):
                layer.take_back()
            else:
                layer.keys, layer.values = _first(layer.keys, self.start), _first(layer.values, self.start)
        self.forget()
        return tokens_to_remove - extra


def _update(layer_idx: int, state: tuple[object, ...]) -> object:
    return layer_idx if state is ATTENTION else (layer_idx, *state)


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
