"""Sliding layers and their table without a model: what is kept, what it weighs, what is refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from tests.test_cache import held_tensors, states
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.attention import turboquant_attention
from tq_hf.layers import sliding
from tq_hf.layers.sliding import SlidingLayer, SlidingTable, packs_window, window_bytes

WINDOW = 96
SMALL = {"page_size": 32, "recent_window": 16}
MOST_PAGES = 3  # of a row while decoding: (96 - 16) / 32, rounded up


def mistral(layers: int = 2, window: int = WINDOW, **options: Any) -> PretrainedConfig:
    return tf.MistralConfig(
        hidden_size=128, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        sliding_window=window, **options,
    )  # fmt: skip


def new_cache(preset: str = "raw", **options: Any) -> TurboQuantCache:
    return TurboQuantCache(mistral(), preset, **{**SMALL, **options})


def table_of(cache: TurboQuantCache) -> SlidingTable:
    (table,) = cache.sliding_tables.values()
    return table


def feed(cache: Any, key: Tensor, value: Tensor) -> Any:
    """New tokens for two layers; the handles, or tensors, of the first."""
    first = cache.update(key, value, 0)
    cache.update(value, key, 1)
    return first


def flush(cache: TurboQuantCache) -> None:
    for layer in cache.packed_layers:
        layer.flush()


# -- which layers are packed -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("window", "dim", "dtype", "packed_by"),
    [
        (4096, 128, torch.bfloat16, {"tq4", "tq3", "tq3v2", "tq2", "k8v4", "4bit_nc", "3bit_nc", "raw"}),  # Mistral
        (1024, 256, torch.bfloat16, {"tq4", "tq3", "tq3v2", "tq2", "k8v4", "4bit_nc", "3bit_nc", "raw"}),  # Gemma 3
        (512, 256, torch.bfloat16, {"tq4", "tq3", "tq3v2", "tq2", "k8v4", "4bit_nc", "3bit_nc", "raw"}),
        (200, 128, torch.bfloat16, {"tq4", "tq2", "tq3", "tq3v2", "k8v4", "4bit_nc", "3bit_nc", "raw"}),
        (170, 128, torch.bfloat16, {"tq4", "k8v4", "4bit_nc", "3bit_nc", "raw"}),
        (128, 64, torch.bfloat16, {"k8v4", "4bit_nc", "3bit_nc", "raw"}),  # gpt-oss
        (128, 64, torch.float32, {"k8v4", "4bit_nc", "3bit_nc", "raw"}),
        (63, 128, torch.bfloat16, set()),
    ],
)
def test_a_layer_is_packed_where_that_is_smaller(window: int, dim: int, dtype: torch.dtype, packed_by: set[str]) -> None:
    presets = ("tq4", "tq3", "tq3v2", "tq2", "k8v4", "4bit_nc", "3bit_nc", "raw")
    assert {p for p in presets if packs_window(PRESETS[p], window, dim, dim, dtype)} == packed_by


@pytest.mark.parametrize("preset", ["tq4", "tq2", "4bit_nc", "k8v4"])
def test_the_rule_counts_what_a_layer_really_takes(preset: str) -> None:
    cache = new_cache(preset, boundary_layers=0)
    most = 0
    for i in range(300):
        feed(cache, states(1, seed=i), states(1, seed=-i))
        flush(cache)
        layer = cache.layers[0]
        of_all_rows = 4 * (2 + 3)  # flags and counters, and which channels rotary embeddings turn into each other
        if cache.quantization.balance_keys:
            of_all_rows += layer.partner.nbytes + layer.partner_share.nbytes
        sinks = 2 * layer.sink_key.nbytes  # only until the window has left them
        if i > 200:
            most = max(most, layer.nbytes - of_all_rows - sinks)
    expected = window_bytes(cache.quantization, WINDOW, 64, 64, torch.float32)
    assert most == 2 * expected
    stock = DynamicCache(config=mistral())
    feed(stock, states(300), states(300))
    held = stock.layers[0].keys.shape[2]
    assert cache.layers[0].report(0).bytes_bf16 == 2 * held * 128 * 2
    assert packs_window(cache.quantization, WINDOW, 64, 64, torch.float32) == (expected < held * 128 * 4)


def test_what_is_not_packed_keeps_transformers_class() -> None:
    def classes(config: PretrainedConfig, *args: Any, **options: Any) -> list[str]:
        return [type(layer).__name__ for layer in TurboQuantCache(config, *args, **options).layers]

    ours, stock = "SlidingLayer", "DynamicSlidingWindowLayer"
    assert classes(mistral(window=4096)) == [ours] * 2
    assert classes(mistral(window=100)) == [stock] * 2
    assert classes(mistral(window=4096), max_cache_len=8192) == ["StaticSlidingWindowLayer"] * 2
    # The boundary layers of published presets are exact, and smaller so.
    assert classes(mistral(layers=8, window=4096), "4bit_nc") == [stock] * 2 + [ours] * 4 + [stock] * 2
    gemma = tf.Gemma3TextConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=2, head_dim=256, sliding_window=512,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    cache = TurboQuantCache(gemma)
    assert [type(layer).__name__ for layer in cache.layers] == [ours, "TurboQuantLayer", ours]
    assert cache.is_sliding == [True, False, True]
    assert table_of(cache).layers == [cache.layers[0], cache.layers[2]]
    gemma.head_dim = 512  # has no page layout
    gemma.layer_types = ["sliding_attention"] * 3
    assert classes(gemma) == [stock] * 3


# -- what is kept ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [[1] * 400, [300, *[1] * 100], [150] * 3, [33] * 12, [7, 500, 1, 64, 1, 200, 1]], ids=len)
@pytest.mark.parametrize("sinks", [0, 4])
def test_handles_show_what_transformers_own_layer_shows(sizes: list[int], sinks: int) -> None:
    ours, stock = new_cache(sink_tokens=sinks), DynamicCache(config=mistral())
    for i, size in enumerate(sizes):
        key, value = states(size, 2, seed=i), states(size, 2, seed=1000 + i)
        assert ours.get_mask_sizes(size, 0) == stock.get_mask_sizes(size, 0)
        expected, given = feed(stock, key, value), feed(ours, key, value)
        assert [h.shape for h in given] == [t.shape for t in expected]
        assert ours.get_seq_length() == stock.get_seq_length() == sum(sizes[: i + 1])
        if i % 7 == 0 or size > 1:
            assert all(torch.equal(h.dense(), t) for h, t in zip(given, expected, strict=True))
    assert table_of(ours).origin > 0


def test_memory_stays_bounded_while_decoding() -> None:
    cache = new_cache("tq2", boundary_layers=0)
    sizes = []
    for i in range(2000):
        feed(cache, states(1, 2, seed=i), states(1, 2, seed=-i))
        if i >= 200:
            flush(cache)
            assert table_of(cache).pages.used <= 2 * MOST_PAGES
            assert len(table_of(cache).spans) <= MOST_PAGES + 48 // 32 + 1
            sizes.append(cache.nbytes)
    assert max(sizes) == max(sizes[:100])


@pytest.mark.parametrize("chunk", [40, 96, 300, 2000])
def test_memory_stays_bounded_while_a_long_prompt_comes_in(chunk: int) -> None:
    cache = new_cache("tq2", boundary_layers=0)
    for start in range(0, 2000, chunk):
        feed(cache, states(chunk, seed=start), states(chunk, seed=-start))
        flush(cache)
        assert table_of(cache).pages.capacity <= 2 * MOST_PAGES + 4
        assert cache.layers[0].pool.shape[0] <= 2 * MOST_PAGES + 4
    for i in range(40):
        feed(cache, states(1, seed=i), states(1, seed=-i))
    flush(cache)
    assert table_of(cache).pages.used <= MOST_PAGES
    assert len(table_of(cache).spans) <= MOST_PAGES + 2
    assert cache.nbytes == sum(t.untyped_storage().nbytes() for t in held_tensors(cache))


def test_pools_shrink_when_their_pages_are_gone() -> None:
    cache = new_cache("raw")
    feed(cache, states(400, 16), states(400, 16))
    flush(cache)
    before = cache.layers[0].pool.shape[0]
    cache.batch_select_indices(torch.tensor([3, 3]))
    stock = DynamicCache(config=mistral())
    feed(stock, states(400, 16)[[3, 3]], states(400, 16)[[3, 3]])
    for i in range(60):
        key, value = states(1, 2, seed=i), states(1, 2, seed=-i)
        ours, expected = feed(cache, key, value), feed(stock, key, value)
        assert all(torch.equal(h.dense(), t) for h, t in zip(ours, expected, strict=True))
    assert before >= 16 * 2
    assert cache.layers[0].pool.shape[0] <= 2 * MOST_PAGES + 4


def test_rows_with_long_padding_keep_their_sinks() -> None:
    """One row's tokens begin when the other's have left the window; its first tokens stay exact until they leave."""
    cache = new_cache("tq2", boundary_layers=0)
    keep = torch.ones(2, 400, dtype=torch.bool)
    keep[1, :350] = False
    key, value = states(400, 2), states(400, 2, seed=1)
    for layer in range(2):
        step = cache.update(key, value, layer)[0].step
        cache.layers[layer].commit(step, keep[:, None, None])
    table = table_of(cache)
    assert table.row_starts == [0, 350]
    for i in range(40):
        handle, _ = feed(cache, states(1, 2, seed=i), states(1, 2, seed=-i))
        shown = handle.dense()
        assert torch.equal(shown[1, :, -51 - i : -47 - i], key[1, :, 350:354])
        assert not torch.equal(shown[1, :, -47 - i], key[1, :, 354]) or i < 20
    assert table.origin == 0
    assert table.pages.used <= 2 * MOST_PAGES  # pages are freed all the same
    for i in range(80):
        feed(cache, states(1, 2, seed=i), states(1, 2, seed=-i))
    assert table.origin > 354
    assert table.row_starts == [0, 0]
    assert cache.layers[0].sink_key.shape[2] == 0


def test_statistics_stay_when_their_page_has_left() -> None:
    cache = new_cache("tq2", boundary_layers=0)
    feed(cache, states(100), states(100))
    flush(cache)
    factors = [layer.balance.clone() for layer in cache.packed_layers]
    assert all(f.all() for f in factors)
    for i in range(300):
        feed(cache, states(1, seed=i), states(1, seed=-i))
    assert table_of(cache).origin > 0
    assert all(torch.equal(f, layer.balance) for f, layer in zip(factors, cache.packed_layers, strict=True))


# -- edits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("removed", [0, 1, 20, 48])
@pytest.mark.parametrize("length", [60, 96, 300])
def test_what_was_recorded_can_be_cropped(length: int, removed: int) -> None:
    ours, stock = new_cache(), DynamicCache(config=mistral())
    for cache in (ours, stock):
        feed(cache, states(length), states(length, seed=1))
        cache.activate_past_recording()
        assert cache.layers[0].record_past
    for turn in range(5):
        key, value = states(50, seed=turn), states(50, seed=-turn)
        for cache in (ours, stock):
            for part in (slice(0, 20), slice(20, 50)):
                given = feed(cache, key[:, :, part], value[:, :, part])
            cache.crop(-removed)
        assert ours.get_seq_length() == stock.get_seq_length()
        assert ours.get_mask_sizes(3, 0) == stock.get_mask_sizes(3, 0)
    key, value = states(3, seed=70), states(3, seed=71)
    given, expected = feed(ours, key, value), feed(stock, key, value)
    shown = expected[0].shape[2] if stock.layers[0].cumulative_length < WINDOW else WINDOW - 1 + 3
    assert all(torch.equal(h.dense(), t[:, :, -shown:]) for h, t in zip(given, expected, strict=True))
    assert table_of(ours).pages.used <= 2 * MOST_PAGES + 2


def test_crop_to_what_is_forgotten_is_refused_and_nothing_changes() -> None:
    cache, stock = new_cache(), DynamicCache(config=mistral())
    for some in (cache, stock):
        feed(some, states(90), states(90))
        some.crop(-10)  # the window is not full yet
        feed(some, states(150), states(150))
    flush(cache)
    before = [t.clone() for t in held_tensors(cache)]
    for removed in (0, 1, 220):
        for some in (cache, stock):
            with pytest.raises(RuntimeError, match="activate_past_recording"):
                some.crop(-removed)
    cache.activate_past_recording()
    with pytest.raises(RuntimeError, match=r"crop\(-20\) after 230 tokens.*no more than 0"):
        cache.crop(-20)
    assert cache.get_seq_length() == 230
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(cache), strict=True))
    feed(cache, states(30), states(30))
    cache.crop(-30)
    assert cache.get_seq_length() == 230


def test_crop_of_a_mixed_cache_changes_all_layers_or_none() -> None:
    config = tf.Gemma3TextConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    cache = TurboQuantCache(config, "raw", **SMALL)
    feed(cache, states(200), states(200))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-5)
    assert [layer.get_seq_length() for layer in cache.layers] == [200, 200]
    assert cache.get_max_length() in (-1, WINDOW)
    cache.reorder_cache(torch.tensor([0]))
    assert [layer.get_seq_length() for layer in cache.layers] == [200, 200]


def test_reset_begins_anew() -> None:
    cache, fresh = new_cache("tq4"), new_cache("tq4")
    feed(cache, states(400, 3), states(400, 3))
    feed(cache, states(1, 3), states(1, 3))
    cache.activate_past_recording()
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.layers[0].record_past
    for some in (cache, fresh):
        for size in (200, 1, 1):
            feed(some, states(size, seed=size), states(size, seed=1))
        flush(some)
    assert cache.batch_size == 1
    assert cache.nbytes == fresh.nbytes
    for a, b in zip(cache.packed_layers, fresh.packed_layers, strict=True):
        assert torch.equal(a.counters, b.counters)
        assert torch.equal(a.pool[:2], b.pool[:2])


def test_a_deep_copy_is_independent() -> None:
    cache = new_cache()
    feed(cache, states(300), states(300, seed=1))
    feed(cache, states(1), states(1, seed=1))
    flush(cache)
    twin = copy.deepcopy(cache)
    assert table_of(twin).layers == twin.layers
    before = [t.clone() for t in held_tensors(cache)]
    for i in range(100):
        feed(twin, states(1, seed=i), states(1, seed=-i))
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(cache), strict=True))
    assert cache.get_seq_length() == 301


def test_one_layer_ahead_of_the_others_forgets_nothing() -> None:
    cache = new_cache()
    for i in range(200):
        cache.layers[0].update(states(1, seed=i), states(1, seed=-i))
    assert table_of(cache).origin == 0
    shown = cache.layers[0].update(states(1), states(1))[0].dense()
    assert torch.equal(shown[:, :, :-1], torch.cat([states(1, seed=i) for i in range(105, 200)], 2))


# -- bad input ---------------------------------------------------------------------------------------------------------
def test_a_step_is_read_once_where_its_tokens_have_left() -> None:
    cache = new_cache()
    feed(cache, states(100), states(100))
    query = states(300)
    mask = torch.ones(1, 1, 300, WINDOW - 1 + 300, dtype=torch.bool)
    key, value = cache.update(states(300), states(300), 0)
    attend = torch.nn.functional.scaled_dot_product_attention
    attend(query, key, value, mask)
    with pytest.raises(RuntimeError, match="read once"):
        attend(query, key, value, mask)


def test_an_old_handle_is_refused() -> None:
    cache = new_cache()
    feed(cache, states(100), states(100))
    old, _ = feed(cache, states(48), states(48))
    for _ in range(3):
        feed(cache, states(48), states(48))  # a ring at a time: counted from the origin, lengths are the same again
    with pytest.raises(RuntimeError, match="show the cache at 148 tokens, and it holds 2"):
        old.sum()


def test_an_attention_window_must_be_the_tables() -> None:
    cache = new_cache()
    feed(cache, states(200), states(200))
    for window, message in ((WINDOW, None), (50, r"sliding_window=50.*sliding attention over 96 tokens")):
        key, value = cache.layers[0].update(states(1), states(1))
        if message is None:
            out, _ = turboquant_attention(torch.nn.Module(), states(1), key, value, None, sliding_window=window)
            assert isinstance(cache.layers[0], SlidingLayer)
            assert out.shape == (1, 1, 2, 64)
        else:
            with pytest.raises(ValueError, match=message):
                turboquant_attention(torch.nn.Module(), states(1), key, value, None, sliding_window=window)
            assert cache.get_seq_length() == 201


def test_without_a_mask_a_query_sees_what_the_handle_shows() -> None:
    cache = new_cache()
    for size in (150, 37):
        feed(cache, states(size, seed=size), states(size, seed=size + 1))
    for i in range(50):
        key, value = feed(cache, states(1, seed=i), states(1, seed=-i))
        query = states(1, seed=99)
        attend = torch.nn.functional.scaled_dot_product_attention
        twin = copy.deepcopy(cache).layers[0]
        dense_key, dense_value = twin.dense(twin.pending)
        assert dense_key.shape[2] == WINDOW
        assert torch.allclose(attend(query, key, value), attend(query, dense_key, dense_value), atol=1e-5)


def test_the_readmes_table_is_the_arithmetic() -> None:
    readme = (Path(__file__).parents[1] / "tq_hf" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w ,.-]+ \| (\d+) \| (\d+) \| 1\.00 \| (.*) \| (.*) \| (.*) \|$", readme, flags=re.M)
    assert len(rows) == 4
    for window, dim, *cells in rows:
        for preset, cell in zip(("tq4", "tq2", "4bit_nc"), cells, strict=True):
            shape = (PRESETS[preset], int(window), int(dim), int(dim), torch.bfloat16)
            own = (int(window) - 1) * 2 * int(dim) * 2
            packed = window_bytes(*shape)
            assert cell == (f"{own / packed:.2f}" if packs_window(*shape) else "larger: own layer")


# -- host work ---------------------------------------------------------------------------------------------------------
def test_the_layers_of_a_forward_pass_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is hidden of the history is put before a mask once, and again for another mask or one that was changed."""
    cache = TurboQuantCache(mistral(layers=3), "raw", **SMALL)
    made: list[Tensor] = []
    original = sliding.pad
    monkeypatch.setattr(sliding, "pad", lambda *args: made.append(original(*args)) or made[-1])

    def attend(layer: int, mask: Tensor | None, seed: int) -> None:
        handles = cache.update(states(1, 2, seed=seed), states(1, 2, seed=seed + 1), layer)
        query, read = states(1, 2, seed=seed + 2), cache.layers[layer]._gather(handles[0].step)
        keep = None if mask is None else mask != 0
        expected = torch.nn.functional.scaled_dot_product_attention(query, *read, attn_mask=keep)
        out = turboquant_attention(torch.nn.Module(), query, *handles, mask, sliding_window=WINDOW)[0]
        assert torch.allclose(out.transpose(1, 2), expected, atol=1e-5)

    for layer in range(3):
        cache.update(states(180, 2, seed=layer), states(180, 2, seed=-layer), layer)
    flush(cache)
    for mask in (None, torch.ones(2, 1, 1, WINDOW, dtype=torch.uint8)):
        made.clear()
        for layer in range(3):
            attend(layer, mask, seed=10 * layer)
        assert len(made) == 1
        assert table_of(cache)._mask is None
    made.clear()
    attend(0, mask, seed=1)
    mask[0, :, :, 5:60] = 0
    attend(1, mask, seed=2)
    attend(2, mask.clone(), seed=3)
    assert len(made) == 3
