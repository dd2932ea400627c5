"""What a cache is going to take, from the model's config alone: no weights, no tokens, no memory.

    estimate_memory(AutoConfig.from_pretrained("meta-llama/Llama-3.1-8B"), "tq4", context=131_072).nbytes

The layers and their block tables are the cache's own, empty; what their tensors would be is counted (`page_count.py`), with
shapes from a model without memory (`state_shapes.py`). So whatever the cache decides about a layer holds here too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, StaticCache

from ..cache import TurboQuantCache
from ..config import DEFAULT_PRESET, MODEL_DTYPES, TurboQuantConfig
from ..layers.full import TurboQuantLayer
from ..layers.hybrid import HybridLayer
from ..layers.plan import decoder_config
from ..reporting.reports import CacheReport, LayerReport, kind_of
from .page_count import PageCount, count_pages
from .state_shapes import LayerShapes, model_shapes

SCALAR_BYTES = 8  # transformers' windows and static lengths are int64 tensors


LARGEST_BATCH = 1 << 20  # where `largest_batch` stops counting


@dataclass(frozen=True, repr=False)
class MemoryEstimate(CacheReport):
    """What a `TurboQuantCache` is going to hold, as its `report()` says it. `str()` gives the same table.

    Attributes:
        context: tokens a row, the new ones included.
        batch: rows.
        bytes_dynamic: what transformers' own cache (`DynamicCache`, or `StaticCache` beside `max_cache_len`) takes for the
            same text in bfloat16. `bytes_bf16` are the keys and values in it that are still needed.
        weight_bytes: of the model in `dtype`; None where only the text half of a larger model could be built.
    """

    context: int
    batch: int
    bytes_dynamic: int
    weight_bytes: int | None
    _arguments: tuple[Any, ...] = field(compare=False)  # a config has no hash

    @property
    def ratio(self) -> float:
        """`bytes_dynamic` over `nbytes`: how many times smaller than transformers' cache in bfloat16."""
        return self.bytes_dynamic / self.nbytes if self.nbytes else 0.0

    def largest_batch(self, gib: float, dynamic: bool = False) -> int:
        """How many sequences of this context fit into so much memory, the weights left out; 0 if not even one.

        Args:
            gib: memory for the cache, in GiB. Where the weights share it, take `weight_bytes` off first.
            dynamic: transformers' own cache in place of the packed one.
        """
        room = gib * 2**30

        def fits(batch: int) -> bool:
            config, preset, context, _, *others = self._arguments
            made = _estimate(config, preset, context, batch, *others)
            return (made.bytes_dynamic if dynamic else made.nbytes) <= room

        # Bytes grow almost evenly with the rows, so that the answer is near; an estimate takes milliseconds a layer.
        held = self.bytes_dynamic if dynamic else self.nbytes
        guess = max(1, int(min(LARGEST_BATCH, room / held * self.batch))) if held else LARGEST_BATCH
        step = 1
        if fits(guess):
            low, high = guess, guess + step
            while high <= LARGEST_BATCH and fits(high):
                step *= 2
                low, high = high, high + step
        else:
            low, high = guess - step, guess
            while low > 0 and not fits(low):
                step *= 2
                low, high = max(0, low - step), low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def estimate_memory(
    config: PretrainedConfig,
    preset: str | TurboQuantConfig = DEFAULT_PRESET,
    context: int = 4096,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    *,
    new_tokens: int = 1,
    max_cache_len: int | None = None,
    **overrides: Any,
) -> MemoryEstimate:
    """What `TurboQuantCache(config, preset, ...)` holds once it has taken `context` tokens in each of `batch` rows.

    To the byte what `cache.report()` says then, after a prompt in one forward pass and decoding, without padding, beams,
    forks or offloading. Of an encoder-decoder model it is the decoder's own cache.

    Args:
        config: the model's config.
        preset, max_cache_len, overrides: as for `TurboQuantCache`.
        context: tokens in the cache (`generate()` does not store its last one); at least 1.
        batch: rows; at least 1.
        dtype: of the model.
        new_tokens: how many of the context's tokens came one by one after the prompt. Pages grow in steps of up to 1/64
            then, and transformers' windows keep a whole prompt until the first of them.

    Raises:
        ValueError: a number out of range, an unknown preset, dtype or option, a head_dim that has no packed layout, or a
            model that transformers cannot build from this config.
    """
    for name, value, least in (("context", context, 1), ("batch", batch, 1), ("new_tokens", new_tokens, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r} is not possible: expected an integer of at least {least}.")
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype={dtype} is not supported: expected one of {MODEL_DTYPES}.")
    if max_cache_len is not None and type(max_cache_len) is int and 0 < max_cache_len < context:
        raise ValueError(f"max_cache_len={max_cache_len} is less than context={context}: expected room for all of it.")
    settings = TurboQuantConfig.from_preset(preset, **overrides)
    if not isinstance(config, PretrainedConfig):
        raise ValueError(f"config is a {type(config).__name__}: expected the model's config, as in model.config.")
    config = copy.deepcopy(config)
    config.dtype = config.get_text_config(decoder=True).dtype = dtype  # as in a model that is loaded so
    return _estimate(config, preset, context, batch, dtype, new_tokens, max_cache_len, settings)


def _estimate(
    config: PretrainedConfig,
    preset: str | TurboQuantConfig,
    context: int,
    batch: int,
    dtype: torch.dtype,
    new_tokens: int,
    max_cache_len: int | None,
    settings: TurboQuantConfig,
) -> MemoryEstimate:
    cache = TurboQuantCache(config, settings, max_cache_len=max_cache_len)
    name = preset if isinstance(preset, str) else cache.preset
    shapes = model_shapes(config, dtype)
    run = _Run(batch, max(1, context - new_tokens), context)
    counts: dict[int, PageCount] = {}
    layers = []
    for i, (layer, held) in enumerate(zip(cache.layers, shapes.layers, strict=True)):
        if isinstance(layer, TurboQuantLayer):
            layer.preset = name
            if id(layer.table) not in counts:
                counts[id(layer.table)] = count_pages(layer.table, batch, run.prompt, context)
            layers.append(_packed(i, layer, held, counts[id(layer.table)], run, dtype))
        else:
            layers.append(_stock(i, layer, held, run, dtype))
    text = decoder_config(config)
    stock = DynamicCache(config=text) if max_cache_len is None else StaticCache(text, max_cache_len=max_cache_len)
    in_bf16 = model_shapes(config, torch.bfloat16).layers
    dynamic = sum(_stock(i, *pair, run, torch.bfloat16).nbytes for i, pair in enumerate(zip(stock.layers, in_bf16)))
    return MemoryEstimate(
        preset=name,
        layers=tuple(layers),
        table_bytes=sum(count.table_bytes for count in counts.values()),
        context=context,
        batch=batch,
        bytes_dynamic=dynamic,
        weight_bytes=shapes.weight_bytes,
        _arguments=(config, preset, context, batch, dtype, new_tokens, max_cache_len, settings),
    )


@dataclass(frozen=True)
class _Run:
    """A batch of rows that read a prompt at once and the rest of the length token by token."""

    rows: int
    prompt: int
    length: int


def _packed(
    i: int, layer: TurboQuantLayer, shapes: LayerShapes, count: PageCount, run: _Run, dtype: torch.dtype
) -> LayerReport:
    """A layer in pages: see `TurboQuantLayer.lazy_initialization` for its tensors."""
    config, heads = layer.config, shapes.kv_heads
    layout = config.layout(shapes.key_dim, shapes.value_dim, dtype)
    dims = shapes.key_dim + shapes.value_dim
    ring = config.recent_window + config.page_size
    nbytes = 4 * count.pages * heads * layout.page_words
    nbytes += run.rows * heads * (ring + count.sinks) * dims * dtype.itemsize
    nbytes += 4 * heads + 4 * 3  # flags, counters
    if config.balance_keys:
        nbytes += 2 * run.rows * heads * shapes.key_dim * 4  # the factors and the queries' energy, fp32
        nbytes += shapes.key_dim * (8 + 4)  # each channel's partner, int64, and its share, fp32
    if isinstance(layer, HybridLayer):
        nbytes += run.rows * shapes.state_bytes
    tokens = run.length if layer.sliding_window is None else min(run.length, layer.sliding_window - 1)
    return LayerReport(
        layer=i,
        kind=kind_of(layer),
        packed_tokens=run.rows * count.packed_tokens,
        exact_tokens=run.rows * count.exact_tokens,
        nbytes=nbytes,
        bytes_bf16=run.rows * tokens * heads * dims * 2,
    )


def _stock(i: int, layer: Any, shapes: LayerShapes, run: _Run, dtype: torch.dtype) -> LayerReport:
    """One of transformers' own layers."""
    per_token = run.rows * shapes.kv_heads * (shapes.key_dim + shapes.value_dim)
    window, capacity = getattr(layer, "sliding_window", None), getattr(layer, "max_cache_len", None)
    scalars = 0
    if capacity is not None:
        shown = stored = capacity  # a static window's is the smaller of both
        scalars = SCALAR_BYTES
    elif window is not None:
        # What it keeps is a view: of the whole prompt, then of the window and one token more.
        shown = min(run.length, window - 1)
        stored = run.length if run.prompt == run.length else min(run.length, window)
        scalars = SCALAR_BYTES
    else:
        shown = stored = run.length
    nbytes = stored * per_token * dtype.itemsize + scalars
    nbytes += run.rows * (shapes.state_bytes + run.length * shapes.index_bytes)
    tokens = run.rows * shown if per_token else 0
    return LayerReport(i, type(layer).__name__, 0, tokens, nbytes, 2 * shown * per_token)
