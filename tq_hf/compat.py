"""Where the supported releases of transformers differ."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

# For a single token, models of older releases (5.17) ask whether a layer has a state, and write the convolution's in place;
# newer ones (5.24) get it from the cache.
ASKS_BEFORE_WRITING = not hasattr(Cache, "get_conv_state")


def reset_layer(layer: Any) -> None:
    """Empty one of transformers' own layers.

    Older releases (5.17 does, 5.24 does not) fill a growing layer's tensors with zeros and append to them afterwards.
    """
    layer.reset()
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        layer.keys = layer.values = None
        layer.is_initialized = False


def reset_cache(cache: Any) -> None:
    """Empty a cache, `TurboQuantCache` or one of transformers' own."""
    cache.reset()
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            reset_layer(layer)


def tensor_parallel_plan(config: Any) -> dict[str, str]:
    """The style of each sharded module of a model with tensor parallelism.

    A plan of the user's own replaces the model's in older releases (5.17), and changes single rules of it in newer ones.
    """
    given = getattr(config.distributed_config, "tp_plan", None)
    usual = config.get_text_config(decoder=True).base_model_tp_plan or {}
    if not isinstance(given, dict):
        return dict(usual)
    if not given or not hasattr(PreTrainedModel, "_resolve_parallel_plans"):
        return dict(given)
    last = {name.rpartition(".")[2] for name in given}
    return {name: style for name, style in usual.items() if name.rpartition(".")[2] not in last} | given
