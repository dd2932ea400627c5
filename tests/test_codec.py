"""The quantizers, and pages as vectors and as words."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.presets import sized
from tq_hf.config import PRESETS, TurboQuantConfig
from tq_hf.layout import NON_FINITE_KEY, NON_FINITE_VALUE, SATURATED, PageLayout, lane_word_offset
from tq_hf.quantizer.rotation import unrotate
from tq_hf.reference.codec import PageContent, decode_page, encode_page, unpack_page

GAUSSIAN_DISTORTION = {2: 0.1175, 3: 0.03454, 4: 0.009497}
PRESET_NAMES = list(PRESETS)
# Relative squared errors of keys and values below which a preset has surely worked, where they are not 0.13.
ROUGH = {"paper_mse": (0.13, 0.18), "paper_prod": (0.2, 0.18)}


def layout_of(preset: str, dim: int = 64, value_dim: int = 0, dtype: torch.dtype = torch.float32) -> PageLayout:
    return sized(preset).layout(dim, value_dim or dim, dtype)


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def everything(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def through(
    key: Tensor, value: Tensor, layout: PageLayout, valid: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Key and value after a round trip, the words and the flags."""
    words, flags = encode_page(key, value, everything(*key.shape[:-1]) if valid is None else valid, layout)
    assert words.dtype == torch.int32 and words.shape == (*key.shape[:-2], layout.page_words)
    return *decode_page(words, layout, key.dtype), words, flags


def relative_mse(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).square().sum() / expected.square().sum())


class TestError:
    @pytest.mark.parametrize("codebook", ["gaussian", "beta", "int8_grid"])
    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_lloyd_max_is_near_theory(self, bits: int, codebook: str) -> None:
        # At 256 dimensions a unit vector's coordinates are Gaussian up to 2 %.
        layout = PageLayout(256, 256, 64, "lloyd_max", bits, "lloyd_max", bits, False, codebook)
        key, value = vectors(20, 64, 256), vectors(20, 64, 256, seed=1)
        got_key, got_value, _, flags = through(key, value, layout)
        expected = 2 - 2 * math.sqrt(1 - GAUSSIAN_DISTORTION[bits])
        assert relative_mse(got_value, value) == pytest.approx(expected, rel=0.03)
        assert relative_mse(got_key, key) == pytest.approx(expected, rel=0.03)
        assert not flags.any()
        # Norm correction: norms survive.
        ratio = got_key.norm(dim=-1) / key.norm(dim=-1)
        assert (ratio - 1).abs().max() < 2**-10

    @pytest.mark.parametrize("dim", [16, 50, 80, 96, 160, 256])
    def test_padded_dims_lose_nothing_more(self, dim: int) -> None:
        layout = PageLayout(dim, dim, 32, "lloyd_max", 4, "lloyd_max", 4, False, "beta")
        key, value = vectors(60, 32, dim), vectors(60, 32, dim, seed=1)
        got_key, got_value, _, _ = through(key, value, layout)
        bound = 1.05 * (2 - 2 * math.sqrt(1 - GAUSSIAN_DISTORTION[4]))
        assert relative_mse(got_key, key) < bound
        assert relative_mse(got_value, value) < bound

    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    @pytest.mark.parametrize("dim", [64, 80])
    def test_min_max_is_within_half_a_step(self, bits: int, dim: int) -> None:
        layout = PageLayout(64, dim, 64, "lloyd_max", 4, "min_max", bits, False, "gaussian")
        value = vectors(4, 64, dim) * 3 + 7  # far from zero: padding must not enter the minimum
        _, got, _, _ = through(vectors(4, 64, 64), value, layout)
        step = (value.amax(-1) - value.amin(-1)) / (2**bits - 1)
        rounding = value.abs().amax(-1) * 2**-10  # of scale and minimum to fp16
        assert ((got - value).abs().amax(-1) <= step / 2 + rounding).all()
        assert ((got - value).square().mean() / (step.square().mean() / 12)).item() == pytest.approx(1, abs=0.1)

    def test_centered_keys_survive_a_large_bias(self) -> None:
        bias = vectors(64, seed=3) * 100
        key = vectors(8, 64, 64) + bias
        plain, _, _, _ = through(key, key, layout_of("4bit_nc"))
        centered, _, _, _ = through(key, key, layout_of("tq4"))
        own = key - key.mean(-2, keepdim=True)
        error = (centered - key).square().sum() / own.square().sum()
        assert error.item() == pytest.approx(2 - 2 * math.sqrt(1 - GAUSSIAN_DISTORTION[4]), rel=0.1)
        assert relative_mse(plain, key) > 50 * relative_mse(centered, key)

    @pytest.mark.parametrize("preset", PRESET_NAMES)
    def test_keys_and_values_of_different_dims(self, preset: str) -> None:
        key, value = vectors(2, 3, 64, 96), vectors(2, 3, 64, 64, seed=1)
        got_key, got_value, _, _ = through(key, value, layout_of(preset, 96, 64))
        key_bound, value_bound = ROUGH.get(preset, (0.13, 0.13))
        assert relative_mse(got_key, key) < key_bound
        assert relative_mse(got_value, value) < value_bound

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_raw_keeps_every_bit(self, dtype: torch.dtype) -> None:
        key, value = vectors(3, 64, 80).to(dtype), vectors(3, 64, 48, seed=1).to(dtype)
        got_key, got_value, _, _ = through(key, value, layout_of("raw", 80, 48, dtype))
        assert torch.equal(got_key.to(dtype), key) and torch.equal(got_value.to(dtype), value)

    def test_raw_refuses_another_width(self) -> None:
        with pytest.raises(ValueError, match="float32"):
            through(vectors(64, 64), vectors(64, 64), layout_of("raw", 64, 64, torch.bfloat16))


class TestFp8:
    """e4m3: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, largest 448."""

    MAGNITUDES = tuple(m / 8 * 2.0**-6 for m in range(8)) + tuple(
        (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
    )

    def keys(self, values: Tensor) -> Tensor:
        page = torch.zeros(64, 64)
        page.view(-1)[: len(values)] = values
        return through(page, torch.zeros(64, 64), layout_of("k8v4"))[0].reshape(-1)[: len(values)]

    def test_every_number_is_itself(self) -> None:
        numbers = torch.tensor(self.MAGNITUDES)
        assert torch.equal(self.keys(numbers), numbers) and torch.equal(self.keys(-numbers), -numbers)

    def test_nearest_with_ties_to_even(self) -> None:
        table = torch.tensor(self.MAGNITUDES)
        values = torch.cat((vectors(1000) * 2, vectors(1000) * 150, vectors(1000) * 0.01)).clamp(-448, 448)
        nearest = (values.abs()[:, None] - table).abs().amin(1)
        assert torch.equal((self.keys(values) - values).abs(), nearest)
        ties = torch.tensor([17.0, 19.0, 2.0**-10, 3 * 2.0**-10])
        assert self.keys(ties).tolist() == [16.0, 20.0, 0.0, 4 * 2.0**-10]

    def test_large_keys_saturate_and_nothing_clips_early(self) -> None:
        values = torch.tensor([1.75, 1.8, 2.0, 30.0, 240.0, 447.0, 448.0, 460.0, 500.0, 3e4, -3e4])
        expected = [1.75, 1.75, 2.0, 30.0, 240.0, 448.0, 448.0, 448.0, 448.0, 448.0, -448.0]
        assert self.keys(values).tolist() == expected


@pytest.mark.parametrize("preset", PRESET_NAMES)
class TestEdges:
    def test_zero_vectors_stay_zero(self, preset: str) -> None:
        key, value, _, flags = through(torch.zeros(2, 64, 80), torch.zeros(2, 64, 80), layout_of(preset, 80))
        assert not key.any() and not value.any() and not flags.any()

    def test_one_zero_vector_among_others(self, preset: str) -> None:
        key, value = vectors(64, 64), vectors(64, 64, seed=1)
        key[::2] *= -1
        key[1::2] = -key[::2]  # so that the mean is exactly zero
        key[10] = key[11] = value[10] = 0
        got_key, got_value, _, _ = through(key, value, layout_of(preset))
        assert not got_key[10].any() and not got_value[10].any()

    def test_non_finite_vectors_touch_nobody(self, preset: str) -> None:
        layout = layout_of(preset)
        key, value = vectors(3, 64, 64), vectors(3, 64, 64, seed=1)
        key[1, 5, 3], key[1, 6, 0], value[2, 7, 9] = math.nan, math.inf, -math.inf
        got_key, got_value, words, flags = through(key, value, layout)
        assert flags.tolist() == [0, NON_FINITE_KEY, NON_FINITE_VALUE]
        assert not got_value[2, 7].any()
        # The same page without these tokens: the same bytes.
        without = everything(3, 64)
        without[1, 5] = without[1, 6] = False
        blank = value.clone()
        blank[1, 5:7] = 0
        _, _, expected, none = through(key, blank, layout, without)
        assert torch.equal(decode_page(expected, layout, key.dtype)[0][1], got_key[1])
        assert none.tolist() == [0, 0, NON_FINITE_VALUE]
        assert torch.equal(expected[0], words[0])
        mean = key[1, [t for t in range(64) if t not in (5, 6)]].mean(0).half().float()
        expected_key = mean if layout.center_keys else torch.zeros(64)
        torch.testing.assert_close(got_key[1, 5], expected_key, rtol=2**-10, atol=1e-6)

    def test_padding_is_as_if_it_were_not_there(self, preset: str) -> None:
        layout = layout_of(preset)
        key, value = vectors(2, 64, 64) + vectors(64, seed=3), vectors(2, 64, 64, seed=1)
        valid = everything(2, 64)
        valid[0, :40] = valid[1, 3] = False
        got_key, got_value, words, flags = through(key, value, layout, valid)
        garbage_key, garbage_value = key.clone(), value.clone()
        garbage_key[~valid], garbage_value[~valid] = math.nan, 1e30
        assert torch.equal(through(garbage_key, garbage_value, layout, valid)[2], words)
        assert not flags.any()
        assert not got_value[~valid].any()
        assert relative_mse(got_key[valid], key[valid]) < ROUGH.get(preset, (0.13,))[0]
        if layout.center_keys:
            mean = unpack_page(words, layout, key.dtype).key_mean
            assert mean is not None
            torch.testing.assert_close(mean[0], key[0, 40:].mean(0), rtol=2**-10, atol=1e-5)

    def test_a_page_of_padding_only(self, preset: str) -> None:
        key, value, _, flags = through(
            torch.full((64, 64), math.nan), torch.full((64, 64), math.inf), layout_of(preset), ~everything(64)
        )
        assert not key.any() and not value.any() and not flags.any()

    def test_vectors_of_equal_coordinates(self, preset: str) -> None:
        constant = torch.linspace(-8, 8, 64).unsqueeze(1).expand(64, 64).contiguous()
        key, value, _, _ = through(constant, constant, layout_of(preset))
        if PRESETS[preset].value_format != "lloyd_max":
            torch.testing.assert_close(value, constant, rtol=2**-10, atol=0)
        # The rotation makes one huge coordinate of such a vector: far beyond the last level, but the norm stays, or with
        # fitted scales the projection of values, and of keys the product of both.
        norm = constant.norm(dim=-1)
        for got in (key, value):
            assert got.isfinite().all()
            if PRESETS[preset].scale != "fitted":
                torch.testing.assert_close(got.norm(dim=-1), norm, rtol=0.09, atol=1e-3)
        if PRESETS[preset].scale == "fitted":
            projection = [(got * constant).sum(-1) / norm for got in (key, value)]
            torch.testing.assert_close(projection[1], norm, rtol=2**-10, atol=0)
            torch.testing.assert_close(projection[0] * key.norm(dim=-1), norm.square(), rtol=2**-9, atol=0)

    def test_one_huge_coordinate(self, preset: str) -> None:
        key, value = vectors(64, 64), vectors(64, 64, seed=1)
        key[4, 7] = value[9, 0] = 3e4
        got_key, got_value, _, flags = through(key, value, layout_of(preset))
        fp8 = PRESETS[preset].key_format == "fp8"
        assert got_key.isfinite().all() and got_value.isfinite().all() and flags.unique().tolist() == [4 if fp8 else 0]
        if not fp8:
            assert got_key[4, 7] == pytest.approx(3e4, rel=0.15)
        assert got_value[9, 0] == pytest.approx(3e4, rel=0.15)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_inputs(self, preset: str, dtype: torch.dtype) -> None:
        key, value = vectors(2, 64, 64).to(dtype), vectors(2, 64, 64, seed=1).to(dtype)
        layout = layout_of(preset, dtype=dtype)
        got = through(key, value, layout)
        if PRESETS[preset].key_format != "raw":  # the quantizers read the same numbers in fp32
            expected = through(key.float(), value.float(), layout)
            assert torch.equal(got[2], expected[2])
        assert got[0].dtype == got[1].dtype == torch.float32


@pytest.mark.parametrize("bits", [2, 3, 4])
class TestFittedScale:
    """`scale="fitted"`: values project onto themselves, keys take the geometric mean of that and the norm correction."""

    def page(self, vector: Tensor, bits: int) -> tuple[Tensor, Tensor, PageContent]:
        """Vectors `[..., 32, D]` as keys and as values of pages, read back; and the factors of these pages."""
        dim = vector.shape[-1]
        layout = PageLayout(dim, dim, 32, "lloyd_max", bits, "lloyd_max", bits, False, "int8_grid", scale="fitted")
        key, value, words, flags = through(vector, vector, layout)
        assert not flags.any()
        return key, value, unpack_page(words, layout, torch.float32)

    def uneven(self, dim: int) -> Tensor:
        """Vectors of many lengths, some with most of their energy in few coordinates, before or after the rotation."""
        some = vectors(6, 32, dim)
        some[1] = some[1] ** 5
        some[2, :, 7] += 100
        some[3] += some[3].norm(dim=-1, keepdim=True)
        return some * torch.logspace(-2, 2, 32).unsqueeze(-1)

    @pytest.mark.parametrize("dim", [16, 64, 80, 256])
    def test_values_project_onto_themselves(self, bits: int, dim: int) -> None:
        value = self.uneven(dim)
        _, got, _ = self.page(value, bits)
        projection = (got * value).sum(-1) / value.square().sum(-1)
        torch.testing.assert_close(projection, torch.ones_like(projection), rtol=2**-10, atol=0)
        # The norm correction would not do: the images are longer than the vectors.
        assert (got.norm(dim=-1) > (1 + 2**-9) * value.norm(dim=-1)).float().mean() > 0.5

    @pytest.mark.parametrize("dim", [16, 64, 80, 256])
    def test_keys_have_the_geometric_mean(self, bits: int, dim: int) -> None:
        key = self.uneven(dim)
        got, _, page = self.page(key, bits)
        norm, image = key.norm(dim=-1), unrotate(page.key, dim)
        norm_corrected, unbiased = norm / page.key.norm(dim=-1), norm.square() / (key * image).sum(-1)
        assert page.key_scale is not None
        torch.testing.assert_close(page.key_scale, (norm_corrected * unbiased).sqrt(), rtol=2**-10, atol=0)
        assert ((got - page.key_scale.unsqueeze(-1) * image).norm(dim=-1) < 1e-5 * norm).all()
        assert (unbiased > (1 + 2**-9) * norm_corrected).float().mean() > 0.5  # neither is their mean

    def test_zero_and_vanishing_vectors_stay_zero(self, bits: int) -> None:
        key = vectors(4, 32, 64)
        key[0], key[1, ::2], key[2, 5], key[3, 9] = 0, 0, 1e-30, 1e-44
        for got in self.page(key, bits)[:2]:
            assert not got[0].any() and not got[1, ::2].any() and not got[2, 5].any() and not got[3, 9].any()
            assert got.isfinite().all() and got[1, 1::2].any(-1).all()


class TestSaturation:
    def test_scales_beyond_fp16_are_flagged_and_stay_finite(self) -> None:
        key, value = vectors(4, 64, 64), vectors(4, 64, 64, seed=1)
        key[1, 0] *= 1e5
        value[2, 0] *= 1e6
        value[3] += 7e4
        for preset, expected in (("4bit_nc", [0, SATURATED, SATURATED, SATURATED]), ("tq4", [0, 4, 4, 4])):
            got_key, got_value, _, flags = through(key, value, layout_of(preset))
            assert got_key.isfinite().all() and got_value.isfinite().all()
            assert flags.tolist() == expected

    def test_the_largest_finite_numbers(self) -> None:
        top = torch.finfo(torch.float32).max
        key = torch.full((64, 64), top) * torch.sign(vectors(64, 64))
        for preset in PRESET_NAMES:
            got_key, got_value, _, flags = through(key, key, layout_of(preset))
            assert got_key.isfinite().all() and got_value.isfinite().all()
            assert flags.item() == (0 if preset == "raw" else SATURATED)


class TestQuantizerInDetail:
    def test_a_value_on_a_boundary_goes_to_the_right_cell(self) -> None:
        # Rotated coordinates of e_0 are all equal (Sylvester's first row), of e_0 + e_1 half of them are exactly zero, and
        # zero is a boundary of every symmetric codebook with an even number of levels.
        layout = PageLayout(32, 32, 32, "lloyd_max", 2, "lloyd_max", 2, False, "gaussian")
        key = torch.zeros(32, 32)
        key[0, :2] = 1
        words, _ = encode_page(key, key, everything(32), layout)
        page = unpack_page(words, layout, torch.float32)
        assert page.key[0].min() > 0 and page.value[0].min() > 0

    def test_min_max_by_hand(self) -> None:
        layout = PageLayout(32, 32, 32, "fp8", 8, "min_max", 2, False, "gaussian")
        value = torch.zeros(32, 32)
        value[3, :6] = torch.tensor([-1.0, 2.0, 0.49, 0.5, 0.51, 1.5])
        words, _ = encode_page(torch.zeros(32, 32), value, everything(32), layout)
        page = unpack_page(words, layout, torch.float32)
        assert page.value_min is not None and page.value_scale is not None
        assert (page.value_min[3], page.value_scale[3]) == (-1.0, 1.0)
        assert page.value[3, :7].tolist() == [0, 3, 1, 2, 2, 3, 1]

    def test_a_page_written_by_hand(self) -> None:
        # 4-bit Lloyd-Max keys and 4-bit min/max values, D=32, the second group of a page of 64.
        layout = PageLayout(32, 32, 64, "lloyd_max", 4, "min_max", 4, True, "int8_grid")
        words = torch.zeros(layout.page_words, dtype=torch.int32)
        words[:16] = torch.arange(32, dtype=torch.float16).view(torch.int32)  # the mean key
        group = words[16 + 128 + 128 + 48 :]  # header, keys, values, three fields of 32 halves
        token, lane = 9, 5  # octet 1, g=1; lane 5 has t=1: dimensions 8..15 of the key
        group[lane_word_offset(lane, 1, 4)] = 0x00000007  # code 15, then 8 (magnitude 0, positive)
        # Token 9 as a value is h=0, t=0, a=3; g=2 holds dimensions 8, 9 in lane 8's word 0 (p=0) and 10, 11 in its word 2:
        # codes 3 and 7, magnitudes in bits 12 and 28, signs in bits 31 and 27. Codes 3 4 1 2 are magnitudes -4 -3 -6 -5.
        group[128 + lane_word_offset(8, 0, 4)] = 0xB8004000 - (1 << 32)
        group[128 + lane_word_offset(8, 2, 4)] = 0xD8006000 - (1 << 32)
        halves = group[256:].view(torch.float16)
        halves[8 * 1 + 1], halves[8 * 1 + 4 + 1], halves[64 + 4 * 1 + 1] = 2.0, 0.5, -3.0
        page = unpack_page(words, layout, torch.float32)
        at = 32 + token
        assert page.key_scale is not None and page.value_scale is not None and page.value_min is not None
        assert (page.key_scale[at], page.value_scale[at], page.value_min[at]) == (2.0, 0.5, -3.0)
        assert page.key_scale.count_nonzero() == 1
        key, value = decode_page(words, layout, torch.float32)
        # Elsewhere stands code 8, which a zero bit pattern means.
        assert value[at].tolist() == [1.0] * 8 + [-1.5, -1.0, -2.5, -2.0] + [1.0] * 20
        table = page.key[at].unique()
        assert len(table) == 2 and page.key[at, 8] == page.key[at].max()
        mean = torch.arange(32, dtype=torch.float32)
        assert torch.equal(key[0], mean)
        torch.testing.assert_close((key[at] - mean).norm(), 2 * page.key[at].norm())

    @pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "raw"])
    def test_padded_dims_hold_code_zero_where_nothing_rotates(self, preset: str) -> None:
        layout = layout_of(preset, 80)
        page = unpack_page(through(vectors(64, 80), vectors(64, 80) + 3, layout)[2], layout, torch.float32)
        assert page.value.shape[-1] == 96 and not page.value[:, 80:].any()
        assert layout.rotates_keys or not page.key[:, 80:].any()

    @pytest.mark.parametrize("page_size", [32, 128, 256])
    def test_groups_are_independent(self, page_size: int) -> None:
        layout = TurboQuantConfig.from_preset("4bit_nc", page_size=page_size).layout(64, 64, torch.float32)
        small = TurboQuantConfig.from_preset("4bit_nc", page_size=32).layout(64, 64, torch.float32)
        key, value = vectors(page_size, 64), vectors(page_size, 64, seed=1)
        words = through(key, value, layout)[2]
        groups = through(key.unflatten(0, (-1, 32)), value.unflatten(0, (-1, 32)), small)[2]
        assert torch.equal(words, groups.flatten())
