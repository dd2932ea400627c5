"""Long runs and many runs on a GPU: its memory stays flat but for the pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.robustness.counts import count
from tests.robustness.test_atomicity import CONFIGS
from tests.test_cache import states
from tests.test_cache_sliding import SMALL
from tests.test_generate import generate
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache
from tq_hf.attention import turboquant_attention

pytestmark = [pytest.mark.gpu]
ROWS = 2


def on_gpu(tokens: int, seed: int) -> list[Tensor]:
    """Queries, keys and values."""
    return [states(tokens, ROWS, seed=3 * seed + side).to("cuda", torch.bfloat16) for side in range(3)]


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_decoding_takes_no_gpu_memory_but_the_pages(kind: str, soak: bool) -> None:
    """Steps through the kernels. What the cache may hold more of is pages and the tables that name them."""
    steps, warm = (10_000, 1_000) if soak else (600, 200)
    cache = TurboQuantCache(CONFIGS[kind], "tq4", **SMALL)
    decoded = [on_gpu(1, seed) for seed in range(50)]

    def forward(query: Tensor, key: Tensor, value: Tensor) -> None:
        for i in range(len(cache.layers)):
            handles = cache.update(key, value, i)
            turboquant_attention(nn.Module(), query, *handles, None)

    def run(first: int, last: int) -> None:
        for step in range(first, last):
            forward(*decoded[step % 50])

    def held() -> int:
        """Bytes of the pages and of the tables."""
        pages = sum(layer.pool.nbytes for layer in cache.packed_layers)
        return pages + sum(t.nbytes for table in cache.tables for t in table.tensors())

    forward(*on_gpu(200, 1000))
    run(0, warm)
    beside, pages = allocated() - held(), held()
    run(warm, steps)
    grown = allocated() - held() - beside
    torch.cuda.reset_peak_memory_stats()
    before = allocated()
    run(steps, steps + 5)  # too few for pools to grow much
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{kind}: {steps} steps: pages and tables +{held() - pages} B, everything else +{grown} B, a step's peak {peak} B")
    # The allocator rounds each tensor up to 512 bytes, and pools larger than 1 MiB to whole blocks.
    assert abs(grown) <= 512 * 20 * len(cache.layers)
    assert cache.get_seq_length() == 200 + steps + 5
    cache.check()
    count("decode steps soaked on a GPU", steps)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_many_short_generations_leave_nothing_on_the_gpu(static: bool, soak: bool) -> None:
    runs, warm = (1_000, 50) if soak else (30, 10)
    model, ids = tiny_model("gemma3_hybrid").to("cuda", torch.bfloat16), prompt(1, 60).cuda()
    model.set_attn_implementation("turboquant")
    options: dict[str, Any] = SMALL | ({"max_cache_len": 80} if static else {})
    kept = TurboQuantCache(model.config, **options)

    def answer(cache: TurboQuantCache) -> Tensor:
        return generate(model, ids, cache, new=4, disable_compile=True).cpu()

    wanted = answer(TurboQuantCache(model.config, **options))

    def run(n: int) -> None:
        for i in range(n):
            cache = kept if i % 2 else TurboQuantCache(model.config, **options)  # reused, and new
            cache.reset()
            assert torch.equal(answer(cache), wanted)

    run(warm)
    before, reserved = allocated(), torch.cuda.memory_reserved()
    run(runs)
    assert allocated() == before
    assert torch.cuda.memory_reserved() == reserved
    print(f"{runs} generations: {before} B allocated and {reserved} B reserved before and after")
    count("short generations on a GPU", runs)
