"""`TurboQuantCache`: a drop-in for transformers' `DynamicCache` (or, with `max_cache_len`, `StaticCache`).

    model.generate(**inputs, past_key_values=TurboQuantCache(model.config, preset="tq4"))
"""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, StaticCache
from transformers.cache_utils import Cache
from transformers.utils import logging

from .compat import reset_layer
from .config import DEFAULT_PRESET, TurboQuantConfig
from .files import loading, saving
from .files.saving import model_facts
from .layers.full import TurboQuantLayer
from .layers.hybrid import HybridLayer
from .layers.plan import decoder_config, plan
from .layers.sliding import SlidingLayer, SlidingTable
from .layers.stock import all_or_nothing, contents, move_stock
from .layout import NON_FINITE_KEY, NON_FINITE_VALUE, SATURATED, PageLayout
from .pages.table import BlockTable
from .quantizer.rotary import rotary_of
from .reporting import summary
from .reporting.reports import CacheReport, stock_report

logger = logging.get_logger(__name__)


class TurboQuantCache(DynamicCache):
    """Keys and values at 2 to 4 bits in pages that attention reads directly.

        cache = TurboQuantCache(model.config, preset="tq4")
        model.generate(**inputs, past_key_values=cache)

    Layers with full attention are packed, and without `max_cache_len` so are those with a sliding window, where that is
    smaller. A layer of another kind (linear attention, latents, ...) keeps transformers' own class (`layers/plan.py`).
    Boundary layers of presets that ask for them keep the model's dtype in the same pages, or transformers' own class if
    they have a window. A model none of whose layers can be packed works as with transformers' own cache, which is logged.

    Args:
        config: the model's config.
        preset: a name of `tq_hf.PRESETS`, or a `TurboQuantConfig`.
        max_cache_len: capacity in tokens. None grows with the sequence; a number preallocates everything, keeps lengths
            on the device and lets `generate()` compile decoding.
        offloading: keep packed pages in host memory while other layers compute, as `DynamicCache(offloading=True)` keeps
            all keys and values: slower, and the GPU holds the pages of two layers only. Not with `max_cache_len`.
        offload_only_non_sliding: leave layers with a sliding window, which are small, on the device.
        overrides: fields of `TurboQuantConfig` to change in the preset, e.g. `recent_window=128`.

    Raises:
        ValueError: an unknown preset or field, or a value out of range.

    Source: Zandieh et al., TurboQuant, arXiv:2504.19874.
    """

    is_decoder_only = True  # otherwise it is the half of an `EncoderDecoderCache`
    layer_class: type[TurboQuantLayer] = TurboQuantLayer
    hybrid_layer_class: type[HybridLayer] = HybridLayer
    sliding_layer_class: type[SlidingLayer] = SlidingLayer

    def __init__(
        self,
        config: PretrainedConfig,
        preset: str | TurboQuantConfig = DEFAULT_PRESET,
        *,
        max_cache_len: int | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
        **overrides: Any,
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            raise ValueError(f"config is a {type(config).__name__}: expected the model's config, as in model.config.")
        self.quantization = TurboQuantConfig.from_preset(preset, **overrides)
        self.preset = preset if isinstance(preset, str) else "custom"
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise ValueError(f"max_cache_len={max_cache_len!r} is not allowed: expected a positive int, or None.")
        if offloading and max_cache_len is not None:
            raise ValueError("offloading=True cannot be combined with max_cache_len: a static cache keeps its addresses.")
        text = decoder_config(config)
        stock = DynamicCache(config=text) if max_cache_len is None else StaticCache(text, max_cache_len=max_cache_len)
        settings = self.quantization
        reasons, exact = plan(text, stock.layers, settings)
        packed = [i for i, reason in enumerate(reasons) if reason is None]
        if not packed:
            logger.warning_once(
                f"TurboQuantCache packs none of the {len(reasons)} layers of this {text.model_type!r} model and works as"
                f" transformers' {type(stock).__name__}: {'; '.join(sorted({str(reason) for reason in reasons}))}."
            )
        self.table = BlockTable(settings.page_size, settings.sink_tokens, settings.recent_window, max_cache_len)
        self.sliding_tables: dict[int, SlidingTable] = {}
        shares_keys = bool(getattr(text, "num_kv_shared_layers", None))
        unquantized = replace(settings, key_format="raw", value_format="raw", center_keys=False, balance_keys=False)
        for i in packed:
            rotary = rotary_of(text, i)
            if (window := getattr(stock.layers[i], "sliding_window", None)) is not None:
                if window not in self.sliding_tables:
                    self.sliding_tables[window] = SlidingTable(self.table, window, shares_keys)
                stock.layers[i] = self.sliding_layer_class(settings, self.sliding_tables[window], self.preset, rotary)
                continue
            layer_config = unquantized if i in exact else settings
            arguments = (layer_config, self.table, self.preset, rotary, i == packed[0])
            states = getattr(stock.layers[i], "number_of_states", 0)
            made = self.hybrid_layer_class(*arguments, states) if states else self.layer_class(*arguments)
            stock.layers[i] = made
        if config.is_encoder_decoder:
            self.is_decoder_only = False
        Cache.__init__(self, layers=stock.layers)  # a `DynamicCache` by contract only: transformers asks for its type
        self.offloading, self.only_non_sliding = offloading, offload_only_non_sliding
        self.model_facts = model_facts(text)

    @classmethod
    def from_parts(cls, layers: list[Any], tables: list[Any], offloading: list[bool], **attributes: Any) -> TurboQuantCache:
        """A cache of layers and tables that are there already, in the order of `tables` (`load`)."""
        cache = cls.__new__(cls)
        Cache.__init__(cache, layers=layers)
        cache.table, *sliding = tables
        cache.sliding_tables = {table.window: table for table in sliding}
        cache.offloading, cache.only_non_sliding = offloading
        for name, value in attributes.items():
            setattr(cache, name, value)
        return cache

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

    def _settled_layers(self, table: BlockTable | None = None) -> list[TurboQuantLayer]:
        """The packed layers (of this table) that hold something, with nothing left to commit."""
        layers = [layer for layer in self.packed_layers if layer.is_initialized and table in (None, layer.table)]
        for layer in layers:
            layer.flush()
        return layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take a layer's new states [B, H, n, D / Dv] and return what attention reads: handles, or a stock layer's tensors.

        Raises:
            ValueError: states that do not fit (`TurboQuantLayer.update`), a cross-attention's, or a layer that the cache
                does not have.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the model asks for layer {layer_idx} and this cache has {len(self.layers)}: it was made for another"
                " model's config. Make one with TurboQuantCache(model.config)."
            )
        if not self.is_decoder_only:
            self._refuse_cross_attention(layer_idx)
        if not self.offloading or key_states.is_cuda:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.prefetch(layer_idx + 1, self.only_non_sliding)  # transformers' own code needs CUDA streams
        states = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        self.offload(layer_idx, self.only_non_sliding)
        return states

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Fetch the next offloaded layer from `layer_idx` on, as transformers does; nothing where all of them stay."""
        offloadable = [layer for layer in self.layers if hasattr(layer, "prefetch")]
        if any(not (only_non_sliding and layer.is_sliding) for layer in offloadable):
            super().prefetch(layer_idx, only_non_sliding)

    def _refuse_cross_attention(self, layer_idx: int) -> None:
        """A bare cache would take the keys of an encoder-decoder model's cross-attention behind the decoder's own."""
        layer, last = self.layers[layer_idx], self.layers[-1]
        packed = isinstance(layer, TurboQuantLayer) and isinstance(last, TurboQuantLayer)
        # Again, before the first tokens have reached the last layer.
        if packed and not layer.is_empty and last.is_empty:
            raise ValueError(
                f"layer {layer_idx} is updated twice in one forward pass, as by the cross-attention of an encoder-decoder"
                " model: pass EncoderDecoderCache(TurboQuantCache(model.config), DynamicCache())."
            )

    # -- edits: the shared table once, then each layer -----------------------------------------------------------------
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

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest tokens. Packed pages are dropped or shortened, never rewritten.

        Args:
            tokens_to_remove: minus the number of tokens to remove. 0 removes nothing, but ends what
                `activate_past_recording` began: sliding layers forget what is no more in their window.

        Raises:
            ValueError: a positive number, or more tokens than the cache holds, which `DynamicCache` would empty. Nothing is
                changed then.
            RuntimeError: a layer with a sliding window or linear attention has forgotten what would be needed
                (`activate_past_recording` before the tokens makes it keep more), or a static cache has no room for another
                crop into its pages. Nothing is changed then.
        """
        tokens_to_remove = operator.index(tokens_to_remove)  # assisted decoding passes a tensor on some releases
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative integer, e.g. crop(-5)."
            )
        settled = {table: layers for table in self.tables if (layers := self._settled_layers(table))}
        if settled:
            length = max(int(layers[0].get_seq_length()) for layers in settled.values())
            if -tokens_to_remove > length:
                raise ValueError(
                    f"crop({tokens_to_remove}): the cache holds {length} tokens. Remove at most these, or call reset()."
                )
        for sliding in self.sliding_tables.values():
            sliding.require_croppable(-tokens_to_remove)
        with all_or_nothing(self._stock_layers):
            for layer in self._stock_layers:
                layer.crop(tokens_to_remove)
            for table, layers in settled.items() if tokens_to_remove < 0 else ():
                _crop_packed(table, layers, -tokens_to_remove)
        for sliding in self.sliding_tables.values():
            sliding.finish_crop()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of row `beam_idx[i]`: pages are shared, exact tails copied."""
        self._select_rows(beam_idx)
        for layer in self._stock_layers:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times; the copies share the packed pages."""
        if repeats < 1:
            raise ValueError(f"repeats={repeats} is not possible: expected at least 1.")
        rows = torch.arange(self._rows or 0).repeat_interleave(repeats)
        if len(rows):
            self._select_rows(rows)
        for layer in self._stock_layers:
            _edit_rows(layer, "batch_repeat_interleave", repeats, rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` (int64 indices or a bool mask)."""
        self._select_rows(indices)
        for layer in self._stock_layers:
            _edit_rows(layer, "batch_select_indices", indices, indices)

    @property
    def _rows(self) -> int | None:
        """Rows of the batch; None before the first token."""
        return next((table.batch_size for table in self.tables if table.batch_size is not None), None)

    def _select_rows(self, indices: Tensor) -> None:
        rows = self._rows
        if rows is None:
            return
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
        for table in self.tables:
            if not (layers := self._settled_layers(table)):
                continue
            if table.is_static:
                table.permute_rows(chosen, used=layers[0].counters.tolist()[2])
            else:
                table.select_rows(chosen)
            for layer in layers:
                layer.select_rows(torch.tensor(chosen, device="cpu"))

    # -- copies --------------------------------------------------------------------------------------------------------
    def fork(self, n: int) -> list[TurboQuantCache]:
        """`n` caches that go on from here, each on its own: one prefix, many continuations.

        They share this cache's packed pages, which never change, and have copies of the rest (exact tokens, and
        transformers' own layers). Any of them, this one included, may be extended, cropped, reordered, reset, copied or
        dropped without the others noticing, in a thread of its own too; a page is freed with its last user. `nbytes` of each
        counts the shared pages. Continuations that run side by side, as one batch, are `batch_repeat_interleave(n)`, which
        shares pages in the same way: independent caches are what continuations at different times need (a system prompt,
        the turns of a tree).

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

    def _fork(self) -> TurboQuantCache:
        twin = copy.copy(self)
        twin.table = self.table.fork()
        twin.sliding_tables = {w: table.fork_beside(twin.table) for w, table in self.sliding_tables.items()}
        tables = dict(zip(self.tables, twin.tables, strict=True))
        twin.layers = [
            layer.fork(tables[layer.table]) if isinstance(layer, TurboQuantLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return twin

    def to(self, device: torch.device | str | int, *, non_blocking: bool | None = None) -> TurboQuantCache:
        """Move everything to one device. What forks share is copied: they stay where they are.

        Args:
            device: where to.
            non_blocking: leave it out. A call with it does nothing: it comes from accelerate, whose hooks send each module
                of a model that is spread over devices all arguments that have a `to`, but a layer's cache stays where
                that layer's inputs are.

        Returns:
            This cache.

        Raises:
            ValueError: a static cache whose layout has no kernels for that device.
        """
        if non_blocking is not None:
            return self
        target = torch.empty(0, device=device).device  # with an index, as tensors have it
        layers = self._settled_layers()
        for layer in layers:
            layer.require_kernels(PageLayout.from_name(layer.layout_name), target)
        if any(layer.device != target for layer in layers):
            for table in self.tables:
                table.move(target)
            for layer in layers:
                layer.move(target)
        for layer in self._stock_layers:
            move_stock(layer, target)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a safetensors file, from which `load` goes on bit for bit.

        Of the pages, only those in use are written; forks are saved one by one.

        Raises:
            ValueError: naming a layer of transformers' that cannot be saved. No file is written then.
            OSError: the file cannot be written.
        """
        self._settled_layers()
        saving.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: PretrainedConfig | None = None,
        device: torch.device | str | int | None = None,
    ) -> TurboQuantCache:
        """The cache that `save` has written.

        Args:
            path: the file.
            config: the model's config. If given, the file must be of a model of the same kind and shape.
            device: where everything goes; None: each layer where it was saved from.

        Raises:
            ValueError: no such file by its content (truncated, foreign, newer, inconsistent), a model that does not match
                (or no config of one), or a device that is not there. Everything is checked before anything is allocated.
            OSError: the file cannot be read.
        """
        return loading.load(cls, path, config, device)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Keys, values [B, H, length, D / Dv] and the sliding window of each layer, as `DynamicCache` gives them.

        Packed layers are dequantized one by one: `DynamicCache(cache)` is an unpacked copy.
        """
        for layer in self.layers:
            if isinstance(layer, TurboQuantLayer):
                window = layer.sliding_window
                yield (*layer.unpacked(), None if window is None else torch.tensor(window, device="cpu"))
            else:
                # Layers of linear attention have neither; `DynamicCache` cannot be iterated with them.
                names = ("keys", "values", "_sliding_window_tensor")
                keys, values, window = (getattr(layer, name, None) for name in names)
                yield keys, values, window

    @property
    def prefetch_stream(self) -> Any:
        """Where transformers' `prefetch` copies."""
        return _prefetch_stream()

    # -- reports -------------------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the cache holds."""
        return self.report().nbytes

    def report(self) -> CacheReport:
        """Tokens packed and exact, bytes and the ratio to bf16, layer by layer."""
        layers = []
        for i, layer in enumerate(self.layers):
            layers.append(layer.report(i) if isinstance(layer, TurboQuantLayer) else stock_report(i, layer))
        return CacheReport(self.preset, tuple(layers), sum(t.nbytes for table in self.tables for t in table.tensors()))

    def check(self) -> None:
        """Raise if something could not be stored as given.

        Raises:
            ValueError: naming layer and KV heads that were given a non-finite key or value (stored as zero), or a number
                beyond its stored format (a scale beyond fp16, an fp8 key beyond 448; stored saturated).
        """
        kinds = (
            (NON_FINITE_KEY, "a non-finite key"),
            (NON_FINITE_VALUE, "a non-finite value"),
            (SATURATED, "a number beyond its stored format"),
        )
        found = []
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, TurboQuantLayer) or not layer.is_initialized:
                continue
            layer.flush()
            flags = layer.flags.tolist()
            for bit, what in kinds:
                if heads := [h for h, flag in enumerate(flags) if flag & bit]:
                    found.append(f"layer {i}, KV heads {heads}: {what}")
        if found:
            raise ValueError(
                "the model produced states that a packed page cannot hold (non-finite vectors are stored as zero, larger"
                f" numbers are clamped): {'; '.join(found)}. Check the model's dtype and inputs."
            )

    def __repr__(self) -> str:
        return summary.describe(self)

    def _repr_html_(self) -> str:
        return summary.as_html(self)


def _edit_rows(layer: Any, method: str, argument: Any, rows: Tensor) -> None:
    """Repeat or select rows of transformers' layer. Recurrent states can only be reordered there, which takes any rows."""
    if hasattr(layer, method):
        getattr(layer, method)(argument)
    elif len(rows):
        layer.reorder_cache(rows.nonzero().flatten() if rows.dtype == torch.bool else rows)


def _crop_packed(table: BlockTable, layers: list[TurboQuantLayer], tokens: int) -> None:
    """Remove the newest tokens of the layers of one table."""
    before, packed_end, had_used = layers[0].counters.tolist()
    used, length = had_used, before - tokens
    if length < packed_end:
        packed_end, used = table.crop(length, used)
    table.trim(length)
    no_page_left = used == 0 and (had_used > 0 or length == 0)
    for layer in layers:
        layer.cut(length, packed_end, used, no_page_left)


@lru_cache(maxsize=1)
def _prefetch_stream() -> Any:
    return torch.Stream() if torch.accelerator.is_available() else nullcontext()
