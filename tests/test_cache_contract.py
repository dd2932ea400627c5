"""The cache contract of transformers, member by member, against `DynamicCache` and plain tensors."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from tests.test_cache import CONFIG, filled, held_tensors, states
from tests.test_cache_fork import SMALL, content, extend, same
from tests.test_generate import generate, left_padded, reference
from tests.tiny_models import tiny_model
from tq_hf import TurboQuantCache
from tq_hf.pages.pool import PagePool

CPU = torch.device("cpu")
# On 5.17, `DynamicCache.reset` zeroes what it holds and keeps its length, and `crop` fails before the first token.
RESET_KEEPS_LENGTH = "reset" not in vars(DynamicLayer)


# -- every public member -----------------------------------------------------------------------------------------------
def held(cache: Any) -> list[Any]:
    return [tuple(entry) for entry in cache]


def updated(cache: Any) -> Any:
    new = states(3, 2, dim=16), states(3, 2, dim=16, seed=1)
    return [handle + 0 for layer in range(2) for handle in cache.update(*new, layer)]


def begun(cache: Any) -> Any:
    cache.reset()
    cache.early_initialization(2, 2, 16, torch.float32, CPU)
    return cache.get_seq_length(), [layer.is_initialized for layer in cache.layers]


# What each member gives on a cache, and what the cache holds after it.
MEMBERS: dict[str, Callable[[Any], Any]] = {
    "activate_past_recording": lambda c: c.activate_past_recording(),
    "batch_repeat_interleave": lambda c: c.batch_repeat_interleave(3),
    "batch_select_indices": lambda c: c.batch_select_indices(torch.tensor([1])),
    "crop": lambda c: c.crop(-min(40, int(c.get_seq_length()))),
    "early_initialization": begun,
    "get_conv_state": lambda c: c.get_conv_state(0),
    "get_mask_sizes": lambda c: (c.get_mask_sizes(3, 0), c.get_mask_sizes(1, 1), c.get_mask_sizes(5, 99)),
    "get_max_length": lambda c: (c.get_max_length(0), c.get_max_length(1), c.get_max_length()),
    "get_query_offset": lambda c: (c.get_query_offset(), c.get_query_offset(1)),
    "get_recurrent_state": lambda c: c.get_recurrent_state(0),
    "get_seq_length": lambda c: (c.get_seq_length(), c.get_seq_length(1), c.get_seq_length(99)),
    "has_previous_state": lambda c: c.has_previous_state(0),
    "is_compileable": lambda c: c.is_compileable,
    "is_croppable": lambda c: c.is_croppable,
    "is_dummy": lambda c: c.is_dummy,
    "is_initialized": lambda c: c.is_initialized,
    "is_linear": lambda c: c.is_linear,
    "is_recording_past": lambda c: (c.activate_past_recording(), c.is_recording_past(0), c.is_recording_past(1)),
    "is_sliding": lambda c: c.is_sliding,
    "max_cache_len": lambda c: c.max_cache_len,
    "offload": lambda c: c.offload(1),
    "reorder_cache": lambda c: c.reorder_cache(torch.tensor([1, 1])),
    "reset": lambda c: (c.reset(), c.get_seq_length(), updated(c)),
    "update": updated,
    "update_conv_state": lambda c: c.update_conv_state(states(1), 0),
    "update_indexer": lambda c: c.update_indexer(states(1), 0),
    "update_recurrent_state": lambda c: c.update_recurrent_state(states(1), 0),
}  # fmt: skip
OTHERWISE = {
    "batch_size": "rows; DynamicCache does not know them (-1), or fails",
    "max_batch_size": "the same, deprecated",
    "get_max_cache_shape": "get_max_length's old name, deprecated",
    "prefetch": "DynamicCache without offloading has no stream for it; ours does nothing then",
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return bool(a == b)


def outcome(call: Callable[[Any], Any], cache: Any) -> Any:
    try:
        return call(cache)
    except Exception as error:
        return type(error)


def pair(family: str, tokens: int = 100, **options: Any) -> tuple[TurboQuantCache, DynamicCache]:
    config = tiny_model(family).config
    caches = TurboQuantCache(config, "raw", **SMALL, **options), DynamicCache(config=config)
    for cache in caches:
        for layer in range(2 if tokens else 0):
            key, value = cache.update(states(tokens, 2, dim=16, seed=layer), states(tokens, 2, dim=16, seed=5), layer)
            _ = key + 0, value + 0  # somebody reads them
    return caches


def test_every_public_member_is_compared_or_excused() -> None:
    members = {name for name in dir(Cache) if not name.startswith("_")}
    assert members <= set(MEMBERS) | set(OTHERWISE)


@pytest.mark.parametrize("member", [name for name in MEMBERS if hasattr(Cache, name)])
@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid"])
@pytest.mark.parametrize("tokens", [0, 20, 100])
def test_members_do_what_dynamic_cache_does(member: str, family: str, tokens: int) -> None:
    if RESET_KEEPS_LENGTH and member in (("reset", "early_initialization") if tokens else ("crop",)):
        pytest.skip("DynamicCache of this transformers does not forget")
    ours, theirs = pair(family, tokens)
    if tokens == 100:
        assert ours.report().packed_tokens > 0
    before = held(ours)
    results = [outcome(MEMBERS[member], cache) for cache in (ours, theirs)]
    assert equal(*results)
    if isinstance(results[0], type):  # an error: nothing has changed
        assert equal(held(ours), before)
    elif tokens or member != "early_initialization":
        assert [c.get_seq_length() for c in (ours, theirs)] == [ours.get_seq_length()] * 2
    assert member in ("early_initialization", "reset") or not tokens or equal(held(ours), held(theirs))


def test_members_that_differ_from_dynamic_cache() -> None:
    ours, _ = pair("llama")
    assert ours.batch_size == 2
    for name in ("max_batch_size", "get_max_cache_shape"):
        if hasattr(Cache, name):
            value = getattr(ours, name)
            assert value == 2 if name == "max_batch_size" else value() == -1
    before = held(ours)
    ours.prefetch(0)
    ours.offload(0)
    ours.prefetch(0, only_non_sliding=False)
    assert equal(held(ours), before)


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 120}])
def test_iteration_length_and_index_are_dynamic_caches(options: dict[str, int]) -> None:
    ours, theirs = pair("llama", **options)
    assert len(ours) == len(theirs) == 2
    assert equal(held(ours), held(theirs))
    assert equal(held(DynamicCache(ours)), held(theirs))  # an unpacked copy
    for cache in (ours, theirs):
        with pytest.raises(TypeError, match="not subscriptable"):
            cache[0]
    if not options:
        ours, theirs = pair("gemma3_hybrid")
        assert equal(held(ours), held(theirs))
        assert held(ours)[0][2].item() == 24
    assert held(TurboQuantCache(CONFIG)) == [(None, None, None)] * 2


# -- edits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_edits_equals_the_same_on_plain_tensors(seed: int) -> None:
    """Dynamic, static and forked caches in preset raw; lengths fall on pages and next to them."""
    rng, rows = random.Random(seed), 3
    dynamic, static = (TurboQuantCache(CONFIG, "raw", **SMALL, **o) for o in ({}, {"max_cache_len": 700}))
    caches, crops = [dynamic, static], 0
    plain = [torch.zeros(rows, 2, 0, 64) for _ in range(4)]
    for step in range(16):
        edit = rng.choice(["extend", "extend", "reorder", "crop", "fork", "reset"]) if step else "extend"
        if edit == "extend":
            tokens = rng.choice([1, 4, 31, 32, 33, 36, 64, 70]) if plain[0].shape[2] < 400 else 1
            new = [states(tokens, rows, seed=100 * step + i) for i in range(4)]
            plain = [torch.cat([a, b], 2) for a, b in zip(plain, new)]
            for cache in caches:
                for layer in range(2):
                    cache.update(new[2 * layer], new[2 * layer + 1], layer)
        elif edit == "reorder":
            index = torch.tensor([rng.randrange(rows) for _ in range(rows)])
            plain = [t[index] for t in plain]
            for cache in caches:
                cache.reorder_cache(index)
        elif edit == "crop" and crops < 4:
            crops += 1
            left = max(0, plain[0].shape[2] - rng.choice([1, 3, 31, 32, 33, 65]))
            for cache in caches:
                cache.crop(left - plain[0].shape[2])
            plain = [t[:, :, :left] for t in plain]
        elif edit == "fork" and plain[0].shape[2]:
            caches[0] = caches[0].fork(2)[1]
        elif edit == "reset" and rng.random() < 0.3:
            plain, crops = [t[:, :, :0] for t in plain], 0
            for cache in caches:
                cache.reset()
        for cache in caches:
            assert int(cache.get_seq_length()) == plain[0].shape[2]
        if step % 4 == 3:
            for cache in caches:
                given = content(cache)
                assert same(given, plain) or (not given and plain[0].shape[2] == 0)
    pages = dynamic.table.pages
    assert sorted(pages.free) == [p for p, n in enumerate(pages.references) if n == 0]


@pytest.mark.parametrize("tokens", [3, 4, 5, 35, 36, 37, 51, 52, 53, 67, 68, 69])
def test_batch_edits_at_page_and_window_edges(tokens: int) -> None:
    cache = TurboQuantCache(CONFIG, "raw", page_size=32, recent_window=16, sink_tokens=4)
    whole = [states(tokens, 3, seed=i) for i in range(4)]
    for layer in range(2):
        cache.update(whole[2 * layer], whole[2 * layer + 1], layer)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0, 2]))
    cache.reorder_cache(torch.tensor([2, 1, 0]))
    cache.crop(-1)
    assert (cache.report().packed_tokens > 0) == (tokens >= 52)
    assert same(content(cache), [t[[1, 0, 2]][:, :, :-1] for t in whole])


def test_static_rows_are_reordered_in_place_and_nothing_is_requantized() -> None:
    cache = filled(150, batch=3, **SMALL, max_cache_len=300)
    addresses = sorted(t.data_ptr() for t in held_tensors(cache))
    before, pools = content(cache), [layer.pool.clone() for layer in cache.packed_layers]
    index = torch.tensor([2, 2, 0])
    cache.reorder_cache(index)
    cache.batch_select_indices(torch.tensor([0, 1, 2]))
    cache.batch_repeat_interleave(1)
    assert sorted(t.data_ptr() for t in held_tensors(cache)) == addresses
    assert all(torch.equal(layer.pool, pool) for layer, pool in zip(cache.packed_layers, pools, strict=True))
    assert same(content(cache), [t[index] for t in before])
    extend(cache, 40, seed=3)  # rows that share pages now write their own
    rows = cache.table.rows
    assert rows[0][:4] == rows[1][:4] and not set(rows[0][4:]) & set(rows[1][4:])
    cache.reset()
    assert len({page for row in cache.table.rows for page in row}) == cache.table.pages.capacity


def test_static_caches_keep_their_number_of_rows() -> None:
    cache = filled(150, "raw", batch=2, **SMALL, max_cache_len=300)
    before = content(cache)
    with pytest.raises(NotImplementedError, match=r"of 2 rows cannot become one of 1: .*without max_cache_len"):
        cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(NotImplementedError, match="one of 6"):
        cache.batch_repeat_interleave(3)
    assert same(content(cache), before)


@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid"])
def test_beams_in_a_static_cache_equal_the_reference(family: str) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(2, 100, [0, 30])
    expected = reference(model, ids, mask, num_beams=3, new=12)
    cache = TurboQuantCache(model.config, "raw", **SMALL, max_cache_len=140)
    assert torch.equal(generate(model, ids, cache, mask, num_beams=3, new=12), expected)
    assert cache.report().packed_tokens > 0


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 200}])
def test_a_crop_of_all_leaves_nothing_and_one_of_more_is_refused(options: dict[str, int]) -> None:
    ours, theirs = pair("llama", **options)
    before = [t.clone() for t in held_tensors(ours)]
    for removed in (101, 10**6):
        with pytest.raises(ValueError, match=f"crop.-{removed}.: the cache holds 100 tokens"):
            ours.crop(-removed)
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(ours), strict=True))
    for cache in (ours, theirs):
        cache.crop(-100)
    assert int(ours.get_seq_length()) == theirs.get_seq_length() == 0
    assert equal(updated(ours)[0][:, :, :3], updated(theirs)[0])


def test_a_crop_that_a_sliding_layer_refuses_changes_nothing() -> None:
    ours, theirs = pair("gemma3_hybrid")
    before = [t.clone() for t in held_tensors(ours)]
    lengths = [ours.get_seq_length(i) for i in range(2)]
    for cache in (ours, theirs):
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-3)
    assert [ours.get_seq_length(i) for i in range(2)] == lengths
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(ours), strict=True))


def test_a_crop_that_a_static_table_refuses_changes_nothing() -> None:
    cache = TurboQuantCache(tiny_model("gemma3_hybrid", sliding_window=600).config, "raw", **SMALL, max_cache_len=512)
    if not hasattr(type(cache.layers[0]), "crop"):
        pytest.skip("this transformers has no crop for its static layers")
    for step in range(4):  # each leaves an entry with a single token
        for layer in range(2):
            new = states(32 if step else 36, dim=16)
            _ = cache.update(new, new, layer)[0] + 0
        if step < 3:
            cache.crop(-31)
    before = [t.clone() for t in held_tensors(cache)]
    with pytest.raises(RuntimeError, match="cropped into packed pages 4 times"):
        cache.crop(-31)
    assert [int(cache.get_seq_length(i)) for i in range(2)] == [39, 39]
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(cache), strict=True))
    assert cache.layers[0].cumulative_length_int == 39


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 200}])
def test_a_packed_layers_keys_are_dequantized_when_they_are_read(options: dict[str, int]) -> None:
    cache = TurboQuantCache(CONFIG, **SMALL, **options)
    assert cache.layers[0].keys is None and cache.layers[0].values is None
    cache = filled(100, **SMALL, **options)
    for layer, (keys, values, _) in zip(cache.layers, cache, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values) and keys.shape == (1, 2, 100, 64)
        with pytest.raises(RuntimeError, match="inference"):  # a copy: the layer would not hear of it
            layer.keys[..., -1, :] = 0.0
        with pytest.raises(AttributeError):
            layer.values = values


@pytest.mark.parametrize("index", [[2, 0], [-3, 0], [0.0, 1.0], []])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 200}])
def test_reordering_with_a_wrong_index_changes_nothing(index: list[Any], options: dict[str, int]) -> None:
    ours, _ = pair("llama", **options)
    before = [t.clone() for t in held_tensors(ours)]
    with pytest.raises(ValueError, match=r"row indices .* do not fit a cache of 2 rows"):
        ours.reorder_cache(torch.tensor(index))
    assert all(torch.equal(a, b) for a, b in zip(before, held_tensors(ours), strict=True))


# -- devices -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300}])
def test_to_moves_everything_and_returns_the_cache(options: dict[str, int]) -> None:
    """`meta` stands in for another device."""
    cache = filled(150, batch=2, **SMALL, **options)
    before = content(cache)
    assert cache.to("cpu") is cache
    assert cache.to(CPU) is cache and same(content(cache), before)
    forks = [] if options else cache.fork(2)
    shapes = sorted(t.shape for t in held_tensors(cache))
    assert cache.to("meta") is cache
    tensors = [t for layer in cache.packed_layers for t in layer.tensors()] + cache.table.tensors()
    assert {t.device.type for t in tensors} == {"meta"}
    assert sorted(t.shape for t in tensors) == shapes
    for layer in range(2):
        key, _ = cache.update(states(70, 2).to("meta"), states(70, 2).to("meta"), layer)
        cache.layers[layer].flush()
        assert key.device.type == "meta"
    with pytest.raises(ValueError, match=r"keys are on cpu, and .* tokens are on meta: .* another device map"):
        cache.update(states(1, 2), states(1, 2), 0)
    for fork in forks:
        assert same(content(fork), before)
    del cache
    if forks:
        assert forks[0].table.pages.used == 2 * 4  # the fork that moved has given its references back


def test_a_cache_has_no_dtype_to_go_to() -> None:
    cache = filled(100)
    before = content(cache)
    with pytest.raises(TypeError, match=r"cache\.to\(torch\.float16\): expected a device"):
        cache.to(torch.float16)
    assert same(content(cache), before)


def test_to_moves_transformers_own_layers() -> None:
    ours, _ = pair("gemma3_hybrid")
    layer = ours.to("meta").layers[0]
    assert {layer.keys.device.type, layer.values.device.type, layer.device.type} == {"meta"}


def test_a_moved_cache_goes_on_as_before() -> None:
    """From a stand-in for another device and back: what is read from it stays the same."""
    cache = filled(150, **SMALL)
    twin = copy.deepcopy(cache)
    cache.table.moved(CPU)()  # what `to` does where the device differs
    for layer in cache.packed_layers:
        layer.move(CPU, layer.on(CPU))
    assert same(content(cache), content(twin))
    for c in (cache, twin):
        extend(c, 70, seed=4)
    assert same(content(cache), content(twin))


def test_layers_on_two_devices_keep_their_state_where_their_inputs_are() -> None:
    """A model spread over devices by a device_map: CPU and a stand-in."""
    cache = TurboQuantCache(CONFIG, "raw", **SMALL)
    devices = ("cpu", "meta")
    for tokens in (100, 1, 40):
        for layer, device in enumerate(devices):
            key, value = (states(tokens, 2, seed=s).to(device) for s in (1, 2))
            handle, _ = cache.update(key, value, layer)
            assert handle.device.type == device
            cache.layers[layer].flush()
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-60)
    (fork,) = cache.fork(1)
    for held_cache in (cache, fork, copy.deepcopy(cache)):
        for layer, device in zip(held_cache.packed_layers, devices, strict=True):
            assert {t.device.type for t in layer.tensors()} == {device}
            assert layer.on_device.page_ids.device.type == device
        assert held_cache.get_seq_length() == held_cache.get_seq_length(1) == 81
        expected = torch.cat([states(n, 2, seed=1) for n in (100, 1, 40)], 2)[[1, 1, 0, 0], :, :81]
        assert torch.equal(held_cache.layers[0].unpacked()[0], expected)
    # accelerate's hooks send every argument with a `to` to the device of each module
    assert send_to_device({"past_key_values": cache}, "meta")["past_key_values"] is cache
    assert cache.layers[0].pool.device.type == "cpu"


# -- offloading --------------------------------------------------------------------------------------------------------
@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is copied out of and into the device, by slot."""
    log: list[tuple[str, int]] = []
    fetch, copy_out = PagePool.fetch, PagePool.offload

    def noted_fetch(pool: PagePool, slot: int) -> None:
        if pool.is_offloaded(slot):
            log.append(("in", slot))
        fetch(pool, slot)

    def noted_offload(pool: PagePool, slot: int) -> None:
        if not pool.is_offloaded(slot):
            log.append(("out" if slot in pool._unsaved else "drop", slot))
        copy_out(pool, slot)

    monkeypatch.setattr(PagePool, "fetch", noted_fetch)
    monkeypatch.setattr(PagePool, "offload", noted_offload)
    return log


@pytest.mark.parametrize("attention", ["turboquant", "sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid"])
def test_an_offloaded_cache_gives_the_reference_tokens(family: str, attention: str, traffic: list[tuple[str, int]]) -> None:
    model = tiny_model(family, **({"num_hidden_layers": 3} if family == "llama" else {}))
    ids, mask = left_padded(2, 100, [0, 30])
    expected = reference(model, ids, mask, num_beams=2, new=12)
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, "raw", **SMALL, offloading=True)
    assert torch.equal(generate(model, ids, cache, mask, num_beams=2, new=12), expected)
    assert all(layer.table.pages.is_offloaded(layer.slot) for layer in cache.packed_layers[1:])
    assert {kind for kind, _ in traffic} == {"in", "out", "drop"}
    assert cache.report().packed_tokens > 0
    assert cache.nbytes >= cache.packed_layers[0].pool.nbytes


def test_pages_are_copied_out_only_when_some_were_written(traffic: list[tuple[str, int]]) -> None:
    cache = TurboQuantCache(CONFIG, "raw", **SMALL, offloading=True)

    def step(tokens: int, seed: int) -> list[tuple[str, int]]:
        traffic.clear()
        for layer in range(2):
            key, _ = cache.update(states(tokens, seed=seed), states(tokens, seed=seed), layer)
            assert not traffic or traffic[-1][0] != "out" or traffic[-1][1] != layer  # not before attention
            _ = key + 0
        return list(traffic)

    step(100, 0)
    assert step(1, 1) == [("in", 1), ("drop", 0), ("in", 0), ("drop", 1)]
    assert step(40, 2) == [("in", 1), ("out", 0), ("in", 0), ("out", 1)]
    assert step(1, 3) == [("in", 1), ("drop", 0), ("in", 0), ("drop", 1)]
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([0]))
    twins = [copy.deepcopy(cache), *cache.fork(1)]
    expected = [torch.cat([states(100), states(1, seed=1), states(40, seed=2)], 2)[:, :, :140]] * 4
    assert all(same(content(c), expected) for c in (cache, *twins))


def test_layers_offload_by_hand_and_come_back_by_themselves() -> None:
    cache = filled(150, **SMALL)
    before = content(cache)
    for layer in cache.packed_layers:
        layer.offload()
        layer.offload()
        assert layer.table.pages.is_offloaded(layer.slot)
    assert cache.nbytes == sum(t.untyped_storage().nbytes() for t in held_tensors(cache))
    cache.layers[0].prefetch()
    assert not cache.table.pages.is_offloaded(0) and cache.table.pages.is_offloaded(1)
    assert same(content(cache), before)


def test_a_static_cache_is_not_offloaded() -> None:
    with pytest.raises(ValueError, match="offloading=True cannot be combined with max_cache_len"):
        TurboQuantCache(CONFIG, max_cache_len=100, offloading=True)
    cache = filled(100, max_cache_len=200)
    with pytest.raises(RuntimeError, match="without max_cache_len"):
        cache.offload(0)
