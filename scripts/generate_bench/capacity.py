"""The largest batch whose caches fit on the GPU beside the weights and decode a few tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from tq_hf.generation.comparison import cache_argument

from .caches import BenchCache
from .measure import failure
from .shapes import prompt

CHUNK = 4096  # tokens of an update
DECODED = 4


def decodes_with(model: Any, cache: BenchCache, rows: int, tokens: int) -> bool:
    """Whether a cache of `rows` x `tokens`, filled through `update()` with random states, decodes `DECODED` tokens.

    Raises:
        RuntimeError: pages of a packed cache were read dequantized.
    """
    device = model.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
    made = None
    try:
        made = cache.make(model.config, tokens + DECODED)
        _fill(model.config, made, rows, tokens, device)
        ids = prompt(model, rows, 1)
        with torch.no_grad():
            for _ in range(DECODED):
                logits = model(ids, use_cache=True, logits_to_keep=1, **{cache_argument(model): made}).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
        ids.tolist()  # errors of the device show here
        if cache.packed and any(table.dense_read_noted for table in made.tables):
            raise RuntimeError("a handle was unpacked: attention read a dequantized copy.")
        assert int(made.get_seq_length()) == tokens + DECODED
    except Exception as error:
        if "oom" not in failure(error):
            raise
        return False
    finally:
        del made
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def _fill(config: Any, made: Any, rows: int, tokens: int, device: torch.device) -> None:
    """Random keys and values, chunk by chunk through all layers, as a prompt read in chunks brings them."""
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    generator = torch.Generator(device).manual_seed(0)
    shape = (rows, heads, min(CHUNK, tokens), dim)
    key, value = (torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2))
    for start in range(0, tokens, CHUNK):
        new = min(CHUNK, tokens - start)
        for layer in range(config.num_hidden_layers):
            made.update(key[:, :, :new], value[:, :, :new], layer)


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest n >= 0 for which `fits(n)`, which is monotonic; `guess` is where the search begins."""
    guess = max(1, guess)
    low, high, stride = 0, None, max(1, guess // 16)
    n = guess
    while high is None or high - low > 1:
        if fits(n):
            low = n
        else:
            high = n
        if high is None:
            n, stride = low + stride, 2 * stride
        elif low == 0:
            n, stride = max(1, high - stride), 2 * stride
        else:
            n = (low + high) // 2
        if high is not None and high <= 1:
            return 0
    return low
