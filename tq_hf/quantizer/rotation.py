"""The rotations that make the coordinates of any vector look Gaussian.

One matrix a dimension and kind, shared by all layers and heads.

- `"hadamard"`: powers of two take Sylvester's matrix, which is symmetric; the other multiples of 32 take the Kronecker
  product of a Paley matrix of order 12, 20 or 28 (https://doi.org/10.1002/sapm1933121311) with Sylvester's.
- `"qr"`: a matrix drawn uniformly from the orthogonal ones, the same at every run, as in the paper
  (https://arxiv.org/abs/2504.19874).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from ..layout import MAX_HEAD_DIM, ROTATIONS

DIM_STEP = 32
_PALEY_I_PRIMES = {3: 11, 5: 19}  # odd part of the dimension -> prime q, q % 4 == 3, order q + 1
_PALEY_II_PRIMES = {7: 13}  # odd part of the dimension -> prime q, q % 4 == 1, order 2 (q + 1)
_QR_SEED = 0x7142


@lru_cache(maxsize=None)
def hadamard_signs(dim: int) -> Tensor:
    """The Hadamard matrix H of a dimension: +-1 entries and H Hᵀ = dim I.

    Args:
        dim: a multiple of 32, 32 to 256.

    Returns:
        int8 [dim, dim] on the CPU, symmetric if dim is a power of two. It is cached: do not modify it.

    Raises:
        ValueError: any other dim.
    """
    _require_dim(dim)
    odd = dim
    while odd % 2 == 0:
        odd //= 2
    # A cached tensor must not be an inference tensor, or a later training step could not use it.
    with torch.inference_mode(False):
        signs = _paley(odd)
        doubling = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")
        while len(signs) < dim:
            signs = torch.kron(signs, doubling)
        return signs


def orthogonal_matrix(dim: int) -> Tensor:
    """The `"qr"` matrix of a dimension: the orthogonal factor of a Gaussian matrix, always the same.

    The signs of R's diagonal are made positive: the factors are then unique, and Q is uniformly distributed
    (https://arxiv.org/abs/math-ph/0609050). The numbers come from a generator of their own.

    Args:
        dim: a multiple of 32, 32 to 256.

    Returns:
        float64 [dim, dim] on the CPU.

    Raises:
        ValueError: any other dim.
    """
    _require_dim(dim)
    generator = torch.Generator(device="cpu").manual_seed(_QR_SEED)
    gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


def rotate(x: Tensor, dim_padded: int, rotation: str = "hadamard") -> Tensor:
    """Pads vectors with zeros to `dim_padded` and rotates each: H x / sqrt(dim_padded), or Q x. Norms stay.

    Args:
        x: [..., d] of any floating dtype and strides, d at most `dim_padded`.
        dim_padded: a multiple of 32, 32 to 256.
        rotation: `"hadamard"` or `"qr"`.

    Returns:
        float32 [..., dim_padded], computed in float32 even under autocast. (Like any float32 product, it loses
        precision on a GPU if `torch.backends.cuda.matmul.allow_tf32` is set.)

    Raises:
        ValueError: `dim_padded` without a matrix, or smaller than d; an unknown rotation.
    """
    matrix = _rotation(dim_padded, x.device, rotation)
    d = x.shape[-1]
    if d > dim_padded:
        raise ValueError(f"vectors of {d} dimensions do not fit dim_padded={dim_padded}: expected at most that many.")
    with _without_autocast(x.device):
        return x.float() @ matrix[:, :d].mT  # the columns left out meet the zeros of the padding


def unrotate(y: Tensor, dim: int, rotation: str = "hadamard") -> Tensor:
    """Undoes `rotate`: the first `dim` coordinates of Hᵀ y / sqrt(dim_padded), or of Qᵀ y.

    Args:
        y: [..., dim_padded] of any floating dtype and strides; dim_padded as for `rotate`.
        dim: the dimension before padding, 1 to dim_padded.
        rotation: as for `rotate`.

    Returns:
        float32 [..., dim], computed as `rotate` does.

    Raises:
        ValueError: a dim_padded without a matrix, or dim out of range; an unknown rotation.
    """
    dim_padded = y.shape[-1]
    matrix = _rotation(dim_padded, y.device, rotation)
    if not 1 <= dim <= dim_padded:
        raise ValueError(f"dim={dim} is not allowed for vectors of {dim_padded} dimensions: expected 1 to that.")
    with _without_autocast(y.device):
        return y.float() @ matrix[:, :dim]


@lru_cache(maxsize=None)
def _rotation(dim: int, device: torch.device, rotation: str) -> Tensor:
    """float32 [dim, dim] on `device`, orthonormal: H / sqrt(dim) or Q."""
    if rotation not in ROTATIONS:
        raise ValueError(f"rotation={rotation!r} is unknown: expected one of {ROTATIONS}.")
    with torch.inference_mode(False):
        if rotation == "qr":
            return orthogonal_matrix(dim).to(torch.float32).to(device)
        return (hadamard_signs(dim).to(torch.float32) / math.sqrt(dim)).to(device)


def _require_dim(dim: int) -> None:
    if not isinstance(dim, int) or dim % DIM_STEP or not DIM_STEP <= dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"dim={dim!r} has no rotation here: expected a multiple of {DIM_STEP} from {DIM_STEP} to {MAX_HEAD_DIM}. Pad"
            " the vectors to the next multiple."
        )


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _paley(odd: int) -> Tensor:
    """The Hadamard matrix, int8 [order, order], whose order is 4 times `odd`, the dimension's odd part; order 1 for 1.

    Both constructions border the matrix of quadratic characters of i - j modulo a prime q to one with zero diagonal and
    C Cᵀ = q I, which is skew for q % 4 == 3 and symmetric for q % 4 == 1.
    """
    if odd == 1:
        return torch.ones((1, 1), dtype=torch.int8, device="cpu")
    skew = odd in _PALEY_I_PRIMES
    q = _PALEY_I_PRIMES[odd] if skew else _PALEY_II_PRIMES[odd]
    squares = {i * i % q for i in range(1, q)}
    character = [0] + [1 if i in squares else -1 for i in range(1, q)]
    rows = [[0] + [1] * q] + [[-1 if skew else 1] + [character[(i - j) % q] for j in range(q)] for i in range(q)]
    conference = torch.tensor(rows, dtype=torch.int8, device="cpu")
    identity = torch.eye(q + 1, dtype=torch.int8, device="cpu")
    if skew:
        return identity + conference
    off_diagonal = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")
    diagonal = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8, device="cpu")
    return torch.kron(conference, off_diagonal) + torch.kron(identity, diagonal)
