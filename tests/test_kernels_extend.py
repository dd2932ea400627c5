"""The extend kernel against the reference: as `test_kernels_attend.py`, whose cases and checks it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.presets import KERNEL_PRESETS
from tests.test_kernels_attend import Case, check, interpreted, narrow, on_gpu

BFLOAT16 = torch.bfloat16


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
        Case(new=1, causal=False),
        Case(crop=31, length=85),
        Case(value_size=1e-4),
        Case(value_size=1e4),
        Case(key_size=1e3),
        Case("4bit_nc", value_size=1e-4),
    ],
    ids=str,
)
def test_interpreted_features(case: Case) -> None:
    changes = {"length": 77 if case.length == 100 else case.length, "queries": max(case.queries, 18)}
    check(replace(case, dim=32, options=case.options or narrow(), **changes), "cpu")
