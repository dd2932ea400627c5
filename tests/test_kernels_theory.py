"""The error that the kernels make in storing and reading unit vectors, against the codebook's distortion.

Run without a GPU in a process of its own, as `test_kernels_store.py` says.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernel_states import BATCH, EITHER, FP32, HEADS, commit_chunks, fresh_state, own
from tq_hf.kernels.commit import commit, gather
from tq_hf.layout import padded_dim
from tq_hf.quantizer.codebooks import distortion


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("bits, dim", [(2, 64), (3, 64), (4, 64), (3, 96), (4, 128)])
def test_unit_vectors_meet_the_distortion(bits: int, dim: int, device: str) -> None:
    tokens = 128 if dim == 64 else 96  # the more coordinates, the nearer is each error to their mean
    case = own("lloyd_max", bits, "lloyd_max", bits, (dim, dim), FP32, codebook="beta", page_size=32)
    generator = torch.Generator().manual_seed(bits)
    state = fresh_state(case, tokens, [0] * BATCH, generator).to(device)
    shape = (2, BATCH, HEADS, tokens, dim)
    key, value = torch.nn.functional.normalize(torch.randn(shape, generator=generator), dim=-1).to(device)
    commit_chunks(commit, state, case, key, value, (tokens,), None)
    assert state.counters.tolist()[1] == tokens  # all of them are in pages
    # With the norm restored the error is 2 - 2 sqrt(1 - D), but for terms of order D / dim.
    expected = 2 - 2 * math.sqrt(1 - distortion(bits, padded_dim(dim), "beta"))
    for got, given in zip(gather(*state.read, case.layout.name, tokens), (key, value), strict=True):
        errors = (got - given).square().sum(-1).double().cpu()
        uncertainty = errors.std().item() / math.sqrt(errors.numel())
        assert uncertainty < 0.015 * expected
        assert errors.mean().item() == pytest.approx(expected, abs=4 * uncertainty + 3 / dim * expected)
