"""One prefix, many continuations: forks and copies share or own pages, and none changes another."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.test_cache import CONFIG, filled, held_tensors, states
from tests.test_generate import generate, left_padded, reference
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache

SMALL = {"page_size": 32, "recent_window": 0, "sink_tokens": 4}


def content(cache: TurboQuantCache) -> list[Tensor]:
    """All that the cache holds, dequantized."""
    return [tensor.clone() for keys, values, _ in cache for tensor in (keys, values) if tensor is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def extend(cache: TurboQuantCache, tokens: int, seed: int) -> None:
    for layer in range(2):
        batch = cache.batch_size
        cache.update(states(tokens, batch, seed=seed), states(tokens, batch, seed=seed + 1), layer)
        cache.layers[layer].flush()


# -- memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", ["tq4", "raw"])
def test_sixteen_forks_of_a_prefix_use_the_pages_of_one(preset: str) -> None:
    cache = filled(4096, preset)
    used, pools = cache.table.pages.used, [layer.pool for layer in cache.packed_layers]
    assert used >= 60
    forks = cache.fork(16)
    assert cache.table.pages.used == used
    for fork in forks:
        assert fork.table.pages is cache.table.pages
        assert all(a.pool is b for a, b in zip(fork.packed_layers, pools, strict=True))
    assert same(content(forks[7]), content(cache))
    storages = {t.untyped_storage().data_ptr(): t.nbytes for t in held_tensors([cache, *forks])}
    tails = cache.nbytes - sum(pool.nbytes for pool in pools)
    assert sum(storages.values()) <= cache.nbytes + 16 * (tails + 1024)


def test_pages_go_with_their_last_user() -> None:
    cache = filled(100, **SMALL)
    prefix = cache.table.pages.used
    forks = cache.fork(3)
    for i, fork in enumerate(forks):
        extend(fork, 320, seed=30 + i)
    assert cache.table.pages.used == prefix + 30
    pool = cache.table.pages
    del fork
    forks.pop(1)
    gc.collect()
    assert pool.used == prefix + 20
    del cache
    gc.collect()
    assert pool.used == prefix + 20  # the prefix is the other forks' as well
    forks.clear()
    gc.collect()
    assert pool.used == 0


def test_what_dropped_forks_leave_is_given_back_at_the_next_page() -> None:
    cache = filled(100, **SMALL)
    forks = cache.fork(8)
    for i, fork in enumerate(forks):
        extend(fork, 160, seed=30 + i)
    survivor, before = forks[3], content(forks[3])
    assert len(cache.layers[0].pool) >= 3 + 8 * 5
    del cache, fork, forks
    gc.collect()
    extend(survivor, 32, seed=99)
    pages = survivor.table.pages
    assert (pages.used, pages.capacity) == (9, 9)
    assert all(len(layer.pool) == 9 for layer in survivor.packed_layers)
    packed = 4 + 8 * 32  # what was in pages before
    assert same([t[:, :, :packed] for t in content(survivor)], [t[:, :, :packed] for t in before])


def test_forks_that_grow_in_turn_never_write_each_others_pages() -> None:
    cache = filled(100, "raw", **SMALL)
    forks = cache.fork(3)
    expected = [content(cache) for _ in forks]
    for turn in range(4):  # each turn is a page and a half: pools grow under the others
        for i, fork in enumerate(forks):
            extend(fork, 48, seed=100 * i + turn)
            for layer in range(2):
                for side in (0, 1):
                    new = states(48, seed=100 * i + turn + side)
                    expected[i][2 * layer + side] = torch.cat([expected[i][2 * layer + side], new], 2)
    assert all(same(content(fork), e) for fork, e in zip(forks, expected, strict=True))
    assert cache.get_seq_length() == 100
    assert cache.table.pages.used == 3 + 3 * 6


EDITS: dict[str, Callable[[TurboQuantCache], Any]] = {
    "extend": lambda c: extend(c, 70, seed=50),
    "crop a little": lambda c: c.crop(-7),
    "crop into pages and refill": lambda c: (c.crop(-70), extend(c, 70, seed=50)),
    "crop everything": lambda c: c.crop(-150),
    "reorder": lambda c: c.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda c: (c.batch_repeat_interleave(3), extend(c, 100, seed=50)),
    "select": lambda c: c.batch_select_indices(torch.tensor([1])),
    "reset": lambda c: c.reset(),
    "reset and refill": lambda c: (c.reset(), extend_anew(c)),
    "fork and extend": lambda c: extend(c.fork(2)[1], 70, seed=50),
    "deepcopy and extend": lambda c: extend(copy.deepcopy(c), 70, seed=50),
    "offload": lambda c: [layer.offload() for layer in c.packed_layers],
    "to": lambda c: c.to("cpu"),
}


def extend_anew(cache: TurboQuantCache) -> None:
    for layer in range(2):
        cache.update(states(100, 3, seed=70), states(100, 3, seed=71), layer)
        cache.layers[layer].flush()


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", ["fork", "deepcopy"])
def test_an_edit_of_one_changes_no_other(kind: str, edit: str) -> None:
    caches = [filled(150, "raw", batch=2, **SMALL)]
    caches += caches[0].fork(2) if kind == "fork" else [copy.deepcopy(caches[0]) for _ in range(2)]
    before = content(caches[0])
    assert caches[0].report().packed_tokens > 0
    for edited in caches:  # the origin first, then its forks: each while the others still stand
        others = [cache for cache in caches if cache is not edited]
        snapshots = [content(cache) for cache in others]
        EDITS[edit](edited)
        assert all(same(content(cache), was) for cache, was in zip(others, snapshots, strict=True))
    assert same(content(caches[0]), before) == (edit in ("offload", "to", "fork and extend", "deepcopy and extend"))


# -- tokens ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid", "gpt2"])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa", "eager"])
def test_forks_continue_as_the_reference_does(family: str, attention: str) -> None:
    model = tiny_model(family)
    prefix, tails = prompt(1, 100), [prompt(1, n, seed=n) for n in (40, 7, 70)]
    expected = [reference(model, torch.cat([prefix, tail], 1), new=12) for tail in tails]
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    with torch.no_grad():
        model(prefix, past_key_values=cache)
    forks = [*cache.fork(2), cache]  # the origin is one of the three
    packed = cache.report().packed_tokens
    assert packed > 0
    for i in (1, 2, 0):
        out = generate(model, torch.cat([prefix, tails[i]], 1), forks[i], new=12)
        assert torch.equal(out, expected[i])
    assert all(fork.report().packed_tokens >= packed for fork in forks)


def test_a_fork_in_a_batch_of_beams_equals_the_reference() -> None:
    model = tiny_model()
    prefix, question = prompt(1, 100), prompt(1, 60, seed=5)
    ids = torch.cat([prefix, question], 1)
    expected = reference(model, ids, num_beams=3, new=6)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    with torch.no_grad():
        model(prefix, past_key_values=cache)
    before = content(cache)
    for _ in range(2):  # the same prefix twice
        (fork,) = cache.fork(1)
        fork.batch_repeat_interleave(3)
        assert torch.equal(generate(model, ids, fork, num_beams=3, new=6), expected)
        assert fork.report().packed_tokens > 0
    assert same(content(cache), before)


@pytest.mark.parametrize("n", [0, -1, 1.0, "2", True])
def test_fork_of_no_number_is_refused(n: Any) -> None:
    with pytest.raises(ValueError, match=r"fork\("):
        filled(100).fork(n)


def test_an_empty_or_static_cache_is_not_forked() -> None:
    with pytest.raises(ValueError, match="empty"):
        TurboQuantCache(CONFIG).fork(2)
    emptied = filled(100)
    emptied.reset()
    with pytest.raises(ValueError, match="empty"):
        emptied.fork(2)
    with pytest.raises(ValueError, match=r"copy\.deepcopy"):
        filled(100, max_cache_len=200).fork(2)


# -- beams -------------------------------------------------------------------------------------------------------------
def test_beams_at_8k_use_the_pages_of_one_row_after_the_first_reorder() -> None:
    key, value = states(8192, heads=1, dim=32), states(8192, heads=1, dim=32, seed=1)
    config = copy.deepcopy(CONFIG)
    config.num_hidden_layers, config.head_dim = 1, 32
    one, beams = TurboQuantCache(config), TurboQuantCache(config)
    for cache, rows in ((one, 1), (beams, 8)):  # transformers expands beams before the prompt
        cache.update(key.repeat(rows, 1, 1, 1), value.repeat(rows, 1, 1, 1), 0)
        cache.packed_layers[0].flush()
    alone = one.table.pages.used
    assert (alone, beams.table.pages.used) == (126, 8 * 126)
    expected = content(one)
    beams.reorder_cache(torch.tensor([0, 0, 0, 2, 2, 1, 1, 1]))
    beams.reorder_cache(torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]))
    assert beams.table.pages.used <= 1.1 * alone
    assert len(beams.packed_layers[0].pool) <= 1.1 * alone  # freed, not only unused
    beams.batch_select_indices(torch.tensor([7]))
    assert same(content(beams), expected)


def test_few_unused_pages_stay_for_the_next() -> None:
    cache = filled(32 * 8, batch=2, **SMALL)
    cache.crop(-32 * 4)
    assert cache.table.pages.used < cache.table.pages.capacity == len(cache.layers[0].pool)


# -- copies ------------------------------------------------------------------------------------------------------------
def test_a_deep_copy_of_a_fork_takes_no_other_forks_pages() -> None:
    cache = filled(100, **SMALL)
    forks = cache.fork(4)
    for i, fork in enumerate(forks):
        extend(fork, 160, seed=30 + i)
    twin = copy.deepcopy(forks[2])
    assert twin.table.pages is not cache.table.pages
    assert twin.table.pages.used == twin.table.pages.capacity == len(twin.layers[0].pool) == 3 + 5
    assert same(content(twin), content(forks[2]))
    extend(twin, 100, seed=3)
    twin.reorder_cache(torch.tensor([0, 0]))
    assert forks[2].get_seq_length() == 260


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}])
def test_pickling_keeps_everything(options: dict[str, int]) -> None:
    cache = filled(150, **SMALL, **options)
    twin = pickle.loads(pickle.dumps(cache))
    assert same(content(twin), content(cache))
    extend(twin, 90, seed=5)
    extend(cache, 90, seed=5)
    assert same(content(twin), content(cache))


@pytest.mark.parametrize(
    ("copier", "options"),
    [(copy.deepcopy, {}), (copy.deepcopy, {"max_cache_len": 200}), (lambda cache: cache.fork(1)[0], {})],
    ids=["deepcopy", "deepcopy-static", "fork"],
)
def test_copies_between_update_and_attention_are_right(copier: Any, options: dict[str, int]) -> None:
    """A hook may copy the cache while a forward pass has updated it and not yet attended."""
    model = tiny_model()
    ids, mask = left_padded(2, 120, [30, 0])
    more = torch.ones(2, 1, dtype=torch.long)
    copies: dict[int, TurboQuantCache] = {}

    class Copied(TurboQuantCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            handles = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            if layer_idx == 1 and self.taking:
                self.taking = False
                copies[int(self.get_seq_length(1))] = copier(self)
            return handles

    exact, cache = DynamicCache(config=model.config), Copied(model.config, "raw", **SMALL, **options)
    tokens = prompt(2, 40, seed=9)
    with torch.no_grad():
        for step in range(4):
            cache.taking = step in (0, 2)
            new = ids if step == 0 else tokens[:, step : step + 1]
            mask = mask if step == 0 else torch.cat([mask, more], 1)
            ours, theirs = (model(new, attention_mask=mask, past_key_values=c).logits for c in (cache, exact))
            assert torch.allclose(ours[mask[:, -new.shape[1] :] > 0], theirs[mask[:, -new.shape[1] :] > 0], atol=2e-5)
        for length, twin in copies.items():
            past = copy.deepcopy(exact)
            past.crop(length - past.get_seq_length())
            new, longer = tokens[:, 20:21], torch.cat([mask[:, :length], more], 1)
            ours, theirs = (model(new, attention_mask=longer, past_key_values=c).logits for c in (twin, past))
            assert torch.allclose(ours, theirs, atol=2e-5)
            assert twin.report().packed_tokens > 0
    assert list(copies) == [120, 122]


def test_forks_in_threads_of_their_own() -> None:
    """They share the pool's tensors, which grow and are renumbered under way; none must lose a page to another."""
    start, sizes = filled(100, "raw", **SMALL), [1, 40, 3, 64, 33, 1, 70, 5]
    lone = [copy.deepcopy(start) for _ in range(4)]
    forks = start.fork(4)
    errors: list[BaseException] = []

    def go_on(cache: TurboQuantCache, number: int) -> None:
        try:
            for seed, size in enumerate(sizes):
                extend(cache, size, seed=1000 * number + 2 * seed)
                content(cache)
                if seed % 3 == number % 3:
                    cache.crop(-50)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [Thread(target=go_on, args=(fork, i)) for i, fork in enumerate(forks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for i, cache in enumerate(lone):
        go_on(cache, i)
    assert not errors
    assert [same(content(a), content(b)) for a, b in zip(forks, lone, strict=True)] == [True] * 4
    rows = [row for cache in (start, *forks) for row in cache.table.rows or []]
    assert start.table.pages.used == len({page for row in rows for page in row})
