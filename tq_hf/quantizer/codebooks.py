"""Scalar codebooks for the coordinates of a rotated unit vector, and their expected error.

After the rotation, a coordinate of a unit vector is close to N(0, 1/dim); exactly, its density is proportional to
(1 - t^2)^((dim - 3) / 2) on [-1, 1] (Zandieh et al., TurboQuant, https://arxiv.org/abs/2504.19874). All levels here are
in units of a coordinate of variance 1, i.e. sqrt(dim) times the coordinate.

Everything is solved in Python floats from closed forms: no sampling, no random state, and no dependence on torch's
default dtype, device or modes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..config import CODEBOOKS

MIN_DIM, MAX_DIM = 4, 65536  # beyond, float64 loses digits of the marginal, which is Gaussian to 4 digits by then
_BITS = {"gaussian": (1, 2, 3, 4), "beta": (1, 2, 3, 4), "int8_grid": (2, 3, 4)}
_INT8_MAX = 127
_TOLERANCE = 1e-12

# x >= 0 -> the integrals from 0 to x of the density and of x times the density; math.inf is allowed.
_Integrals = Callable[[float], tuple[float, float]]


def levels(bits: int, dim: int, codebook: str) -> Tensor:
    """The reconstruction levels of a codebook, in units of a coordinate of variance 1.

    Args:
        bits: 1 to 4; `"int8_grid"` has 2 to 4.
        dim: dimension of the rotated vector, 4 to 65536; only `"beta"` depends on it.
        codebook: `"gaussian"`: Lloyd-Max of N(0, 1). `"beta"`: sqrt(dim) times the Lloyd-Max levels of the exact
            marginal. `"int8_grid"`: the best levels for N(0, 1) on an 8-bit grid, see `int8_grid`.

    Returns:
        float32 [2**bits] on the CPU: ascending, symmetric, every value exactly an fp16. It is cached: do not modify it.

    Raises:
        ValueError: an unknown codebook, or bits or dim out of range.
    """
    _check(bits, dim, codebook)
    return _level_tensor(bits, dim if codebook == "beta" else MIN_DIM, codebook)


def boundaries(bits: int, dim: int, codebook: str) -> Tensor:
    """The midpoints of neighbouring `levels`: float32 [2**bits - 1] on the CPU, ascending, exact, cached.

    The code of a coordinate is the number of boundaries that are at most as large. Arguments and errors: see `levels`.
    """
    _check(bits, dim, codebook)
    return _boundary_tensor(bits, dim if codebook == "beta" else MIN_DIM, codebook)


def unit_levels(bits: int, dim: int, codebook: str) -> Tensor:
    """The levels for the coordinates of a unit vector: `levels / sqrt(dim)`, float32 [2**bits] on the CPU.

    Arguments and errors as for `levels`. This is the scale in which papers print codebooks.
    """
    return levels(bits, dim, codebook) / math.sqrt(dim)


def distortion(bits: int, dim: int, codebook: str) -> float:
    """Expected squared error per coordinate of variance 1, which is that of a whole unit vector; by exact integration.

    The density is the one that the codebook is made for: the exact marginal for `"beta"`, N(0, 1) for the other two. It
    is the error before norm correction. Arguments and errors as for `levels`.
    """
    _check(bits, dim, codebook)
    return _distortion(_half_levels(bits, dim, codebook), _integrals(dim, codebook))


@lru_cache(maxsize=None)
def int8_grid(bits: int) -> tuple[float, tuple[int, ...]]:
    """The grid of the `"int8_grid"` codebook: `(delta, m)`, so that its positive levels are `(m + 0.5) * delta`.

    With codes that count up, the negative levels are `(-1 - m + 0.5) * delta`: all are int8 multiples of `delta` plus
    half of it. `2m + 1` has at most 8 significant bits and `delta` at most 3, so every level has at most 11: an fp16.

    Args:
        bits: 2 to 4.

    Returns:
        `delta` and the 2**(bits - 1) ascending integers m, 0 to 127, that minimize the squared error for N(0, 1).

    Raises:
        ValueError: bits out of range.
    """
    _check(bits, MIN_DIM, "int8_grid")
    ideal = _lloyd_max(bits, _gaussian_integrals)
    # Two octaves of steps, from the finest whose grid reaches the outermost level. With few levels a coarser grid can
    # happen to fit better than a fine one, but not one coarser than these.
    finest = ideal[-1] / (_INT8_MAX + 0.5)
    exponent = math.floor(math.log2(finest)) - 2
    steps = [math.ldexp(mantissa, exponent + octave) for octave in (0, 1, 2) for mantissa in (4, 5, 6, 7)]
    _, delta, m = min(_best_on_grid(delta, ideal) for delta in steps if finest <= delta < 4 * finest)
    return delta, m


def _check(bits: int, dim: int, codebook: str) -> None:
    if codebook not in CODEBOOKS:
        raise ValueError(f"codebook={codebook!r} is unknown: expected one of {CODEBOOKS}.")
    if bits not in _BITS[codebook]:
        raise ValueError(f"bits={bits!r} has no {codebook!r} codebook: expected one of {_BITS[codebook]}.")
    if not isinstance(dim, int) or not MIN_DIM <= dim <= MAX_DIM:
        raise ValueError(f"dim={dim!r} is not allowed: expected an integer from {MIN_DIM} to {MAX_DIM}.")


@lru_cache(maxsize=None)
def _level_tensor(bits: int, dim: int, codebook: str) -> Tensor:
    half = _half_levels(bits, dim, codebook)
    return _cpu_tensor([-c for c in reversed(half)] + list(half))


@lru_cache(maxsize=None)
def _boundary_tensor(bits: int, dim: int, codebook: str) -> Tensor:
    half = _half_levels(bits, dim, codebook)
    positive = _midpoints(half)
    return _cpu_tensor([-b for b in reversed(positive)] + [0.0] + positive)


def _cpu_tensor(values: list[float]) -> Tensor:
    # A cached tensor must not be an inference tensor, or a later training step could not use it.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=None)
def _half_levels(bits: int, dim: int, codebook: str) -> tuple[float, ...]:
    """The positive levels, ascending, each exactly an fp16."""
    if codebook == "int8_grid":
        delta, m = int8_grid(bits)
        return tuple((i + 0.5) * delta for i in m)
    return tuple(struct.unpack("e", struct.pack("e", c))[0] for c in _lloyd_max(bits, _integrals(dim, codebook)))


def _integrals(dim: int, codebook: str) -> _Integrals:
    return _beta_integrals(dim) if codebook == "beta" else _gaussian_integrals


def _gaussian_integrals(x: float) -> tuple[float, float]:
    return 0.5 * math.erf(x / math.sqrt(2)), (1 - math.exp(-x * x / 2)) / math.sqrt(2 * math.pi)


def _beta_integrals(dim: int) -> _Integrals:
    """The integrals of the marginal at variance 1: z = x^2 / dim has the Beta(1/2, (dim - 1)/2) distribution."""
    a, b = 0.5, (dim - 1) / 2
    beta = math.exp(math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b))

    def integrals(x: float) -> tuple[float, float]:
        z = x * x / dim
        if z >= 1:
            return 0.5, math.sqrt(dim) / (2 * b * beta)
        # The regularized incomplete beta function as a hypergeometric series of positive terms: nothing cancels.
        # https://dlmf.nist.gov/8.17.E8
        term = total = 1.0
        k = 0
        while term > 1e-17 * total:
            term *= z * (a + b + k) / (a + 1 + k)
            total += term
            k += 1
        log_power = b * math.log1p(-z)  # of (1 - z)^b, which would lose digits in large dimensions
        mass = total * math.sqrt(z) * math.exp(log_power) / (2 * a * beta)
        return mass, -math.sqrt(dim) * math.expm1(log_power) / (2 * b * beta)

    return integrals


def _midpoints(half: list[float] | tuple[float, ...]) -> list[float]:
    return [(low + high) / 2 for low, high in zip(half, half[1:])]


def _lloyd_max(bits: int, integrals: _Integrals) -> list[float]:
    """The positive Lloyd-Max levels: each the mean of its cell, cells ending at midpoints.

    Both densities are log-concave, so the fixed point is unique and every start reaches it.
    """
    n = 2 ** (bits - 1)
    half = [2.0 * (i + 0.5) / n for i in range(n)]  # inside the support, which ends at sqrt(dim) >= 2
    outside = integrals(math.inf)
    change = math.inf
    while change > _TOLERANCE:
        edges = [(0.0, 0.0), *(integrals(b) for b in _midpoints(half)), outside]
        means = [(high[1] - low[1]) / (high[0] - low[0]) for low, high in zip(edges, edges[1:])]
        change = max(abs(new - old) for new, old in zip(means, half))
        half = means
    return half


def _distortion(half: list[float] | tuple[float, ...], integrals: _Integrals) -> float:
    """E[(x - level(x))^2] for variance 1: 1 - 2 E[x level(x)] + E[level(x)^2]."""
    edges = [(0.0, 0.0), *(integrals(b) for b in _midpoints(half)), integrals(math.inf)]
    cells = zip(half, edges, edges[1:])
    return 1 + 2 * sum(c * c * (high[0] - low[0]) - 2 * c * (high[1] - low[1]) for c, low, high in cells)


def _best_on_grid(delta: float, ideal: list[float]) -> tuple[float, float, tuple[int, ...]]:
    """The error, `delta` and the m of the levels `(m + 0.5) * delta` next to `ideal` with the least error for N(0, 1).

    Dynamic programming over the levels, from the innermost out: a boundary depends on its two levels only. Every level
    may stand up to 3 steps from the grid point nearest to its ideal.
    """
    integrals = lru_cache(maxsize=None)(_gaussian_integrals)

    def window(level: float) -> range:
        nearest = min(round(level / delta - 0.5), _INT8_MAX)
        return range(max(nearest - 3, 0), min(nearest + 3, _INT8_MAX) + 1)

    def at_boundary(low: int, high: int) -> float:
        # What the two neighbours' cells add to `_distortion` at the boundary that they share.
        c, e = (low + 0.5) * delta, (high + 0.5) * delta
        mass, moment = integrals((c + e) / 2)
        return (c * c - e * e) * mass - 2 * (c - e) * moment

    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, (m,)) for m in window(ideal[0])]
    for level in ideal[1:]:
        paths = [
            min((cost + at_boundary(path[-1], m), (*path, m)) for cost, path in paths if path[-1] < m) for m in window(level)
        ]
    best = min((_distortion([(m + 0.5) * delta for m in path], _gaussian_integrals), path) for _, path in paths)
    return best[0], delta, best[1]
