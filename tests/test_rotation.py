"""The Hadamard matrices in exact integers, and the rotation as an isometry with an inverse."""

from __future__ import annotations

import pytest
import torch

from tq_hf.layout import padded_dim
from tq_hf.quantizer import rotation
from tq_hf.quantizer.rotation import hadamard_signs, orthogonal_matrix, rotate, unrotate

DIMS = list(range(32, 257, 32))


def sylvester(n: int) -> torch.Tensor:
    """Entry (i, j) is -1 to the number of one bits that i and j share."""
    return torch.tensor([[1 - 2 * ((i & j).bit_count() % 2) for j in range(n)] for i in range(n)], dtype=torch.int8)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", DIMS)
def test_signs_are_a_hadamard_matrix(dim: int) -> None:
    signs = hadamard_signs(dim)
    assert signs.shape == (dim, dim) and signs.dtype == torch.int8 and signs.device.type == "cpu"
    assert (signs.abs() == 1).all()
    wide = signs.long()
    assert torch.equal(wide @ wide.T, dim * torch.eye(dim, dtype=torch.long))


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_powers_of_two_are_sylvesters(dim: int) -> None:
    signs = hadamard_signs(dim)
    assert torch.equal(signs, signs.T)
    assert torch.equal(signs, sylvester(dim))


@pytest.mark.parametrize("dim, order", [(96, 12), (160, 20), (192, 12), (224, 28)])
def test_other_dims_are_kronecker_products_with_sylvesters(dim: int, order: int) -> None:
    """A butterfly over the low bits of the index, then one small matrix: the order that a fused kernel relies on."""
    n = dim // order
    blocks = hadamard_signs(dim).reshape(order, n, order, n).transpose(1, 2)
    paley = blocks[:, :, 0, 0].long()
    assert torch.equal(blocks, paley[:, :, None, None].to(torch.int8) * sylvester(n))
    assert torch.equal(paley @ paley.T, order * torch.eye(order, dtype=torch.long))


@pytest.mark.parametrize("dim", DIMS)
def test_rotate_multiplies_each_vector_by_h(dim: int) -> None:
    x = randn(3, 5, dim)
    expected = torch.einsum("ij,...j->...i", hadamard_signs(dim).double(), x.double()) / dim**0.5
    torch.testing.assert_close(rotate(x, dim).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dim", DIMS)
def test_the_qr_matrix_is_orthogonal_and_uniform(dim: int) -> None:
    q = orthogonal_matrix(dim)
    assert q.dtype == torch.float64 and q.device.type == "cpu"
    assert (q @ q.T - torch.eye(dim)).abs().max() < 1e-12
    gaussian = torch.randn(dim, dim, generator=torch.Generator().manual_seed(rotation._QR_SEED), dtype=torch.float64)
    r = q.T @ gaussian  # the factors are unique, and Q uniform, where R's diagonal is positive
    assert r.tril(-1).abs().max() < 1e-10 and (r.diagonal() > 0).all()
    x = randn(5, dim)
    torch.testing.assert_close(rotate(x, dim, "qr").double(), x.double() @ q.T, rtol=0, atol=2e-6)


def test_an_unknown_rotation_is_refused() -> None:
    for turn in (lambda: rotate(randn(2, 64), 64, "dct"), lambda: unrotate(randn(2, 64), 64, "dct")):
        with pytest.raises(ValueError, match=r"rotation='dct' is unknown: expected one of \('hadamard', 'qr'\)"):
            turn()


@pytest.mark.parametrize("kind", ["hadamard", "qr"])
@pytest.mark.parametrize("head_dim", range(16, 257, 2))
def test_unrotate_inverts_rotate_and_norms_stay(head_dim: int, kind: str) -> None:
    x = randn(2, 3, 7, head_dim, seed=head_dim)
    y = rotate(x, padded_dim(head_dim), kind)
    assert y.shape == (2, 3, 7, padded_dim(head_dim)) and y.dtype == torch.float32
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    back = unrotate(y, head_dim, kind)
    assert back.shape == x.shape and back.dtype == torch.float32
    assert ((back - x).norm(dim=-1) <= 1e-6 * x.norm(dim=-1)).all()


@pytest.mark.parametrize("dim, head_dim", [(64, 64), (96, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_dtype_shape_and_stride_is_computed_in_float32(dtype: torch.dtype, dim: int, head_dim: int) -> None:
    x = randn(head_dim, 4, 6).to(dtype).permute(2, 1, 0)
    expected = rotate(x.float().contiguous(), dim)
    torch.testing.assert_close(rotate(x, dim), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(rotate(x[0, 0], dim), expected[0, 0], rtol=0, atol=2e-6)
    assert rotate(x[:0], dim).shape == (0, 4, dim)
    y = randn(5, dim).to(dtype)
    assert unrotate(y, head_dim).dtype == torch.float32
    torch.testing.assert_close(unrotate(y, head_dim), unrotate(y.float(), head_dim), rtol=0, atol=2e-6)


def test_autocast_does_not_lower_the_precision() -> None:
    x = randn(4, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = rotate(x, 128)
        back = unrotate(y, 128)
    assert torch.equal(y, rotate(x, 128))
    assert torch.equal(back, unrotate(y, 128))


@pytest.mark.parametrize("kind", ["hadamard", "qr"])
def test_global_state_of_torch_neither_matters_nor_changes(kind: str) -> None:
    x = randn(2, 80)
    expected = rotate(x, 96, kind)
    random_state = torch.get_rng_state()
    hadamard_signs.cache_clear()
    rotation._rotation.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            y = rotate(x, 96, kind)
            signs = [hadamard_signs(dim) for dim in (64, 96, 224)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(y, expected)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(t.dtype == torch.int8 and t.device.type == "cpu" and not t.is_inference() for t in signs)
    x.requires_grad_()
    torch.autograd.grad(rotate(x, 96, kind).sum(), x)  # an inference tensor in the cache would raise here


def test_meta_tensors_keep_their_device() -> None:
    y = rotate(torch.empty(3, 80, device="meta"), 96)
    assert y.device.type == "meta" and y.shape == (3, 96)
    assert unrotate(y, 80).shape == (3, 80)


@pytest.mark.parametrize("dim", [0, -32, 16, 48, 100, 288, 512, 64.5])
def test_a_dim_without_a_matrix_is_refused_by_name(dim: int) -> None:
    for matrix in (hadamard_signs, orthogonal_matrix):
        with pytest.raises(ValueError, match=f"dim={dim} "):
            matrix(dim)


def test_rotate_refuses_dims_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="dim=80 "):
        rotate(randn(2, 80), 80)
    with pytest.raises(ValueError, match="vectors of 128 dimensions do not fit dim_padded=64"):
        rotate(randn(2, 128), 64)


def test_unrotate_refuses_dims_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="dim=80 "):
        unrotate(randn(2, 80), 80)
    for dim in (0, 65):
        with pytest.raises(ValueError, match=f"dim={dim} is not allowed for vectors of 64"):
            unrotate(randn(2, 64), dim)
