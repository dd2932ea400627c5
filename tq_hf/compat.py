"""Where the supported releases of transformers differ."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicLayer


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
