"""Long runs, many runs and many threads: nothing grows but the pages, and nothing gets mixed up."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tests.robustness.counts import count
from tests.robustness.states import equal, require_sound, state_of
from tests.robustness.test_atomicity import cache_of, forward, generate
from tests.test_cache_sliding import SMALL
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache

THREADS = 8


def tensors_alive() -> tuple[int, int]:
    """How many tensors there are in this process, and the bytes of their storages."""
    gc.collect()
    storages = {}
    number = 0
    for known in gc.get_objects():
        if isinstance(known, Tensor) and not isinstance(known, FakeTensor):  # which compiled code may keep
            number += 1
            storages[known.untyped_storage().data_ptr()] = known.untyped_storage().nbytes()
    return number, sum(storages.values())


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_decoding_takes_no_memory_but_the_pages(kind: str, soak: bool) -> None:
    """Steps on a cache alone. What it holds is counted apart: its pages, which grow, and the rest, which does not."""
    steps, warm = (10_000, 1_000) if soak else (300, 100)
    cache = cache_of(kind, 200)

    def run(first: int, last: int) -> None:
        for step in range(first, last):
            forward(cache, 1, seed=step % 50)

    def beside_pages() -> tuple[int, int]:
        pages = sum(layer.pool.nbytes for layer in cache.packed_layers)
        tables = sum(t.nbytes for table in cache.tables for t in table.tensors())
        number, nbytes = tensors_alive()
        return number, nbytes - pages - tables

    run(0, warm)
    before, objects, rss = beside_pages(), len(gc.get_objects()), resident()
    pools = sum(layer.pool.nbytes for layer in cache.packed_layers)
    watched = steps // 5  # with tracemalloc, which is slow
    run(warm, steps - watched)
    tracemalloc.start()
    run(steps - watched, steps - watched + 10)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    run(steps - watched + 10, steps)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    entries = sum(len(table.spans) for table in cache.tables)
    assert beside_pages() == before
    # Host numbers: a start, a count and an id for each row an entry, some hundred bytes, and reference counts.
    assert grown < 20_000 + 500 * entries
    more = len(gc.get_objects()) - objects
    assert more < 200 + 4 * entries
    pages = sum(layer.pool.nbytes for layer in cache.packed_layers) - pools
    larger = resident() - rss
    assert larger < 24 * 2**20 + 4 * pages
    print(f"{kind}: {steps} steps: host +{grown} B (last {watched}), objects +{more}, pages +{pages} B, RSS +{larger} B")
    for layer in cache.packed_layers:
        assert layer.length - layer.packed_end < SMALL["recent_window"] + SMALL["page_size"]
    assert cache.get_seq_length() == 200 + steps
    require_sound(cache)
    count("decode steps soaked", steps)


def test_many_short_generations_leave_nothing(soak: bool) -> None:
    runs, warm = (1_000, 100) if soak else (30, 10)
    model, ids = tiny_model("gemma3_hybrid"), prompt(1, 60)
    kept = TurboQuantCache(model.config, **SMALL)
    wanted = generate(model, ids, TurboQuantCache(model.config, **SMALL), new=4)

    def run(n: int) -> None:
        for i in range(n):
            cache = kept if i % 2 else TurboQuantCache(model.config, **SMALL)  # reused, and new
            cache.reset()
            assert torch.equal(generate(model, ids, cache, new=4), wanted)
            if i % 5 == 0:
                generate(model, wanted, cache.fork(1)[0], new=2)

    run(warm)
    before, rss = tensors_alive(), resident()
    gc.disable()  # a cache that is dropped frees its memory at once
    try:
        run(runs)
        larger = resident() - rss
        assert larger < 16 * 2**20
    finally:
        gc.enable()
    assert tensors_alive() == before
    print(f"{runs} generations: {before[0]} tensors of {before[1]} B before and after, RSS +{larger} B")
    count("short generations", runs)


def side_by_side(work: Callable[[int], Any]) -> list[Any]:
    """The results of `work(0)` to `work(THREADS - 1)`, which start together, each in a thread."""
    start = threading.Barrier(THREADS)

    def begin(i: int) -> Any:
        start.wait()
        return work(i)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(begin, range(THREADS)))


@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid"])
def test_threads_with_a_cache_each(family: str, soak: bool) -> None:
    model = tiny_model(family)
    new, rounds = (120, 10) if soak else (24, 1)

    def work(i: int) -> tuple[Tensor, list[Any]]:
        cache = TurboQuantCache(model.config, **SMALL)
        tokens = generate(model, prompt(1 + i % 2, 50 + 13 * i, seed=i), cache, new=new)
        return tokens, state_of(cache)

    serial = [work(i) for i in range(THREADS)]
    for _ in range(rounds):
        assert equal(side_by_side(work), serial)
        count("generations in threads", THREADS)


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_threads_that_fork_one_cache(kind: str, soak: bool) -> None:
    """Each thread forks the same cache again and again, and every fork goes on, is cropped, forked and dropped."""
    rounds = 60 if soak else 4
    base = cache_of(kind, 200, 1)
    before = state_of(base)

    def work(i: int) -> list[Any]:
        states = []
        for turn in range(rounds):
            (fork,) = base.fork(1)
            forward(fork, 40 + i, seed=7 * i + turn)
            if kind == "full":
                fork.crop(-(60 + i))
            fork.batch_repeat_interleave(2)
            (again,) = fork.fork(1)
            del fork
            forward(again, 35, seed=turn)
            states.append(state_of(again))
        return states

    serial = [work(i) for i in range(THREADS)]
    assert equal(side_by_side(work), serial)
    assert equal(state_of(base), before)
    gc.collect()
    require_sound(base)
    count("forks in threads", 2 * rounds * THREADS)
