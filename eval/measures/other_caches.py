"""The other caches that `compare` measures, under one interface: how to make one, and how much of it is quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, QuantizedCache, cache_utils
from transformers.cache_utils import Cache, DynamicLayer

RESIDUAL_LENGTH = 128  # tokens that transformers' QuantizedCache keeps exact, at most: its default
FP8 = torch.float8_e4m3fn


class Fp8CastLayer(DynamicLayer):
    """Keys and values cast to fp8 (e4m3, saturating), and back to the model's dtype whenever they are read."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        dtype = key_states.dtype
        stored = super().update(_as_bytes(key_states), _as_bytes(value_states), *args, **kwargs)
        key, value = (each.view(FP8).to(dtype) for each in stored)
        return key, value


def _as_bytes(states: Tensor) -> Tensor:
    """fp8 as uint8, which all tensor operations know."""
    most = torch.finfo(FP8).max
    return states.clamp(-most, most).to(FP8).view(torch.uint8)


class Fp8CastCache(Cache):
    """`DynamicCache` with its full-attention layers in fp8."""

    def __init__(self, config: PretrainedConfig) -> None:
        layers = DynamicCache(config=config).layers
        super().__init__(layers=[Fp8CastLayer() if type(layer) is DynamicLayer else layer for layer in layers])


@dataclass(frozen=True)
class OtherCache:
    """A cache of `compare` that is not this project's.

    Attributes:
        name: unique.
        make: an empty cache for a model's config.
        missing: why it cannot be made here; None: it can.
    """

    name: str
    make: Callable[[PretrainedConfig], Any]
    missing: Callable[[], str | None] = lambda: None


def _package(module: str, name: str) -> Callable[[], str | None]:
    return lambda: None if _is_there(module) else f"{name} is not installed: pip install {name}"


def _newer_transformers() -> str | None:
    if hasattr(cache_utils, "Fp8QuantizedLayer"):
        return None
    return f"transformers {transformers.__version__} has no fp8 backend: later releases do"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that the module would lie in
        return False


def _quantized(backend: str, **options: Any) -> Callable[[PretrainedConfig], Any]:
    return lambda config: QuantizedCache(backend, config, **options)


QUANTO, HQQ = _package("optimum.quanto", "optimum-quanto"), _package("hqq", "hqq")
DYNAMIC = "DynamicCache"
OTHERS = {
    each.name: each
    for each in (
        OtherCache(DYNAMIC, lambda config: DynamicCache(config=config)),
        OtherCache("fp8 cast", Fp8CastCache),
        OtherCache("QuantizedCache fp8", _quantized("fp8"), missing=_newer_transformers),
        OtherCache("QuantizedCache quanto, 4 bits", _quantized("quanto", nbits=4), missing=QUANTO),
        OtherCache("QuantizedCache quanto, 2 bits", _quantized("quanto", nbits=2), missing=QUANTO),
        OtherCache("QuantizedCache hqq, 4 bits", _quantized("hqq", nbits=4, axis_key=1, axis_value=1), missing=HQQ),
        OtherCache("QuantizedCache hqq, 2 bits", _quantized("hqq", nbits=2, axis_key=1, axis_value=1), missing=HQQ),
    )
}


def other_chunks(prompt: int, length: int, residual: int = RESIDUAL_LENGTH) -> list[tuple[int, int]]:
    """Cut a text so that each token behind a prompt reads what it would read if fed alone: [(start, end), ...].

    transformers' `QuantizedCache` quantizes everything with the token that fills its `residual` exact ones; some releases
    count only one new token however many come, so that it has to come alone.
    """
    ends = {prompt, length}
    for start in range(prompt, length, residual):
        ends |= {start + residual - 1, start + residual}
    cuts = sorted(end for end in ends if end <= length)
    return list(zip([0, *cuts], cuts))


def quantizing_layers(cache: Any) -> list[Any]:
    """The layers that hold something quantized."""
    return [
        layer
        for layer in cache.layers
        if isinstance(layer, Fp8CastLayer) or getattr(layer, "_quantized_keys", None) is not None
    ]


def quantized_share(cache: Any) -> float:
    """The share of tokens that are quantized in the layers that quantize; 0 if none does."""
    for layer in quantizing_layers(cache):  # which are alike
        if isinstance(layer, Fp8CastLayer):
            return 1.0
        exact = layer.keys.shape[-2] if layer.keys.ndim == 4 else 0
        return 1 - exact / layer.get_seq_length()
    return 0.0
