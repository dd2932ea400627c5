"""The cache as an object: what it refuses, what it holds, what it weighs."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from tests.presets import sizes
from tests.tiny_models import prompt, tiny_model
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig

CONFIG = LlamaConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)


def states(tokens: int, batch: int = 1, heads: int = 2, dim: int = 64, seed: int = 0, dtype: Any = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, tokens, dim, generator=generator).to(dtype)


def filled(
    tokens: int = 300, preset: str = "tq4", batch: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> TurboQuantCache:
    """Two layers of that preset with these tokens, in pages of 64 with a window of 64 or none (`sizes`)."""
    cache = TurboQuantCache(CONFIG, preset, **{**sizes(preset), **options})
    for layer in range(2):
        key, value = (states(tokens, batch, seed=layer + shift, dtype=dtype) for shift in (0, 9))
        cache.update(key, value, layer)
    for layer in cache.packed_layers:
        layer.flush()
    return cache


def held_tensors(root: Any) -> list[Tensor]:
    """Every tensor that can be reached from `root` through attributes and containers of this project's objects."""
    seen: dict[int, Tensor] = {}
    todo, visited = [root], set()
    while todo:
        thing = todo.pop()
        if id(thing) in visited:
            continue
        visited.add(id(thing))
        if isinstance(thing, Tensor):
            seen[thing.untyped_storage().data_ptr()] = thing
        elif isinstance(thing, dict):
            todo += list(thing.values())
        elif isinstance(thing, (list, tuple, set)):
            todo += list(thing)
        elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("tq_hf"):
            todo += list(vars(thing).values())
    return list(seen.values())


# -- construction ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "tq5"}, r"preset='tq5'.*tq4.*4bit_nc"),
        ({"key_bits": 5}, r"key_bits=5.*\(2, 3, 4\)"),
        ({"value_bits": 1}, "value_bits=1"),
        ({"key_format": "int4"}, "key_format='int4'"),
        ({"page_size": 48}, "page_size=48"),
        ({"recent_window": -1}, "recent_window=-1"),
        ({"sink_tokens": -4}, "sink_tokens=-4"),
        ({"sink_tokens": 1.5}, "sink_tokens=1.5"),
        ({"codebook": "uniform"}, "codebook='uniform'"),
        ({"window": 3}, "unknown option window.*recent_window"),
        ({"max_cache_len": 0}, "max_cache_len=0"),
        ({"max_cache_len": 1.5}, "max_cache_len=1.5"),
        ({"max_cache_len": "100"}, "max_cache_len='100'"),
        ({"page_size": 64.0}, "page_size=64.0"),
        ({"key_bits": 4.0}, "key_bits=4.0"),
        ({"center_keys": "no"}, "center_keys='no'"),
        ({"preset": ["tq4"]}, "preset="),
        ({"preset": TurboQuantConfig("fp8", 8, "min_max", 4), "windw": 3}, "unknown option windw"),
        ({"preset": "k8v4", "center_keys": True}, "center_keys=True needs"),
        ({"preset": "4bit_nc", "boundary_layers": 7}, None),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str | None) -> None:
    if message is None:  # boundary layers are capped at half of the model, and two layers have none to spare
        assert len(TurboQuantCache(CONFIG, **options).packed_layers) == 2
        return
    with pytest.raises(ValueError, match=message):
        TurboQuantCache(CONFIG, **options)


@pytest.mark.parametrize("config", [None, "name", {}, torch.nn.Linear(1, 1)])
def test_something_that_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match=r"expected the model's config"):
        TurboQuantCache(config)


@pytest.mark.parametrize("dim", [8, 258, 512])
def test_a_head_dim_without_layout_stays_exact(dim: int) -> None:
    config = LlamaConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=dim)
    cache = TurboQuantCache(config)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicLayer"] * 2
    key = torch.randn(1, 2, 3, dim)
    assert cache.update(key, key, 0)[0] is not None and cache.get_seq_length() == 3
    config.head_dim = 64  # not what the model does
    with pytest.raises(ValueError, match=f"{dim}.*even head_dim from 16 to 256"):
        TurboQuantCache(config).update(key, key, 0)


def test_layers_that_are_not_full_attention_keep_transformers_classes() -> None:
    cache = TurboQuantCache(tiny_model("gemma3_hybrid").config)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicSlidingWindowLayer", "TurboQuantLayer"]
    cache = TurboQuantCache(tiny_model("gemma3_hybrid").config, max_cache_len=64)
    assert [type(layer).__name__ for layer in cache.layers] == ["StaticSlidingWindowLayer", "TurboQuantLayer"]


@pytest.mark.parametrize(("layers", "exact"), [(2, 0), (4, 2), (7, 2), (8, 4), (30, 4)])
def test_published_presets_keep_boundary_layers_exact(layers: int, exact: int) -> None:
    config = LlamaConfig(hidden_size=128, num_hidden_layers=layers, num_attention_heads=2)
    kinds = [layer.config.key_format for layer in TurboQuantCache(config, "4bit_nc").packed_layers]
    assert kinds.count("raw") == exact
    assert kinds == kinds[::-1]
    assert all(layer.config.key_format != "raw" for layer in TurboQuantCache(config, "tq4").packed_layers)


def test_a_config_object_can_be_given_and_overridden() -> None:
    cache = TurboQuantCache(CONFIG, TurboQuantConfig("lloyd_max", 3, "min_max", 2), recent_window=7)
    assert (cache.preset, cache.quantization.key_bits, cache.quantization.recent_window) == ("custom", 3, 7)


def test_building_and_filling_leaves_global_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    filled()
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_default_dtype() == torch.float32
    config = copy.deepcopy(CONFIG)
    TurboQuantCache(config)
    assert config.to_dict() == CONFIG.to_dict()


# -- bad input leaves the cache unchanged ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (states(1, batch=2), states(1, batch=2), "batch size 2 does not match the 1 rows"),
        (states(1), states(2), "do not fit together"),
        (states(1)[0], states(1)[0], "do not fit together"),
        (states(1, dim=32), states(1, dim=32), "does not match the cache's"),
        (states(1, heads=4), states(1, heads=4), "does not match the cache's"),
        (states(1, dtype=torch.bfloat16), states(1, dtype=torch.bfloat16), "does not match the cache's"),
        (states(1), states(1, dtype=torch.float16), "value dtype"),
        (states(1).double(), states(1).double(), "key dtype torch.float64"),
    ],
)
def test_states_that_do_not_fit_are_refused(key: Tensor, value: Tensor, message: str) -> None:
    cache = filled()
    before = [t.clone() for t in held_tensors(cache)]
    with pytest.raises(ValueError, match=message):
        cache.update(key, value, 0)
    assert cache.get_seq_length() == 300
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(cache), strict=True))


def test_static_capacity_is_enforced_before_anything_changes() -> None:
    cache = TurboQuantCache(CONFIG, max_cache_len=200)
    for layer in range(2):
        with pytest.raises(RuntimeError, match="max_cache_len=200"):
            cache.update(states(201, batch=5), states(201, batch=5), layer)
    for tokens in (199, 1):
        for layer in range(2):
            cache.update(states(tokens), states(tokens), layer)
    with pytest.raises(RuntimeError, match="max_cache_len=200"):
        cache.update(states(1), states(1), 0)
    assert int(cache.get_seq_length()) == 200


def test_one_layer_cannot_be_edited_alone() -> None:
    cache = filled()
    for edit, arguments in (("reset", ()), ("crop", (-1,)), ("reorder_cache", (torch.tensor([0]),))):
        with pytest.raises(RuntimeError, match="share one block table"):
            getattr(cache.layers[0], edit)(*arguments)


@pytest.mark.parametrize("attention", ["sdpa", "turboquant", "eager"])
def test_gradients_are_refused_not_dropped(attention: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, **sizes("tq4"))
    ids = prompt(1, 150)
    model(ids, past_key_values=cache)
    logits = model(ids[:, :1], past_key_values=cache).logits  # forward works outside no_grad
    with pytest.raises(RuntimeError, match="for inference"):
        logits.sum().backward()


def test_gradients_through_softcapped_attention_are_refused_not_dropped() -> None:
    model = tiny_model("gemma2_softcap")
    model.set_attn_implementation("turboquant")
    with pytest.raises(RuntimeError, match="for inference"):
        model(prompt(1, 20), use_cache=False).logits.sum().backward()


def test_a_cache_filled_in_inference_mode_works_outside_it() -> None:
    with torch.inference_mode():
        cache = filled(300)
    for layer in range(2):
        cache.update(states(100), states(100), layer)
        cache.layers[layer].flush()
    cache.crop(-50)
    assert cache.get_seq_length() == 350


# -- lengths -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}])
def test_lengths_and_mask_sizes(options: dict[str, Any]) -> None:
    cache = TurboQuantCache(CONFIG, **sizes("tq4"), **options)
    limit = options.get("max_cache_len", -1)
    assert cache.get_seq_length() == 0
    assert cache.get_max_length() == limit
    assert cache.is_compileable == (limit > 0)
    assert cache.get_mask_sizes(7, 0) == ((limit, 0) if limit > 0 else (7, 0))
    key, value = cache.layers[0].update(states(150), states(150))
    assert cache.get_seq_length() == 150  # counted at once, although attention has not seen it yet
    assert key.shape == value.shape == (1, 2, limit if limit > 0 else 150, 64)
    assert (key.dtype, key.device.type, key.ndim, key.dim(), key.size(1)) == (torch.float32, "cpu", 4, 4, 2)
    cache.layers[0].update(states(1), states(1))
    assert cache.get_seq_length() == 151
    assert cache.get_mask_sizes(1, 0) == ((limit, 0) if limit > 0 else (152, 0))


@pytest.mark.parametrize(("preset", "tokens", "packed"), [
    ("tq4", 131, 0), ("tq4", 132, 64), ("tq4", 195, 64), ("tq4", 196, 128), ("4bit_nc", 63, 0), ("4bit_nc", 64, 64),
    ("4bit_nc", 300, 256), ("raw", 300, 192),
])  # fmt: skip
def test_tokens_older_than_the_window_are_packed(preset: str, tokens: int, packed: int) -> None:
    report = filled(tokens, preset).report()
    assert [layer.packed_tokens for layer in report.layers] == [packed] * 2
    assert [layer.exact_tokens for layer in report.layers] == [tokens - packed] * 2


@pytest.mark.parametrize("preset", PRESETS)
def test_a_page_is_packed_when_all_its_tokens_are_older_than_the_presets_window(preset: str) -> None:
    config = PRESETS[preset]
    size, window = config.page_size, config.recent_window
    first = config.sink_tokens + window + size
    for tokens, pages in ((first - 1, 0), (first, 1), (first + size - 1, 1), (first + size, 2)):
        report = filled(tokens, preset, page_size=size, recent_window=window).report()
        assert [layer.packed_tokens for layer in report.layers] == [pages * size] * 2
        assert [layer.exact_tokens for layer in report.layers] == [tokens - pages * size] * 2


def test_one_token_at_a_time_packs_the_same_bytes_as_one_prompt() -> None:
    whole = filled(280)
    stepwise = TurboQuantCache(CONFIG, **sizes("tq4"))
    for i in range(280):
        for layer in range(2):
            key, value = states(280, seed=layer), states(280, seed=9 + layer)
            stepwise.update(key[:, :, i : i + 1], value[:, :, i : i + 1], layer)
    for layer in stepwise.packed_layers:
        layer.flush()
    for a, b in zip(whole.packed_layers, stepwise.packed_layers, strict=True):
        assert torch.equal(a.pool[:3], b.pool[:3])
        assert torch.equal(a.sink_value, b.sink_value)
        assert torch.equal(a.counters, b.counters)
        handles = [layer.update(states(1), states(1)) for layer in (a, b)]
        for one, other in zip(*handles, strict=True):
            assert torch.equal(one.dense(), other.dense())


# -- memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 2048}])
def test_nbytes_counts_every_tensor_the_cache_can_reach(preset: str, options: dict[str, Any]) -> None:
    cache = filled(1000, preset, **options)
    assert cache.nbytes == sum(t.untyped_storage().nbytes() for t in held_tensors(cache))


def test_no_copy_of_the_history_in_the_model_dtype_survives() -> None:
    cache = filled(4096, batch=2, dtype=torch.bfloat16)
    gc.collect()
    big = [t for t in held_tensors(cache) if t.is_floating_point() and t.numel() > 2 * 2 * 132 * 64]
    assert big == []
    assert cache.report().ratio > 3.3


def test_pools_hold_just_the_pages_that_were_needed() -> None:
    cache = filled(4096)
    for layer in cache.packed_layers:
        assert layer.pool.shape[0] == cache.table.pages.used == (4096 - 4 - 64) // 64


def test_growth_is_slow_and_keeps_pages() -> None:
    cache = filled(64 * 70)
    first = cache.packed_layers[0].pool.clone()
    for layer in range(2):
        cache.update(states(64, seed=5), states(64, seed=6), layer)
        cache.layers[layer].flush()
    pool = cache.packed_layers[0].pool
    assert torch.equal(pool[: len(first)], first)
    assert len(pool) == len(first) + len(first) // 64


def test_the_report_reads_like_a_table() -> None:
    report = filled(500).report()
    assert str(report).count("\n") == 4
    assert report.nbytes == sum(layer.nbytes for layer in report.layers) + report.table_bytes
    assert report.bytes_bf16 == 2 * 500 * 2 * 128 * 2
    assert "tq4" in repr(filled(500))
    assert "empty" in repr(TurboQuantCache(CONFIG))


# -- edits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("removed", [0, 1, 63, 64, 65, 100, 150, 250, 295, 297, 299, 300])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}])
def test_crop_then_continue_equals_never_having_seen_the_rest(removed: int, options: dict[str, Any]) -> None:
    """In preset raw, what attention reads after crop and refill is exactly the plain concatenation."""
    cache = filled(300, "raw", **options)
    left = 300 - removed
    cache.crop(torch.tensor(-removed) if removed % 2 else -removed)  # transformers passes either
    assert int(cache.get_seq_length()) == left
    for layer in range(2):
        new_key, new_value = states(70, seed=20), states(70, seed=21)
        key, value = cache.update(new_key, new_value, layer)
        expected = torch.cat([states(300, seed=layer)[:, :, :left], new_key], 2)
        assert torch.equal(key.dense()[:, :, : left + 70], expected)
        expected = torch.cat([states(300, seed=9 + layer)[:, :, :left], new_value], 2)
        assert torch.equal(value.dense()[:, :, : left + 70], expected)
    assert int(cache.get_seq_length()) == left + 70


@pytest.mark.parametrize("layer_idx", [2, -1])
def test_a_layer_that_there_is_not(layer_idx: int) -> None:
    with pytest.raises(ValueError, match=rf"layer_idx={layer_idx} of a cache of 2 layers: .* another config"):
        TurboQuantCache(CONFIG).update(states(3), states(3), layer_idx)


def test_crop_wants_a_negative_integer() -> None:
    with pytest.raises(ValueError, match=r"crop\(5\)"):
        filled().crop(5)
    with pytest.raises(TypeError):
        filled().crop(-3.7)


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}])
def test_reset_forgets_everything(options: dict[str, Any]) -> None:
    cache = filled(300, **options)
    fresh = filled(260, **options)
    cache.reset()
    assert cache.get_seq_length() == 0
    for layer in range(2):
        cache.update(states(260, seed=layer), states(260, seed=9 + layer), layer)
        cache.layers[layer].flush()
    for a, b in zip(cache.packed_layers, fresh.packed_layers, strict=True):
        assert torch.equal(a.counters, b.counters)
        assert torch.equal(a.pool[:3], b.pool[:3])


def test_reset_lets_the_batch_size_change_where_nothing_is_preallocated() -> None:
    cache = filled(100, batch=3)
    cache.reset()
    cache.update(states(5, batch=1), states(5, batch=1), 0)
    assert cache.batch_size == 1


def test_rows_are_reordered_repeated_and_selected_by_reference() -> None:
    cache = filled(300, "raw", batch=2)
    used = cache.table.pages.used
    cache.batch_repeat_interleave(3)
    assert cache.table.pages.used == used
    cache.reorder_cache(torch.tensor([5, 0, 0, 3, 1, 4]))
    cache.batch_select_indices(torch.tensor([True, False, True, False, False, False]))
    for layer in range(2):
        key, _ = cache.update(states(1, batch=2, seed=20), states(1, batch=2, seed=21), layer)
        expected = states(300, batch=2, seed=layer)[[1, 0]]
        assert torch.equal(key.dense()[:, :, :300], expected)


@pytest.mark.parametrize("indices", [[3], [-4], [], [True, False], [0.5]])
def test_rows_that_do_not_exist_are_refused_and_nothing_changes(indices: list[Any]) -> None:
    cache = filled(300, "raw", batch=3)
    before = [t.clone() for t in held_tensors(cache)]
    with pytest.raises((ValueError, TypeError)):
        cache.batch_select_indices(torch.tensor(indices))
    with pytest.raises(ValueError, match="repeats=0"):
        cache.batch_repeat_interleave(0)
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(cache), strict=True))
    cache.batch_select_indices(torch.tensor([0, -1]))
    assert cache.batch_size == 2


def test_a_deep_copy_is_independent() -> None:
    cache = filled(300)
    twin = copy.deepcopy(cache)
    before = [t.clone() for t in held_tensors(cache)]
    for layer in range(2):
        twin.update(states(100, seed=3), states(100, seed=4), layer)
        twin.layers[layer].flush()
    assert twin.get_seq_length() == 400
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(cache), strict=True))


def test_an_old_handle_is_refused() -> None:
    cache = filled(100, "raw")
    key, value = cache.layers[0].update(states(1), states(1))
    cache.layers[0].flush()
    cache.layers[0].update(states(1), states(1))
    cache.layers[0].flush()
    with pytest.raises(RuntimeError, match="show the cache at 101 tokens"):
        torch.nn.functional.scaled_dot_product_attention(states(1), key, value)
    with pytest.raises(RuntimeError, match="show the cache at 101 tokens"):
        key.sum()


def test_handles_in_each_others_place_are_read_as_what_they_are() -> None:
    cache = filled(100, "raw")
    key, value = cache.update(states(1, seed=5), states(1, seed=6), 0)
    query = states(1, seed=7)
    attend = torch.nn.functional.scaled_dot_product_attention
    dense_key, dense_value = key.dense(), value.dense()
    assert torch.allclose(attend(query, value, key), attend(query, dense_value, dense_key))
    assert torch.allclose(attend(query, key, key), attend(query, dense_key, dense_key))
    assert torch.equal(key - value, dense_key - dense_value)
    assert torch.equal(-key / 2 + 1, -dense_key / 2 + 1)
    assert torch.equal(key == value, dense_key == dense_value) and torch.equal(key == dense_key, key <= dense_key)
    assert len({key, value, key}) == 2 and (key == None) is False  # noqa: E711


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("bad", "what"), [(float("nan"), "non-finite key"), (float("inf"), "non-finite key")])
def test_a_non_finite_key_is_stored_as_zero_flagged_and_touches_nobody(bad: float, what: str) -> None:
    clean, dirty = (TurboQuantCache(CONFIG, **sizes("tq4"), center_keys=False) for _ in range(2))
    key = states(300)
    clean_key = key.clone()
    clean_key[0, 1, 40] = 0.0
    key[0, 1, 40, 3] = bad
    for cache, k in ((clean, clean_key), (dirty, key)):
        cache.update(k, states(300, seed=1), 0)
        cache.layers[0].flush()
    assert torch.equal(clean.layers[0].pool, dirty.layers[0].pool)
    clean.check()
    with pytest.raises(ValueError, match=rf"layer 0, KV heads \[1\]: a {what}"):
        dirty.check()


def test_fp8_keys_beyond_their_range_are_flagged() -> None:
    for size, flagged in ((448.0, False), (900.0, True)):
        cache = TurboQuantCache(CONFIG, "k8v4", boundary_layers=0)
        key = states(100)
        key[0, 1, 10, 5] = size
        cache.update(key, states(100), 0)
        if flagged:
            with pytest.raises(ValueError, match=r"KV heads \[1\]: a number beyond"):
                cache.check()
        else:
            cache.check()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_zero_and_equal_vectors_are_legal(preset: str) -> None:
    cache = TurboQuantCache(CONFIG, preset, **sizes(preset))
    key, value = torch.zeros(1, 2, 300, 64), torch.full((1, 2, 300, 64), 3.0)
    handles = cache.layers[0].update(key, value)
    assert torch.equal(handles[0].dense(), key)
    handles = cache.layers[0].update(key[:, :, :1], value[:, :, :1])
    dense_key, dense_value = (h.dense() for h in handles)
    assert torch.equal(dense_key, torch.zeros_like(dense_key))
    assert torch.isfinite(dense_value).all()
    # A Hadamard matrix turns equal values into one spike. What survives is the norm, or with fitted scales the projection.
    fitted = cache.quantization.scale == "fitted"
    lengths = (dense_value * value[:, :, :1]).sum(-1) / 24.0 if fitted else dense_value.norm(dim=-1)
    assert torch.allclose(lengths, torch.full_like(lengths, 24.0), rtol=2**-10 if fitted else 0.1)


@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid"])
def test_iteration_gives_what_dynamic_cache_gives(family: str) -> None:
    model, ids = tiny_model(family), prompt(2, 90)
    ours = TurboQuantCache(model.config, preset="raw", page_size=32, recent_window=0)
    theirs = DynamicCache(config=model.config)
    assert [keys for keys, *_ in ours if keys is not None] == []
    for cache in (ours, theirs):
        model(ids, past_key_values=cache)
    assert ours.report().packed_tokens > 0
    for layer, other in zip(ours, theirs, strict=True):
        for mine, its in zip(layer, other, strict=True):
            assert torch.equal(mine, its) if its is not None else mine is None
