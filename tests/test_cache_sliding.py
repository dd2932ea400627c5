"""Layers with a window, and layers with a recurrent state beside packed keys, under the rest of the cache contract: forks,
files, devices, offloading, copies. Each against `DynamicCache`, after pages have left the window."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache

from tests.test_cache import held_tensors, states
from tests.test_cache_fork import content, same
from tests.test_cache_save import bits, parts
from tests.test_generate import generate, left_padded
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache
from tq_hf.layers.hybrid import HybridLayer
from tq_hf.layers.sliding import SlidingTable

WINDOW = 96
SMALL = {"page_size": 32, "recent_window": 16, "sink_tokens": 4}
MIXED = tf.Gemma3TextConfig(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
    sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip
ALL_SLIDING = tf.MistralConfig(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=64, sliding_window=WINDOW
)
CONFIGS = {"mixed": MIXED, "all_sliding": ALL_SLIDING}


def table_of(cache: TurboQuantCache) -> SlidingTable:
    (table,) = cache.sliding_tables.values()
    return table


def feed(caches: list[Any], tokens: int, seed: int, rows: int = 2) -> None:
    """The same new tokens for every layer of all caches; somebody reads them."""
    for cache in caches:
        for layer in range(len(cache.layers)):
            key, value = (states(tokens, rows, seed=seed * 100 + 2 * layer + side) for side in (0, 1))
            given = cache.update(key, value, layer)
            _ = given[0] + 0, given[1] + 0


def pair(kind: str, sizes: tuple[int, ...] = (150, 37, 1, 1), preset: str = "raw") -> tuple[TurboQuantCache, DynamicCache]:
    ours, theirs = TurboQuantCache(CONFIGS[kind], preset, **SMALL), DynamicCache(config=CONFIGS[kind])
    for seed, size in enumerate(sizes):
        feed([ours, theirs], size, seed)
    assert table_of(ours).origin > 0
    return ours, theirs


def agree(ours: TurboQuantCache, theirs: DynamicCache) -> bool:
    """What a next query sees is the same, in all layers."""
    shown = [t for keys, values, _ in theirs for t in (keys, values)]
    return same(content(ours), shown)


@pytest.mark.parametrize("kind", CONFIGS)
def test_forks_go_on_independently_and_share_pages(kind: str) -> None:
    ours, theirs = pair(kind)
    pools = [table.pages for table in ours.tables]
    used = [pool.used for pool in pools]
    forks, twins = ours.fork(3), [copy.deepcopy(theirs) for _ in range(3)]
    assert [pool.used for pool in pools] == used
    assert all(table_of(fork).pages is table_of(ours).pages for fork in forks)
    assert all(table_of(fork).full is fork.table for fork in forks)
    for fork in forks:
        assert table_of(fork).layers == [layer for layer in fork.packed_layers if layer.is_sliding]
    for turn in range(5):
        for i, (fork, twin) in enumerate(zip(forks, twins)):
            feed([fork, twin], (1, 40, 130)[i], seed=10 * i + turn + 20)
    assert all(agree(fork, twin) for fork, twin in zip(forks, twins))
    assert agree(ours, theirs)
    assert len({table_of(fork).origin for fork in forks}) == 3
    for cache in (ours, forks[2]):  # one goes back to nothing, the others stay
        cache.reset()
    assert agree(forks[1], twins[1])
    del fork, cache, forks[1:], ours
    gc.collect()
    alone = {page for row in table_of(forks[0]).rows or [] for page in row} - {-1}
    assert table_of(forks[0]).pages.used == len(alone)


EDITS: dict[str, Callable[[Any], Any]] = {
    "reorder": lambda c: c.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda c: c.batch_repeat_interleave(2),
    "select": lambda c: c.batch_select_indices(torch.tensor([1])),
    "record and crop": lambda c: (c.activate_past_recording(), feed([c], 50, seed=77), c.crop(-45)),
    "nothing": lambda c: None,
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("preset", ["raw", "tq4"])
def test_a_file_goes_on_bit_for_bit(tmp_path: Path, kind: str, edit: str, preset: str) -> None:
    ours, theirs = pair(kind, preset=preset)
    for cache in (ours, theirs):
        EDITS[edit](cache)
    ours.save(tmp_path / "cache")
    back = TurboQuantCache.load(tmp_path / "cache", CONFIGS[kind])
    for name in ("origin", "kept_from", "recording", "sink_tokens", "row_starts", "window", "packed_end", "spans"):
        assert getattr(table_of(back), name) == getattr(table_of(ours), name), name
    counts = [[(r.packed_tokens, r.exact_tokens) for r in cache.report().layers] for cache in (back, ours)]
    assert counts[0] == counts[1]
    assert back.nbytes <= ours.nbytes  # only pages in use are written
    assert preset != "raw" or agree(back, theirs)
    rows = ours.batch_size
    for turn, size in enumerate((1, 33, 1, 150, 1)):
        feed([ours, back, theirs], size, 50 + turn, rows)
        assert same(content(back), content(ours))
    assert same(bits(back), bits(ours))
    assert preset != "raw" or agree(back, theirs) or table_of(ours).recording


def test_an_empty_cache_with_windows_is_saved(tmp_path: Path) -> None:
    TurboQuantCache(MIXED, "raw", **SMALL).save(tmp_path / "cache")
    back, theirs = TurboQuantCache.load(tmp_path / "cache", MIXED), DynamicCache(config=MIXED)
    for seed, size in enumerate((150, 1, 40)):
        feed([back, theirs], size, seed)
    assert agree(back, theirs)


WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("tables", 0, "sliding"), {}, "not one without a window"),
    (("tables", 1, "sliding"), None, "not one without a window"),
    (("tables", 1, "sliding", "window"), 40, "window=40"),
    (("tables", 1, "sliding", "window"), 10**12, "window="),
    (("tables", 1, "sliding", "origin"), -1, "origin=-1"),
    (("tables", 1, "sliding", "origin"), 0, "has not the sizes|kept_from"),
    (("tables", 1, "sliding", "kept_from"), 0, "kept_from=0"),
    (("tables", 1, "sliding", "recording"), 1, "recording='1'"),
    (("tables", 1, "sliding", "shares_keys"), None, "shares_keys"),
    (("tables", 1, "sink_tokens"), 4, "has not the sizes"),
    (("tables", 1, "page_size"), 64, "has not the sizes"),
    (("layers", 0, "table"), 0, "do not fit|is missing|is \\(|more entries"),
    (("layers", 0, "hybrid"), {"layer": {}}, "both a window"),
    (("is_decoder_only",), 1, "is_decoder_only='1'"),
]


@pytest.mark.parametrize(("where", "value", "message"), WRONG)
def test_a_hostile_window_is_refused(tmp_path: Path, where: Any, value: Any, message: str) -> None:
    pair("mixed")[0].save(tmp_path / "cache")
    tensors, header, metadata = parts(tmp_path / "cache")
    holder = header
    for step in where[:-1]:
        holder = holder[step]
    holder[where[-1]] = value
    safetensors.torch.save_file(tensors, tmp_path / "bad", {**metadata, "header": json.dumps(header)})
    with pytest.raises(ValueError, match=message):
        TurboQuantCache.load(tmp_path / "bad")


def test_entries_of_a_window_must_follow_each_other(tmp_path: Path) -> None:
    pair("mixed")[0].save(tmp_path / "cache")
    tensors, _, metadata = parts(tmp_path / "cache")
    assert len(tensors["tables.1.entries"]) > 0
    for change in (32, -32):
        moved = tensors["tables.1.entries"] + torch.tensor([change, 0], dtype=torch.int32)
        safetensors.torch.save_file({**tensors, "tables.1.entries": moved}, tmp_path / "bad", metadata)
        with pytest.raises(ValueError, match=r"do not follow|do not fit"):
            TurboQuantCache.load(tmp_path / "bad")


@pytest.mark.parametrize("kind", CONFIGS)
def test_to_moves_everything(kind: str) -> None:
    """`meta` stands in for another device; forks stay where they are."""
    ours, theirs = pair(kind)
    (fork,) = ours.fork(1)
    assert ours.to("meta") is ours
    tensors = [t for layer in ours.packed_layers for t in layer.tensors()]
    tensors += [t for table in ours.tables for t in table.tensors()]
    assert {t.device.type for t in tensors} == {"meta"}
    assert agree(fork, theirs)
    for table in fork.tables:  # what `to` does where the device differs
        table.moved(torch.device("cpu"))()
    for layer in fork.packed_layers:
        layer.move(torch.device("cpu"), layer.on(torch.device("cpu")))
    for seed in range(40):
        feed([fork, theirs], 3, 30 + seed)
    assert agree(fork, theirs)


@pytest.mark.parametrize("kind", CONFIGS)
def test_offloaded_windows_give_the_same(kind: str) -> None:
    ours = TurboQuantCache(CONFIGS[kind], "raw", **SMALL, offloading=True, offload_only_non_sliding=False)
    theirs = DynamicCache(config=CONFIGS[kind])
    for seed, size in enumerate((150, 37, *[1] * 60, 200, 1)):
        feed([ours, theirs], size, seed)
    last = ours.packed_layers[-1]
    assert last.table.pages.is_offloaded(last.slot)
    assert agree(ours, theirs)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), lambda c: c.fork(1)[0]])
def test_copies_between_update_and_attention_are_right(kind: str, copier: Any) -> None:
    ours, theirs = pair(kind)
    new = [states(3, 2, seed=900 + i) for i in range(2)]
    for layer in range(len(ours.layers)):
        ours.update(*new, layer)
        theirs.update(*new, layer)
    twin = copier(ours)
    for seed in range(40):
        feed([twin], 2, 40 + seed)
    assert agree(ours, theirs)
    for seed in range(40):
        feed([theirs], 2, 40 + seed)
    assert agree(twin, theirs)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_edits_equals_dynamic_cache(tmp_path: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = pair(kind)
    recorded = 0
    for step in range(30):
        edit = rng.choice(["extend", "extend", "reorder", "crop", "fork", "save", "record"])
        if edit == "extend":
            tokens = rng.choice([1, 31, 33, 64, 100])
            recorded += tokens
            feed([ours, theirs], tokens, 100 + step)
        elif edit == "reorder":
            index = torch.tensor([rng.randrange(2) for _ in range(2)])
            for cache in (ours, theirs):
                cache.reorder_cache(index)
        elif edit == "crop":
            removed = rng.choice([0, 1, 20, 33])
            if ours.layers[0].record_past and removed <= recorded:
                for cache in (ours, theirs):
                    cache.crop(-removed)
                recorded = 0
        elif edit == "fork":
            ours = ours.fork(2)[1]
        elif edit == "save":
            ours.save(tmp_path / "cache")
            ours = TurboQuantCache.load(tmp_path / "cache", CONFIGS[kind])
        elif not ours.layers[0].record_past:
            recorded = 0
            for cache in (ours, theirs):
                cache.activate_past_recording()
    length = ours.get_seq_length()
    assert length == theirs.get_seq_length()
    shown = [t[:, :, -(WINDOW - 1) :] if w is not None else t for k, v, w in theirs for t in (k, v)]
    assert same(content(ours), shown)
    for table in ours.tables:
        pages = table.pages
        assert sorted(pages.free) == [page for page, n in enumerate(pages.references) if n == 0]


def test_a_refused_crop_changes_no_layer() -> None:
    ours, theirs = pair("mixed")
    before = [t.clone() for t in held_tensors(ours)]
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        ours.crop(-5)
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(ours), strict=True))
    assert agree(ours, theirs)


def test_an_unpacked_copy_keeps_the_windows() -> None:
    ours, theirs = pair("mixed")
    plain = DynamicCache(ours)
    assert [getattr(layer, "sliding_window", None) for layer in plain.layers] == [WINDOW, None, WINDOW]
    assert agree(ours, plain) and agree(ours, theirs)


# -- attention beside a state space ------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["falcon_h1", "zamba2"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 140}])
def test_hybrid_layers_are_saved_and_forked(tmp_path: Path, family: str, options: dict[str, int]) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(2, 100, [0, 30])
    cache = TurboQuantCache(model.config, "raw", page_size=32, recent_window=0, sink_tokens=4, **options)
    generate(model, ids, cache, mask, new=1)
    assert any(isinstance(layer, HybridLayer) for layer in cache.layers)
    cache.save(tmp_path / "cache")
    copies = [TurboQuantCache.load(tmp_path / "cache", model.config), *([] if options else cache.fork(2))]
    longer, seen = torch.cat([ids, prompt(2, 3, seed=4)], 1), torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], 1)
    expected = generate(model, longer, cache, seen, new=12)
    assert cache.report().packed_tokens > 0
    for twin in copies:
        assert torch.equal(generate(model, longer, twin, seen, new=12), expected)
        assert same(states_of(twin), states_of(cache))


def states_of(cache: TurboQuantCache) -> list[Tensor]:
    layers = [layer.state for layer in cache.layers if isinstance(layer, HybridLayer)]
    return [t for layer in layers for kind in (layer.conv_states, layer.recurrent_states) for t in kind.values()]


def test_a_cache_that_packs_nothing_is_saved(tmp_path: Path) -> None:
    model = tiny_model("mistral_full", sliding_window=24)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    generate(model, prompt(1, 60), cache, new=1)
    assert not cache.packed_layers
    cache.save(tmp_path / "cache")
    back = TurboQuantCache.load(tmp_path / "cache", model.config)
    longer = torch.cat([prompt(1, 60), prompt(1, 3, seed=2)], 1)
    assert torch.equal(generate(model, longer, back, new=8), generate(model, longer, cache, new=8))


def test_the_decoder_half_of_an_encoder_decoder_is_saved_as_such(tmp_path: Path) -> None:
    model = tiny_model("bart")
    TurboQuantCache(model.config, "raw").save(tmp_path / "cache")
    assert TurboQuantCache.load(tmp_path / "cache", model.config).is_decoder_only is False


def test_a_dropped_cache_is_freed_without_the_garbage_collector() -> None:
    """Otherwise the memory of every call's cache would stay until the collector happens to run."""
    ours, _ = pair("mixed")
    gc.collect()
    gc.disable()
    try:
        fork = ours.fork(1)[0]
        pages = table_of(ours).pages
        before = pages.used
        feed([fork], 70, seed=9)
        assert pages.used > before
        layers = [weakref.ref(layer) for layer in (*ours.layers, *fork.layers)]
        del fork
        assert pages.used <= before
        del ours
        assert not any(layer() for layer in layers)
    finally:
        gc.enable()


@pytest.mark.parametrize("by_pickle", [False, True])
def test_copies_know_their_own_layers(by_pickle: bool) -> None:
    ours, _ = pair("mixed")
    twin = pickle.loads(pickle.dumps(ours)) if by_pickle else copy.deepcopy(ours)
    for cache in (ours, twin, ours.fork(1)[0]):
        assert table_of(cache).layers == [cache.layers[0], cache.layers[2]]


def test_offloading_where_every_layer_stays_on_the_device() -> None:
    """transformers' own `prefetch` looks for one that does not."""
    ours, theirs = TurboQuantCache(ALL_SLIDING, "raw", **SMALL, offloading=True), DynamicCache(config=ALL_SLIDING)
    for seed, size in enumerate((150, 1, 1)):
        feed([ours, theirs], size, seed)
    assert ours.report().packed_tokens > 0 and same(content(ours), [t for k, v, _ in theirs for t in (k, v)])
