"""Codebooks against published tables, numeric integration, sampling and exhaustive search."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch

from tq_hf.quantizer.codebooks import boundaries, distortion, int8_grid, levels, unit_levels

SHAPES = [
    *(("gaussian", bits, 128) for bits in (1, 2, 3, 4)),
    *(("beta", bits, dim) for bits in (1, 2, 3, 4) for dim in (4, 128, 576)),
    *(("int8_grid", bits, 128) for bits in (2, 3, 4)),
]


@lru_cache(maxsize=2)
def grid_density(codebook: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Midpoints and probabilities, float64, of a fine grid over the density of a coordinate of variance 1."""
    end = min(math.sqrt(dim), 12.0) if codebook == "beta" else 12.0
    n = 100_000
    x = (torch.arange(n, dtype=torch.float64) + 0.5) * (2 * end / n) - end
    p = (1 - x**2 / dim) ** ((dim - 3) / 2) if codebook == "beta" else torch.exp(-(x**2) / 2)
    return x, p / p.sum()


@pytest.mark.parametrize("codebook, bits, dim", SHAPES)
def test_levels_are_ascending_symmetric_and_exact_in_fp16(codebook: str, bits: int, dim: int) -> None:
    c = levels(bits, dim, codebook)
    assert c.shape == (2**bits,) and c.dtype == torch.float32 and c.device.type == "cpu"
    assert (c.diff() > 0).all()
    assert torch.equal(c, -c.flip(0))
    assert torch.equal(c, c.half().float())


@pytest.mark.parametrize("codebook, bits, dim", SHAPES)
def test_boundaries_are_the_exact_midpoints(codebook: str, bits: int, dim: int) -> None:
    c, b = levels(bits, dim, codebook).double(), boundaries(bits, dim, codebook)
    assert b.shape == (2**bits - 1,) and b.dtype == torch.float32 and b.device.type == "cpu"
    assert torch.equal(b.double(), (c[1:] + c[:-1]) / 2)


@pytest.mark.parametrize(
    "codebook, bits, expected",
    [
        ("gaussian", 3, [0.0217, 0.0668, 0.1188, 0.1902]),
        ("gaussian", 4, [0.0114, 0.0343, 0.0581, 0.0833, 0.1111, 0.1431, 0.1829, 0.2416]),
        ("beta", 3, [0.0216, 0.0666, 0.1181, 0.1884]),
    ],
)
def test_published_levels_at_dim_128(codebook: str, bits: int, expected: list[float]) -> None:
    half = unit_levels(bits, 128, codebook)[2 ** (bits - 1) :]
    assert half.tolist() == pytest.approx(expected, abs=1e-4)  # their last digit, and the rounding to fp16


@pytest.mark.parametrize(
    "bits, expected",
    [
        (1, [0.7979]),
        (2, [0.4528, 1.510]),
        (3, [0.2451, 0.7560, 1.344, 2.152]),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
    ],
)
def test_gaussian_levels_are_those_of_max(bits: int, expected: list[float]) -> None:
    """J. Max, Quantizing for minimum distortion, 1960, table I."""
    assert levels(bits, 128, "gaussian")[2 ** (bits - 1) :].tolist() == pytest.approx(expected, rel=2**-10)


@pytest.mark.parametrize("codebook, bits, dim", [s for s in SHAPES if s[0] != "int8_grid"])
def test_lloyd_max_levels_are_the_means_of_their_cells(codebook: str, bits: int, dim: int) -> None:
    x, p = grid_density(codebook, dim)
    cell = torch.bucketize(x, boundaries(bits, dim, codebook).double(), right=True)
    mass = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, cell, p)
    mean = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, cell, p * x) / mass
    # An fp16 is off by 2^-11 at most, relatively, and the cell's mean moves by less than its boundaries do.
    c = levels(bits, dim, codebook).double()
    assert ((c - mean).abs() <= 2**-10 * c.abs()).all()


@pytest.mark.parametrize("codebook, bits, dim", SHAPES)
def test_distortion_is_the_integral_of_the_squared_error(codebook: str, bits: int, dim: int) -> None:
    x, p = grid_density(codebook, dim)
    code = torch.bucketize(x, boundaries(bits, dim, codebook).double(), right=True)
    integral = (p * (x - levels(bits, dim, codebook).double()[code]) ** 2).sum().item()
    assert distortion(bits, dim, codebook) == pytest.approx(integral, rel=1e-5)


@pytest.mark.parametrize("bits, expected", [(1, 0.363), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_gaussian_distortion_is_the_published_one(bits: int, expected: float) -> None:
    assert distortion(bits, 128, "gaussian") == pytest.approx(expected, rel=0.02)
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(bits))
    code = torch.bucketize(x, boundaries(bits, 128, "gaussian"), right=True)
    sampled = (x - levels(bits, 128, "gaussian")[code]).square().mean().item()
    assert sampled == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("dim", [64, 128, 576])
def test_unit_vectors_meet_the_distortion_of_the_beta_codebook(dim: int) -> None:
    x = torch.randn(200_000 // dim, dim, generator=torch.Generator().manual_seed(dim))
    u = x / x.norm(dim=-1, keepdim=True)
    for bits in (1, 2, 3, 4):
        code = torch.bucketize(u * math.sqrt(dim), boundaries(bits, dim, "beta"), right=True)
        error = (u - unit_levels(bits, dim, "beta")[code]).square().sum(-1).mean().item()
        assert error == pytest.approx(distortion(bits, dim, "beta"), rel=0.02)


def test_beta_distortion_falls_with_bits_and_with_the_dimension_nears_the_gaussian_one() -> None:
    for bits in (1, 2, 3, 4):
        by_dim = [distortion(bits, dim, "beta") for dim in (4, 64, 128, 576, 65536)]
        gaussian = distortion(bits, 128, "gaussian")
        assert [*by_dim, gaussian] == sorted([*by_dim, gaussian])
        assert by_dim[-1] == pytest.approx(gaussian, rel=1e-4)
    for dim in (64, 128, 576):
        by_bits = [distortion(bits, dim, "beta") for bits in (1, 2, 3, 4)]
        assert all(4**-bits < d < 2.72 * 4**-bits for bits, d in zip((1, 2, 3, 4), by_bits))
        assert all(low < high / 3 for high, low in zip(by_bits, by_bits[1:]))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_int8_grid_fits_int8_and_fp16(bits: int) -> None:
    delta, m = int8_grid(bits)
    mantissa, _ = math.frexp(delta)
    assert 8 * mantissa in (4, 5, 6, 7)
    assert len(m) == 2 ** (bits - 1) and list(m) == sorted(set(m)) and 0 <= m[0] and m[-1] <= 127
    half = torch.tensor([(i + 0.5) * delta for i in m])
    assert torch.equal(levels(bits, 128, "int8_grid"), torch.cat((-half.flip(0), half)))


@pytest.mark.parametrize("bits, margin", [(2, 1e-4), (3, 2e-4), (4, 2e-3)])
def test_int8_grid_costs_next_to_nothing(bits: int, margin: float) -> None:
    assert distortion(bits, 128, "int8_grid") <= (1 + margin) * distortion(bits, 128, "gaussian")


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_int8_grid_is_the_best_of_all_grids(bits: int) -> None:
    """Against exhaustive search: all steps of 3 significant bits in 6 octaves, all ascending m from 0 to 127."""

    def below(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.erf(x / math.sqrt(2)) / 2, (1 - torch.exp(-(x**2) / 2)) / math.sqrt(2 * math.pi)

    best = math.inf
    for delta in (math.ldexp(mantissa, exponent) for mantissa in (4, 5, 6, 7) for exponent in range(-10, -4)):
        c = (torch.arange(128, dtype=torch.float64) + 0.5) * delta
        low, high = c[:, None], c[None, :]
        mass, moment = below((low + high) / 2)
        step = (low**2 - high**2) * mass - 2 * (low - high) * moment  # the two cells' part at their common boundary
        step = step.masked_fill(low >= high, math.inf)
        cost = torch.zeros(128, dtype=torch.float64)
        for _ in range(2 ** (bits - 1) - 1):
            cost = (cost[:, None] + step).amin(0)
        mass, moment = below(torch.tensor(math.inf, dtype=torch.float64))
        best = min(best, (1 + 2 * (cost + c**2 * mass - 2 * c * moment)).min().item())
    assert distortion(bits, 128, "int8_grid") == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("function", [levels, boundaries, unit_levels, distortion])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3, 128, "normal"), "codebook='normal'"),
        ((0, 128, "gaussian"), "bits=0"),
        ((5, 128, "beta"), "bits=5"),
        ((1, 128, "int8_grid"), "bits=1"),
        ((3, 3, "beta"), "dim=3"),
        ((3, 65537, "beta"), "dim=65537"),
        ((3, 64.0, "gaussian"), "dim=64.0"),
    ],
)
def test_errors_name_the_value(function, arguments, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_int8_grid_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match="bits=1"):
        int8_grid(1)


def test_global_state_of_torch_neither_matters_nor_changes() -> None:
    """With a dimension that no other test has, so that nothing is cached yet."""
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            tensors = [levels(3, 77, "beta"), boundaries(3, 77, "beta")]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(t.dtype == torch.float32 and t.device.type == "cpu" and not t.is_inference() for t in tensors)
    assert torch.equal(torch.get_rng_state(), before)
