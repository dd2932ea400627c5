"""`TurboQuantCache`: a drop-in for transformers' `DynamicCache` (or, with `max_cache_len`, `StaticCache`).

model.generate(**inputs, past_key_values=TurboQuantCache(model.config, preset="tq4"))
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, StaticCache
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin
from transformers.utils import logging

from .cache_edits import CacheEdits
from .compat import ASKS_BEFORE_WRITING
from .config import DEFAULT_PRESET, TurboQuantConfig
from .files import loading, saving
from .files.saving import model_facts
from .layers.forward_pass import ATTENTION, ForwardPass
from .layers.full import TurboQuantLayer
from .layers.hybrid import HybridLayer
from .layers.plan import decoder_config, idle_layers, plan
from .layers.sliding import SlidingLayer, SlidingTable
from .pages.table import BlockTable
from .quantizer.rotary import rotaries_of
from .reporting import summary
from .reporting.reports import CacheReport, not_stored, stock_report
from .tensor_parallel import ranks, require_whole_heads, shard_facts

logger = logging.get_logger(__name__)


class TurboQuantCache(CacheEdits):
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
        ValueError: an unknown preset or field, a value out of range, or a model whose KV heads cannot be split over the
            ranks of its tensor parallelism.

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
        require_whole_heads(config)
        text = decoder_config(config)
        stock = DynamicCache(config=text) if max_cache_len is None else StaticCache(text, max_cache_len=max_cache_len)
        settings = self.quantization
        self.idle = idle_layers(text, stock.layers)
        reasons, exact = plan(text, stock.layers, settings, self.idle)
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
        for i, rotary in rotaries_of(text, packed).items():
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
        self.model_facts = model_facts(text) | shard_facts(ranks(config))
        self._number_layers()

    @classmethod
    def from_parts(cls, layers: list[Any], tables: list[Any], offloading: list[bool], **attributes: Any) -> TurboQuantCache:
        """A cache of layers and tables that are there already, in the order of `tables` (`load`)."""
        cache = cls.__new__(cls)
        Cache.__init__(cache, layers=layers)
        cache.table, *sliding = tables
        cache.sliding_tables = {table.window: table for table in sliding}
        cache.offloading, cache.only_non_sliding = offloading
        cache.idle = frozenset()
        if any(getattr(layer, "is_initialized", False) for layer in layers):
            cache.idle = frozenset(i for i, layer in enumerate(layers) if not getattr(layer, "is_initialized", True))
        for name, value in attributes.items():
            setattr(cache, name, value)
        cache._number_layers()
        return cache

    def _number_layers(self) -> None:
        self.forward_pass = ForwardPass()
        packed = [i for i, layer in enumerate(self.layers) if isinstance(layer, TurboQuantLayer)]
        for i in packed:
            self.layers[i].index = i
        self.packed_indices, self.last_packed = frozenset(packed), max(packed, default=-1)
        if self.table.is_static and len(packed) > 1:
            self.layers[packed[0]].last_layer = self.layers[packed[-1]]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take a layer's new states [B, H, n, D / Dv] and return what attention reads: handles, or a stock layer's tensors.

        Raises:
            ValueError: states that do not fit (`TurboQuantLayer.update`), a cross-attention's, or a layer that the cache
                does not have.
            RuntimeError: the forward pass before has not reached all layers. `crop` takes its tokens back.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx={layer_idx} of a cache of {len(self.layers)} layers: a model that asks for it has another config"
                " than this cache was made for. Make one with TurboQuantCache(model.config)."
            )
        if not self.is_decoder_only:
            self._refuse_cross_attention(layer_idx)
        layer = self.layers[layer_idx]
        if torch.compiler.is_compiling():
            self.forward_pass.has_gaps = True
            return layer.update(key_states, value_states, *args, **kwargs)
        self.forward_pass.enter(self, layer_idx, ATTENTION)
        try:
            if self.offloading:
                states = self._update_offloaded(key_states, value_states, layer_idx, *args, **kwargs)
            else:  # as transformers' own method does, without its call: this is once a layer and token
                states = layer.update(key_states, value_states, *args, **kwargs)
        except BaseException:
            self.forward_pass.leave(layer_idx)
            raise
        if layer_idx == self.last_packed:
            states[0].step.ends = ref(self)
        return states

    def _update_offloaded(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if key_states.is_cuda:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.prefetch(layer_idx + 1, self.only_non_sliding)  # transformers' own code needs CUDA streams
        states = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        self.offload(layer_idx, self.only_non_sliding)
        return states

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._note_linear(layer_idx, "convolution", state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._note_linear(layer_idx, "recurrence", state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        self._note_look(state, layer_idx, "convolution", state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        self._note_look(state, layer_idx, "recurrence", state_idx)
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        has_one = bool(super().has_previous_state(layer_idx, state_idx))
        if has_one and layer_idx is not None and not state_idx and ASKS_BEFORE_WRITING:
            self._note_look(self.layers[layer_idx].conv_states[0], layer_idx, "convolution", 0)
        return has_one

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        if hasattr(self.layers[layer_idx], "update_indexer") and not torch.compiler.is_compiling():
            self.forward_pass.enter(self, layer_idx, ("indexer",))
        return super().update_indexer(indexer_key_states, layer_idx)

    def _note_linear(self, layer_idx: int, *state: object) -> None:
        """A layer gets a new state of linear attention."""
        is_linear = isinstance(self.layers[layer_idx], LinearAttentionCacheLayerMixin)
        if is_linear and not torch.compiler.is_compiling():
            self.forward_pass.enter(self, layer_idx, state)

    def _note_look(self, held: Tensor | None, layer_idx: int, *state: object) -> None:
        """A model gets a state that a layer has, which it may write in place."""
        if held is not None and not torch.compiler.is_compiling():
            self.forward_pass.look(self, layer_idx, state, held)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Fetch the next offloaded layer from `layer_idx` on, as transformers does; nothing where all of them stay."""
        dummies: Any = getattr(self, "is_dummy", self.is_linear)  # older transformers have none
        kinds = zip(self.is_linear, dummies, self.is_sliding, strict=True)
        if not all(linear or dummy or (only_non_sliding and sliding) for linear, dummy, sliding in kinds):
            super().prefetch(layer_idx, only_non_sliding)

    def _refuse_cross_attention(self, layer_idx: int) -> None:
        """A bare cache would take the keys of an encoder-decoder model's cross-attention behind the decoder's own."""
        layer, last = self.layers[layer_idx], self.layers[-1]
        packed = isinstance(layer, TurboQuantLayer) and isinstance(last, TurboQuantLayer)
        # Again, before the first tokens have reached the last layer.
        if packed and not layer.is_empty and last.is_empty:
            raise ValueError(
                f"layer {layer_idx} is updated twice in one forward pass, as by the cross-attention of an encoder-decoder"
                " model: pass EncoderDecoderCache(TurboQuantCache(model.config), DynamicCache()). If that is what you pass,"
                " the first forward pass ended early, by an error or an interrupt: call cache.reset() before another."
            )

    # -- files and copies ----------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a safetensors file, from which `load` goes on bit for bit.

        Of the pages, only those in use are written; forks are saved one by one. The file holds the text's states: its owner
        alone may read it. A file that was there is replaced in one step, and so is a link.

        Raises:
            ValueError: naming a layer of transformers' that cannot be saved. No file is written then.
            RuntimeError: layers hold different tokens, as an interrupted forward pass leaves them. Nor then.
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
        self.forward_pass.require_over(self)
        self.forward_pass.require_even(self)
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
        for layer in self.packed_layers:
            if layer.is_initialized:
                layer.flush()  # after the last one, no layer needs what would undo the forward pass
        layers = []
        for i, layer in enumerate(self.layers):
            layers.append(layer.report(i) if isinstance(layer, TurboQuantLayer) else stock_report(i, layer))
        return CacheReport(self.preset, tuple(layers), sum(t.nbytes for table in self.tables for t in table.tensors()))

    def check(self) -> None:
        """Raise if the model produced states that cannot be stored as given.

        Raises:
            ValueError: naming layer and KV heads that were given a non-finite key or value (packed, it is stored as zero;
                an exact token keeps it), or a number beyond its stored format (a scale beyond fp16, an fp8 key beyond
                448; stored saturated).
        """
        found = []
        for i, layer in enumerate(self.layers):
            if isinstance(layer, TurboQuantLayer) and layer.is_initialized:
                layer.flush()
                found += [f"layer {i}, {what}" for what in not_stored(layer)]
        if found:
            raise ValueError(
                "the model produced states that a packed page cannot hold (non-finite vectors are stored as zero, larger"
                f" numbers are clamped): {'; '.join(found)}. Check the model's dtype and inputs."
            )

    def __repr__(self) -> str:
        return summary.describe(self)

    def _repr_html_(self) -> str:
        return summary.as_html(self)


@lru_cache(maxsize=1)
def _prefetch_stream() -> Any:
    return torch.Stream() if torch.accelerator.is_available() else nullcontext()
