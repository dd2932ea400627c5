"""A cache that simulates a page format: exact states, overwritten by what a packed page would give back.

Nothing is packed and no memory is saved. A page is overwritten when `TurboQuantCache` would pack it, so that every query
reads what it would read there. Made for formats that have no packed layout, to find out whether they deserve one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from tq_hf import CacheReport, LayerReport, TurboQuantConfig
from tq_hf.attention import turboquant_attention, turboquant_mask
from tq_hf.quantizer.conditioning import partners
from tq_hf.quantizer.rotary import Rotary, rotary_of
from tq_hf.reporting.reports import stock_report

from .outlier_split import Conditioning, Split, bytes_per_token, condition, pages_as_read

ATTENTION_NAME = "turboquant_simulated"


class SimulatedLayer(DynamicLayer):
    """A full-attention layer whose older pages hold their quantize-dequantize image.

    Channel statistics are those of `TurboQuantCache`: the tokens of the first page and of the recent window behind it.
    Attention must be `ATTENTION_NAME`, which shows the layer its queries.
    """

    def __init__(self, config: TurboQuantConfig, split: Split, rotary: Rotary | None = None) -> None:
        super().__init__()
        self.rotary = rotary
        self.config = config
        self.split = split
        self.packed_end = config.sink_tokens
        self.query_energy: Tensor | None = None  # fp32 [B, H, D]
        self.known: Conditioning | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Overwrite the pages that fell due with the last tokens, then append the new ones."""
        self.settle()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        keys.simulated_layer = weakref.ref(self)
        return keys, values

    @property
    def first_tokens(self) -> slice:
        """The positions that channel statistics are taken of."""
        sinks = self.config.sink_tokens
        return slice(sinks, sinks + self.config.page_size + self.config.recent_window)

    def observe(self, query: Tensor) -> None:
        """Take the newest tokens' queries, [B, Hq, n, D], into the statistics, as far as they belong there."""
        if self.known is None:
            start, counted = self.keys.shape[2] - query.shape[2], self.first_tokens
            query = query[:, :, max(0, counted.start - start) : max(0, counted.stop - start)]
            energy = query.float().square().sum(2).unflatten(1, (self.keys.shape[1], -1)).sum(2)
            self.query_energy = energy if self.query_energy is None else self.query_energy + energy

    def settle(self) -> None:
        """Overwrite the pages that are due by now."""
        if not self.is_initialized:
            return
        size = self.config.page_size
        due = max(0, (self.keys.shape[2] - self.packed_end - self.config.recent_window) // size)
        if not due:
            return
        if self.known is None:
            if self.query_energy is None:
                raise RuntimeError(f"a simulated layer has seen no queries: use attn_implementation={ATTENTION_NAME!r}.")
            key, value = self.keys[:, :, self.first_tokens], self.values[:, :, self.first_tokens]
            pairs = partners(self.rotary, key.shape[3], key.device)
            self.known = condition(self.query_energy, key, value, pairs, self.config)
        end = self.packed_end + due * size
        key, value = self.keys[:, :, self.packed_end : end], self.values[:, :, self.packed_end : end]
        in_pages = key.unflatten(2, (due, size)), value.unflatten(2, (due, size))
        key_read, value_read = pages_as_read(*in_pages, self.known, self.config, self.split)
        key.copy_(key_read.flatten(2, 3))
        value.copy_(value_read.flatten(2, 3))
        self.packed_end = end

    def report(self, layer: int) -> LayerReport:
        """Tokens in simulated pages and exact ones; the bytes are what packed pages would take."""
        self.settle()
        rows, heads, length, key_dim = self.keys.shape
        value_dim = self.values.shape[3]
        packed = self.packed_end - self.config.sink_tokens
        exact_bytes = (key_dim + value_dim) * self.keys.element_size()
        nbytes = rows * heads * (packed * self.page_bytes + (length - packed) * exact_bytes)
        bf16 = rows * heads * length * (key_dim + value_dim) * 2
        return LayerReport(layer, "simulated", rows * packed, rows * (length - packed), round(nbytes), bf16)

    @property
    def page_bytes(self) -> float:
        """Bytes that a packed token would take a KV head."""
        return bytes_per_token(self.keys.shape[3], self.values.shape[3], self.config, self.split)


class SimulatedCache(Cache):
    """`DynamicCache` with a `SimulatedLayer` wherever `TurboQuantCache` packs.

    Args:
        config: the model's config.
        quantization: widths, page size, window, sinks; Lloyd-Max keys and values, and no boundary layers.
        split: which sides have outlier channels.
    """

    def __init__(self, config: PretrainedConfig, quantization: TurboQuantConfig, split: Split) -> None:
        if (quantization.key_format, quantization.value_format, quantization.boundary_layers) != (
            "lloyd_max",
            "lloyd_max",
            0,
        ):
            raise ValueError(f"{quantization} cannot be simulated: expected lloyd_max keys and values, no boundary layers.")
        self.quantization = quantization
        text = config.get_text_config(decoder=True)
        layers = DynamicCache(config=text).layers
        for i, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[i] = SimulatedLayer(quantization, split, rotary_of(text, i))
        super().__init__(layers=layers)

    @property
    def simulated_layers(self) -> list[SimulatedLayer]:
        return [layer for layer in self.layers if isinstance(layer, SimulatedLayer)]

    def report(self) -> CacheReport:
        """As `TurboQuantCache.report`, for the simulated layers and the model's own."""
        layers = []
        for i, layer in enumerate(self.layers):
            layers.append(layer.report(i) if isinstance(layer, SimulatedLayer) else stock_report(i, layer))
        return CacheReport("simulated", tuple(layers), 0)


def _observed_attention(module: torch.nn.Module, query: Tensor, key: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    if isinstance(key, Tensor) and (layer := getattr(key, "simulated_layer", None)) is not None:
        layer().observe(query)
    return turboquant_attention(module, query, key, *args, **kwargs)


AttentionInterface.register(ATTENTION_NAME, _observed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, turboquant_mask)
