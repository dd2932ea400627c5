"""The kernels that write pages and read them back, against the torch reference.

On a GPU the whole matrix runs. Without one, Triton's interpreter runs a small one on the CPU: it must be switched on before
Triton is imported, so that takes a process of its own, `TRITON_INTERPRET=1 pytest tests/test_kernels_store.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernel_states import (
    BATCH,
    BF16,
    EITHER,
    FP16,
    FP32,
    HEADS,
    Case,
    assert_same_state,
    check,
    commit_chunks,
    fresh_state,
    gpu,
    interpreter,
    own,
    preset,
    random_tokens,
    relative_rms,
    tolerance,
)
from tests.presets import KERNEL_PRESETS
from tq_hf import reference
from tq_hf.kernels.commit import commit, gather
from tq_hf.kernels.encode import UNIT, magnitude_cells
from tq_hf.quantizer.codebooks import boundaries
from tq_hf.reference.codec import decode_page

INTERPRETER_CASES = [preset(name, 64, BF16, page_size=64 if name in ("tq4", "k8v4") else 32) for name in KERNEL_PRESETS] + [
    preset("tq4", 96, FP32, page_size=32),
    preset("4bit_nc", 128, FP16, page_size=32),
    preset("tq3", 80, BF16, 40, page_size=32, recent_window=7),
    preset("raw", 32, FP32),
    own("fp8", 8, "min_max", 8, (64, 80), FP32, page_size=128, sink_tokens=3),
    # More than 128 dimensions are taken in larger blocks.
    preset("tq4", 256, FP32, 64, page_size=32, recent_window=7),
    preset("tq3", 150, BF16, 224, page_size=32, recent_window=7),
]
# Every format, width and dtype, every kind of dimension, all page sizes; each case compiles its own kernels.
GPU_CASES = [
    preset("tq4", 128, BF16),
    preset("tq4", 256, FP32, page_size=32),
    preset("tq4", 192, BF16, 128),
    preset("tq4", 16, BF16, codebook="beta"),
    preset("tq3", 64, BF16, page_size=32),
    preset("tq3", 160, FP16),
    preset("tq3v2", 96, FP16, page_size=256, recent_window=0),
    preset("tq2", 80, BF16, page_size=128),
    preset("tq2", 224, FP16, center_keys=False),
    preset("tq3", 128, BF16, balance_keys=False),
    preset("4bit_nc", 128, BF16),
    preset("4bit_nc", 80, FP16, recent_window=40, sink_tokens=4),
    preset("k3v4_nc", 256, FP16, page_size=32),
    preset("3bit_nc", 192, BF16, page_size=256),
    preset("k8v4", 128, BF16),
    preset("k8v4", 64, FP32),
    preset("k8v4", 80, FP16, page_size=128),
    preset("raw", 128, BF16),
    preset("raw", 96, FP32, page_size=32),
    preset("raw", 80, FP16, page_size=256, recent_window=3),
    own("lloyd_max", 4, "min_max", 8, (64, 128), FP16),
    own("lloyd_max", 2, "min_max", 2, (192, 192), BF16, page_size=32),
    own("lloyd_max", 3, "min_max", 3, (80, 80), FP32, sink_tokens=2),
    own("fp8", 8, "lloyd_max", 3, (64, 96), BF16, codebook="int8_grid"),
    own("lloyd_max", 4, "raw", 16, (96, 64), BF16, center_keys=True),
    own("raw", 16, "min_max", 4, (256, 256), BF16),
]


@interpreter
@pytest.mark.parametrize("case", INTERPRETER_CASES, ids=str)
def test_interpreted(case: Case) -> None:
    """A page of the first chunk, and one of what that left in the ring, a token and a part of another chunk."""
    page = case.layout.page_size
    check(case, "cpu", (page + case.config.recent_window + 21, 1, page // 2 + 15), [0, 5])


@interpreter
@pytest.mark.parametrize("masked", [False, True])
def test_interpreted_padding(masked: bool) -> None:
    check(preset("tq4", 32, BF16, page_size=32, recent_window=5), "cpu", (3, 1, 90, 30), [70, 0], masked)


@gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_matches_reference(case: Case) -> None:
    for chunks in ((1,), (31,), (32, 1), (33, 63), (65, 1, 1), (127, 1, 200), (1000,)):
        check(case, "cuda", chunks, [0, min(9, sum(chunks))])


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("codebook", "steps"), [("int8_grid", 0.21), ("gaussian", 0.51), ("beta", 0.51)])
def test_boundaries_stand_where_rounded_coordinates_cross_them(bits: int, codebook: str, steps: float) -> None:
    """To the given share of the steps between fp16: a coordinate reaches a number once it is half a step below it."""
    cells = magnitude_cells(bits, 64, codebook, torch.device("cpu"))
    exact = boundaries(bits, 64, codebook)[2 ** (bits - 1) :].double() * UNIT.value
    counted = cells[: 3 if bits == 4 else len(exact)].view(torch.float16)[::2]
    if bits == 4:  # every other one is in a table of low bytes, then of high bytes
        inside = cells[3:5].view(torch.uint8).view(2, 4).mT.contiguous().view(torch.float16).squeeze(-1)
        counted = torch.stack([inside, torch.cat([counted, inside[:1]])], 1).flatten()[:7]
    below = (counted / -2).double()
    step = 2.0 ** (below.log2().floor() - 10)
    assert (below.half() == below).all()
    assert ((below + step / 2 - exact).abs() <= steps * step).all()


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("name", ["tq4", "tq3", "tq2"])
def test_rounding_adds_no_error(name: str, device: str) -> None:
    """Coordinates next to a boundary may get either code: the vectors come back as well as the reference's."""
    case = preset(name, 64, FP16, page_size=32, recent_window=0, sink_tokens=0, balance_keys=False)
    generator = torch.Generator().manual_seed(0)
    expected = fresh_state(case, 64, [0, 0], generator)
    got = expected.to(device)
    key, value = random_tokens(case, 64, generator)
    commit_chunks(reference.commit, expected, case, key, value, (64,), None)
    commit_chunks(commit, got, case, key.to(device), value.to(device), (64,), None)
    errors = []
    for pool in (got.pool.cpu(), expected.pool):
        pages = decode_page(pool[expected.page_ids[:, :2].long()], case.layout, case.dtype)  # [B, 2, H, 32, dim]
        vectors = [side.transpose(1, 2).flatten(2, 3) for side in pages]
        errors.append([(side - exact).square().sum().item() for side, exact in zip(vectors, (key, value), strict=True)])
    assert all(mine <= 1.001 * theirs for mine, theirs in zip(*errors, strict=True)), errors


@gpu
def test_long_chunks_padding_and_holes() -> None:
    for case in (GPU_CASES[0], GPU_CASES[9]):  # one with window, sinks and mean; one with none
        check(case, "cuda", (4097, 1, 1000), [0, 0])
        check(case, "cuda", (300, 1, 1, 77), [200, 3])
        check(case, "cuda", (300, 1, 1, 77), [0, 131], masked=True)


SMALL = preset("tq4", 64, BF16, page_size=32, recent_window=0, sink_tokens=0)


@pytest.mark.parametrize("device", EITHER)
def test_bad_vectors_are_zero_and_flagged(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = fresh_state(SMALL, 64, [0, 0], generator)
    key, value = random_tokens(SMALL, 64, generator)
    key[0, 0, 5, 3], key[1, 0, 40] = float("inf"), float("nan")
    value[1, 1, 7, 0] = float("-inf")
    value[0, 1, 50] *= 1e6
    got = expected.to(device)
    commit_chunks(reference.commit, expected, SMALL, key, value, (64,), None)
    commit_chunks(commit, got, SMALL, key.to(device), value.to(device), (64,), None)
    assert got.flags.tolist() == [1, 2 | 4]
    assert_same_state(got.to("cpu"), expected, SMALL.layout)


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("name", ["k8v4", "4bit_nc", "tq4"])
def test_extreme_magnitudes_stay_with_their_vectors(name: str, device: str) -> None:
    """Huge, tiny, constant, one-hot and subnormal vectors: finite when read, and the others as without them."""
    case = preset(name, 64, BF16, page_size=32, recent_window=0, sink_tokens=0, center_keys=False)
    generator = torch.Generator().manual_seed(0)
    key, value = random_tokens(case, 32, generator)
    plain = fresh_state(case, 32, [0, 0], generator).to(device)
    extreme = plain.to(device)
    commit_chunks(commit, plain, case, key.to(device), value.to(device), (32,), None)
    for tensor in (key, value):
        tensor[:, :, 3], tensor[:, :, 7], tensor[:, :, 8] = 3e38, 1e-39, 1.0
        tensor[:, :, 12] *= 1e-30
        tensor[:, :, 20] = torch.nn.functional.one_hot(torch.tensor(9), 64)
    commit_chunks(commit, extreme, case, key.to(device), value.to(device), (32,), None)
    others = [i for i in range(32) if i not in (3, 7, 8, 12, 20)]
    for got, expected in zip(gather(*extreme.read, case.layout.name, 32), gather(*plain.read, case.layout.name, 32)):
        assert got.isfinite().all()
        assert torch.equal(got[:, :, others], expected[:, :, others])


def values_on_edges(case: Case, tokens: int, generator: torch.Generator) -> Tensor:
    """[B, H, tokens, dim]: numbers half way between two codes, and in fp32 next to it, of scales of all fp16 mantissas."""
    shape = (BATCH, HEADS, tokens, case.value_dim)
    top = 2**case.layout.value_bits - 1
    scale = torch.rand(*shape[:3], 1, generator=generator).add(1).half().float() * 2.0 ** -torch.arange(tokens)[
        :, None
    ].fmod(9)
    steps = torch.randint(0, 2 * top + 1, shape, generator=generator) / 2
    steps[..., 0], steps[..., -1] = 0, top
    value = scale * (steps - torch.randint(0, top, (*shape[:3], 1), generator=generator))
    aside = torch.randint(-1, 2, shape, generator=generator)
    aside[..., 0] = aside[..., -1] = 0
    return (value * (1 + aside * 2.0**-23)).to(case.dtype)


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize(
    ("bits", "dim", "dtype"),
    [(2, 18, BF16), (3, 80, FP16), (4, 112, BF16), (8, 64, BF16), (8, 160, FP32), (4, 254, FP32)],
    ids=str,
)
def test_values_between_their_bounds_are_the_references(bits: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """On the edges between codes, and of any size; vectors with a bad coordinate, wherever it is, are lost alone."""
    case = own("fp8", 8, "min_max", bits, (32, dim), dtype, page_size=64, recent_window=0, sink_tokens=0)
    generator = torch.Generator().manual_seed(bits * dim)
    expected = fresh_state(case, 128, [0, 3], generator)
    got = expected.to(device)
    key = random_tokens(case, 128, generator)[0]
    value = values_on_edges(case, 128, generator)
    for i, bad in enumerate((float("inf"), float("-inf"), float("nan"))):
        for d in (0, dim // 2, dim - 1):
            value[0, 1, 10 * i + d % 7, d] = bad
    for i, size in enumerate((1e-38, 1e-30, 1e-9, 1e-7, 1e-4, 6e4, 1e9, 3e37)):
        value[1, 0, 40 + i] = (size * torch.randn(dim, generator=generator)).to(dtype)
        value[1, 1, 50 + i] = size
    value[0, 0, 7], value[0, 0, 9] = 0.0, -0.0
    commit_chunks(reference.commit, expected, case, key, value, (70, 58), None)
    commit_chunks(commit, got, case, key.to(device), value.to(device), (70, 58), None)
    assert got.flags.tolist() == ([2, 2] if dtype is FP16 else [4, 6])  # what saturates is beyond fp16
    assert_same_state(got.to("cpu"), expected, case.layout)


@pytest.mark.parametrize("device", EITHER)
def test_any_strides(device: str) -> None:
    """Keys and values as slices of a fused projection, keep-masks as slices of a longer one, uint8."""
    generator = torch.Generator().manual_seed(0)
    key, value = random_tokens(SMALL, 40, generator)
    keep = (torch.rand(BATCH, 200, generator=generator) < 0.8).to(torch.uint8)
    plain = fresh_state(SMALL, 40, [0, 0], generator).to(device)
    sliced = plain.to(device)
    masked = keep[:, :40].bool().to(device)
    commit_chunks(commit, plain, SMALL, key.contiguous().to(device), value.to(device), (40,), masked)
    fused = torch.cat([key.transpose(1, 2).flatten(2), value.transpose(1, 2).flatten(2)], -1).to(device)
    key, value = (part.unflatten(-1, (HEADS, 64)).transpose(1, 2) for part in fused.chunk(2, -1))
    commit_chunks(commit, sliced, SMALL, key, value, (40,), keep.to(device)[:, :40])
    assert torch.equal(plain.pool, sliced.pool)
    torch.testing.assert_close(plain.ring_key, sliced.ring_key, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", EITHER)
def test_gather_part_of_the_history_and_short_pages(device: str) -> None:
    """Reading less than was committed, and entries shortened by a crop: positions that nothing holds are zero."""
    generator = torch.Generator().manual_seed(0)
    case = preset("tq4", 64, BF16, page_size=32, recent_window=3, sink_tokens=2)
    state = fresh_state(case, 120, [0, 4], generator)
    key, value = random_tokens(case, 120, generator)
    commit_chunks(reference.commit, state, case, key, value, (120,), None)
    state.entries[1, 1] = 11
    for length in (0, 1, 40, 100, 119):
        expected = reference.gather(*state.read, case.layout.name, length)
        for got, side in zip(gather(*state.to(device).read, case.layout.name, length), expected, strict=True):
            assert got.shape == side.shape
            assert length == 0 or relative_rms(got.cpu(), side) <= tolerance(case.dtype)


@pytest.mark.parametrize("device", EITHER)
def test_no_tokens_change_nothing(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    before = fresh_state(SMALL, 40, [0, 0], generator).to(device)
    after = before.to(device)
    key, value = random_tokens(SMALL, 0, generator)
    commit_chunks(commit, after, SMALL, key.to(device), value.to(device), (0,), None)
    assert torch.equal(before.pool, after.pool) and torch.equal(before.counters, after.counters)


@gpu
def test_captured_graph_replays_every_step() -> None:
    case = preset("tq4", 64, BF16, page_size=32, recent_window=5)
    generator = torch.Generator().manual_seed(0)
    steps = 150
    expected = fresh_state(case, steps + 3, [0, 9], generator)
    key, value = (t.cuda() for t in random_tokens(case, steps + 3, generator))
    state = expected.to("cuda")
    new_key, new_value = key[:, :, :1].clone(), value[:, :, :1].clone()
    args = (new_key, new_value, *vars(state).values(), None, case.layout.name, case.config.recent_window, 1)
    commit(*args)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        commit(*args)
    for i in range(1, steps):
        new_key.copy_(key[:, :, i : i + 1])
        new_value.copy_(value[:, :, i : i + 1])
        graph.replay()
    commit_chunks(reference.commit, expected, case, key.cpu(), value.cpu(), (steps,), None)
    # The rings hold the same recent tokens; older slots differ, because one call writes only what stays.
    recent = torch.arange(int(expected.counters[1]), steps) % expected.ring_key.shape[2]
    got = state.to("cpu")
    assert torch.equal(got.counters, expected.counters)
    assert torch.equal(got.ring_key[:, :, recent], expected.ring_key[:, :, recent])
    for name in ("ring_key", "ring_value"):
        setattr(got, name, getattr(expected, name))
    assert_same_state(got, expected, case.layout)


@gpu
def test_lengths_do_not_recompile() -> None:
    from tq_hf.kernels.append import append_tokens
    from tq_hf.kernels.store import pack_pages

    def variants() -> int:
        return sum(len(caches[0]) for kernel in (append_tokens, pack_pages) for caches in kernel.device_caches.values())

    case = GPU_CASES[0]
    check(case, "cuda", (1, 2, 63), [0, 0])
    check(case, "cuda", (200,), [0, 0])
    before = variants()
    check(case, "cuda", (16, 1, 1, 99, 32, 300), [0, 3])
    assert variants() == before
