"""What the random sequences of `test_sequences.py` have found, each as one plain case."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from tests.robustness.invariants import check_invariants
from tests.test_cache import CONFIG, filled, states
from tests.test_cache_fork import SMALL, content, extend, same
from tests.tiny_models import tiny_model
from tq_hf import TurboQuantCache

LINEAR = ("qwen3_next", "falcon_h1")  # a state in place of attention, and one beside it


def with_state(family: str, rows: int, **options: Any) -> tuple[TurboQuantCache, int, torch.Tensor]:
    """A cache with keys and a recurrent state; the layer that has the state, and the state."""
    cache = TurboQuantCache(tiny_model(family).config, "tq4", **SMALL, **options)
    layer = next(i for i, held in enumerate(cache.layers) if hasattr(held, "update_recurrent_state"))
    return cache, layer, take_in(cache, layer, rows)


def take_in(cache: TurboQuantCache, layer: int, rows: int) -> torch.Tensor:
    state = states(3, rows, dim=5, seed=rows)
    cache.update_recurrent_state(state, layer)
    _ = cache.update(states(40, rows, dim=16), states(40, rows, dim=16), 1)[0] + 0
    return state


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("only_non_sliding", [True, False])
def test_a_model_with_linear_attention_can_be_offloaded(family: str, only_non_sliding: bool) -> None:
    options = {"offloading": True, "offload_only_non_sliding": only_non_sliding}
    cache, layer, state = with_state(family, 2, **options)
    plain, _, _ = with_state(family, 2)
    assert torch.equal(getattr(cache.layers[layer], "state", cache.layers[layer]).recurrent_states[0], state)
    for held in (cache, plain):
        held.prefetch(0)
    assert all(torch.equal(a, b) for a, b in zip(cache.layers[1].unpacked(), plain.layers[1].unpacked(), strict=True))
    assert cache.layers[1].table.pages.used > 0


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_batch_may_change_after_a_reset_of_recurrent_states(family: str, rows: int) -> None:
    cache, layer, _ = with_state(family, 2)
    cache.reset()
    state = take_in(cache, layer, rows)
    held = getattr(cache.layers[layer], "state", cache.layers[layer])
    assert torch.equal(held.recurrent_states[0], state)
    assert cache.batch_size == rows


def test_a_pickled_fork_leaves_the_pages_of_the_others_behind() -> None:
    cache = filled(100, **SMALL)
    forks = cache.fork(4)
    for i, fork in enumerate(forks):
        extend(fork, 160, seed=30 + i)
    twin = pickle.loads(pickle.dumps(forks[2]))
    assert twin.table.pages.used == twin.table.pages.capacity == len(twin.layers[0].pool) == 3 + 5
    assert same(content(twin), content(forks[2]))
    for held in (twin, forks[2]):
        extend(held, 100, seed=3)
        held.crop(-150)
    assert same(content(twin), content(forks[2]))
    twin.crop(-int(twin.get_seq_length()))
    assert twin.table.pages.used == 0


def test_a_crop_of_more_than_an_exact_window_has_recorded_is_refused() -> None:
    """Transformers' own layer would go on with fewer keys than the window."""
    cache = TurboQuantCache(tiny_model("gemma3_hybrid").config, "raw", **SMALL)

    def feed(tokens: int) -> None:
        for layer in range(2):
            _ = cache.update(states(tokens, dim=16), states(tokens, dim=16), layer)[0] + 0

    feed(60)
    cache.activate_past_recording()
    feed(10)
    before = content(cache)
    with pytest.raises(RuntimeError, match=r"window of 24 would have only 21 left\. Remove no more than"):
        cache.crop(-12)
    assert same(content(cache), before) and cache.get_seq_length() == cache.get_seq_length(1) == 70
    cache.crop(-10)
    assert cache.layers[0].keys.shape[2] == 23
    cache.reset()
    feed(10)
    cache.crop(-4)  # nothing is lost of a window that is not full
    assert cache.get_seq_length() == 6


def test_a_layer_that_nobody_reads_shares_its_row_starts_with_the_others() -> None:
    """Only one of two layers hears of the padding, after the other has taken its tokens in: both hold all of them then."""
    for reads_first in (False, True):
        cache = TurboQuantCache(CONFIG, "raw", page_size=32, recent_window=0, sink_tokens=4)
        mask = torch.ones(1, 1, 1, 100, dtype=torch.bool)
        mask[..., :50] = False
        key = states(100)
        steps = [cache.update(key, key, layer)[0].step for layer in range(2)]
        for layer in (1, 0) if reads_first else (0, 1):
            cache.layers[layer].commit(steps[layer], mask if layer else None)
        for layer in range(2):
            assert torch.equal(cache.layers[layer].unpacked()[0][:, :, 50:], key[:, :, 50:]), (reads_first, layer)


# -- what random sequences come to too seldom --------------------------------------------------------------------------
def test_a_pool_that_is_renumbered_is_so_for_all_forks() -> None:
    cache = filled(100, "raw", **SMALL)
    forks = cache.fork(8)
    for i, fork in enumerate(forks):
        extend(fork, 160, seed=30 + i)
    kept, before = forks[5:7], [content(fork) for fork in forks[5:7]]
    capacity = cache.table.pages.capacity
    del cache, fork, forks
    extend(kept[0], 32, seed=99)
    assert kept[0].table.pages.capacity < capacity
    for held, was in zip(kept, before, strict=True):
        check_invariants(held)
        assert same([t[:, :, :260] for t in content(held)], was)


def test_pages_that_are_written_after_an_offload_are_offloaded_anew() -> None:
    cache, plain = (filled(150, "raw", **SMALL) for _ in range(2))
    for held in (cache, plain):
        for seed in (5, 6):
            for layer in held.packed_layers if held is cache else ():
                layer.offload()
            held.crop(-70)
            extend(held, 70, seed=seed)  # into pages that the crop has freed
    for layer in cache.packed_layers:
        layer.offload()
    assert same(content(cache), content(plain))
