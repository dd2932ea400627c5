"""`generate()` with packed sliding layers, against transformers' own: pages leave the window in every case."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.test_generate import generate, left_padded, reference
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache
from tq_hf.layers.sliding import SlidingLayer, SlidingTable

WINDOW = 64
SMALL = {"page_size": 32, "recent_window": 8}
# What differs from a family of `tiny_models`.
SLIDING: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("llama", {"config": "MistralConfig", "sliding_window": WINDOW}),
    "gemma2": ("gemma2_softcap", {"sliding_window": WINDOW}),
    "gemma3": ("gemma3_hybrid", {"sliding_window": WINDOW}),
    "gpt_oss": ("gpt_oss_sinks", {"sliding_window": WINDOW}),
    "llama4": (
        "llama",
        {
            "config": "Llama4TextConfig", "head_dim": 16, "intermediate_size_mlp": 64, "attention_chunk_size": WINDOW,
            "num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 1,
        },
    ),
    "gemma3n": (  # layers 2 and 3 read what layers 0 and 1 have stored
        "llama",
        {
            "config": "Gemma3nTextConfig", "num_hidden_layers": 4, "intermediate_size": [64] * 4, "head_dim": 16,
            "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
}  # fmt: skip
CASES = [
    (family, attention)
    for family in SLIDING
    for attention in ("turboquant", "sdpa", "eager")
    if attention == "turboquant" or family in ("mistral", "gemma3", "llama4")
]


def sliding_model(family: str, attention: str = "turboquant", **changes: Any) -> PreTrainedModel:
    base, settings = SLIDING[family]
    model = tiny_model(base, **{**settings, **changes})
    model.set_attn_implementation(attention)
    return model


def raw_cache(model: PreTrainedModel, **options: Any) -> TurboQuantCache:
    return TurboQuantCache(model.config, "raw", **{**SMALL, **options})


def sliding_table(cache: TurboQuantCache) -> SlidingTable:
    (table,) = cache.sliding_tables.values()
    return table


def assert_pages_have_left(cache: TurboQuantCache, tokens: int = 136) -> None:
    """The sliding layers have pages, of a part of the history only."""
    table = sliding_table(cache)
    assert cache.get_seq_length() >= tokens
    assert 0 < table.origin <= cache.get_seq_length() - WINDOW + 1
    for layer in cache.packed_layers:
        report = layer.report(0)
        assert report.packed_tokens > 0
        if isinstance(layer, SlidingLayer):
            assert layer.get_seq_length() - table.origin < WINDOW + 3 * 40
            assert report.exact_tokens < 40 * cache.batch_size


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_padded_batch_gives_the_reference_tokens(family: str, attention: str) -> None:
    model = sliding_model(family, attention)
    ids, mask = left_padded(2, 120, [0, 40])
    scored = {"output_logits": True, "return_dict_in_generate": True, "new": 20}
    expected = reference(model, ids, mask, **scored)
    cache = raw_cache(model)
    result = generate(model, ids, cache, mask, **scored)
    assert torch.equal(result.sequences, expected.sequences)
    for ours, theirs in zip(result.logits, expected.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=1e-4)
    assert_pages_have_left(cache)


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("sinks", [0, 4])
def test_a_padded_row_equals_the_row_alone(attention: str, sinks: int) -> None:
    model = sliding_model("mistral", attention)
    ids, mask = left_padded(2, 120, [30, 0])
    cache = raw_cache(model, sink_tokens=sinks)
    both = generate(model, ids, cache, mask, new=20)
    alone = generate(model, ids[:1, 30:], raw_cache(model, sink_tokens=sinks), new=20)
    assert torch.equal(both[0, 120:], alone[0, 90:])
    assert_pages_have_left(cache)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma3n"])
@pytest.mark.parametrize(("chunk", "pads"), [(37, [0, 0]), (100, [0, 0]), (70, [0, 80])])
def test_chunked_prefill(family: str, chunk: int, pads: list[int]) -> None:
    model = sliding_model(family)
    ids, mask = left_padded(2, 150, pads)
    expected = reference(model, ids, mask, new=8)
    cache = raw_cache(model)
    assert torch.equal(generate(model, ids, cache, mask, new=8, prefill_chunk_size=chunk), expected)
    assert_pages_have_left(cache)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 4}], ids=str
)
def test_decoding_modes(family: str, options: dict[str, int]) -> None:
    model = sliding_model(family)
    lookup = "prompt_lookup_num_tokens" in options
    ids = prompt(1, 40).repeat(1, 3) if lookup else prompt(2, 120)
    expected = reference(model, ids, new=20, **options)
    cache = raw_cache(model)
    assert torch.equal(generate(model, ids, cache, new=20, **options), expected)
    assert_pages_have_left(cache)


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_assisted_decoding(attention: str) -> None:
    model, assistant = sliding_model("mistral", attention), sliding_model("mistral", "sdpa")
    with torch.no_grad():  # an assistant that is often right and often wrong
        assistant.lm_head.weight += 0.02 * torch.randn(99, 64, generator=torch.Generator().manual_seed(2))
    ids = prompt(1, 120)
    expected = reference(model, ids, new=20)
    cache = raw_cache(model)
    assert torch.equal(generate(model, ids, cache, new=20, assistant_model=assistant), expected)
    assert_pages_have_left(cache)


@pytest.mark.parametrize("pads", [[0, 0], [0, 25]])
def test_two_turns_on_one_cache(pads: list[int]) -> None:
    model = sliding_model("gemma3", "sdpa")
    ids, mask = left_padded(2, 80, pads)
    results = []
    ours = raw_cache(model)
    for cache, name in ((DynamicCache(config=model.config), "sdpa"), (ours, "turboquant")):
        model.set_attn_implementation(name)
        first = generate(model, ids, cache, mask, new=6)
        more, hole = left_padded(2, 60, pads[::-1])  # padding in the middle of the history
        turn = torch.cat([first, more], 1)
        seen = torch.cat([mask, torch.ones(2, 6, dtype=torch.long), hole], 1)
        results.append(generate(model, turn, cache, seen, new=6))
    assert torch.equal(*results)
    assert_pages_have_left(ours)


@torch.no_grad()
def logits_after(model: PreTrainedModel, cache: Any, ids: Tensor, sizes: list[int]) -> Tensor:
    """Feed these tokens in chunks of these sizes; the logits of all of them."""
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)], 1)


def test_copies_of_a_prompts_cache_go_on_apart() -> None:
    model = sliding_model("mistral")
    ids, tails = prompt(1, 180), prompt(3, 60, seed=4)
    cache = raw_cache(model)
    logits_after(model, cache, ids, [100, 80])
    twin = copy.deepcopy(cache)
    cache.batch_repeat_interleave(4)
    cache.batch_select_indices(torch.tensor([0, 1, 3]))
    used = sliding_table(cache).pages.used
    assert used == sliding_table(twin).pages.used  # rows share their pages
    before = logits_after(model, cache, tails, [30, 1, 29])
    order = [2, 2, 0]
    cache.reorder_cache(torch.tensor(order))
    after = logits_after(model, cache, tails[:, :1], [1])
    for row in range(3):
        rows = torch.cat([ids, tails[order[row]][None], tails[row, :1][None]], 1)
        expected = logits_after(model, DynamicCache(config=model.config), rows, [241])[0, 180:]
        assert torch.allclose(before[order[row]], expected[:60], atol=1e-5)
        assert torch.allclose(after[row], expected[60:], atol=1e-5)
    assert torch.allclose(logits_after(model, twin, tails[:1], [60])[0], before[0], atol=1e-5)
    assert_pages_have_left(cache)


@pytest.mark.parametrize("preset", ["tq4", "tq2", "4bit_nc", "k8v4"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@torch.no_grad()
def test_attention_reads_what_dequantizing_gives(preset: str, family: str) -> None:
    model = sliding_model(family, head_dim=64, sliding_window=96)  # where k8v4 is smaller too
    cache = TurboQuantCache(model.config, preset, **SMALL, boundary_layers=0)
    assert any(isinstance(layer, SlidingLayer) for layer in cache.layers)
    ids = prompt(2, 241)
    exact = logits_after(model, DynamicCache(config=model.config), ids, [241])[:, -1]
    logits_after(model, cache, ids[:, :-1], [100, 100, 20, *[1] * 20])
    dense = copy.deepcopy(cache)
    packed = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    model.set_attn_implementation("eager")
    assert torch.allclose(packed, model(ids[:, -1:], past_key_values=dense).logits[:, -1], atol=2e-3)
    error = (packed - exact).norm() / exact.norm()
    assert 1e-5 < error < 1  # the quantized bytes were really read
    assert_pages_have_left(cache)
