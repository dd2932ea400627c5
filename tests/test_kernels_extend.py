"""The extend kernel against the reference: as `test_kernels_attend.py`, whose cases and checks it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.presets import KERNEL_PRESETS
from tests.test_kernels_attend import Case, check, interpreted, narrow, on_gpu

BFLOAT16 = torch.bfloat16


NOTHING_EXACT = (("page_size", 32), ("recent_window", 0), ("sink_tokens", 0))


@interpreted
@pytest.mark.parametrize("preset", [name for name in KERNEL_PRESETS if name != "raw"])
def test_interpreted_presets(preset: str) -> None:
    check(Case(preset, 64, options=narrow(), group=3, queries=6, length=77), "cpu")


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        Case("tq4", 128, 32, length=45, queries=17, options=narrow()),
        Case("tq3", 96, length=109, queries=9, group=2, options=narrow(64)),
        Case("tq2", 80, 112, length=173, queries=5, group=4, options=narrow(128)),  # pages longer than tiles
        Case("3bit_nc", 128, 224, length=77, queries=2, group=16, options=narrow()),
        Case("tq4", 32, 160, length=45, queries=3, group=7, options=narrow(codebook="beta")),
        Case("k8v4", 96, 32, length=77, queries=20, options=narrow(value_bits=8)),
        Case("4bit_nc", 32, length=77, queries=20, options=narrow(value_bits=2), dtype=torch.float32),
        Case("k3v4_nc", 32, length=77, queries=70, options=narrow()),  # two blocks of columns
    ],
    ids=str,
)
def test_interpreted_shapes(case: Case) -> None:
    check(case, "cpu")


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=2, row_start=(0, 40), mask="row", aux_sinks=True),
        Case(rows=2, row_start=(50, 3), softcap=5.0, heads=2, group=2),
        Case(rows=2, row_start=(78, 0)),  # nothing but new tokens
        Case(rows=3, row_start=(0, 190, 64), length=300, options=narrow(64)),
        Case(mask="strided"),
        Case(mask="query", softcap=5.0),
        Case(rows=2, mask="shared", aux_sinks=True, new=3),
        Case(queries=40, new=2),  # the first queries do not see the end of the history
        Case(new=0),
        Case(new=0, length=96, queries=96, options=NOTHING_EXACT),  # a prompt that reads itself from its pages
        Case("4bit_nc", new=0, length=96, queries=40, rows=2, row_start=(0, 33), mask="row", options=NOTHING_EXACT),
        Case(new=1, causal=False),
        Case(crop=31, length=85),
        Case(value_size=1e-4),
        Case(value_size=1e4),
        Case(key_size=1e3),
        Case(key_mean=30.0, length=140),
        Case(key_mean=30.0, length=140, softcap=60.0),
        Case("4bit_nc", value_size=1e-4),
    ],
    ids=str,
)
def test_interpreted_features(case: Case) -> None:
    changes = {"length": 77 if case.length == 100 else case.length, "queries": max(case.queries, 18)}
    check(replace(case, dim=32, options=case.options or narrow(), **changes), "cpu")


# Queries and group: less than a block of columns, an odd number, several blocks.
SHAPES = [(5, 4), (17, 1), (33, 7), (130, 4), (300, 3)]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("preset", "queries", "group"),
    [
        (preset, *SHAPES[(i + k) % len(SHAPES)])
        for i, preset in enumerate(name for name in KERNEL_PRESETS if name != "raw")
        for k in (0, 3)
    ],
)
def test_presets_and_lengths(preset: str, queries: int, group: int) -> None:
    case = Case(preset, 128, queries=queries, group=group, rows=2, heads=2, row_start=(0, 61), dtype=BFLOAT16)
    for length in (65, 1000, 4097):  # all by the same kernels
        check(replace(case, length=length), "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("preset", "dim", "value_dim"),
    [("tq4", 64, 64), ("tq3", 96, 96), ("k8v4", 80, 112), ("tq2", 192, 128), ("4bit_nc", 160, 224), ("tq4", 256, 256)],
)
@pytest.mark.parametrize("queries", [9, 100])
def test_dims(preset: str, dim: int, value_dim: int, queries: int) -> None:
    check(Case(preset, dim, value_dim, queries=queries, group=2, length=700, heads=2, dtype=BFLOAT16), "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=3, row_start=(0, 130, 499), mask="row", aux_sinks=True),
        Case(rows=2, row_start=(519, 0), mask="row"),
        Case(mask="query", new=1, softcap=5.0),
        Case(rows=2, mask="shared", aux_sinks=True),
        Case(mask="strided"),
        Case(new=0, causal=False),
        Case(new=0, queries=480, options=NOTHING_EXACT),
        Case("4bit_nc", new=0, queries=300, rows=2, row_start=(0, 33), mask="row", options=NOTHING_EXACT),
        Case(queries=200, new=3),
        Case(queries=70, crop=33),
        Case("tq2", options=(("page_size", 256),)),
        Case("tq3", options=(("page_size", 32),), crop=31),
        Case(value_size=1e-4, dtype=BFLOAT16),
        Case(value_size=1e4),
        Case(key_size=1e3),
        Case("4bit_nc", value_size=1e-4, dtype=BFLOAT16),
        Case("k8v4", options=(("value_bits", 8),), dtype=torch.float32),
    ],
    ids=str,
)
def test_features(case: Case) -> None:
    check(replace(case, dim=64, queries=max(case.queries, 20), length=500, group=2, heads=2), "cuda")
