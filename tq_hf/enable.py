"""`enable(model)`: plain `model.generate()` and `pipeline("text-generation")` build a `TurboQuantCache` by themselves.

One attribute of the one model object is overridden, the method with which `generate()` prepares its cache; no class and no
module of transformers is changed. transformers decides as ever whether a call needs a cache at all, and of which kind: only
where that is a fresh `DynamicCache` is it replaced. A `custom_generate` function would be the public way in, but is handed
neither an assistant model nor a streamer, and pipelines would need it at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

from .cache import TurboQuantCache
from .config import DEFAULT_PRESET, TurboQuantConfig

Model = TypeVar("Model", bound=Any)

_METHOD = "_prepare_cache_for_generation"
_NAMES = ("cache", "past_key_values")  # of the model's argument: from transformers 5.24 on, and before


def enable(model: Model, preset: str | TurboQuantConfig = DEFAULT_PRESET, **options: Any) -> Model:
    """Let this model's `generate()` build a fresh `TurboQuantCache` for every call.

        enable(model, preset="tq4")
        model.generate(**inputs)
        pipeline("text-generation", model=model, tokenizer=tokenizer)("Once")

    A call that passes a cache, `use_cache=False` or `cache_implementation=` (or whose generation config does) gets what it
    asks for. Enabling again replaces the settings. Copies of the model (`copy.deepcopy`, `pickle`) are enabled as well;
    `save_pretrained` writes the same files as before. An assistant model keeps its own cache unless it is enabled too.

    Args:
        model: a transformers model that can `generate()`. Of a PEFT model take `model.get_base_model()`.
        preset, options: as for `TurboQuantCache`, fields of `TurboQuantConfig` and `max_cache_len` included.

    Returns:
        The model itself.

    Raises:
        ValueError: an object that cannot generate, a model that manages its cache by itself, or anything for which
            `TurboQuantCache` refuses this model's config. The model is unchanged then.
    """
    if not isinstance(model, GenerationMixin) or not hasattr(model, _METHOD):
        raise ValueError(f"a {type(model).__name__} has no generate(): expected a transformers model that has, e.g. of"
                         " AutoModelForCausalLM.")  # fmt: skip
    if not model._supports_default_dynamic_cache():
        raise ValueError(f"{type(model).__name__} makes its own kind of cache, which TurboQuantCache cannot replace.")
    TurboQuantCache(model.config, preset, **options)  # raises now what would fail at each call
    used = vars(model).get(_METHOD)
    replaced = used.replaced if isinstance(used, _CachePreparation) else used
    setattr(model, _METHOD, _CachePreparation(model, preset, options, replaced))
    return model


def disable(model: Model) -> Model:
    """Undo `enable(model)`: `generate()` makes transformers' caches again.

    Returns:
        The model itself.

    Raises:
        ValueError: the model is not enabled.
    """
    used = getattr(model, "__dict__", {}).get(_METHOD)
    if not isinstance(used, _CachePreparation):
        raise ValueError(f"this {type(model).__name__} is not enabled: call enable(model) first.")
    delattr(model, _METHOD)
    if used.replaced is not None:
        setattr(model, _METHOD, used.replaced)
    return model


class _CachePreparation:
    """An enabled model's way to prepare a cache: its own, with a fresh `DynamicCache` replaced.

    An object rather than a closure, so that enabled models can be pickled; a copy of the model gets one that refers to it.

    Attributes:
        replaced: what the model object had under that name before; None: its class's method.
    """

    def __init__(
        self,
        model: GenerationMixin,
        preset: str | TurboQuantConfig,
        options: dict[str, Any],
        replaced: Callable[..., Any] | None,
    ) -> None:
        self.model, self.preset, self.options, self.replaced = model, preset, options, replaced

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given = {name: model_kwargs.get(name) for name in _NAMES}
        prepare = self.replaced or getattr(type(self.model), _METHOD).__get__(self.model)
        result = prepare(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.cache_implementation is not None:
            return result
        for name in _NAMES:
            made: Any = model_kwargs.get(name)
            if made is given[name]:
                continue
            if type(made) is DynamicCache:
                model_kwargs[name] = self._new_cache(generation_config)
            elif type(made) is EncoderDecoderCache and type(made.self_attention_cache) is DynamicCache:
                made.self_attention_cache = self._new_cache(generation_config)
        return result

    def _new_cache(self, generation_config: Any) -> TurboQuantCache:
        cache = TurboQuantCache(self.model.config, self.preset, **self.options)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        return cache
