"""Which layers of a model's cache are packed, and why the others are not.

transformers builds a cache's layers from the model's config. A layer that holds the keys and values of full attention is
packed; every other keeps transformers' class, whatever the model, so that any model that `DynamicCache` serves is served:

- *No keys and values that grow* (linear attention, convolutions, layers that read another layer's keys): nothing to pack.
- *Full attention beside a state space in one layer* (Falcon-H1, Zamba2): the attention's half is packed (`HybridLayer`).
- *A sliding window*: packed where that takes fewer bytes than transformers' own layer, which keeps the window and no more
  (`packs_window`). Not in static caches, whose windows transformers shifts in place, nor at the boundary of the published
  presets: exact pages of a window are larger than its own layer.
- *Latents* (multi-head latent attention: DeepSeek-V3 and its like): exact. They are small already, 576 numbers or 1,152
  bytes per token and layer in bfloat16, where 8 KV heads of 128 take 4,096. transformers expands all of them to the keys and
  values of every head at each step (81,920 bytes per token at 128 heads, one layer at a time), so that pages could not be
  attended to where they lie: 61 layers packed in 4 bits would take 19 KB per token instead of 70 KB, of 150 KB at the peak.
- *A head_dim without a packed layout* (512 in Gemma 4's full layers): exact.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    StaticLayer,
)

from ..config import MODEL_DTYPES, TurboQuantConfig
from ..layout import MAX_HEAD_DIM, MIN_HEAD_DIM
from .rules import boundary_layers
from .sliding import packs_window

ATTENTION = (DynamicLayer, StaticLayer)
WINDOW = DynamicSlidingWindowLayer
HYBRID = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndStaticFullAttentionLayer)


def decoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the text decoder, whose layers T5 and its like count in a field that transformers' caches ignore."""
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_decoder_layers", None)
    if layers is not None and layers != text.num_hidden_layers:
        text = copy.deepcopy(text)
        text.num_hidden_layers = layers
    return text


def plan(
    config: PretrainedConfig, stock: Sequence[Any], quantization: TurboQuantConfig, idle: Collection[int]
) -> tuple[list[str | None], set[int]]:
    """What becomes of each layer of a model's cache.

    Args:
        config: the model's text config.
        stock: the layers of transformers' own cache for it.
        quantization: the packed layers' settings.
        idle: the `idle_layers`.

    Returns:
        Why each of transformers' layers keeps its class, None where it is packed; and which of the packed ones keep the
        model's dtype, as layers at the boundary of the model.
    """
    reasons = _reasons_against_packing(config, stock, quantization, idle)
    packable = [i for i, reason in enumerate(reasons) if reason is None]
    exact = boundary_layers(config, packable, quantization.boundary_layers)
    for i in [i for i in exact if type(stock[i]) is WINDOW]:
        exact.discard(i)
        reasons[i] = "boundary layers with a sliding window stay exact, and transformers' own layer is smaller than pages"
    return reasons, exact


def idle_layers(config: PretrainedConfig, stock: Sequence[Any]) -> frozenset[int]:
    """Layers that have a place in transformers' cache and are never updated: RecurrentGemma keeps the states of its
    recurrent layers itself, and until its `layer_types` said so, caches took them for layers with a window."""
    kinds = getattr(config, "layers_block_type", None) or ()
    return frozenset(i for i, kind in enumerate(kinds) if kind == "recurrent" and hasattr(stock[i], "keys"))


def _reasons_against_packing(
    config: PretrainedConfig, stock: Sequence[Any], quantization: TurboQuantConfig, idle: Collection[int]
) -> list[str | None]:
    # One config for all layers, or one a layer; shared layers at the end may have no cache layer (Gemma 3n).
    per_layer = getattr(config, "per_layer_config", None) or [config] * len(stock)
    reasons: list[str | None] = []
    for i, layer in enumerate(stock):
        if i in idle:
            reasons.append("a recurrent layer, whose state the model keeps itself")
        elif type(layer) not in (*ATTENTION, *HYBRID, WINDOW):
            reasons.append(f"{type(layer).__name__} holds no keys and values of full attention")
        elif getattr(per_layer[i], "kv_lora_rank", None):
            reasons.append(f"latents stay exact (multi-head latent attention, kv_lora_rank={per_layer[i].kv_lora_rank})")
        elif type(layer) is WINDOW:
            reasons.append(_reason_of_window(per_layer[i], layer.sliding_window, quantization))
        else:
            reasons.append(_reason_of_dim(_head_dim(per_layer[i]), quantization))
    return reasons


def _head_dim(config: Any) -> int | None:
    """The head_dim that the config tells, if it does: the first update checks the real one."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    dim = getattr(config, "head_dim", None) or (hidden // heads if isinstance(heads, int) and hidden else None)
    return dim if isinstance(dim, int) else None


def _reason_of_window(config: Any, window: int, quantization: TurboQuantConfig) -> str | None:
    dim, dtype = _head_dim(config), getattr(config, "dtype", None)
    if dim is None:
        return "the config tells no head_dim, without which there is no telling whether a packed window is smaller"
    if reason := _reason_of_dim(dim, quantization):
        return reason
    if packs_window(quantization, window, dim, dim, dtype if dtype in MODEL_DTYPES else torch.bfloat16):
        return None
    return f"transformers' own layer is smaller for a sliding window of {window} tokens"


def _reason_of_dim(dim: int | None, quantization: TurboQuantConfig) -> str | None:
    if dim is not None:
        try:
            quantization.layout(dim, dim, torch.bfloat16)
        except ValueError:
            return f"there are pages for an even head_dim from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, and this one is {dim}"
    return None
