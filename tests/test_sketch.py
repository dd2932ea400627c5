"""The QJL sketch: one matrix a dimension, from numbers of its own, with the gain that unbiased estimates need."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tq_hf.quantizer import rotation
from tq_hf.quantizer import sketch as module
from tq_hf.quantizer.rotation import orthogonal_matrix
from tq_hf.quantizer.sketch import sign_weight, sketch, unsketch

DIMS = (32, 64, 96, 128, 256)


def matrix(dim: int) -> Tensor:
    return sketch(torch.eye(dim)).mT.double()


@pytest.mark.parametrize("dim", DIMS)
def test_unsketch_is_the_transpose(dim: int) -> None:
    x, y = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((sketch(x) * y).sum(-1), (x * unsketch(y)).sum(-1), rtol=1e-4, atol=1e-3)
    assert sketch(x).dtype == torch.float32 and not torch.allclose(sketch(x), unsketch(x), atol=1)


@pytest.mark.parametrize("dim", DIMS)
def test_numbers_are_standard_normal(dim: int) -> None:
    numbers = matrix(dim).flatten()
    assert numbers.mean().abs() < 4 / dim
    assert numbers.square().mean() == pytest.approx(1, abs=4 * math.sqrt(2) / dim)
    assert numbers.pow(4).mean() == pytest.approx(3, abs=4 * math.sqrt(96) / dim)


@pytest.mark.parametrize("dim", DIMS)
def test_estimates_have_no_gain_on_average_over_all_directions(dim: int) -> None:
    """The expected |cosine| of a row with a random direction is known in closed form: no sampling."""
    cosine = math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)
    gain = sign_weight(dim) * matrix(dim).norm(dim=1).sum().item() * cosine
    assert gain == pytest.approx(math.sqrt(math.pi / 2) * math.sqrt(2 / math.pi), abs=1e-6)


@pytest.mark.parametrize("dim", DIMS)
def test_sketch_and_rotation_are_independent(dim: int) -> None:
    gaussian, q = matrix(dim), orthogonal_matrix(dim)
    correlation = (gaussian * q).sum() / (gaussian.norm() * q.norm())
    assert correlation.abs() < 4 / dim
    assert module._SEED != rotation._QR_SEED


def test_global_state_of_torch_neither_matters_nor_changes() -> None:
    expected = sketch(torch.eye(64))
    module._sketch_matrix.cache_clear()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            sketch(torch.ones(1, 64, dtype=torch.float32, device="cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(sketch(torch.eye(64)), expected)
    x = torch.ones(64, requires_grad=True)
    torch.autograd.grad(sketch(x).sum(), x)  # an inference tensor in the cache would raise here
