"""A trained model, unquantized pages: every way of using a cache gives token for token what `DynamicCache` gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tests.test_generate import generate
from tq_hf import TurboQuantCache

pytestmark = pytest.mark.network
SMALL = {"page_size": 32, "recent_window": 0, "sink_tokens": 4}
PROMPT, NEW = 126, 8  # the fourth page falls due at 132 tokens
TEXT = (Path(__file__).parents[1] / "tq_hf" / "handbook.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def exact_model(embedded_folder: Path) -> tuple[Any, Tensor]:
    """The embedded model in float32, and a text's tokens."""
    model = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(embedded_folder)(TEXT, return_tensors="pt").input_ids[:, : 2 * PROMPT]


def padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    batch, mask = ids.view(2, PROMPT).clone(), torch.ones(2, PROMPT, dtype=torch.long)
    batch[1, :37], mask[1, :37] = 0, 0
    return batch, mask


def forked(model: Any, ids: Tensor, cache: Any) -> list[Tensor]:
    with torch.no_grad():
        model(ids[:, :100], past_key_values=cache)
    forks = cache.fork(2) if isinstance(cache, TurboQuantCache) else [DynamicCache(config=model.config) for _ in range(2)]
    texts = [torch.cat([ids[:, :100], ids[:, start : start + 20]], 1) for start in (100, 150)]
    return [generate(model, text, fork, new=NEW) for text, fork in zip(texts, forks)]


MODES: dict[str, Callable[[Any, Tensor, Any], Any]] = {
    "greedy": lambda model, ids, cache: generate(model, ids[:, :PROMPT], cache, new=16),
    "beams": lambda model, ids, cache: generate(model, ids[:, :PROMPT], cache, new=NEW, num_beams=2),
    "lookup": lambda model, ids, cache: generate(model, ids[:, :PROMPT], cache, new=16, prompt_lookup_num_tokens=3),
    "padded batch": lambda model, ids, cache: generate(model, padded(ids)[0], cache, padded(ids)[1], new=NEW),
    "forks": forked,
}


@pytest.mark.parametrize(("mode", "attention"), zip(MODES, ["turboquant", "sdpa", "turboquant", "sdpa", "turboquant"]))
def test_tokens_are_those_of_dynamic_cache(exact_model: tuple[Any, Tensor], mode: str, attention: str) -> None:
    model, ids = exact_model
    model.set_attn_implementation("sdpa")
    theirs = MODES[mode](model, ids, DynamicCache(config=model.config))
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    model.set_attn_implementation(attention)
    ours = MODES[mode](model, ids, cache)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    assert all(layer.packed_tokens >= 64 for layer in cache.report().layers)


def test_a_saved_cache_goes_on(exact_model: tuple[Any, Tensor], tmp_path: Path) -> None:
    model, ids = exact_model
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    with torch.no_grad():
        model(ids[:, :100], past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = TurboQuantCache.load(tmp_path / "cache", model.config)
    tokens = generate(model, ids[:, :110], loaded, new=NEW)
    assert torch.equal(tokens, generate(model, ids[:, :110], DynamicCache(config=model.config), new=NEW))
