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
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from . import loading, saving
from .config import DEFAULT_PRESET, TurboQuantConfig
from .layer import TurboQuantLayer
from .layer_rules import boundary_layers
from .layout import NON_FINITE_KEY, NON_FINITE_VALUE, SATURATED, PageLayout
from .pages import BlockTable
from .reports import CacheReport, stock_report
from .saving import model_facts
from .stock_layers import all_or_nothing, move_stock


class TurboQuantCache(Cache):
    """Keys and values at 2 to 4 bits in pages that attention reads directly.

        cache = TurboQuantCache(model.config, preset="tq4")
        model.generate(**inputs, past_key_values=cache)

    Layers with full attention are packed; a layer of another kind (sliding window, linear attention, ...) keeps
    transformers' own class, and boundary layers of presets that ask for them keep the model's dtype in the same pages.

    Args:
        config: the model's config.
        preset: a name of `tq_hf.PRESETS`, or a `TurboQuantConfig`.
        max_cache_len: capacity in tokens. None grows with the sequence; a number preallocates everything, keeps lengths
            on the device and lets `generate()` compile decoding.
        offloading: keep packed pages in host memory while other layers compute, as `DynamicCache(offloading=True)` keeps
            all keys and values: slower, and the GPU holds the pages of two layers only. Not with `max_cache_len`.
        offload_only_non_sliding: leave transformers' sliding-window layers, which are small, on the device.
        overrides: fields of `TurboQuantConfig` to change in the preset, e.g. `recent_window=128`.

    Raises:
        ValueError: an unknown preset or field, a value out of range, a head_dim without a packed layout, a model
            that caches latents, or one none of whose layers can be packed.

    Source: Zandieh et al., TurboQuant, arXiv:2504.19874.
    """

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
        text = config.get_text_config(decoder=True)
        stock = DynamicCache(config=text) if max_cache_len is None else StaticCache(text, max_cache_len=max_cache_len)
        packable = [i for i, layer in enumerate(stock.layers) if type(layer) in (DynamicLayer, StaticLayer)]
        for layer_config in _layer_configs(text, packable):
            _validate_model(layer_config, self.quantization)
        if not packable:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in stock.layers}))
            raise ValueError(
                f"none of the {len(stock.layers)} layers of this {text.model_type!r} model can be packed (transformers"
                f" caches them as {kinds}): use transformers' own cache classes."
            )
        exact = boundary_layers(text, packable, self.quantization.boundary_layers)
        settings = self.quantization
        self.table = BlockTable(settings.page_size, settings.sink_tokens, settings.recent_window, max_cache_len)
        unquantized = replace(settings, key_format="raw", value_format="raw", center_keys=False, balance_keys=False)
        for i in packable:
            layer_config = unquantized if i in exact else settings
            stock.layers[i] = TurboQuantLayer(layer_config, self.table, self.preset, guards_capacity=i == packable[0])
        super().__init__(layers=stock.layers)
        self.offloading, self.only_non_sliding = offloading, offload_only_non_sliding
        self.model_facts = model_facts(text)

    @classmethod
    def from_parts(cls, layers: list[Any], table: BlockTable, offloading: list[bool], **attributes: Any) -> TurboQuantCache:
        """A cache of layers that are there already (`load`)."""
        cache = cls.__new__(cls)
        Cache.__init__(cache, layers=layers)
        cache.table = table
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
        """The layers that keep transformers' own classes."""
        return [layer for layer in self.layers if not isinstance(layer, TurboQuantLayer)]

    @property
    def tables(self) -> list[BlockTable]:
        """The block tables of the packed layers, each once."""
        return list({id(layer.table): layer.table for layer in self.packed_layers}.values())

    def _settled_layers(self) -> list[TurboQuantLayer]:
        """The packed layers that hold something, with nothing left to commit."""
        layers = [layer for layer in self.packed_layers if layer.is_initialized]
        for layer in layers:
            layer.flush()
        return layers

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
            layer.reset()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest tokens. Packed pages are dropped or shortened, never rewritten.

        Args:
            tokens_to_remove: minus the number of tokens to remove, at most all there are; 0 removes nothing.

        Raises:
            ValueError: a positive number.
            RuntimeError: a sliding-window or linear-attention layer of transformers' has forgotten what would be needed
                (`activate_past_recording` before the tokens makes it keep more), or a static cache has no room for another
                crop into its pages. Nothing is changed then.
        """
        tokens_to_remove = operator.index(tokens_to_remove)  # assisted decoding passes a tensor on some releases
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative integer, e.g. crop(-5)."
            )
        layers = self._settled_layers()
        before, packed_end, had_used = layers[0].counters.tolist() if layers else (0, 0, 0)
        if layers:
            tokens_to_remove = max(tokens_to_remove, -before)
        with all_or_nothing(self._stock_layers):
            for layer in self._stock_layers:
                layer.crop(tokens_to_remove)
            if tokens_to_remove < 0 and layers:
                self._crop_packed(layers, before + tokens_to_remove, packed_end, had_used)

    def _crop_packed(self, layers: list[TurboQuantLayer], length: int, packed_end: int, had_used: int) -> None:
        used = had_used
        if length < packed_end:
            packed_end, used = self.table.crop(length, used)
        self.table.trim(length)
        no_page_left = used == 0 and (had_used > 0 or length == 0)
        for layer in layers:
            layer.cut(length, packed_end, used, no_page_left)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of row `beam_idx[i]`: pages are shared, exact tails copied."""
        self._select_rows(beam_idx)
        for layer in self._stock_layers:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times; the copies share the packed pages."""
        if repeats < 1:
            raise ValueError(f"repeats={repeats} is not possible: expected at least 1.")
        if self.table.batch_size is not None:
            self._select_rows(torch.arange(self.table.batch_size).repeat_interleave(repeats))
        for layer in self._stock_layers:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` (int64 indices or a bool mask)."""
        self._select_rows(indices)
        for layer in self._stock_layers:
            layer.batch_select_indices(indices)

    def _select_rows(self, indices: Tensor) -> None:
        rows = self.table.batch_size
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
        layers = self._settled_layers()
        for table in self.tables:
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
        dropped without the others noticing; a page is freed with its last user. Continuations that run side by side, as
        one batch, are `batch_repeat_interleave(n)`, which shares pages in the same way: independent caches are what
        continuations at different times need (a system prompt, the turns of a tree), and a batch has them no others
        already. `nbytes` of each counts the shared pages.

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
        if not self._settled_layers():
            raise ValueError("this cache is empty, there is nothing to fork: fill it first, or make new ones.")
        return [self._fork() for _ in range(n)]

    def _fork(self) -> TurboQuantCache:
        twin = copy.copy(self)
        tables = {id(table): table.fork() for table in self.tables}
        twin.table = tables[id(self.table)]
        twin.layers = [
            layer.fork(tables[id(layer.table)]) if isinstance(layer, TurboQuantLayer) else copy.deepcopy(layer)
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
            ValueError: no such file by its content (truncated, foreign, newer, inconsistent), a model that does not match,
                or a device that is not there. Everything is checked before anything is allocated.
            OSError: the file cannot be read.
        """
        return loading.load(cls, path, config, device)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Keys, values [B, H, length, D / Dv] and the sliding window of each layer, as `DynamicCache` gives them.

        Packed layers are dequantized one by one: `DynamicCache(cache)` is an unpacked copy.
        """
        for layer in self.layers:
            if isinstance(layer, TurboQuantLayer):
                yield (*layer.unpacked(), None)
            else:
                # Layers of linear attention have neither; `DynamicCache` cannot be iterated with them.
                names = ("keys", "values", "_sliding_window_tensor")
                keys, values, window = (getattr(layer, name, None) for name in names)
                yield keys, values, window

    # -- offloading ----------------------------------------------------------------------------------------------------
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take a layer's new states [B, H, n, D / Dv] and return all of its keys and values (`TurboQuantLayer.update`)."""
        if not self.offloading or key_states.is_cuda:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.prefetch(layer_idx + 1, self.only_non_sliding)  # transformers' own code needs CUDA streams
        states = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        self.offload(layer_idx, self.only_non_sliding)
        return states

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
        mode = "dynamic" if self.table.max_cache_len is None else f"max_cache_len={self.table.max_cache_len}"
        if self.table.batch_size is None:
            return f"TurboQuantCache(preset={self.preset!r}, {mode}, {len(self.packed_layers)} packed layers, empty)"
        report = self.report()
        return (
            f"TurboQuantCache(preset={self.preset!r}, {mode}, {len(self.packed_layers)} packed layers,"
            f" {report.nbytes / 2**20:.1f} MiB where bf16 takes {report.bytes_bf16 / 2**20:.1f})"
        )


def _layer_configs(config: PretrainedConfig, layers: list[int]) -> list[Any]:
    """The configs of these layers, where a model's layers differ; else the one config."""
    per_layer = getattr(config, "per_layer_config", None)
    return [per_layer[i] for i in layers] if per_layer else [config]


def _validate_model(config: Any, quantization: TurboQuantConfig) -> None:
    """Refuse at construction what would fail at the first token."""
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"this model caches latents (multi-head latent attention, kv_lora_rank={config.kv_lora_rank}), which have no"
            " packed layout: use transformers' DynamicCache."
        )
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    dim = getattr(config, "head_dim", None) or (hidden // heads if isinstance(heads, int) and hidden else None)
    if isinstance(dim, int):
        quantization.layout(dim, dim, torch.bfloat16)  # raises, naming the head_dim


@lru_cache(maxsize=1)
def _prefetch_stream() -> Any:
    return torch.Stream() if torch.accelerator.is_available() else nullcontext()
