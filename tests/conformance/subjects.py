"""What a decoding mode runs on: one model with one kind of cache.

`Stock` gives it transformers' `DynamicCache`, `Packed` a `TurboQuantCache` whose pages fall due early and hold the model's
dtype, so that both must give the same tokens.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from tests.tiny_models import FAMILIES, attentions, cache_for, prompt, tiny_model, use_attention
from tq_hf import TurboQuantCache, disable, enable

SMALL = {"page_size": 32, "recent_window": 0, "sink_tokens": 4}  # the first page falls due at 36 tokens


@functools.cache
def model_of(family: str, seed: int = 0) -> PreTrainedModel:
    """The family's tiny model; skips the test where this release of transformers does not have the family."""
    if not hasattr(tf, FAMILIES[family]["config"]):
        pytest.skip(f"transformers {tf.__version__} has no {FAMILIES[family]['config']}")
    return tiny_model(family, seed=seed)


class Subject:
    """A model and the caches that it is given.

    Attributes:
        edits_rows: whether rows of the cache can be repeated and selected.
        model: in eval mode, float32, with this subject's attention function.
        made: every cache that was made, to look into afterwards.
    """

    edits_rows = True

    def __init__(self, family: str, attention: str) -> None:
        self.family = family
        self.model = model_of(family)
        self.attention = attention
        self.made: list[Any] = []

    def _decoder_cache(self, **options: Any) -> Any:
        raise NotImplementedError

    def cache(self, **options: Any) -> Any:
        """A fresh cache for `generate`. `max_cache_len` asks for a static one."""
        cache = self._decoder_cache(**options)
        self.made.append(cache)
        return cache_for(self.model, cache)

    @contextlib.contextmanager
    def plain(self) -> Iterator[PreTrainedModel]:
        """The model for calls that name no cache."""
        yield self.model

    def assistant(self) -> PreTrainedModel:
        """Another model of the family, right in some of its guesses."""
        return model_of(self.family, seed=1)

    def inputs(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """`generate`'s arguments for these tokens: the prompt, or an encoder-decoder's first decoded tokens."""
        mask = torch.ones_like(ids) if mask is None else mask
        if not self.model.config.is_encoder_decoder:
            return {"input_ids": ids, "attention_mask": mask}
        source = prompt(len(ids), 9, seed=5)
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "decoder_input_ids": ids,
                "decoder_attention_mask": mask}  # fmt: skip

    def generate(self, inputs: Tensor | dict[str, Any], cache: Any, new: int = 6, **options: Any) -> Any:
        """`model.generate`, exactly `new` tokens, greedy unless `options` say otherwise.

        Without repeats, since an untrained model otherwise says the same token again and again.
        """
        if isinstance(inputs, Tensor):
            inputs = self.inputs(inputs)
        settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new, "min_new_tokens": new}
        settings |= {"no_repeat_ngram_size": 2, **options}
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")  # `past_key_values=` is the name that all releases know
            torch.manual_seed(11)
            if cache is None:
                return self.model.generate(**inputs, **settings)
            return self.model.generate(**inputs, past_key_values=cache, **settings)

    def forks(self, cache: Any, n: int) -> list[Any]:
        """Caches that go on from here, each on its own."""
        return [copy.deepcopy(cache) for _ in range(n)]

    def reloaded(self, cache: Any) -> Any:
        """The cache after it has been in a file."""
        return copy.deepcopy(cache)

    def read(self, inputs: Tensor | dict[str, Any], cache: Any) -> None:
        """Fill the cache with these tokens."""
        self.generate(inputs, cache, new=1)

    def forward(self, ids: Tensor, mask: Any, cache: Any, start: int) -> Tensor:
        """Logits of one forward pass over the tokens at positions from `start` on."""
        given = {"past_key_values": cache, "use_cache": True}
        if self.model.config.is_encoder_decoder:
            given |= {
                "input_ids": prompt(len(ids), 9, seed=5),
                "decoder_input_ids": ids,
                "decoder_attention_mask": mask,
            }
        else:
            position = torch.arange(start, start + ids.shape[1])[None]
            given |= {"input_ids": ids, "attention_mask": mask, "position_ids": position}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.model(**given).logits

    def whole_mask(self, keep: Tensor, cache: Any) -> Tensor | dict[str, Tensor]:
        """4D masks as the model and its attention function want complete ones: one, or one for each kind of layer.

        Args:
            keep: bool [q, kv], which of the cached and the new positions the new ones see in a layer with full attention.
        """
        config = self.model.config.get_text_config(decoder=True)
        kinds = list(getattr(config, "layer_types", None) or ["full_attention"])
        kinds = [{"hybrid": "full_attention"}.get(kind, kind) for kind in kinds]
        masks = {}
        for kind in sorted({"full_attention", "sliding_attention", "chunked_attention"}.intersection(kinds)):
            layer = kinds.index(kind)  # layers that share keys come after the ones that have them
            shown, first = cache.get_mask_sizes(len(keep), layer)
            query, key = torch.arange(keep.shape[1])[-len(keep) :, None], torch.arange(keep.shape[1])
            reach = torch.ones_like(keep)
            if kind == "sliding_attention":
                reach = key > query - config.sliding_window
            elif kind == "chunked_attention":
                reach = key // config.attention_chunk_size == query // config.attention_chunk_size
            mask = (keep & reach)[None, None, :, first : first + shown]
            if self.attention == "eager":
                mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            masks[kind] = mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def __enter__(self) -> Subject:
        use_attention(self.model, self.attention)
        return self

    def __exit__(self, *exception: Any) -> None:
        use_attention(self.model, "eager")


class Stock(Subject):
    """With `DynamicCache`, or with `StaticCache` where a static cache is asked for and `static` is set."""

    def __init__(self, family: str, static: bool = False) -> None:
        super().__init__(family, "sdpa" if "sdpa" in attentions(family) else "eager")
        self.static = static
        # transformers' recurrent states cannot be repeated: it refuses, or (Falcon-H1) repeats keys and values alone.
        self.edits_rows = "LinearAttention" not in str([type(layer) for layer in self._decoder_cache().layers])

    def _decoder_cache(self, **options: Any) -> Any:
        if self.static and options:
            return StaticCache(config=self.model.config.get_text_config(decoder=True), **options)
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))


class Packed(Subject):
    """With `TurboQuantCache`."""

    def __init__(self, family: str, attention: str, preset: str = "raw") -> None:
        super().__init__(family, attention)
        self.preset = preset

    def _decoder_cache(self, **options: Any) -> Any:
        return TurboQuantCache(self.model.config, self.preset, **SMALL, **options)

    def forks(self, cache: Any, n: int) -> list[Any]:
        return [self._around(cache, fork) for fork in self.made[-1].fork(n)]

    def reloaded(self, cache: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            self.made[-1].save(Path(folder) / "cache")
            return self._around(cache, TurboQuantCache.load(Path(folder) / "cache", self.model.config))

    def _around(self, cache: Any, decoder: TurboQuantCache) -> Any:
        """What `cache` is, with another decoder's half if it has two."""
        self.made.append(decoder)
        if not isinstance(cache, EncoderDecoderCache):
            return decoder
        whole = EncoderDecoderCache(decoder, copy.deepcopy(cache.cross_attention_cache))
        whole.is_updated = dict(cache.is_updated)
        return whole

    @contextlib.contextmanager
    def plain(self) -> Iterator[PreTrainedModel]:
        enable(self.model, self.preset, **SMALL)
        prepare = self.model._prepare_cache_for_generation
        make = prepare._new_cache
        prepare._new_cache = lambda config: self.made.append(make(config)) or self.made[-1]
        try:
            yield self.model
        finally:
            disable(self.model)

    def packed_tokens(self) -> list[int]:
        return [cache.report().packed_tokens for cache in self.made]
