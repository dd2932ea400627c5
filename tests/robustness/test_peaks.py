"""What edits and forward passes take for a while: memory beyond what a cache holds, and reads of the device."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from tests.robustness.counts import count
from tests.robustness.faults import OutOfMemory, expected
from tests.robustness.peaks import Peak
from tests.robustness.states import equal, require_sound, state_of
from tests.robustness.test_atomicity import CONFIGS, cache_of, forward, places
from tests.test_cache import states
from tests.test_cache_sliding import SMALL
from tq_hf import TurboQuantCache
from tq_hf.layers.forward_pass import ForwardPass
from tq_hf.layers.full import TurboQuantLayer
from tq_hf.reporting.memory import storage_bytes, tensors_of

SIZES = {"hidden_size": 64, "num_hidden_layers": 10, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
DEEP = tf.LlamaConfig(**SIZES)
WINDOWS = tf.MistralConfig(**SIZES, sliding_window=200)
ROWS = 4
Call = Callable[[TurboQuantCache], Any]


def deep(config: tf.PretrainedConfig, **options: Any) -> TurboQuantCache:
    cache = TurboQuantCache(config, "tq4", page_size=64, recent_window=64, sink_tokens=4, **options)
    for tokens in (300, 1):
        for i in range(len(cache.layers)):
            cache.update(states(tokens, ROWS, seed=i), states(tokens, ROWS, seed=-i), i)
            if isinstance(cache.layers[i], TurboQuantLayer):
                cache.layers[i].flush()
    return cache


KINDS: dict[str, Callable[[], TurboQuantCache]] = {
    "packed": lambda: deep(DEEP),
    "static": lambda: deep(DEEP, max_cache_len=400),
    "windows": lambda: deep(WINDOWS, boundary_layers=0),
    "transformers' own": lambda: deep(WINDOWS, boundary_layers=4),
}


def exact(layer: Any) -> dict[str, Tensor]:
    """What a layer holds besides packed pages: its share of an edit of rows."""
    if isinstance(layer, TurboQuantLayer):
        return {name: getattr(layer, name) for name in layer.row_state_names()}
    return {"keys": layer.keys, "values": layer.values}


def nbytes(layer: Any) -> int:
    return sum(tensor.nbytes for tensor in exact(layer).values())


def held(cache: TurboQuantCache) -> list[Tensor]:
    tensors = [tensor for table in cache.tables for tensor in table.tensors()]
    for layer in cache.layers:
        tensors += layer.tensors() if isinstance(layer, TurboQuantLayer) else tensors_of(vars(layer))
    return tensors


FEWER: dict[str, Call] = {
    "reorder": lambda c: c.reorder_cache(torch.tensor([1, 1, 3, 0])),
    "select": lambda c: c.batch_select_indices(torch.tensor([3, 1])),
}


# -- edits of rows -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "edit"), [(k, e) for k in KINDS for e in FEWER if (k, e) != ("static", "select")])
def test_rows_are_chosen_with_the_memory_of_one_layer(kind: str, edit: str) -> None:
    cache = KINDS[kind]()
    own = [layer for layer in cache.layers if not isinstance(layer, TurboQuantLayer)]
    assert len(own) == (4 if kind == "transformers' own" else 0)
    layer = max(nbytes(layer) for layer in cache.layers)
    tensor = max(t.nbytes for packed in cache.packed_layers for t in exact(packed).values())
    wanted = [{name: t.clone() for name, t in exact(layer).items()} for layer in cache.layers]
    with Peak(held(cache)) as memory:
        FEWER[edit](cache)
    assert memory.peak - memory.before <= layer + (tensor if own else 0) + 4096
    rows = [1, 1, 3, 0] if edit == "reorder" else [3, 1]
    for kept, before in zip(cache.layers, wanted, strict=True):
        assert all(torch.equal(tensor, before[name][rows]) for name, tensor in exact(kept).items())
    print(f"{kind}, {edit}: {(memory.peak - memory.before) / layer:.2f} layers of {layer} B")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "static"])
def test_rows_are_repeated_with_the_memory_of_what_was_there(kind: str) -> None:
    cache = KINDS[kind]()
    small, taken = sum(nbytes(layer) for layer in cache.layers), storage_bytes([exact(layer) for layer in cache.layers])
    with Peak(held(cache)) as memory:
        cache.batch_repeat_interleave(3)
    assert sum(nbytes(layer) for layer in cache.layers) == 3 * small
    assert memory.extra <= taken + 4096
    print(f"{kind}, repeat: {memory.extra / memory.after:.2f} of what is there afterwards")


@pytest.mark.parametrize("edit", ["reorder", "select"])
@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_no_memory_for_chosen_rows_leaves_them_as_they_were_or_chosen(kind: str, edit: str) -> None:
    """Whichever allocation it is: once layers change, there is always memory to write them in place."""
    cache = cache_of(kind, 130, 20)
    rows = torch.tensor([1, 1]) if edit == "reorder" else torch.tensor([1])

    def call(cache: TurboQuantCache) -> None:
        (cache.reorder_cache if edit == "reorder" else cache.batch_select_indices)(rows)

    undisturbed, measured = copy.deepcopy(cache), copy.deepcopy(cache)
    before = state_of(cache)
    call(undisturbed)
    after, wanted = state_of(undisturbed), forward(copy.deepcopy(undisturbed), 33, seed=5)
    failed = []
    for place in places(lambda _: call(measured), OutOfMemory, None):
        tried = copy.deepcopy(cache)
        with expected(OutOfMemory(place)):
            call(tried)
        count("faults injected: out of memory")
        list(tried)  # it is refused by no use
        failed.append(equal(state_of(tried), before))
        if failed[-1]:
            call(tried)
        assert equal(state_of(tried), after)
        assert equal(forward(tried, 33, seed=5), wanted)
        require_sound(tried)
    # First comes what may fail, then what may not: rings and first tokens at least, of each layer.
    changing = failed[failed.index(False) :]
    assert not any(changing) and len(changing) >= 4 * len(cache.packed_layers)


def test_no_memory_for_transformers_own_layers_is_found_before_the_others_change() -> None:
    cache = KINDS["transformers' own"]()
    before = state_of(cache)
    undisturbed, measured = copy.deepcopy(cache), copy.deepcopy(cache)
    FEWER["reorder"](undisturbed)
    after, refused = state_of(undisturbed), []
    for place in places(lambda _: FEWER["reorder"](measured), OutOfMemory, None):
        tried = copy.deepcopy(cache)
        with expected(OutOfMemory(place)):
            FEWER["reorder"](tried)
        count("faults injected: out of memory")
        try:
            list(tried)
            assert equal(state_of(tried), before) or equal(state_of(tried), after)
        except RuntimeError as error:
            assert "reset()" in str(error)
            refused.append(place)
    assert len(refused) == 2 * (4 - 1)  # keys and values of all but the first, which frees what these need


# -- what undoes a forward pass ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 5, 20, 33, 64, 90, 200])
@pytest.mark.parametrize("past", [90, 110, 121])
@pytest.mark.parametrize("kind", ["full", "all_sliding"])
def test_a_chunk_keeps_only_the_exact_tokens_that_it_overwrites(kind: str, past: int, tokens: int) -> None:
    cache = cache_of(kind, past, 1)
    layer = cache.layers[0]
    slots = [position % layer.ring_key.shape[2] for position in range(layer.packed_end, layer.length)]
    before = layer.ring_key.clone()
    cache.update(states(tokens, 2, seed=8), states(tokens, 2, seed=9), 0)
    layer.flush()
    overwritten = [slot for slot in slots if not torch.equal(before[:, :, slot], layer.ring_key[:, :, slot])]
    kept = layer.before.overwritten
    assert sum(tensor.nbytes for tensor in kept.values()) == 2 * len(overwritten) * before[:, :, 0].nbytes
    assert not overwritten or torch.equal(kept["ring_key"], before[:, :, overwritten])


# -- a cache that is dropped -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("updated", [1, 3])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_cache_dropped_before_attention_is_freed_without_the_garbage_collector(kind: str, updated: int) -> None:
    """As where a forward pass fails, and what calls it drops the cache: some layers, or all, wait for attention."""
    cache = cache_of(kind, 90, 1)
    gc.collect()
    gc.disable()
    try:
        for i in range(min(updated, len(cache.layers))):
            cache.update(states(1, 2, seed=8), states(1, 2, seed=9), i)  # whose handles go at once
        known = [weakref.ref(layer) for layer in cache.layers]
        known += [weakref.ref(tensor) for layer in cache.packed_layers for tensor in layer.tensors()]
        assert any(layer.pending is not None for layer in cache.packed_layers) or updated == 1
        del cache
        left = [thing for ref in known if (thing := ref()) is not None]
        assert not left, f"{len(left)} of {len(known)}"
    finally:
        gc.enable()


def test_a_handle_outlives_its_cache() -> None:
    cache = cache_of("full", 90, 1)
    key, _ = copy.deepcopy(cache).update(states(1, 2, seed=8), states(1, 2, seed=9), 0)
    expected_key, _ = cache.update(states(1, 2, seed=8), states(1, 2, seed=9), 0)
    del cache
    assert torch.equal(key.dense(), expected_key.dense())


def test_a_cache_pickled_before_attention_goes_on() -> None:
    cache = cache_of("full", 90, 1)
    for i in range(2):
        cache.update(states(1, 2, seed=8), states(1, 2, seed=9), i)
    twin = pickle.loads(pickle.dumps(cache))
    assert twin.get_seq_length() == 92
    assert equal(forward(twin, 3), forward(cache, 3)) and equal(state_of(twin), state_of(cache))


# -- host work ---------------------------------------------------------------------------------------------------------
class Reads(TorchFunctionMode):
    """How often numbers of int32 tensors, such as counters, are brought to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("tolist", "item", "__int__", "__index__", "__bool__")
        if getattr(func, "__name__", "") in names and args[0].dtype == torch.int32:
            self.number += 1
        return func(*args, **(kwargs or {}))


EDITS: dict[str, Call] = {
    "reorder": FEWER["reorder"],
    "crop of the tail": lambda c: c.crop(-3),
    "crop into pages": lambda c: c.crop(-100),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", ["packed", "static"])
def test_an_edit_waits_for_the_device_once_if_at_all(kind: str, edit: str) -> None:
    cache = KINDS[kind]()
    with Reads() as reads:
        EDITS[edit](cache)
    assert reads.number == (1 if kind == "static" else 0)
    assert int(cache.get_seq_length()) == {"reorder": 301, "crop of the tail": 298, "crop into pages": 201}[edit]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", ["packed", "static"])
def test_an_edit_asks_once_whether_the_forward_pass_is_over(kind: str, edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KINDS[kind]()
    asked: list[None] = []
    is_over = ForwardPass.is_over
    monkeypatch.setattr(ForwardPass, "is_over", lambda self, cache: asked.append(None) or is_over(self, cache))
    EDITS[edit](cache)
    assert len(asked) == 1


def test_an_uneven_static_cache_is_refused_whatever_is_pending() -> None:
    cache = KINDS["static"]()
    cache.update(states(1, ROWS), states(1, ROWS), 0)
    for use in EDITS.values():
        with pytest.raises(RuntimeError, match=r"ended early.*cache\.reset\(\)"):
            use(cache)


# -- transformers' own layers ------------------------------------------------------------------------------------------
def test_rows_are_chosen_of_keys_and_of_states_beside_them() -> None:
    """The layer of both repeats and selects keys only, and the states would be those of other rows."""
    cache = cache_of("stock", 20)
    layer = cache.layers[0] = LinearAttentionAndFullAttentionLayer()
    key, value, state = states(20, 2, seed=1), states(20, 2, seed=2), states(3, 2, seed=3)
    layer.update(key, value)
    layer.update_recurrent_state(state)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([-1, 0, 2]))
    for held, was in ((layer.keys, key), (layer.values, value), (layer.recurrent_states[0], state)):
        assert torch.equal(held, was[[1, 0, 1]])


def test_a_cache_that_packs_nothing_knows_its_rows() -> None:
    cache = TurboQuantCache(tf.MistralConfig(**SIZES, sliding_window=24), "tq4", **SMALL)
    cache.batch_repeat_interleave(2)  # of nothing
    for i in range(10):
        cache.update(states(30, 2, seed=i), states(30, 2, seed=-i), i)
    before = state_of(cache)
    with pytest.raises(ValueError, match="do not fit a cache of 2 rows: nothing was changed"):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert equal(state_of(cache), before)
    cache.batch_select_indices(torch.tensor([False, True]))
    cache.batch_repeat_interleave(3)
    assert torch.equal(cache.layers[7].keys, states(30, 2, seed=7)[[1, 1, 1], :, -23:])
