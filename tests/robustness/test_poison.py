"""Fresh memory full of NaN: what an op returns, and what it reads, is memory that something has been written to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.robustness.counts import count
from tests.robustness.rows import HEADS, different, feed, one_layer, random, row_of, same_bits
from tq_hf import PRESETS, ops

TOKENS, CHUNKS = 130, (70, 1, 41, 1, 17)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch fills what `empty` and its like give with NaN, or an integer's largest number."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def test_fresh_memory_is_poisoned(poisoned: None) -> None:
    fresh = (
        random(3, seed=0).new_empty(1000),
        torch.empty(1000, dtype=torch.bfloat16),
        torch.empty(9, dtype=torch.int32),
    )
    assert fresh[0].isnan().all() and fresh[1].isnan().all() and (fresh[2] == 2**31 - 1).all()


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16)])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_poison_reaches_no_output_and_no_state(
    request: pytest.FixtureRequest, preset: str, dim: int, dtype: torch.dtype
) -> None:
    """Attention, packed pages, exact tokens, statistics and dequantized histories are what they are without it."""
    query, key, value = (
        random(2, heads, TOKENS, dim, seed=i, dtype=dtype) for i, heads in enumerate((2 * HEADS, HEADS, HEADS))
    )
    keep = torch.ones(2, TOKENS, dtype=torch.uint8)
    keep[1, :40] = 0  # padding: a page that is not there, one that is partly there
    runs = []
    for poison in (False, True):
        if poison:
            request.getfixturevalue("poisoned")
        cache = one_layer(dim, preset)
        output = feed(cache, query, key, value, CHUNKS, keep)
        layer = cache.layers[0]
        dense = [t for t in layer.unpacked() if t is not None]
        forked = row_of(cache.fork(1)[0].layers[0], 1)
        cache.reorder_cache(torch.tensor([1, 0]))
        runs.append((output, dense, [row_of(layer, row) for row in range(2)], forked))
    (expected, dense, rows, fork), (output, poisoned_dense, poisoned_rows, poisoned_fork) = runs
    assert not output.isnan().any() and same_bits(output, expected)
    for clean, read in zip(dense, poisoned_dense, strict=True):
        assert not read.isnan().any() and same_bits(read, clean)
    for clean_row, row in zip((*rows, fork), (*poisoned_rows, poisoned_fork), strict=True):
        assert different(row, clean_row) == []
        assert not any(tensor.is_floating_point() and tensor.isnan().any() for tensor in row.values())
    count("outputs and states compared with poisoned memory", 3)


def test_attention_over_plain_tensors_writes_all_of_its_output(poisoned: None) -> None:
    """A query that sees nothing included, which gets zeros."""
    query, key, value = (random(2, heads, 9, 64, seed=i) for i, heads in enumerate((4, 2, 2)))
    mask = torch.ones(2, 1, 9, 9, dtype=torch.uint8)
    mask[1, :, 3] = 0
    output = ops.attend_exact(query, key, value, mask, None, 0.125, 0.0, False)
    assert not output.isnan().any() and (output[1, 3] == 0).all()
