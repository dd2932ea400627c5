"""The caches that are compared: how to make one, which attention function reads it, whether `generate()` compiles it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PretrainedConfig, StaticCache
from transformers.utils import import_utils

from eval.measures.other_caches import OTHERS
from tq_hf import TurboQuantCache
from tq_hf.config import PRESETS

Make = Callable[[PretrainedConfig, int], Any]
STATIC = ", static"
FLASH_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


@dataclass(frozen=True)
class BenchCache:
    """One column of the benchmark.

    Attributes:
        name: unique.
        make: an empty cache for a model's config and a capacity in tokens.
        attention: the attention function of the model that it is measured with.
        compiled: whether `generate()` compiles decoding by itself.
        packed: whether it is this project's, with pages to be read packed.
        slow: whether its steps take an order of magnitude longer than other caches' do.
        missing: why it cannot be made here; None: it can.
    """

    name: str
    make: Make
    attention: str = "sdpa"
    compiled: bool = False
    packed: bool = False
    slow: bool = False
    missing: Callable[[], str | None] = lambda: None


def _flash(name: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        check = getattr(import_utils, f"is_flash_attn_{name.rsplit('_', 1)[1]}_available", None)
        if check is None:
            return f"this release of transformers has no {name}"
        return None if check() else f"{name} is not installed"

    return missing


def _packed(preset: str) -> list[BenchCache]:
    def dynamic(config: PretrainedConfig, capacity: int) -> Any:
        return TurboQuantCache(config, preset)

    def static(config: PretrainedConfig, capacity: int) -> Any:
        return TurboQuantCache(config, preset, max_cache_len=capacity)

    return [
        BenchCache(preset, dynamic, "turboquant", packed=True),
        BenchCache(preset + STATIC, static, "turboquant", compiled=True, packed=True),
    ]


def _dynamic(config: PretrainedConfig, capacity: int) -> Any:
    return DynamicCache(config=config)


def _static(config: PretrainedConfig, capacity: int) -> Any:
    return StaticCache(config, max_cache_len=capacity)


def _quantized(name: str) -> BenchCache:
    other = OTHERS[name]
    return BenchCache(name, lambda config, capacity: other.make(config), slow=True, missing=other.missing)


CACHES: dict[str, BenchCache] = {
    cache.name: cache
    for cache in (
        BenchCache("StaticCache", _static, compiled=True),
        *reversed(_packed("tq4")),
        BenchCache("DynamicCache", _dynamic),
        *(
            each
            for name in FLASH_ATTENTIONS
            for each in (
                BenchCache(f"DynamicCache, {name}", _dynamic, name, missing=_flash(name)),
                BenchCache(f"StaticCache, {name}", _static, name, compiled=True, missing=_flash(name)),
            )
        ),
        _quantized("QuantizedCache quanto, 4 bits"),
        _quantized("QuantizedCache hqq, 4 bits"),
        *(cache for preset in PRESETS if preset != "tq4" for cache in _packed(preset)),
    )
}
DEFAULT = tuple(name for name, cache in CACHES.items() if not cache.packed or name in ("tq4", "tq4" + STATIC, "tq3", "tq2"))
QUICK = ("StaticCache", "tq4" + STATIC, "DynamicCache", "tq4")


def warm_up_prompt(cache: BenchCache, made: Any) -> int:
    """Tokens of a short prompt after which a page falls due in the second step, so that all kernels are compiled."""
    if not cache.packed:
        return 192
    settings = made.quantization
    return settings.sink_tokens + settings.recent_window + 2 * settings.page_size - 2
