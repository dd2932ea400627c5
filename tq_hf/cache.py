"""`TurboQuantCache`: a drop-in for transformers' `DynamicCache` (or, with `max_cache_len`, `StaticCache`).

    model.generate(**inputs, past_key_values=TurboQuantCache(model.config, preset="tq4"))
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, StaticCache
from transformers.cache_utils import Cache
from transformers.utils import logging

from .compat import reset_layer
from .config import DEFAULT_PRESET, TurboQuantConfig
from .hybrid_layer import HybridLayer
from .layer import LayerReport, TurboQuantLayer
from .layer_rules import boundary_layers
from .layout import NON_FINITE_KEY, NON_FINITE_VALUE, SATURATED
from .memory import storage_bytes
from .model_layers import decoder_config, reasons_against_packing
from .pages import BlockTable

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds, layer by layer, counted from its real tensors. `str()` gives a Markdown table.

    A static cache counts all that it has preallocated, however few tokens it holds yet.

    Attributes:
        preset: name of the preset.
        layers: one `LayerReport` a layer.
        table_bytes: bytes of the block table that the layers share.
    """

    preset: str
    layers: tuple[LayerReport, ...]
    table_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers) + self.table_bytes

    @property
    def packed_tokens(self) -> int:
        """Tokens in packed pages, summed over layers and rows."""
        return sum(layer.packed_tokens for layer in self.layers)

    @property
    def exact_tokens(self) -> int:
        return sum(layer.exact_tokens for layer in self.layers)

    @property
    def bytes_bf16(self) -> int:
        """What the same tokens take in bfloat16."""
        return sum(layer.bytes_bf16 for layer in self.layers)

    @property
    def ratio(self) -> float:
        """`bytes_bf16` over `nbytes`."""
        return self.bytes_bf16 / self.nbytes if self.nbytes else 0.0

    def __str__(self) -> str:
        rows = ["| layer | kind | packed tokens | exact tokens | bytes | ratio to bf16 |", "| --- " * 6 + "|"]
        total = LayerReport(-1, "", self.packed_tokens, self.exact_tokens, self.nbytes, self.bytes_bf16)
        for r in (*self.layers, total):
            name = "all" if r.layer < 0 else str(r.layer)
            rows.append(f"| {name} | {r.kind} | {r.packed_tokens} | {r.exact_tokens} | {r.nbytes} | {r.ratio:.2f} |")
        return "\n".join(rows)


class TurboQuantCache(DynamicCache):
    """Keys and values at 2 to 4 bits in pages that attention reads directly.

        cache = TurboQuantCache(model.config, preset="tq4")
        model.generate(**inputs, past_key_values=cache)

    Layers with full attention are packed; a layer of another kind (sliding window, linear attention, latents, ...) keeps
    transformers' own class (`model_layers.py`), and boundary layers of presets that ask for them keep the model's dtype in
    the same pages. A model none of whose layers can be packed works as with transformers' own cache, which is logged.

    Args:
        config: the model's config.
        preset: a name of `tq_hf.PRESETS`, or a `TurboQuantConfig`.
        max_cache_len: capacity in tokens. None grows with the sequence; a number preallocates everything, keeps lengths
            on the device and lets `generate()` compile decoding.
        overrides: fields of `TurboQuantConfig` to change in the preset, e.g. `recent_window=128`.

    Raises:
        ValueError: an unknown preset or field, or a value out of range.

    Source: Zandieh et al., TurboQuant, arXiv:2504.19874.
    """

    is_decoder_only = True  # otherwise it is the half of an `EncoderDecoderCache`
    layer_class: type[TurboQuantLayer] = TurboQuantLayer
    hybrid_layer_class: type[HybridLayer] = HybridLayer

    def __init__(
        self,
        config: PretrainedConfig,
        preset: str | TurboQuantConfig = DEFAULT_PRESET,
        *,
        max_cache_len: int | None = None,
        **overrides: Any,
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            raise ValueError(f"config is a {type(config).__name__}: expected the model's config, as in model.config.")
        self.quantization = TurboQuantConfig.from_preset(preset, **overrides)
        self.preset = preset if isinstance(preset, str) else "custom"
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise ValueError(f"max_cache_len={max_cache_len!r} is not allowed: expected a positive int, or None.")
        text = decoder_config(config)
        stock = DynamicCache(config=text) if max_cache_len is None else StaticCache(text, max_cache_len=max_cache_len)
        reasons = reasons_against_packing(text, stock.layers, self.quantization)
        packable = [i for i, reason in enumerate(reasons) if reason is None]
        if not packable:
            logger.warning_once(
                f"TurboQuantCache packs none of the {len(reasons)} layers of this {text.model_type!r} model and works as"
                f" transformers' {type(stock).__name__}: {'; '.join(sorted({str(reason) for reason in reasons}))}."
            )
        exact = boundary_layers(text, packable, self.quantization.boundary_layers)
        settings = self.quantization
        self.table = BlockTable(settings.page_size, settings.sink_tokens, settings.recent_window, max_cache_len)
        unquantized = replace(settings, key_format="raw", value_format="raw", center_keys=False, balance_keys=False)
        for i in packable:
            layer_config = unquantized if i in exact else settings
            arguments = (layer_config, self.table, self.preset, i == packable[0])
            states = getattr(stock.layers[i], "number_of_states", 0)
            made = self.hybrid_layer_class(*arguments, states) if states else self.layer_class(*arguments)
            stock.layers[i] = made
        if config.is_encoder_decoder:
            self.is_decoder_only = False
        Cache.__init__(self, layers=stock.layers)  # a `DynamicCache` by contract only: transformers asks for its type

    @property
    def packed_layers(self) -> list[TurboQuantLayer]:
        """The layers whose tokens live in pages."""
        return [layer for layer in self.layers if isinstance(layer, TurboQuantLayer)]

    @property
    def _stock_layers(self) -> list[Any]:
        """The layers, and the parts of hybrid ones, that keep transformers' own classes."""
        layers = [layer.state if isinstance(layer, HybridLayer) else layer for layer in self.layers]
        return [layer for layer in layers if not isinstance(layer, TurboQuantLayer)]

    def _settled_layers(self) -> list[TurboQuantLayer]:
        """The packed layers that hold something, with nothing left to commit."""
        layers = [layer for layer in self.packed_layers if layer.is_initialized]
        for layer in layers:
            layer.flush()
        return layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take a layer's new states [B, H, n, D / Dv] and return what attention reads: handles, or a stock layer's tensors.

        Raises:
            ValueError: states that do not fit (`TurboQuantLayer.update`), or a cross-attention's.
        """
        if not self.is_decoder_only:
            self._refuse_cross_attention(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _refuse_cross_attention(self, layer_idx: int) -> None:
        """A bare cache would take the keys of an encoder-decoder model's cross-attention behind the decoder's own."""
        layer, last = self.layers[layer_idx], self.layers[-1]
        packed = isinstance(layer, TurboQuantLayer) and isinstance(last, TurboQuantLayer)
        if packed and not layer.is_empty and last.is_empty:  # again, before the first tokens have reached the last layer
            raise ValueError(
                f"layer {layer_idx} is updated twice in one forward pass, as by the cross-attention of an encoder-decoder"
                " model: pass EncoderDecoderCache(TurboQuantCache(model.config), DynamicCache())."
            )

    # -- edits: the shared table once, then each layer -----------------------------------------------------------------
    def reset(self) -> None:
        """Forget all tokens. The batch size may change afterwards, except in the static mode."""
        if self.table.is_static:
            self.table.restart()
        else:
            self.table.clear()
        for layer in self.packed_layers:
            layer.forget()
        for layer in self._stock_layers:
            reset_layer(layer)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest tokens. Packed pages are dropped or shortened, never rewritten.

        Args:
            tokens_to_remove: minus the number of tokens to remove; 0 removes nothing.

        Raises:
            ValueError: a positive number.
        """
        tokens_to_remove = operator.index(tokens_to_remove)  # assisted decoding passes a tensor on some releases
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative integer, e.g. crop(-5)."
            )
        if tokens_to_remove < 0 and (layers := self._settled_layers()):
            before, packed_end, had_used = layers[0].counters.tolist()
            used = had_used
            length = max(0, before + tokens_to_remove)
            if length < packed_end:
                packed_end, used = self.table.crop(length, used)
            self.table.trim(length)
            no_page_left = used == 0 and (had_used > 0 or length == 0)
            for layer in layers:
                layer.cut(length, packed_end, used, no_page_left)
        for layer in self._stock_layers:
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of row `beam_idx[i]`: pages are shared, exact tails copied."""
        self._select_rows(beam_idx)
        for layer in self._stock_layers:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times; the copies share the packed pages."""
        if repeats < 1:
            raise ValueError(f"repeats={repeats} is not possible: expected at least 1.")
        rows = torch.arange(self.table.batch_size or 0).repeat_interleave(repeats)
        if len(rows):
            self._select_rows(rows)
        for layer in self._stock_layers:
            _edit_rows(layer, "batch_repeat_interleave", repeats, rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` (int64 indices or a bool mask)."""
        self._select_rows(indices)
        for layer in self._stock_layers:
            _edit_rows(layer, "batch_select_indices", indices, indices)

    def _select_rows(self, indices: Tensor) -> None:
        if self.table.batch_size is None:
            return
        if self.table.is_static:
            raise NotImplementedError(
                "rows of a static TurboQuantCache cannot be reordered, repeated or selected: use a cache without"
                " max_cache_len for beam search and several return sequences."
            )
        rows = self.table.batch_size
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool and len(indices) == rows:
            indices = indices.nonzero().flatten()
        chosen = [i + rows if i < 0 else i for i in indices.tolist()]
        if indices.dtype == torch.bool or not chosen or not all(0 <= i < rows for i in chosen):
            raise ValueError(f"row indices {indices.tolist()} do not fit a cache of {rows} rows: nothing was changed.")
        layers = self._settled_layers()
        self.table.select_rows(chosen)
        for layer in layers:
            layer.select_rows(torch.tensor(chosen))

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
        return CacheReport(self.preset, tuple(layers), sum(t.nbytes for t in self.table.tensors()))

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


def _edit_rows(layer: Any, method: str, argument: Any, rows: Tensor) -> None:
    """Repeat or select rows of transformers' layer. Recurrent states can only be reordered there, which takes any rows."""
    if hasattr(layer, method):
        getattr(layer, method)(argument)
    elif len(rows):
        layer.reorder_cache(rows.nonzero().flatten() if rows.dtype == torch.bool else rows)


def stock_report(index: int, layer: Any) -> LayerReport:
    """One of transformers' own layers: everything it holds is exact."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    held = [t for t in (keys, values) if isinstance(t, Tensor) and t.ndim == 4]
    tokens = held[0].shape[0] * held[0].shape[2] if held else 0
    return LayerReport(index, type(layer).__name__, 0, tokens, storage_bytes(vars(layer)), sum(2 * t.numel() for t in held))
