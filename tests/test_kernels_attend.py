"""The attention kernels against the reference: on a GPU, and with small cases in Triton's interpreter.

The interpreter works on CPU tensors and has to be chosen before Triton is imported: run this file in a process of its own
with TRITON_INTERPRET=1. It knows no bf16 products, so its cases are fp16.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.presets import KERNEL_PRESETS
from tq_hf import reference
from tq_hf.config import TurboQuantConfig

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs a process with TRITON_INTERPRET=1")
on_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = 2e-3
STATE = (
    *("pool", "ring_key", "ring_value", "sink_key", "sink_value"),
    *("page_ids", "entries", "row_start", "counters", "balance"),
)

if INTERPRETED:
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    from tests import ptx
    from tq_hf.kernels.splits import row_splits, slot_of

    ptx.install()
    patch_tensor, create_splat = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat

    def patch_index(tensor: type, *scope: object) -> None:
        """Before 3.9, a block of one becomes an index in a way that numpy 2.4 refuses."""
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def splat_condition(self: object, shape: triton.language.block_type, scalar: interpreter.TensorHandle) -> object:
        """In 3.9, a comparison keeps the type of what it compares, and a mask made from it is refused."""
        if scalar.data.dtype == bool:
            scalar = interpreter.TensorHandle(scalar.data, triton.language.int1)
        return create_splat(self, shape, scalar)

    @triton.jit
    def write_slots(p_row_start, p_counters, p_out, batch, slots, PAGE_BITS: tl.constexpr, GROUPS: tl.constexpr,
                    TILE: tl.constexpr, LEAST: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
        first, splits, tiles = row_splits(p_row_start, p_counters, batch, slots, PAGE_BITS, GROUPS, TILE, LEAST, BATCH)
        row, start, split, count = slot_of(first, splits, tl.program_id(0), BATCH)
        p_out += 5 * tl.program_id(0)
        tl.store(p_out, row)
        tl.store(p_out + 1, start)
        tl.store(p_out + 2, split)
        tl.store(p_out + 3, count)
        tl.store(p_out + 4, tiles)

    interpreter._patch_lang_tensor = patch_index
    interpreter.InterpreterBuilder.create_splat = splat_condition


@dataclass(frozen=True)
class Case:
    """One attention call on a history of `length` tokens."""

    preset: str = "tq4"
    dim: int = 64
    value_dim: int = 0
    """0: as `dim`."""
    length: int = 100
    queries: int = 1
    new: int = -1
    """New tokens; -1: as many as queries."""
    group: int = 1
    rows: int = 1
    heads: int = 1
    row_start: tuple[int, ...] = ()
    mask: str = ""
    """"row": hides tokens of each row; "query": hides other ones from each query; "shared": one row for the batch;
    "strided": as "query", every other element of a larger mask."""
    aux_sinks: bool = False
    softcap: float = 0.0
    causal: bool = True
    crop: int = 0
    """How many tokens of the last page are cut off, after which the rest stays in place."""
    key_size: float = 1.0
    value_size: float = 1.0
    score_size: float = 1.0
    key_mean: float = 1.0
    """How large what all keys have in common is, beside what they have not."""
    options: tuple[tuple[str, object], ...] = ()
    dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != getattr(Case(), k)}
        return "-".join(f"{k}={v}" for k, v in changed.items()).replace(" ", "") or "default"


def make(case: Case, device: str) -> tuple[TurboQuantConfig, list[Tensor], dict[str, Any]]:
    """Query, key and value, and the state after committing the history in two calls. Unused memory holds NaN."""
    config = TurboQuantConfig.from_preset(case.preset, **dict(case.options))
    value_dim = case.value_dim or case.dim
    layout = config.layout(case.dim, value_dim, case.dtype)
    page, sinks = config.page_size, config.sink_tokens
    capacity = case.length // page + 2
    rows, heads, slots = case.rows, case.heads, config.recent_window + page
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    def unused(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=case.dtype, device=device)

    starts = page * torch.arange(capacity, device=device) + sinks
    row_start = torch.tensor(case.row_start or [0] * rows, device=device)
    page_ids = torch.randperm(rows * capacity, generator=random, device=device).view(rows, capacity)
    page_ids[starts + page <= row_start[:, None]] = -1
    state = {
        "pool": torch.full((rows * capacity, heads, layout.page_words), -1, dtype=torch.int32, device=device),
        "ring_key": unused(rows, heads, slots, case.dim),
        "ring_value": unused(rows, heads, slots, value_dim),
        "sink_key": unused(rows, heads, sinks, case.dim),
        "sink_value": unused(rows, heads, sinks, value_dim),
        "page_ids": page_ids.int(),
        "entries": torch.stack([starts, torch.full_like(starts, page)], 1).int(),
        "row_start": row_start.int(),
        "counters": torch.tensor([0, sinks, 0], dtype=torch.int32, device=device),
        "balance": normal(rows, heads, case.dim).div(2).exp() if config.balance_keys else None,
    }
    total = case.length + (case.queries if case.new < 0 else case.new)
    mean = normal(1, heads, 1, case.dim) * case.key_mean
    key = ((normal(rows, heads, total, case.dim) + mean) * case.key_size).to(case.dtype)
    value = (normal(rows, heads, total, value_dim) * case.value_size).to(case.dtype)
    flags = torch.zeros(heads, dtype=torch.int32, device=device)
    for start, end in ((0, case.length // 2), (case.length // 2, case.length)):
        tensors = [state[name] for name in STATE]
        reference.commit(
            key[:, :, start:end],
            value[:, :, start:end],
            *tensors,
            flags,
            None,
            layout.name,
            config.recent_window,
            capacity,
        )
    if case.crop:
        last = int(state["counters"][2]) - 1
        state["entries"][last, 1] -= case.crop
        state["counters"][1] = state["counters"][0] = state["entries"][last].sum()
        total -= case.length - int(state["counters"][0])
    query = normal(rows, heads * case.group, case.queries, case.dim).to(case.dtype)
    length = int(state["counters"][0])
    return config, [query, key[:, :, length:total], value[:, :, length:total]], state


def make_mask(case: Case, total: int, device: str) -> Tensor | None:
    if not case.mask:
        return None
    per_query = (case.rows, 1, case.queries)
    shape = {"row": (case.rows, 1, 1), "shared": (1, 1, case.queries)}.get(case.mask, per_query)
    random = torch.Generator(device).manual_seed(1)
    if case.mask == "strided":
        return (torch.rand((*shape, 2 * total), generator=random, device=device) > 0.3)[..., ::2]
    # Wider than needed and cut, so that its strides are not those of its shape.
    return (torch.rand((*shape, total + 5), generator=random, device=device) > 0.3)[..., : total + 1]


def check(case: Case, device: str, appends: bool = True) -> None:
    """Against the reference; without `appends`, which takes the interpreter as long again, not with `check_appended`."""
    from tq_hf.kernels.attend import attend

    config, (query, key, value), state = make(case, device)
    layout = config.layout(case.dim, case.value_dim or case.dim, case.dtype)
    aux_sinks = torch.linspace(-1, 2, query.shape[1], device=device) if case.aux_sinks else None
    mask = make_mask(case, int(state["counters"][0]) + key.shape[2], device)
    rest = [state[name] for name in STATE]
    rest += [
        mask,
        aux_sinks,
        layout.name,
        case.dim**-0.5 * case.score_size / case.key_size,
        case.softcap,
        case.causal,
        state["page_ids"].shape[1],
    ]
    expected = reference.attend(query.float(), key.float(), value.float(), *rest)
    actual = attend(query, key, value, *rest)
    assert actual.shape == expected.shape and actual.dtype == case.dtype and actual.is_contiguous()
    assert not actual.isnan().any()
    size = expected.double().pow(2).mean().sqrt()
    error = (actual.double() - expected.double()).pow(2).mean().sqrt()
    assert error <= TOLERANCE * size, f"{case}: relative RMS error {error / size:.1e}"
    length, packed_end, _ = state["counters"].tolist()
    if appends and key.shape[2] == 1 and length + 1 - packed_end < config.recent_window + config.page_size:
        check_appended((query, key, value), state, rest[len(STATE) :], config, actual)


def check_appended(
    new: tuple[Tensor, Tensor, Tensor],
    state: dict[str, Any],
    rest: list[Any],
    config: TurboQuantConfig,
    attended: Tensor,
) -> None:
    """A token that makes no page due can be committed by the same call."""
    from tq_hf.kernels.attend import attend

    found, expected = ([state[name] if state[name] is None else state[name].clone() for name in STATE] for _ in range(2))
    out = attend(*new, *found, *rest, config.recent_window)
    assert torch.equal(out, attended)
    flags = torch.zeros(state["pool"].shape[1], dtype=torch.int32, device=attended.device)
    reference.commit(*new[1:], *expected, flags, None, rest[2], config.recent_window, 0)
    for name, a, b in zip(STATE, found, expected, strict=True):
        assert a is b is None or torch.equal(a.nan_to_num(), b.nan_to_num()), name


def narrow(page_size: int = 32, **options: object) -> tuple[tuple[str, object], ...]:
    """Small pages and a short window, for short tests."""
    return tuple({"page_size": page_size, "recent_window": 8, **options}.items())


@interpreted
def test_queries_in_pieces_commit_the_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("tq_hf.kernels.attend"), "WORKSPACE", 0)
    check(Case(dim=32, length=40, queries=70, new=1, heads=1, causal=False, options=narrow()), "cpu")


@interpreted
@pytest.mark.parametrize("preset", KERNEL_PRESETS)
def test_interpreted_presets(preset: str) -> None:
    check(Case(preset, options=narrow(), group=3, length=77), "cpu")


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        Case("3bit_nc", 96, length=45, options=narrow()),
        Case("tq3", 96, length=45, group=2, options=narrow()),
        Case("tq2", 80, length=45, group=2, options=narrow()),
        Case("tq4", 128, 32, length=45, options=narrow()),
        Case("tq4", 32, 48, length=45, options=narrow()),
        Case("tq4", 32, 128, length=45, options=narrow(codebook="beta")),
        Case("tq4", 32, length=77, group=7, queries=5, options=narrow()),
        Case("tq4", 64, length=200, group=4, options=narrow(64)),  # two groups a tile
        Case("tq4", 64, length=175, group=4, rows=2, row_start=(0, 70), options=narrow()),  # two pages a tile, an odd number
        Case("tq3", 32, length=200, group=8, options=narrow(64)),
        Case("tq2", 32, length=330, group=2, options=narrow(128)),
        Case("tq4", 64, length=150, group=7, queries=2, options=narrow(64)),  # two blocks of columns
        Case("tq4", 32, length=175, group=5, rows=2, row_start=(0, 70), options=narrow()),
        Case("tq3v2", 32, length=77, group=16, options=narrow()),
        Case("tq2", 32, length=175, group=8, rows=2, row_start=(0, 70), options=narrow()),  # two pages a tile
        Case("3bit_nc", 32, length=77, group=12, options=narrow()),
        Case("4bit_nc", 32, length=77, group=8, options=narrow()),
        Case("k8v4", 32, length=77, group=6, options=narrow()),
        Case("k8v4", 32, length=77, group=16, options=narrow()),
        Case("k8v4", 32, length=77, options=narrow(value_bits=8)),
        Case("4bit_nc", 32, length=77, options=narrow(value_bits=2), dtype=torch.float32),
        Case("tq4", 32, length=77, options=narrow(value_format="raw", value_bits=16)),
        Case("raw", 32, length=77, options=narrow(), dtype=torch.float32, queries=3, group=2),
        Case("tq4", 32, length=77, options=narrow(), dtype=torch.float32, queries=2, group=2),
        Case("tq2", 32, length=700, options=narrow(recent_window=600)),  # more exact tokens than the decode kernel takes
        Case("4bit_nc", 96, 80, length=70, group=4, options=narrow(recent_window=0)),
        # More than 128 dimensions are taken in larger blocks.
        Case("tq4", 256, length=77, group=3, rows=2, row_start=(0, 20), options=narrow()),
        Case("tq3", 150, 224, length=77, group=8, options=narrow()),
        Case("k8v4", 256, 150, length=77, group=2, options=narrow()),
        Case("4bit_nc", 224, 256, length=77, group=6, options=narrow()),
    ],
    ids=str,
)
def test_interpreted_shapes(case: Case) -> None:
    check(case, "cpu", appends=False)


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=2, row_start=(0, 40), queries=2, mask="row", aux_sinks=True),
        Case(rows=2, row_start=(50, 3), softcap=5.0, heads=2, group=2),
        Case(rows=2, row_start=(78, 0)),  # nothing but the new token
        Case(rows=5, row_start=(0, 190, 299, 64, 33), length=300, heads=2),  # rows of very different lengths
        Case(rows=2, row_start=(70, 0)),  # sinks that the ring holds as well
        Case(group=8, queries=2, rows=2, row_start=(0, 20), mask="row", new=2, causal=True),  # two blocks of columns
        Case(new=20),  # more new tokens than a block has
        Case(queries=2, mask="strided"),
        Case(queries=3, mask="query", softcap=5.0),
        Case(queries=3, rows=2, mask="shared", aux_sinks=True, new=3),
        Case(queries=4, new=1),  # the first queries do not see the end of the history
        Case(queries=5, new=0),
        Case(queries=3, new=1, causal=False),
        Case(new=0, crop=5),
        Case(queries=2, crop=31, length=85),
        Case(length=3),
        Case(length=0, queries=3),
        Case(group=8, score_size=8.0, length=300),  # the highest score rises again and again
        Case("tq2", group=14, score_size=8.0, length=300),
        Case("raw", queries=40, new=2, length=60),
        Case(value_size=1e-4),
        Case(value_size=1e4),
        Case(key_size=1e3),
        Case(value_size=1e-4, group=8),
        Case(value_size=1e4, group=9),
        Case(rows=2, row_start=(50, 3), softcap=5.0, group=6, mask="row", aux_sinks=True),
        Case(rows=2, row_start=(78, 0), group=16),
    ],
    ids=str,
)
def test_interpreted_features(case: Case) -> None:
    length = 77 if case.length == 100 else case.length
    check(replace(case, dim=32, length=length, options=narrow()), "cpu", appends=length < 100 and case.rows == 1)


@interpreted
def test_rows_share_slots_by_length() -> None:
    """Every tile of every row is in one split, no split is longer than it has to be, and the slots suffice."""
    # In the last two no slot is left.
    cases = [([0], 7, 32, 15), ([0, 640, 3000, 3199, 3200], 40, 32, 6), ([0] * 9, 9, 32, 100), ([5, 0], 3, 32, 100)]
    cases += [([0], 10, 1, 10), ([0] * 4, 40, 32, 10)]
    for row_start, slots, block, most in cases:
        batch = len(row_start)
        out = torch.zeros(slots, 5, dtype=torch.int32)
        counters = torch.tensor([3300, 3200, 50], dtype=torch.int32)
        starts = torch.tensor(row_start, dtype=torch.int32)
        write_slots[(slots,)](starts, counters, out, batch, slots, PAGE_BITS=6, GROUPS=4, TILE=2, LEAST=1, BATCH=block)
        taken: list[set[int]] = [set() for _ in row_start]
        longest = 0
        for row, start, split, count, tiles in out.tolist():
            if row < batch:
                tiles_of_split = range(start + split, tiles, count)
                assert not taken[row].intersection(tiles_of_split)
                taken[row].update(tiles_of_split)
                longest = max(longest, len(tiles_of_split))
        expected = [set(range(2 * (start // 64), 100)) for start in row_start]
        assert taken == expected
        assert longest <= most


BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# Head dimensions, queries and group. Each preset takes two of them: a kernel takes seconds to compile.
SHAPES = [(64, 64, 1, 7), (96, 80, 2, 5), (128, 128, 1, 4), (192, 128, 1, 16), (256, 256, 1, 2)]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("preset", ["tq4", "4bit_nc", "raw"])
def test_lengths(preset: str) -> None:
    case = Case(preset, 128, group=4, rows=2, heads=2, dtype=BFLOAT16, options=(("page_size", 32),))
    for length in (1, 31, 32, 33, 63, 65, 127, 1000, 4097):  # all by the same kernels
        check(replace(case, length=length), "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("preset", "dim", "value_dim", "queries", "group"),
    [(preset, *SHAPES[(i + k) % len(SHAPES)]) for i, preset in enumerate(KERNEL_PRESETS) for k in (0, 2)],
)
def test_formats_and_dims(preset: str, dim: int, value_dim: int, queries: int, group: int) -> None:
    dtype = BFLOAT16 if dim % 128 else torch.float16
    check(Case(preset, dim, value_dim, length=600, queries=queries, group=group, heads=2, dtype=dtype), "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("groups", [range(1, 5), range(5, 9), range(9, 17)], ids=str)
def test_gqa(groups: range) -> None:
    for group in groups:  # by the same kernel
        check(Case("tq4", 128, length=500, group=group, heads=3, rows=2, dtype=BFLOAT16), "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("preset", ["tq4", "3bit_nc", "k8v4", "raw"])
@pytest.mark.parametrize("queries", [2, 17, 130, 1000])
def test_chunks(preset: str, queries: int) -> None:
    check(
        Case(preset, 128, length=2000, queries=queries, group=4, heads=2, rows=2, row_start=(0, 130), dtype=BFLOAT16),
        "cuda",
    )


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("k8v4", 64, options=(("value_bits", 8),)),
        Case("k8v4", 64, options=(("value_bits", 2),)),
        Case("4bit_nc", 80, options=(("value_bits", 8),)),
        Case("tq4", options=(("value_format", "min_max"), ("value_bits", 3))),
        Case("tq3", options=(("value_format", "raw"), ("value_bits", 16))),
        Case("raw", options=(("value_format", "lloyd_max"), ("value_bits", 4))),
        Case("tq4", 112, options=(("codebook", "beta"),)),
        Case("tq4", 160, dtype=FLOAT32),
        Case("raw", 64, dtype=FLOAT32),
        Case("raw", 80, dtype=FLOAT32, queries=40),
        Case("raw", 256, dtype=BFLOAT16),
        Case("tq4", 16, 48),
    ],
    ids=str,
)
def test_other_formats(case: Case) -> None:
    check(replace(case, length=500, group=3, heads=2), "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=3, row_start=(0, 130, 499), queries=2, mask="row", aux_sinks=True),
        Case(rows=2, row_start=(501, 0), mask="row"),
        Case(queries=1, mask="row", softcap=5.0),
        Case(queries=7, mask="query"),
        Case(queries=7, mask="strided"),
        Case(queries=7, rows=2, mask="shared", aux_sinks=True),
        Case(queries=7, mask="query", new=1, softcap=5.0),
        Case(queries=20, new=0, causal=False),
        Case(queries=200, new=3),
        Case(new=0, crop=33),
        Case(queries=3, crop=63),
        Case(value_size=1e-4, dtype=BFLOAT16),  # outputs below fp16's normal range
        Case(value_size=1e4),
        Case(key_size=1e3),
        Case("4bit_nc", value_size=1e-4, dtype=BFLOAT16),
        Case("4bit_nc", value_size=1e3),
    ],
    ids=str,
)
def test_features(case: Case) -> None:
    check(replace(case, dim=64, length=500, group=2, heads=2), "cuda")


@pytest.mark.gpu
@on_gpu
def test_graph_replay_follows_the_counters() -> None:
    """A captured call attends to what the counters say at replay: nothing is baked in."""
    from tq_hf.kernels.attend import attend

    case = Case("tq4", 128, length=700, group=4, heads=2, dtype=BFLOAT16)
    config, inputs, state = make(case, "cuda")
    layout = config.layout(128, 128, BFLOAT16)
    rest = [None, None, layout.name, 128**-0.5, 0.0, True, state["page_ids"].shape[1]]
    tensors = [state[name] for name in STATE]
    attend(*inputs, *tensors, *rest)
    graph = torch.cuda.CUDAGraph()
    query = torch.empty_like(inputs[0])
    with torch.cuda.graph(graph):
        query.copy_(inputs[0])  # the graph copies memory: what goes before the first kernel need not be one
        actual = attend(query, *inputs[1:], *tensors, *rest)
    for length in (0, 100, 300):
        _, _, other = make(replace(case, length=length), "cuda")
        for name in ("ring_key", "ring_value", "sink_key", "sink_value", "counters"):
            state[name].copy_(other[name])
        pages = int(other["counters"][2])
        state["pool"][state["page_ids"][:, :pages].long()] = other["pool"][other["page_ids"][:, :pages].long()]
        graph.replay()
        expected = reference.attend(*inputs, *tensors, *rest).float()
        assert (actual.float() - expected).norm() <= 5e-3 * expected.norm()
