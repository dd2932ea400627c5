"""The quantizers against the theorems of the paper (https://arxiv.org/abs/2504.19874), through real pages.

With unit keys k, their images k' and b bits a coordinate:

- `paper_mse`: the expected |k - k'|^2 is the codebook's distortion D(b), and 4^-b <= D(b) <= sqrt(3) pi/2 * 4^-b (theorems 1
  and 3). Its scores are biased: levels are means of their cells, so that the expected <k, k'> is 1 - D.
- `paper_prod`: the expected <q, k'> is <q, k>, and the expected squared error of a score at most sqrt(3) pi^2 |q|^2/d * 4^-b
  (theorem 2); in detail, nearly pi/2 * D(b - 1) |q|^2/d (lemma 4).

Every sample comes from a fixed seed, and tolerances are at least four standard errors of it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tq_hf.config import TurboQuantConfig
from tq_hf.layout import padded_dim
from tq_hf.quantizer.codebooks import distortion
from tq_hf.quantizer.rotation import rotate
from tq_hf.reference.codec import decode_page, encode_page, unpack_page

BITS = (2, 3, 4)  # the widths that pack; one bit is in the key of a 2-bit `paper_prod`
DIMS = (64, 128, 256)
UPPER = math.sqrt(3) * math.pi / 2


def unit_vectors(count: int, dim: int, seed: int) -> Tensor:
    """[count, dim], uniformly distributed on the sphere."""
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def through_pages(preset: str, bits: int, dim: int, count: int, **options: bool | str) -> tuple[Tensor, Tensor, Tensor]:
    """Unit keys [count, dim], what pages make of them, and their rotated coordinates without the residual's part."""
    config = TurboQuantConfig.from_preset(preset, key_bits=bits, **options)
    layout = config.layout(dim, 32, torch.float32)
    key = unit_vectors(count, dim, seed=bits)
    images, levels = [], []
    for pages in key.unflatten(0, (-1, layout.page_size)).split(32):  # few at a time stay in the processor's cache
        valid = torch.ones(pages.shape[:2], dtype=torch.bool)
        words, flags = encode_page(pages, torch.zeros(*pages.shape[:2], 32), valid, layout)
        assert not flags.any()
        content = unpack_page(words, layout, torch.float32)
        scale = torch.ones(()) if content.key_scale is None else content.key_scale.unsqueeze(-1)
        levels.append((content.key[..., : layout.key_dim_padded] * scale).flatten(0, 1))
        images.append(decode_page(words, layout, torch.float32)[0].flatten(0, 1))
    return key, torch.cat(images), torch.cat(levels)


def mean_and_error(samples: Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    samples = samples.double()
    return samples.mean().item(), samples.std().item() / math.sqrt(samples.numel())


class TestDistortion:
    @pytest.mark.parametrize("codebook, dim", [("beta", 64), ("beta", 128), ("beta", 576), ("gaussian", 128)])
    def test_codebooks_are_within_the_bounds(self, codebook: str, dim: int) -> None:
        errors = [distortion(bits, dim, codebook) for bits in (1, 2, 3, 4)]
        for bits, error in zip((1, 2, 3, 4), errors, strict=True):
            assert 4.0**-bits <= error <= UPPER * 4.0**-bits
        # Each bit divides the error by nearly 4, the more nearly the more bits there are.
        ratios = [coarse / fine for coarse, fine in zip(errors, errors[1:])]
        assert 3 < ratios[0] < ratios[1] < ratios[2] < 4

    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize("bits", BITS)
    def test_pages_meet_the_codebooks_distortion(self, bits: int, dim: int) -> None:
        key, image, _ = through_pages("paper_mse", bits, dim, 8192)
        error, uncertainty = mean_and_error((key - image).square().sum(-1))
        assert uncertainty < 0.005 * error
        assert error == pytest.approx(distortion(bits, dim, "beta"), abs=4 * uncertainty)
        assert 4.0**-bits <= error <= UPPER * 4.0**-bits

    @pytest.mark.parametrize("dim", DIMS)
    def test_one_bit_below_a_residual(self, dim: int) -> None:
        key, _, levels = through_pages("paper_prod", 2, dim, 8192)
        error, uncertainty = mean_and_error((rotate(key, dim, "qr") - levels).square().sum(-1))
        assert error == pytest.approx(distortion(1, dim, "beta"), abs=4 * uncertainty)
        assert 4.0**-1 <= error <= UPPER * 4.0**-1

    @pytest.mark.parametrize("dim", [16, 80, 100])
    @pytest.mark.parametrize("bits", BITS)
    def test_padding_costs_nothing(self, bits: int, dim: int) -> None:
        """A padded vector fills a subspace of the sphere; any one rotation of it is uniform only on average over all."""
        key, image, _ = through_pages("paper_mse", bits, dim, 4096)
        error = (key - image).square().sum(-1).mean().item()
        # What falls on the padding is left out when reading, so that the error can be less by their share.
        padded = distortion(bits, padded_dim(dim), "beta")
        assert 0.95 * padded * dim / padded_dim(dim) < error < 1.03 * padded

    @pytest.mark.parametrize("rotation", ["hadamard", "qr"])
    @pytest.mark.parametrize("bits", BITS)
    def test_norm_correction(self, bits: int, rotation: str) -> None:
        """Restoring the norm of the image leaves 2 - 2 sqrt(1 - D), but for terms of order D / dim."""
        key, image, _ = through_pages("paper_mse", bits, 128, 8192, scale="norm_corrected", rotation=rotation)
        error, uncertainty = mean_and_error((key - image).square().sum(-1))
        expected = 2 - 2 * math.sqrt(1 - distortion(bits, 128, "beta"))
        assert error == pytest.approx(expected, abs=4 * uncertainty + 3 / 128 * expected)
        assert (image.norm(dim=-1) - 1).abs().max() < 2**-10


# (bits, dim): as many keys as bring the standard error of a score's bias below 3e-4.
ENOUGH = {(2, 64): 98304, (2, 128): 65536, (3, 128): 32768, (4, 128): 16384}


@pytest.fixture(scope="module", params=ENOUGH, ids=str)
def prod(request: pytest.FixtureRequest) -> tuple[int, Tensor, Tensor]:
    """Bits, and many unit keys with their images: pytest runs all tests of one set before it makes the next."""
    bits, dim = request.param
    return bits, *through_pages("paper_prod", bits, dim, ENOUGH[bits, dim])[:2]


class TestProdScores:
    def test_they_are_unbiased(self, prod: tuple[int, Tensor, Tensor]) -> None:
        _, key, image = prod
        scores = (key * key).sum(-1)  # each key is the query that it suits best
        bias, uncertainty = mean_and_error((image * key).sum(-1) - scores)
        assert uncertainty < 3e-4
        assert abs(bias) < 1e-3 * scores.mean().item()

    @pytest.mark.parametrize("cosine", [0.8, 0.4])
    def test_they_are_unbiased_at_any_angle(self, prod: tuple[int, Tensor, Tensor], cosine: float) -> None:
        _, key, image = prod
        query = cosine * key + math.sqrt(1 - cosine**2) * unit_vectors(*key.shape, seed=99)
        bias, uncertainty = mean_and_error(((image - key) * query).sum(-1) / cosine)
        assert abs(bias) < 4 * uncertainty < 5e-3

    def test_their_error_is_within_the_bound(self, prod: tuple[int, Tensor, Tensor]) -> None:
        bits, key, image = prod
        dim = key.shape[1]
        query = unit_vectors(*key.shape, seed=98)
        error, uncertainty = mean_and_error(((image - key) * query).sum(-1).square() * dim)
        assert 4.0**-bits <= error <= math.sqrt(3) * math.pi**2 * 4.0**-bits
        # Lemma 4 bounds the variance of the sketch's part; the bound is the sharper, the more dimensions there are.
        sharp = math.pi / 2 * distortion(bits - 1, dim, "beta")
        assert (1 - 6 / dim) * sharp < error < sharp + 4 * uncertainty

    def test_their_error_scales_as_4_to_the_minus_b(self) -> None:
        errors = []
        for bits in BITS:
            key, image, _ = through_pages("paper_prod", bits, 128, 8192)
            errors.append(((image - key) * unit_vectors(*key.shape, seed=97)).sum(-1).square().mean().item())
        for coarse, fine in zip(errors, errors[1:]):
            assert 3 < coarse / fine < 4


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", BITS)
def test_mse_scores_are_biased_by_the_distortion(bits: int, dim: int) -> None:
    key, image, _ = through_pages("paper_mse", bits, dim, 8192)
    bias, uncertainty = mean_and_error((image * key).sum(-1) - 1)
    assert bias == pytest.approx(-distortion(bits, dim, "beta"), abs=4 * uncertainty)
    assert bias < -5e-3


@pytest.mark.parametrize("rotation", ["hadamard", "qr"])
@pytest.mark.parametrize("dim", range(32, 257, 32))
def test_rotations_are_orthogonal(rotation: str, dim: int) -> None:
    matrix = rotate(torch.eye(dim), dim, rotation).double()
    assert (matrix @ matrix.T - torch.eye(dim)).abs().max() < 1e-6
    assert (matrix.T @ matrix - torch.eye(dim)).abs().max() < 1e-6
