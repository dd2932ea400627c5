"""Edits of a whole cache: block tables once, then each layer. All that may fail is done before anything changes.

That takes memory, for what a layer is going to be beside what it is. To choose no more rows than there are, one layer comes
after the other, and all of them together take what the largest does and one tensor:

- A packed layer is written over, at worst, by way of a tensor that is there before the first one changes (`select_rows`).
- Of transformers' own layers, the largest comes first, which is put back if there is no memory for it. Each of the others
  finds what the one before has freed and keeps nothing: should one of them fail all the same, `reset` is what is left.

To make more rows takes what was there besides, at most half as much again as what is asked for: all of it goes at the end.
Layer by layer, a failure could only be undone where every row has a copy, and for transformers' own layers not even then.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from typing_extensions import Self

from .compat import reset_layer
from .layers.forward_pass import ForwardPass
from .layers.full import TurboQuantLayer
from .layers.hybrid import HybridLayer
from .layers.sliding import SlidingTable
from .layers.stock import contents, forget_states, largest_first, move_stock, require_window
from .layout import PageLayout
from .pages.device import int32
from .pages.table import BlockTable


class Settled(NamedTuple):
    """Packed layers that share a block table and hold something, with nothing left to commit.

    Attributes:
        length, packed_end, used: what their `counters` are.
    """

    layers: list[TurboQuantLayer]
    length: int
    packed_end: int
    used: int


class CacheEdits(DynamicCache):
    """The part of `TurboQuantCache` that edits what is there, and what it is made of.

    Attributes:
        layers: packed ones, and transformers' own.
        table: the block table of the layers with full attention.
        sliding_tables: those of layers with a window, by its size.
        forward_pass: which layers have the newest tokens.
    """

    layers: list[Any]
    table: BlockTable
    sliding_tables: dict[int, SlidingTable]
    forward_pass: ForwardPass

    @property
    def packed_layers(self) -> list[TurboQuantLayer]:
        """The layers whose tokens live in pages."""
        return [layer for layer in self.layers if isinstance(layer, TurboQuantLayer)]

    @property
    def _stock_layers(self) -> list[Any]:
        """The layers, and the parts of hybrid ones, that keep transformers' own classes."""
        layers = [layer.state if isinstance(layer, HybridLayer) else layer for layer in self.layers]
        return [layer for layer in layers if not isinstance(layer, TurboQuantLayer)]

    @property
    def tables(self) -> list[BlockTable]:
        """The block tables: of the layers with full attention, and one for each window."""
        return [self.table, *self.sliding_tables.values()]

    def _settled_layers(self) -> list[TurboQuantLayer]:
        """The packed layers that hold something, with nothing left to commit.

        Raises:
            RuntimeError: layers hold different tokens (`forward_pass.py`).
        """
        self.forward_pass.require_over(self)
        return [layer for settled in self._settle().values() for layer in settled.layers]

    def _settle(self) -> dict[BlockTable, Settled]:
        """The same by table, of a cache whose forward pass is over. Counters on a device are read once, all together."""
        by_table: dict[BlockTable, list[TurboQuantLayer]] = {}
        for layer in self.packed_layers:
            if layer.is_initialized:
                layer.flush()
                by_table.setdefault(layer.table, []).append(layer)
        read = self.forward_pass.require_even(self)
        settled = {}
        for table, layers in by_table.items():
            first = layers[0]
            counters = read.get(first) or (first.length, first.packed_end, table.entries_to(first.packed_end))
            settled[table] = Settled(layers, *counters)
        return settled

    def reset(self) -> None:
        """Forget all tokens. The batch size may change afterwards, except in the static mode."""
        for table in self.tables:
            if table.is_static:
                table.restart()
            else:
                table.clear()
        for layer in self.packed_layers:
            layer.forget()
        for layer in self._stock_layers:
            reset_layer(layer)
            if self.packed_layers and not self.table.is_static:
                forget_states(layer)
        self.forward_pass = ForwardPass()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest tokens. Packed pages are dropped or shortened, never rewritten.

        Args:
            tokens_to_remove: minus the number of tokens to remove. 0 removes nothing, but ends what
                `activate_past_recording` began: sliding layers forget what is no more in their window. Where a forward pass
                has ended early, its tokens, which only some layers hold, have to be removed on their own first.

        Raises:
            ValueError: a positive number, or more tokens than the cache holds, which `DynamicCache` would empty, or others
                than those that only some of the layers hold. Nothing is changed then.
            RuntimeError: a layer with a sliding window or linear attention has forgotten what would be needed
                (`activate_past_recording` before the tokens makes it keep more), or a static cache has no room for another
                crop into its pages. Nothing is changed then.
        """
        tokens_to_remove = operator.index(tokens_to_remove)  # assisted decoding passes a tensor on some releases
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative integer, e.g. crop(-5)."
            )
        if not self.forward_pass.is_over(self):
            self.forward_pass.mend(self, -tokens_to_remove)
            return
        self.forward_pass.finish(self)
        settled = self._settle()
        if settled:
            length = max(table.origin + held.length for table, held in settled.items())
            if -tokens_to_remove > length:
                raise ValueError(
                    f"crop({tokens_to_remove}): the cache holds {length} tokens. Remove at most these, or call reset()."
                )
        for sliding in self.sliding_tables.values():
            sliding.require_croppable(-tokens_to_remove)
        tables = settled.items() if tokens_to_remove < 0 else ()
        with self._alone():
            crops = [_prepare_crop(table, held, -tokens_to_remove) for table, held in tables]
            with self.forward_pass.edit("crop()", self._stock_layers) as change:
                for layer in self._stock_layers:
                    layer.crop(tokens_to_remove)
                    require_window(layer)
                change.begin()
                for crop in crops:
                    crop()
            for table in settled:
                table.pages.compact()
        for sliding in self.sliding_tables.values():
            sliding.finish_crop()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of row `beam_idx[i]`: pages are shared, exact tails copied."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times; the copies share the packed pages."""
        if repeats < 1:
            raise ValueError(f"repeats={repeats} is not possible: expected at least 1.")
        self._select_rows(torch.arange(self._rows or 0).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` (int64 indices or a bool mask)."""
        self._select_rows(indices)

    @property
    def _rows(self) -> int | None:
        """Rows of the batch; None before the first token."""
        known = (table.batch_size for table in self.tables if table.batch_size is not None)
        if (rows := next(known, None)) is not None:
            return rows
        return next((len(held) for layer in self._stock_layers for held in contents(layer)[1].values()), None)

    def _select_rows(self, indices: Tensor) -> None:
        """Make row i a copy of row `indices[i]`."""
        self.forward_pass.require_over(self)
        if (rows := self._rows) is None:
            return
        chosen = self._chosen(indices, rows)
        settled = self._settle()
        layers = [layer for held in settled.values() for layer in held.layers]
        stock = largest_first(self._stock_layers)
        index = _on_devices(torch.tensor(chosen, device="cpu"), [*layers, *stock])
        grows = len(chosen) > rows
        states = [layer.selected_rows(index[layer.device]) if grows else None for layer in layers]
        spare = {} if grows else _spare_rows(layers, len(chosen))
        kept = len(stock) if grows else 1
        with self._alone():
            edits = {table: table.selected(chosen) for table in settled if not table.is_static}
            with self.forward_pass.edit("an edit of rows", stock[:kept]) as change:
                for layer in stock[:kept]:
                    _reorder_stock(layer, index)
                change.begin()
                for layer in stock[kept:]:
                    _reorder_stock(layer, index)
                for table, held in settled.items():
                    if table.is_static:
                        table.permute_rows(chosen, held.used)
                    else:
                        table.take(edits[table])
                for layer, state in zip(layers, states, strict=True):
                    if state is None:
                        layer.select_rows(index[layer.device], spare[layer.device])
                    else:
                        layer.take(state)
            for table in edits:
                table.pages.compact()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep forks in other threads from all pages: one that renumbers them would make a prepared edit wrong."""
        with ExitStack() as locks:
            for table in self.tables:
                locks.enter_context(table.alone())
            yield

    def _chosen(self, indices: Tensor, rows: int) -> list[int]:
        """The rows that `indices` name of so many.

        Raises:
            ValueError: none, or one that there is not.
            NotImplementedError: another number of rows, of a static cache.
        """
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool and len(indices) == rows:
            indices = indices.nonzero().flatten()
        chosen = [i + rows if type(i) is int and i < 0 else i for i in indices.tolist()]
        if not chosen or not all(type(i) is int and 0 <= i < rows for i in chosen):
            raise ValueError(f"row indices {indices.tolist()} do not fit a cache of {rows} rows: nothing was changed.")
        if self.table.is_static and len(chosen) != rows:
            raise NotImplementedError(
                f"a static TurboQuantCache of {rows} rows cannot become one of {len(chosen)}: use a cache without"
                " max_cache_len to repeat or select rows."
            )
        return chosen

    def fork(self, n: int) -> list[Self]:
        """`n` caches that go on from here, each on its own: one prefix, many continuations.

        They share this cache's packed pages, which never change, and have copies of the rest (exact tokens, and
        transformers' own layers). Any of them, this one included, may be extended, cropped, reordered, reset, copied or
        dropped without the others noticing, in a thread of its own too; a page is freed with its last user. On a GPU all of
        them belong on one CUDA stream, as threads have it by default: a page that one frees may be another's at once, before
        what the first has queued on a stream of its own has read it. `nbytes` of each counts the shared pages. Continuations
        that run side by side, as one batch, are `batch_repeat_interleave(n)`, which shares pages in the same way:
        independent caches are what continuations at different times need (a system prompt, the turns of a tree).

        Raises:
            ValueError: `n` is no positive integer, the cache is empty, or it is static: its tensors are preallocated for
                one continuation, so that nothing could be shared.
        """
        if type(n) is not int or n < 1:
            raise ValueError(f"fork({n!r}) is not possible: expected the number of caches, at least 1.")
        if self.table.is_static:
            raise ValueError(
                "a static cache has pages for one continuation only: use copy.deepcopy(cache), or make the cache without"
                " max_cache_len."
            )
        if not self._settled_layers() and not any(contents(layer)[1] for layer in self._stock_layers):
            raise ValueError("this cache is empty, there is nothing to fork: fill it first, or make new ones.")
        return [self._fork() for _ in range(n)]

    def _fork(self) -> Self:
        twin = copy.copy(self)
        twin.forward_pass = copy.deepcopy(self.forward_pass)
        twin.table = self.table.fork()
        twin.sliding_tables = {w: table.fork_beside(twin.table) for w, table in self.sliding_tables.items()}
        tables = dict(zip(self.tables, twin.tables, strict=True))
        twin.layers = [
            layer.fork(tables[layer.table]) if isinstance(layer, TurboQuantLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return twin

    def to(self, device: torch.device | str | int, *, non_blocking: bool | None = None) -> Self:
        """Move everything to one device. What forks share is copied: they stay where they are.

        Args:
            device: where to.
            non_blocking: leave it out. A call with it does nothing: it comes from accelerate, whose hooks send each module
                of a model that is spread over devices all arguments that have a `to`, but a layer's cache stays where
                that layer's inputs are.

        Returns:
            This cache.

        Raises:
            TypeError: no device, such as a dtype.
            ValueError: a static cache whose layout has no kernels for that device.
        """
        if non_blocking is not None:
            return self
        if not isinstance(device, (torch.device, str, int)):
            raise TypeError(
                f"cache.to({device!r}): expected a device. Pages have no dtype, and exact tokens have that of the model's"
                " states: a model in another dtype needs a new cache, or cache.reset()."
            )
        target = torch.empty(0, device=device).device  # with an index, as tensors have it
        layers = self._settled_layers()
        for layer in layers:
            layer.require_kernels(PageLayout.from_name(layer.layout_name), target)
        moves = layers if any(layer.device != target for layer in layers) else []
        states = [layer.on(target) for layer in moves]
        with self._alone(), self.forward_pass.edit("to()", self._stock_layers) as change:
            tables = [table.moved(target) for table in self.tables] if moves else []
            for layer in self._stock_layers:
                move_stock(layer, target)
            change.begin()
            for use in tables:
                use()
            for layer, state in zip(moves, states, strict=True):
                layer.move(target, state)
        return self


def _on_devices(index: Tensor, layers: list[Any]) -> dict[torch.device | None, Tensor]:
    """`index` on every device that these layers are on, copied there once; on the CPU for one that is on none yet."""
    devices = {getattr(layer, "device", None) for layer in layers} | {None}
    return {device: index if device is None else index.to(device) for device in devices}


def _reorder_stock(layer: Any, index: dict[torch.device | None, Tensor]) -> None:
    """Choose rows of transformers' layer: its one method that takes any rows, and recurrent states along with keys."""
    layer.reorder_cache(index[getattr(layer, "device", None)])


@torch.inference_mode(False)
def _spare_rows(layers: list[TurboQuantLayer], rows: int) -> dict[torch.device, Tensor]:
    """What `select_rows` of these layers needs, to become so many rows: on each device enough for one tensor."""
    largest: dict[torch.device, int] = {}
    for layer in layers:
        largest[layer.device] = max(largest.get(layer.device, 0), layer.largest_row)
    return {device: torch.empty(rows * n, dtype=torch.uint8, device=device) for device, n in largest.items()}


def _prepare_crop(table: BlockTable, held: Settled, tokens: int) -> Callable[[], None]:
    """What removes the newest tokens of the layers of one table, without a tensor of its own."""
    layers, before, packed_end, had_used = held
    used, length = had_used, before - tokens
    cut = None
    if length < packed_end:
        cut = table.prepare_crop(length, used)
        packed_end, used = cut.end, len(cut.kept)
    no_page_left = used == 0 and (had_used > 0 or length == 0)
    counters = int32([length, packed_end, used])

    def crop() -> None:
        if cut is not None:
            table.make_crop(cut)
        table.trim(length)
        for layer in layers:
            layer.cut(length, packed_end, counters, no_page_left)

    return crop
