"""Every head_dim that a page can have, through the cache: nothing lost unquantized, and packed pages read as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from tests.test_generate import generate, left_padded
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache

SMALL = {"page_size": 32, "recent_window": 0, "sink_tokens": 4}


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("dim", range(32, 257, 16))
def test_generation_equals_the_reference(dim: int, attention: str) -> None:
    model = tiny_model(head_dim=dim, initializer_range=0.2)
    model.set_attn_implementation(attention)
    ids, mask = left_padded(2, 70, [0, 21])
    expected = generate(model, ids, DynamicCache(config=model.config), mask, new=8)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    assert torch.equal(generate(model, ids, cache, mask, new=8), expected)
    assert cache.report().packed_tokens == 2 * 2 * 64


@pytest.mark.parametrize("preset", ["tq4", "tq3v2", "k8v4"])
@pytest.mark.parametrize("dim", range(32, 257, 16))
@torch.no_grad()
def test_packed_pages_are_read_as_they_are(dim: int, preset: str) -> None:
    model = tiny_model(head_dim=dim)
    model.set_attn_implementation("turboquant")
    ids = prompt(2, 101)
    exact, cache = DynamicCache(config=model.config), TurboQuantCache(model.config, preset, boundary_layers=0, **SMALL)
    for each in (exact, cache):
        model(ids[:, :-1], past_key_values=each)
    twin = copy.deepcopy(cache)
    truth, packed = (model(ids[:, -1:], past_key_values=each).logits for each in (exact, cache))
    model.set_attn_implementation("eager")
    dequantized = model(ids[:, -1:], past_key_values=twin).logits
    assert (packed - dequantized).norm() <= 2e-3 * dequantized.norm()
    assert 1e-5 < (packed - truth).norm() / truth.norm() < 0.2
