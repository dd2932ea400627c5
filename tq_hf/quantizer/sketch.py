"""The 1-bit sketch of a key's residual that makes inner products unbiased: a quantized Johnson-Lindenstrauss transform.

For a Gaussian matrix S and vectors q, r, the expectation of sqrt(pi/2) / d * |r| * <S q, sign(S r)> is <q, r> (Zandieh et
al., QJL, https://arxiv.org/abs/2406.03482; TurboQuant, https://arxiv.org/abs/2504.19874, definition of Q_prod). So the signs
and the norm of a residual are enough to add what its quantized key lacks.

That is an expectation over matrices, and here there is one a dimension. For one S, the average over all directions of r is
<q, r> times the mean length of S's rows over that which Gaussian vectors have on average. A row strays from it by 1 part in
sqrt(2 d), so the mean of d rows by 1 in sqrt(2) d, 1 % at d = 64: S is therefore scaled, as a whole, to a ratio of 1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_SEED = 0x51  # not that of the rotation: the same numbers would tie the sketch to the vectors that it sketches


def sketch(x: Tensor) -> Tensor:
    """S x for each vector: float32 `[..., d]` of any strides to float32 `[..., d]`."""
    return x @ _sketch_matrix(x.shape[-1], x.device).mT


def unsketch(y: Tensor) -> Tensor:
    """Sᵀ y for each vector: float32 `[..., d]` of any strides to float32 `[..., d]`."""
    return y @ _sketch_matrix(y.shape[-1], y.device)


def sign_weight(dim: int) -> float:
    """The factor of |r| * <S q, sign(S r)> in the estimate: sqrt(pi/2) / dim."""
    return math.sqrt(math.pi / 2) / dim


@lru_cache(maxsize=None)
def _sketch_matrix(dim: int, device: torch.device) -> Tensor:
    """S, float32 [dim, dim] on `device`: normal numbers from a generator of their own, scaled (module docstring)."""
    # A cached tensor must not be an inference tensor, or a later training step could not use it.
    with torch.inference_mode(False):
        generator = torch.Generator(device="cpu").manual_seed(_SEED)
        gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64, device="cpu")
        # The mean of the chi distribution.
        mean_length = math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))
        return (gaussian * (mean_length / gaussian.norm(dim=1).mean())).float().to(device)
