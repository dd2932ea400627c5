"""Keys with a very large bias, as some trained Qwen2 models have: what quantizing them costs, at the model's output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache

LAYERS, DIM = 6, 32
ALL, BOUNDARY = tuple(range(LAYERS)), (0, LAYERS - 1)
SMALL = {"page_size": 32, "recent_window": 16}


def biased_model(layers: tuple[int, ...], norm: float) -> Any:
    """Key biases of this norm in some layers, most of it in a few slow channels, where trained models have it."""
    model = tiny_model("qwen2_bias", num_hidden_layers=LAYERS, head_dim=DIM, initializer_range=0.15)
    pull = torch.zeros(DIM)
    pull[torch.tensor([12, 14, 15, 29, 31])] = torch.tensor([0.3, 1.0, -0.6, 0.2, 0.8])
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.bias.data = (norm if i in layers else 0) * (pull / pull.norm()).repeat(2)
    return model


def divergence(model: Any, preset: str, **options: Any) -> float:
    """Mean KL divergence from the exact cache's next-token distribution at the positions that read packed pages, in nats."""
    ids = prompt(2, 240)
    with torch.no_grad():
        exact = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, 80:]
        cache = TurboQuantCache(model.config, preset, **SMALL, **options)
        model(ids[:, :80], past_key_values=cache)
        packed = torch.cat([model(part, past_key_values=cache).logits for part in ids[:, 80:].split(8, 1)], 1)
    assert cache.report().packed_tokens > 0
    return float(kl(exact, packed))


def kl(exact: Tensor, other: Tensor) -> Tensor:
    ours, theirs = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1).mean()


@pytest.mark.parametrize("layers", [ALL, BOUNDARY], ids=["all", "boundary"])
@pytest.mark.parametrize(("preset", "bound"), [("tq4", 0.001), ("tq3", 0.006), ("tq3v2", 0.035), ("tq2", 0.04)])
def test_a_bias_of_hundreds_costs_our_presets_next_to_nothing(preset: str, bound: float, layers: tuple[int, ...]) -> None:
    plain, biased = (divergence(biased_model(layers, norm), preset) for norm in (0, 700))
    assert biased < bound and biased < 1.3 * plain


@pytest.mark.parametrize("layers", [ALL, BOUNDARY], ids=["all", "boundary"])
def test_without_conditioning_it_costs_a_lot(layers: tuple[int, ...]) -> None:
    """What the bounds above are about: the page mean and the balance are what keeps them."""
    model = biased_model(layers, 700)
    assert divergence(model, "tq4", center_keys=False, balance_keys=False) > 10 * divergence(model, "tq4")


@pytest.mark.parametrize(("preset", "bound"), [("k8v4", 0.01), ("4bit_nc", 0.05), ("k3v4_nc", 0.3), ("3bit_nc", 0.3)])
def test_the_published_presets_stay_bounded(preset: str, bound: float) -> None:
    """They keep the layers at the boundary exact, which helps where the bias is there, and not where it is everywhere."""
    everywhere, there = (divergence(biased_model(layers, 700), preset) for layers in (ALL, BOUNDARY))
    assert there < everywhere < bound
