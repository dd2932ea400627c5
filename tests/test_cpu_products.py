"""16-bit models whose products a CPU does in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tq_hf import commands, cpu_products, embedded_model
from tq_hf.cpu_products import has_16_bit_products, multiply_in_float32
from tq_hf.generation.comparison import cache_argument


@pytest.mark.parametrize(
    ("capability", "expected"), [("AVX2", False), ("DEFAULT", False), ("AVX512", True), ("SVE256", True)]
)
def test_which_cpus_have_16_bit_products(monkeypatch: pytest.MonkeyPatch, capability: str, expected: bool) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert has_16_bit_products() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_float32_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 8).to(dtype), torch.randn(5, 96).to(dtype)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    multiply_in_float32(layer)
    assert layer.weight.dtype == torch.float32 and layer(x).dtype == dtype
    assert torch.equal(layer(x), exact.to(dtype))


def test_a_model_and_its_cache_keep_their_dtype() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=True)
    model, ids = LlamaForCausalLM(config).to(torch.bfloat16).eval(), torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids).logits
        multiply_in_float32(model)
        cache = DynamicCache(config=config)
        after = model(ids, **{cache_argument(model): cache}).logits
    assert model.dtype == after.dtype == cache.layers[0].keys.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16  # the layer that shared it has its own
    assert (after - before).float().norm() < 0.02 * before.float().norm()


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("has_them", [True, False])
def test_only_the_small_model_is_treated_so(
    monkeypatch: pytest.MonkeyPatch, word_folder: str, is_named: bool, has_them: bool
) -> None:
    """A user's may be too large for float32 weights."""
    treated: list[nn.Module] = []
    monkeypatch.setattr(embedded_model, "embedded_model", lambda: word_folder)
    monkeypatch.setattr(commands, "has_16_bit_products", lambda: has_them)
    monkeypatch.setattr(commands, "multiply_in_float32", treated.append)
    loaded = commands.load(word_folder if is_named else None, torch.device("cpu"))
    assert treated == ([] if is_named or has_them else [loaded.model])


def test_float32_models_are_left_alone() -> None:
    layer = nn.Linear(4, 4)
    cpu_products.multiply_in_float32(layer)
    assert not layer._forward_hooks and not layer._forward_pre_hooks
