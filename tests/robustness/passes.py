"""Caches of every kind, beside `cache_model.py`, and forward passes through both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from transformers import PretrainedConfig

from tests.robustness.cache_model import CacheModel, LayerModel, New
from tests.tiny_models import COMMON, FAMILIES, HEADS
from tq_hf import TurboQuantCache
from tq_hf.attention import turboquant_attention
from tq_hf.layers.full import TurboQuantLayer


# -- what caches are made for ------------------------------------------------------------------------------------------
def _config(family: str, dim: int, **changes: Any) -> PretrainedConfig:
    values = {**FAMILIES[family], "head_dim": dim, **changes}
    return getattr(tf, values.pop("config"))(**values)


# Layers of full attention, packed windows, transformers' own windows, states beside attention and in its place.
KINDS: dict[str, Callable[[int], PretrainedConfig]] = {
    "full": lambda dim: _config("llama", dim),
    "boundary": lambda dim: _config("llama", dim, num_hidden_layers=4),
    "full and window": lambda dim: _config("gemma3_hybrid", dim, sliding_window=130),
    "windows": lambda dim: tf.MistralConfig(**COMMON, **HEADS, head_dim=dim, sliding_window=100),
    "full and exact window": lambda dim: _config("gemma3_hybrid", dim),
    "full beside a state": lambda dim: _config("falcon_h1", dim),
    "state and full": lambda dim: _config("qwen3_next", dim),
}


def model_of(cache: TurboQuantCache, value_dim: int, dtype: torch.dtype) -> CacheModel:
    layers = []
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        if isinstance(layer, TurboQuantLayer):
            layout = layer.config.layout(cache_dim(cache), value_dim, dtype)
            layers.append(LayerModel(layer.config, layout, layer.rotary, window))
        else:
            layers.append(LayerModel(None, None, None, window))
    sizes = cache.quantization
    return CacheModel(layers, sizes.page_size, sizes.recent_window, sizes.sink_tokens, cache.table.is_static)


def cache_dim(cache: TurboQuantCache) -> int:
    return int(cache.model_facts["head_dim"])


def holds_state(layer: Any) -> bool:
    return hasattr(layer, "update_recurrent_state")


def is_stateful(cache: TurboQuantCache) -> bool:
    """Whether a layer has recurrent states, with which transformers cannot crop."""
    return any(holds_state(layer) for layer in cache.layers)


# -- forward passes ----------------------------------------------------------------------------------------------------
class Passes:
    """Tokens for caches of one shape, and attention over them."""

    def __init__(self, heads: int, dim: int, value_dim: int, dtype: torch.dtype, seed: int) -> None:
        self.heads, self.dim, self.value_dim, self.dtype = heads, dim, value_dim, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.key_scale = self.random(heads, 1, dim).float().exp()  # channels that are worth balancing
        self.key_shift = 2 * self.random(heads, 1, dim).float()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def states(self, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        key = self.random(rows, self.heads, tokens, self.dim).float() * self.key_scale + self.key_shift
        value = self.random(rows, self.heads, tokens, self.value_dim)
        return key.to(self.dtype), value, self.random(rows, 2 * self.heads, tokens, self.dim)

    def run(self, cache: TurboQuantCache, model: CacheModel, hidden: Tensor, modes: list[str], makes_mask: bool) -> None:
        """One forward pass, as a model makes it: layer by layer `update`, then what its attention function does.

        Args:
            hidden: bool [B, n], the new tokens that are padding, or holes.
            modes: of each layer: "attend", "dense" (some other attention reads a copy) or "unread".
            makes_mask: whether attention gets a mask where nothing is hidden.
        """
        rows, tokens = hidden.shape
        past = model.hidden if model.rows else hidden[:, :0]
        shown = ~torch.cat([past, hidden], 1)
        makes_mask = makes_mask or not bool(shown.all())
        new: list[New] = []
        for i, (layer, held) in enumerate(zip(model.layers, cache.layers, strict=True)):
            key, value, query = self.states(rows, tokens)
            if holds_state(held):
                model.states[i] = self.random(rows, 2, 5, 3)
                cache.update_recurrent_state(model.states[i], i)
            if not isinstance(held, TurboQuantLayer):
                new.append(New(key, value))
                if hasattr(held, "update"):
                    first = model.first_seen(layer, model.length)
                    read = cache.update(key, value, i)
                    for given, history, tensor in zip((key, value), (layer.key, layer.value), read, strict=True):
                        assert torch.equal(tensor, torch.cat([history[:, :, first:], given], 2) if model.rows else given)
                continue
            history = model.content(layer) if model.rows else (key[:, :, :0], value[:, :, :0])
            first = model.first_seen(layer, model.length)
            whole = [torch.cat(both, 2)[:, :, first:] for both in zip(history, (key, value), strict=True)]
            handles = cache.update(key, value, i)
            uses_mask = modes[i] == "attend" and (makes_mask or layer.window is not None)
            new.append(New(key, value, query if modes[i] == "attend" else None, shown if uses_mask else None))
            if modes[i] == "dense":
                for handle, expected in zip(handles, whole, strict=True):
                    assert torch.equal(handle.dense()[:, :, : expected.shape[2]], expected), "a dense read"
            elif modes[i] == "attend":
                mask = self.mask(model, layer, shown, first, handles[0].shape[2]) if uses_mask else None
                out = turboquant_attention(torch.nn.Module(), query, *handles, mask)[0]
                if self.dtype == torch.float32:
                    self.check_attention(out, query, whole, shown[:, first:], layer.window)
        # The first layer to take them in says where rows start; one that nobody reads does so later than all others.
        taken = [i for i, held in enumerate(cache.layers) if isinstance(held, TurboQuantLayer) and modes[i] != "unread"]
        model.forward(new, hidden, bool(taken) and new[taken[0]].keep is not None)

    @staticmethod
    def visible(queries: int, keys: int, window: int | None) -> Tensor:
        """Bool [queries, keys] of causal attention; the last query is the newest key."""
        apart = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        return (apart >= 0) & (apart < (window or keys))

    def mask(self, model: CacheModel, layer: LayerModel, shown: Tensor, first: int, width: int) -> Tensor:
        """Compact for some layers, complete for others, where a window or a static cache needs it."""
        queries = shown.shape[1] - model.length
        seen = shown[:, first:]
        compact = seen[:, None, None].to(torch.uint8)
        complete = seen[:, None, None] & self.visible(queries, seen.shape[1], layer.window)
        needs_complete = layer.window is not None or model.is_static or layer is model.layers[-1]
        mask = complete if needs_complete else compact
        return torch.nn.functional.pad(mask, (0, width - mask.shape[3]))

    def check_attention(self, out: Tensor, query: Tensor, whole: list[Tensor], shown: Tensor, window: int | None) -> None:
        key, value = (tensor.repeat_interleave(2, 1) for tensor in whole)
        mask = shown[:, None, None] & self.visible(query.shape[2], key.shape[2], window)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        is_seen = mask.any(-1).transpose(1, 2)[..., None]  # [B, q, 1, 1]: a query of padding may see nothing
        off = (out - expected).abs().masked_fill(~is_seen, 0)
        assert float(off.max()) < 2e-3, f"attention is off by {float(off.max())}"
