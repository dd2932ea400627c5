"""The statistics kernel against the reference: on a GPU, or in Triton's interpreter (see test_kernels_store.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.presets import usual_rotary
from tq_hf import reference
from tq_hf.kernels.observe import observe
from tq_hf.quantizer.conditioning import partners

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU and compiled kernels"),
]
EITHER = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=GPU_MARKS),
]
BATCH, HEADS = 3, 2


@dataclass(frozen=True)
class Case:
    dim: int = 64
    group: int = 2
    page: int = 32
    window: int = 5
    sinks: int = 2
    dtype: torch.dtype = torch.bfloat16
    masked: bool = False
    centered: bool = True
    interleaved: bool = False


CASES = [
    Case(),
    Case(centered=False, masked=True),
    Case(dim=128, group=4, page=64, window=64, sinks=4, masked=True),
    Case(dim=80, group=7, dtype=torch.float16, interleaved=True),
    Case(dim=18, group=3),
    Case(dim=256, group=1, window=0, sinks=0, dtype=torch.float32, masked=True),
    Case(dim=96, group=3, page=128, window=40, masked=True),
]


def run(op, case: Case, chunks: tuple[int, ...], query: Tensor | None, key: Tensor, keep: Tensor | None) -> list[Tensor]:
    """Feed chunks; the ring and the counters are kept as `commit` would keep them."""
    device, slots = key.device, case.window + case.page
    ring = torch.full((BATCH, HEADS, slots, case.dim), torch.nan, dtype=key.dtype, device=device)
    row_start = torch.tensor([0, 11, 70], dtype=torch.int32, device=device)
    counters = torch.tensor([0, case.sinks, 0], dtype=torch.int32, device=device)
    balance, energy = torch.zeros(2, BATCH, HEADS, case.dim, device=device)
    rotary = usual_rotary(case.dim, pairs=case.dim // 2 - 1, interleaved=case.interleaved)
    pairs = partners(rotary, case.dim, device)
    partner = pairs.channel, pairs.share
    history, start, packed_end = [], 0, case.sinks
    for n in chunks:
        part = slice(start, start + n)
        new = None if query is None else query[:, :, part]
        state = (ring, row_start, counters, balance, energy)
        op(new, key[:, :, part], *state, *partner, keep, case.page, case.sinks, case.window, case.centered)
        start += n
        packed_end += max(0, start - packed_end - case.window) // case.page * case.page
        at = torch.arange(packed_end, start, device=device)
        ring[:, :, at % slots] = key[:, :, at]
        counters[0], counters[1] = start, packed_end
        history += [balance.clone(), energy.clone()]
    return history


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: Case, device: str) -> None:
    first = case.sinks + case.page + case.window
    chunks = (7, first - 8, 1, 1, 80, 40)
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(-2, 2, case.dim).exp()
    # Strided as a model's: tokens before heads.
    query = torch.randn(BATCH, sum(chunks), HEADS * case.group, case.dim, generator=generator) * scales.flip(0) + 1
    key = torch.randn(BATCH, sum(chunks), HEADS, case.dim, generator=generator) * scales + 3
    query, key = query.to(case.dtype).transpose(1, 2), key.to(case.dtype).transpose(1, 2)
    query[0, 0, 20, 3], key[1, 1, 30, 0] = torch.inf, torch.nan
    keep = torch.rand(BATCH, sum(chunks) + 9, generator=generator) < 0.7 if case.masked else None
    expected = run(reference.observe, case, chunks, query, key, keep)
    got = run(observe, case, chunks, *(t if t is None else t.to(device) for t in (query, key, keep)))
    assert expected[-2].all() and not expected[0].any(), "every row gets its factors, and not at once"
    assert expected[-2].amax() > 1.4 and expected[-2].amin() < 0.5
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=0)


@pytest.mark.parametrize("device", EITHER)
def test_without_queries(device: str) -> None:
    case = Case()
    key = torch.randn(BATCH, HEADS, 150, case.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    balance, energy = run(observe, case, (150,), None, key.to(device), None)
    assert balance.eq(1).all() and not energy.any()


@pytest.mark.parametrize("device", EITHER)
def test_chunks_give_the_same_bits(device: str) -> None:
    case = Case(page=64, window=64, sinks=4)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS * case.group, 220, case.dim, generator=generator).to(device)
    key = torch.randn(BATCH, HEADS, 220, case.dim, generator=generator).to(device)
    whole = run(observe, case, (220,), query, key, None)
    parts = run(observe, case, (50, 81, 1, 1, 60, 27), query, key, None)
    assert torch.equal(whole[-2], parts[-2]) and whole[-2].all()


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("size", [0.0, 1e-19, 1e-21])
def test_next_to_nothing_gives_ones(device: str, size: float) -> None:
    case = Case(dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS * case.group, 150, case.dim, generator=generator)
    key = torch.randn(BATCH, HEADS, 150, case.dim, generator=generator) * size
    for op, place in ((reference.observe, "cpu"), (observe, device)):
        assert run(op, case, (150,), query.to(place), key.to(place), None)[-2].eq(1).all()


@pytest.mark.parametrize("device", EITHER)
def test_keys_that_are_all_alike_give_ones(device: str) -> None:
    """What is left of them less their mean is rounding, which would differ from the reference's."""
    case = Case(page=64, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS * case.group, 230, case.dim, generator=generator)
    key = torch.randn(BATCH, HEADS, 1, case.dim, generator=generator).expand(-1, -1, 230, -1).contiguous()
    key[:, 1, 30::40, 5] += 0.1  # what differs in one channel of few keys is a difference
    for op, place in ((reference.observe, "cpu"), (observe, device)):
        balance = run(op, case, (230,), query.to(place), key.to(place), None)[-2]
        assert balance[:, 0].eq(1).all() and balance[:, 1].all()
        assert balance[:, 1, 5].ne(1).all()
