"""`estimate_memory` says to the byte what a cache's report says after a run."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, StaticCache

from tests.tiny_models import FAMILIES, cache_for, prompt, tiny_model
from tq_hf import PRESETS, TurboQuantCache, estimate_memory
from tq_hf.generation.comparison import cache_argument, cache_nbytes
from tq_hf.sizing import estimate as estimate_module
from tq_hf.sizing.estimate import LARGEST_BATCH
from tq_hf.sizing.state_shapes import model_shapes

LLAMA_8B = LlamaConfig(
    num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256,
)  # fmt: skip

COMMON = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32}
LINEAR = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
# Kinds of state and of keys that the families of the other tests do not have.
FURTHER: dict[str, dict[str, Any]] = {
    "Lfm2Config": {**COMMON, **HEADS, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "NemotronHConfig": {
        **COMMON, **HEADS, "head_dim": 16, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 32,
    },
    "BambaConfig": {**COMMON, **HEADS, **MAMBA, "attn_layer_indices": [1]},
    "GraniteMoeHybridConfig": {
        **COMMON, **HEADS, **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 2,
        "num_experts_per_tok": 1, "shared_intermediate_size": 32,
    },
    "Qwen3_5TextConfig": {
        **COMMON, **HEADS, **LINEAR, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]
    },
    "MixtralConfig": {**COMMON, **HEADS, "num_local_experts": 2},
    "GlmMoeDsaConfig": {
        **COMMON, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 2, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16,
    },
    "RecurrentGemmaConfig": {
        **COMMON, "num_attention_heads": 4, "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 64,
        "block_types": ["recurrent", "attention"],
    },
    "Cohere2Config": {
        **COMMON, **HEADS, "sliding_window": 200, "layer_types": ["sliding_attention", "full_attention"]
    },
    "GPTBigCodeConfig": {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "Mamba2Config": {
        "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "num_heads": 8, "head_dim": 16,
        "n_groups": 1, "chunk_size": 32,
    },
    "FalconMambaConfig": {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "MiMoV2FlashConfig": {**COMMON, **HEADS},
}  # fmt: skip


def run(model: Any, cache: Any, rows: int, first: int, length: int) -> Any:
    """Let the model read a prompt, then single tokens, and return the cache."""
    given, ids = cache_for(model, cache), prompt(rows, length)
    source = {"input_ids": prompt(rows, 9, seed=5)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for start, end in [(0, first), *((t, t + 1) for t in range(first, length))]:
            tokens = {"input_ids": ids[:, start:end]}
            if model.config.is_encoder_decoder:
                tokens = {**source, "decoder_input_ids": ids[:, start:end]}
            model(**tokens, **{cache_argument(model): given}, use_cache=True)
    return cache


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    if not hasattr(tf, FAMILIES[family]["config"]):
        pytest.skip(f"transformers {tf.__version__} has no {FAMILIES[family]['config']}")
    model = tiny_model(family).to(dtype)
    model.config.dtype = model.config.get_text_config(decoder=True).dtype = dtype  # as `from_pretrained` has it
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("preset", "rows", "first", "length"), [("tq2", 2, 190, 198), ("4bit_nc", 1, 150, 150)])
def test_every_family(family: str, preset: str, rows: int, first: int, length: int) -> None:
    model = model_of(family)
    found = run(model, TurboQuantCache(model.config, preset), rows, first, length).report()
    expected = estimate_memory(model.config, preset, length, rows, torch.float32, new_tokens=length - first)
    assert expected.layers == found.layers
    assert (expected.nbytes, expected.packed_tokens) == (found.nbytes, found.packed_tokens)


@pytest.mark.parametrize("name", FURTHER)
def test_other_kinds_of_states(name: str) -> None:
    if not hasattr(tf, name):
        pytest.skip(f"transformers {tf.__version__} has no {name}")
    config = getattr(tf, name)(**copy.deepcopy(FURTHER[name]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config).eval()
    model.config.dtype = torch.float32
    found = run(model, TurboQuantCache(model.config, "tq2"), 2, 190, 198).report()
    expected = estimate_memory(model.config, "tq2", 198, 2, torch.float32, new_tokens=8)
    assert (expected.layers, expected.table_bytes) == (found.layers, found.table_bytes)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_cache_in_bfloat16(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    for first, length in ((30, 30), (30, 33), (10, 12)):
        cache = run(model, DynamicCache(config=model.config.get_text_config(decoder=True)), 2, first, length)
        expected = estimate_memory(model.config, "tq4", length, 2, torch.float16, new_tokens=length - first)
        assert expected.bytes_dynamic == cache_nbytes(cache)


def fill(cache: Any, config: Any, rows: int, first: int, length: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """States of zeros, without a model."""
    for start, end in [(0, first), *((t, t + 1) for t in range(first, length))]:
        states = torch.zeros(rows, config.num_key_value_heads, end - start, config.head_dim, dtype=dtype)
        for i in range(config.num_hidden_layers):
            cache.update(states, states, i)
            if hasattr(cache.layers[i], "flush"):
                cache.layers[i].flush()
    return cache


@pytest.mark.parametrize("preset", PRESETS)
def test_a_real_shape_at_several_lengths(preset: str) -> None:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
    for first, length in ((1, 1), (60, 64), (1000, 1100), (4096, 4096)):
        found = fill(TurboQuantCache(config, preset), config, 1, first, length).report()
        expected = estimate_memory(config, preset, length, new_tokens=length - first)
        assert (expected.layers, expected.table_bytes) == (found.layers, found.table_bytes), (first, length)
        assert expected.bytes_bf16 == found.bytes_bf16 == expected.bytes_dynamic


def window_config(window: int, *kinds: str) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=len(kinds), num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, sliding_window=window, layer_types=list(kinds),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("window", "preset", "rows", "first", "changes"),
    [
        (257, "tq4", 1, 5, {}),
        (300, "tq2", 3, 1000, {"page_size": 64}),
        (130, "4bit_nc", 2, 60, {}),
        (200, "raw", 1, 400, {"page_size": 32, "recent_window": 7, "sink_tokens": 90}),
        (64, "raw", 2, 150, {"page_size": 32, "recent_window": 0, "sink_tokens": 1}),
    ],
)
def test_windows_as_text_runs_through_them(window: int, preset: str, rows: int, first: int, changes: dict[str, int]) -> None:
    config = window_config(window, "sliding_attention", "full_attention")
    config.dtype = torch.float32
    cache = TurboQuantCache(config, preset, **changes)
    assert cache.sliding_tables
    for length in (first, first + 1, first + 33, first + 200, first + 530):
        held = cache.get_seq_length()
        for step in [first] if not held else [1] * (length - held):
            for i in (0, 1):
                states = torch.zeros(rows, 1, step, 16)
                cache.update(states, states, i)
                cache.layers[i].flush()
        found = cache.report()
        expected = estimate_memory(config, preset, length, rows, torch.float32, new_tokens=length - first, **changes)
        assert (expected.layers, expected.table_bytes) == (found.layers, found.table_bytes), length


@pytest.mark.parametrize("preset", ["tq4", "4bit_nc"])
def test_static_caches(preset: str) -> None:
    config = window_config(100, "sliding_attention", "full_attention", *["full_attention"] * 6)
    config.dtype = torch.bfloat16
    cache = fill(TurboQuantCache(config, preset, max_cache_len=500), config, 2, 200, 200)
    expected = estimate_memory(config, preset, 200, 2, max_cache_len=500)
    found = cache.report()
    assert (expected.nbytes, expected.table_bytes) == (found.nbytes, found.table_bytes)
    stock = fill(StaticCache(config, max_cache_len=500), config, 2, 200, 200)
    assert expected.bytes_dynamic == cache_nbytes(stock)


def test_how_many_sequences_fit() -> None:
    estimate = estimate_memory(LLAMA_8B, "tq4", context=32_768)
    for dynamic in (False, True):
        batch = estimate.largest_batch(60, dynamic=dynamic)
        sizes = [estimate_memory(LLAMA_8B, "tq4", context=32_768, batch=n) for n in (batch, batch + 1)]
        taken = [e.bytes_dynamic if dynamic else e.nbytes for e in sizes]
        assert taken[0] <= 60 * 2**30 < taken[1]
    assert estimate.largest_batch(60) > 3 * estimate.largest_batch(60, dynamic=True) > 0
    assert estimate.largest_batch(0.01) == 0
    assert estimate.largest_batch(float("inf")) == LARGEST_BATCH


def test_the_largest_batch_takes_few_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    made = estimate_memory(LlamaConfig(num_hidden_layers=2), "tq4", 5000, 8)
    batches: list[int] = []
    whole = estimate_module._estimate

    def counted(*arguments: Any) -> Any:
        batches.append(arguments[3])
        return whole(*arguments)

    monkeypatch.setattr(estimate_module, "_estimate", counted)
    assert made.largest_batch(40) > 500 and len(batches) <= 8  # doubling and halving takes twice as many


def test_the_weights_are_counted_once_where_they_are_tied() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    count = sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers())
    assert estimate_memory(model.config, dtype=torch.float32).weight_bytes == 4 * count
    assert 8.03e9 * 2 < estimate_memory(LLAMA_8B).weight_bytes < 8.04e9 * 2  # type: ignore[operator]


def test_nothing_but_numbers_is_made() -> None:
    """A model of 70 B parameters: no memory, no random numbers, the config left as it was."""
    config = LlamaConfig(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
                         num_key_value_heads=8, vocab_size=128256)  # fmt: skip
    before, state = config.to_dict(), torch.get_rng_state()
    level = tf.logging.get_verbosity()
    estimate = estimate_memory(config, "tq4", context=131_072, batch=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert config.to_dict() == before
    assert tf.logging.get_verbosity() == level
    assert estimate.bytes_dynamic == 4 * 131_072 * 80 * 8 * 128 * 2 * 2
    assert 3.6 < estimate.ratio < 3.77
    assert "packed (tq4)" in str(estimate)


def test_a_model_that_packs_nothing_is_what_transformers_makes_of_it() -> None:
    config = model_of("mamba").config
    estimate = estimate_memory(config, "tq4", 1000, dtype=torch.bfloat16)
    assert estimate.nbytes == estimate.bytes_dynamic > 0
    assert estimate.packed_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"context": 0}, "context=0 is not possible: expected an integer of at least 1"),
        ({"context": 1.5}, "context=1.5 is not possible"),
        ({"batch": 0}, "batch=0 is not possible: expected an integer of at least 1"),
        ({"new_tokens": -1}, "new_tokens=-1 is not possible: expected an integer of at least 0"),
        ({"dtype": torch.float64}, "dtype=torch.float64 is not supported"),
        ({"preset": "tq5"}, "preset='tq5' is unknown: expected one of tq4"),
        ({"window": 5}, "unknown option window"),
        ({"max_cache_len": 100}, "max_cache_len=100 is less than context=4096"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        estimate_memory(model_of("llama").config, **arguments)


def test_other_configs_are_refused() -> None:
    with pytest.raises(ValueError, match="config is a dict: expected the model's config"):
        estimate_memory({"model_type": "llama"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no cache can be estimated for a 'clip' model"):
        model_shapes(tf.CLIPConfig(), torch.bfloat16)


def test_an_estimate_can_be_a_key() -> None:
    first, second = (estimate_memory(copy.deepcopy(LLAMA_8B), context=100) for _ in range(2))
    assert first == second and len({first, second}) == 1
