"""What a model puts into its cache, by its config alone: shapes of keys, values and recurrent states, and its own size.

No table of model families: the model is built on torch's meta device, where tensors have shapes and no memory, and reads two
tokens there. Keys and values then have the shapes that a real cache gets, and so have convolution and recurrent states. That
takes a tenth of a second for small models and about one for the largest.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache, PretrainedConfig

from ..errors import first_line
from ..generation.comparison import cache_argument
from ..layers.plan import decoder_config
from ..reporting.memory import tensors_of

PROBE = 2  # tokens: with a single one, some models take the path for decoding, which expects states to be there


@dataclass(frozen=True)
class LayerShapes:
    """What one row of a batch adds to one layer of the cache.

    Attributes:
        kv_heads, key_dim, value_dim: of its keys and values; all 0 in a layer that holds none of its own.
        state_bytes: bytes of convolution and recurrent states, which do not grow with the text.
        index_bytes: bytes a token of what else it keeps (the keys of an indexer, in sparse attention).
    """

    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    state_bytes: int = 0
    index_bytes: int = 0


@dataclass(frozen=True)
class ModelShapes:
    """Layer by layer, and the bytes of the weights in that dtype (None where only the text half could be built)."""

    layers: tuple[LayerShapes, ...]
    weight_bytes: int | None


def model_shapes(config: PretrainedConfig, dtype: torch.dtype) -> ModelShapes:
    """The shapes of a model with this config, in this dtype.

    Raises:
        ValueError: transformers has no model for the config, or it cannot run without data.
    """
    # In float16 some models look for infinities, which takes data; bfloat16 is as wide.
    return _model_shapes(_Key(config), torch.bfloat16 if dtype == torch.float16 else dtype)


class _Key:
    """A config that `lru_cache` can tell from others."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.text = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


@lru_cache(maxsize=64)
def _model_shapes(key: _Key, dtype: torch.dtype) -> ModelShapes:
    failed: list[Exception] = []
    for kind, config in _candidates(key.config):
        try:
            model = _on_meta(kind, config, dtype)
            layers = _probe(model, config)
        except Exception as error:  # any model's own code runs here
            failed.append(error)
            continue
        whole = config.model_type == key.config.model_type
        return ModelShapes(layers, _weight_bytes(model) if whole else None)
    reason = first_line(failed[0]) if failed else "transformers has no generating model for it"
    raise ValueError(f"no cache can be estimated for a {key.config.model_type!r} model: {reason}")


def _candidates(config: PretrainedConfig) -> Iterator[tuple[Any, PretrainedConfig]]:
    """Classes that may build the model, with the config that each takes: the whole model, or its text half."""
    for name in getattr(config, "architectures", None) or ():
        if (found := getattr(transformers, name, None)) is not None:
            yield found, copy.deepcopy(config)
    decoders = (AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    pairs = (transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq)
    for auto in pairs if config.is_encoder_decoder else decoders:
        if type(config) in auto._model_mapping:
            yield auto, copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if text is not config:
        yield AutoModelForCausalLM, copy.deepcopy(text)


def _on_meta(kind: Any, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    with torch.device("meta"), _quiet():
        make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        # Only eager attention decides nothing by the contents of a mask. A quantized checkpoint caches what its model does.
        vars(config).pop("quantization_config", None)
        model = make(config, dtype=dtype, attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):
        with _quiet():
            model.set_experts_implementation("batched_mm")  # without branches by where tokens go
    return model


def _probe(model: Any, config: PretrainedConfig) -> tuple[LayerShapes, ...]:
    """Let the model read a few tokens, and look into its cache."""
    cache = DynamicCache(config=decoder_config(config))
    given: Any = cache
    ids = torch.ones(1, PROBE, dtype=torch.long, device="meta")
    arguments = {"input_ids": ids}
    if config.is_encoder_decoder:
        given = EncoderDecoderCache(cache, DynamicCache())
        arguments["decoder_input_ids"] = ids
        if model.main_input_name != "input_ids":
            arguments[model.main_input_name] = _features(model)
            del arguments["input_ids"]
    with torch.no_grad(), _quiet():
        model(**arguments, **{cache_argument(model): given}, use_cache=True)
    return tuple(_shapes(layer) for layer in cache.layers)


def _features(model: Any) -> Tensor:
    """What a speech model's encoder takes in place of tokens: Whisper's spectrum."""
    config = model.config
    return torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions, dtype=model.dtype, device="meta")


def _shapes(layer: Any) -> LayerShapes:
    held = {name: value for name, value in vars(layer).items() if name not in ("keys", "values")}
    states = [*tensors_of(held.pop("conv_states", None)), *tensors_of(held.pop("recurrent_states", None))]
    per_token = [t for t in tensors_of(held) if t.device.type == "meta" and t.ndim > 0]
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    found = LayerShapes(state_bytes=sum(t.nbytes for t in states), index_bytes=sum(t.nbytes for t in per_token) // PROBE)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.ndim != 4:
        return found
    return replace(found, kv_heads=keys.shape[1], key_dim=keys.shape[3], value_dim=values.shape[3])


def _weight_bytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


class _quiet(warnings.catch_warnings):
    """No warnings about a model that is not there to be used: slow kernels, tokens beyond the vocabulary."""

    def __enter__(self) -> Any:
        self._level = transformers.logging.get_verbosity()
        entered: Sequence[Any] | None = super().__enter__()
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        return entered

    def __exit__(self, *exception: Any) -> None:
        transformers.logging.set_verbosity(self._level)
        super().__exit__(*exception)
