"""Which layers the published presets leave exact, on the configs that models really have."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as tf
from transformers import PretrainedConfig

from tq_hf import TurboQuantCache
from tq_hf.layers.rules import boundary_layers, is_hybrid

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}


def exact_and_packed(config: PretrainedConfig, **options: Any) -> tuple[list[int], list[int]]:
    """The layers in pages, by what the pages hold: the model's dtype, or codes."""
    exact, packed = [], []
    for i, layer in enumerate(TurboQuantCache(config, "4bit_nc", **options).layers):
        if hasattr(layer, "config"):
            (exact if layer.config.key_format == "raw" else packed).append(i)
    return exact, packed


DENSE = {
    "llama": tf.LlamaConfig(num_hidden_layers=12, **SMALL),  # no list at all
    "qwen2": tf.Qwen2Config(num_hidden_layers=12, **SMALL),  # layer_types, all full
    "smollm3": tf.SmolLM3Config(num_hidden_layers=12, no_rope_layers=[1] * 12, **SMALL),
    "gpt2": tf.GPT2Config(n_layer=12, n_embd=64, n_head=2),
    "minimax_m2": tf.MiniMaxM2Config(num_hidden_layers=12, attn_type_list=[1] * 12, **SMALL),
}
HYBRIDS = {
    "jamba": (tf.JambaConfig(num_hidden_layers=16, **SMALL), [4, 12]),  # layers_block_type: mamba, attention
    "bamba": (
        tf.BambaConfig(num_hidden_layers=12, attn_layer_indices=[0, 11], mamba_n_heads=4, mamba_d_head=32, **SMALL),
        [0, 11],
    ),
    "qwen3_next": (tf.Qwen3NextConfig(num_hidden_layers=12, **SMALL), [3, 7, 11]),  # layer_types
    "minimax": (tf.MiniMaxConfig(num_hidden_layers=12, **SMALL), [0, 2, 4, 6, 8, 10]),
    "lfm2": (
        tf.Lfm2Config(num_hidden_layers=8, full_attn_idxs=[0, 4, 7], hidden_size=64, num_attention_heads=2),
        [0, 4, 7],
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_keep_two_layers_at_each_end(name: str) -> None:
    assert not is_hybrid(DENSE[name])
    assert exact_and_packed(DENSE[name]) == ([0, 1, 10, 11], list(range(2, 10)))
    assert exact_and_packed(DENSE[name], boundary_layers=1)[0] == [0, 11]
    assert exact_and_packed(DENSE[name], boundary_layers=0)[0] == []


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_pack_all_their_full_attention_layers(name: str) -> None:
    config, full = HYBRIDS[name]
    assert is_hybrid(config)
    assert exact_and_packed(config) == ([], full)


@pytest.mark.parametrize(
    "lists",
    [
        {"layer_types": ["full_attention"] * 7 + ["linear_attention"]},
        {"layer_types": ["conv"] + ["full_attention"] * 7},
        {"layers_block_type": ["attention", "mamba"] * 4},
        {"layers_block_type": ["recurrent", "recurrent", "attention", "attention"] * 2},
        {"layers_block_type": ["hybrid"] + ["attention"] * 7},
        {"attn_type_list": [0, 0, 0, 1, 0, 0, 0, 1]},
    ],
    ids=str,
)
def test_one_list_is_enough_to_tell_a_hybrid(lists: dict[str, list[Any]]) -> None:
    """Configs of models that bring their own code may have any of the lists alone."""
    config = PretrainedConfig(num_hidden_layers=8, **lists)
    assert is_hybrid(config)
    assert boundary_layers(config, range(8), 2) == set()
    ((name, kinds),) = lists.items()
    dense = {"layer_types": "full_attention", "layers_block_type": "attention", "attn_type_list": 1}[name]
    config = PretrainedConfig(num_hidden_layers=8, **{name: [dense] * len(kinds)})
    assert not is_hybrid(config)
    assert boundary_layers(config, range(8), 2) == {0, 1, 6, 7}


def test_linear_attention_that_transformers_does_not_know_of() -> None:
    """Without `layer_types`, transformers caches every layer alike; the list still says what the model is."""
    config = tf.LlamaConfig(num_hidden_layers=8, attn_type_list=[0, 0, 0, 1] * 2, **SMALL)
    assert exact_and_packed(config) == ([], list(range(8)))


@pytest.mark.parametrize(
    ("config", "exact", "packed"),
    [
        # Every sixth layer is full; as published with 18 layers, the last one is.
        (tf.Gemma3TextConfig(num_hidden_layers=18, sliding_window=16, **SMALL), [17], [5, 11]),
        (tf.Gemma3TextConfig(num_hidden_layers=26, sliding_window=16, **SMALL), [], [5, 11, 17, 23]),
        (tf.Gemma2Config(num_hidden_layers=12, sliding_window=16, **SMALL), [1, 11], [3, 5, 7, 9]),
        (tf.GptOssConfig(num_hidden_layers=12, sliding_window=16, **SMALL), [1, 11], [3, 5, 7, 9]),
        # The last 15 of 35 layers read the keys of earlier ones.
        (tf.Gemma3nTextConfig(sliding_window=16, **SMALL), [], [4, 9, 14, 19]),
    ],
    ids=lambda value: f"{value.model_type}-{value.num_hidden_layers}" if hasattr(value, "model_type") else "",
)
def test_with_sliding_layers_places_count_among_all_layers(
    config: PretrainedConfig, exact: list[int], packed: list[int]
) -> None:
    assert not is_hybrid(config)
    assert exact_and_packed(config) == (exact, packed)


@pytest.mark.parametrize(("layers", "exact"), [(1, []), (3, []), (4, [0, 3]), (7, [0, 6]), (8, [0, 1, 6, 7])])
def test_half_of_a_small_model_is_packed_at_least(layers: int, exact: list[int]) -> None:
    config = tf.LlamaConfig(num_hidden_layers=layers, **SMALL)
    assert sorted(boundary_layers(config, range(layers), 100 if layers < 8 else 2)) == exact
