"""The paper's own schemes, `paper_mse` and `paper_prod`, as formats and through the cache."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_reference_attend import check, query_for
from test_reference_state import PackedState
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from tests import tiny_models
from tests.presets import KERNEL_PRESETS, sizes
from tests.tiny_models import prompt
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig, ops
from tq_hf.layout import SATURATED, PageLayout
from tq_hf.quantizer.codebooks import levels
from tq_hf.quantizer.rotation import orthogonal_matrix
from tq_hf.quantizer.sketch import sketch
from tq_hf.reference.codec import decode_page, encode_page, unpack_page

PAPER = ("paper_mse", "paper_prod")
CONFIG = LlamaConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoded(key: Tensor, value: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor]:
    return encode_page(key, value, torch.ones(key.shape[:-1], dtype=torch.bool), layout)


# -- what a preset is --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", PAPER)
def test_bits_can_be_overridden(preset: str) -> None:
    cache = TurboQuantCache(CONFIG, preset=preset, key_bits=4, value_bits=4)
    settings = cache.quantization
    assert (settings.key_bits, settings.value_bits, settings.recent_window) == (4, 4, 128)
    assert (settings.rotation, settings.codebook, settings.scale) == ("qr", "beta", "norm")
    assert (settings.sink_tokens, settings.boundary_layers, settings.center_keys) == (0, 0, False)
    assert len(cache.packed_layers) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "paper_prod", "scale": "norm_corrected"}, "scale='norm_corrected' would bias.*scale='norm'"),
        (
            {"preset": "paper_prod", "key_bits": 5},
            r"key_bits=5 does not fit key_format='qjl': expected one of \(2, 3, 4\)",
        ),
        ({"preset": "paper_mse", "value_bits": 8}, r"value_bits=8 does not fit value_format='grouped'"),
        ({"preset": "paper_prod", "center_keys": True}, "center_keys=True needs key_format='lloyd_max', not 'qjl'"),
        ({"preset": "paper_prod", "balance_keys": True}, "balance_keys=True needs"),
        ({"preset": "paper_prod", "key_bits": 2, "codebook": "int8_grid"}, "codebook='int8_grid' has no 1-bit levels"),
        ({"rotation": "dct"}, r"rotation='dct' is unknown: expected one of \('hadamard', 'qr'\)"),
        ({"scale": "no"}, "scale='no' is unknown: expected one of"),
        ({"key_format": "qjl", "center_keys": False, "balance_keys": False}, "scale='fitted' would bias"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurboQuantCache(CONFIG, **options)


def test_the_layout_refuses_them_too() -> None:
    with pytest.raises(ValueError, match="scale='norm_corrected' would bias"):
        PageLayout(64, 64, 64, "qjl", 3, "grouped", 2, False, "beta")
    with pytest.raises(ValueError, match="rotation='dct'"):
        PageLayout(64, 64, 64, "lloyd_max", 3, "grouped", 2, False, "beta", "dct")


# -- bytes -------------------------------------------------------------------------------------------------------------
def test_a_prod_page_written_by_hand() -> None:
    """3-bit `qjl` keys (2-bit levels and a sign) and 4-bit `grouped` values, D = 32, one group."""
    layout = TurboQuantConfig.from_preset("paper_prod", value_bits=4, page_size=32).layout(32, 32, torch.float32)
    words = torch.zeros(layout.page_words, dtype=torch.int32)
    # Token 9 is g=1, r=1. Of its key, lane 5 (t=1) has dimensions 8 to 15 in word 1 of 3, behind no quads: 3 * 5 + 1.
    words[16] = 0x00000726  # codes 6, 2, 7: levels 2, 2, 3 and signs +, -, +; the others are level 0 and -
    # Of its value (h=0, t=0, a=3), lane 8 (g=2) has dimensions 8 and 9 in word 0 of 4 and 10 and 11 in word 2, each as codes
    # 3 and 7: magnitudes in bits 12 and 28, signs in bits 31 and 27. Codes 1 2 3 4 are magnitudes -6 -5 -4 -3.
    words[96 + 4 * 8], words[96 + 4 * 8 + 2] = 0xD8006000 - (1 << 32), 0xB8004000 - (1 << 32)
    halves = words[96 + 128 :].view(torch.float16)
    halves[9], halves[13], halves[64 + 9], halves[64 + 13] = 2.0, 0.5, 0.25, -3.0

    table = levels(2, 32, "beta")
    coordinates, signs = torch.full((32,), 2 * table[0].item()), -torch.ones(32)
    coordinates[8:11] = 2 * table[[2, 2, 3]]
    signs[8] = signs[10] = 1
    weighted = 0.5 * math.sqrt(math.pi / 2) / 32 * signs
    page = unpack_page(words, layout, torch.float32)
    torch.testing.assert_close(page.key[9], torch.cat((coordinates, weighted)))
    assert page.key_scale is None and page.value_scale is None and page.value_min is None

    key, value = decode_page(words, layout, torch.float32)
    sketch_matrix = sketch(torch.eye(32)).mT
    expected = orthogonal_matrix(32).float().T @ (coordinates + sketch_matrix.T @ weighted)
    torch.testing.assert_close(key[9], expected)
    assert value[9].tolist() == [-1.0] * 8 + [-2.75, -2.5, -2.25, -2.0] + [-1.0] * 20  # a zero bit pattern is code 8
    others = [token for token in range(32) if token != 9]
    assert not key[others].any() and not value[others].any()


def test_groups_of_values_written_by_hand() -> None:
    """2-bit `grouped` values of 64 dimensions beside `paper_mse` keys: five fields, the last in a block of its own."""
    layout = TurboQuantConfig.from_preset("paper_mse", page_size=32).layout(32, 64, torch.float32)
    assert layout.metadata == ("key_scale", "value_scale_0", "value_min_0", "value_scale_1", "value_min_1")
    words = torch.zeros(layout.page_words, dtype=torch.int32)
    # Token 20 is g=4, r=2, and h=1, t=2, a=0 as a value. Lane 4 * 5 + 2 (g=5) has dimensions 40 to 43 in chunk 0 and 44 to
    # 47 in chunk 1, two runs a word: words 2 and 3 of 4 hold p=0 and p=1 of chunk 1, with h=1 in the high bits of nibbles 0
    # and 4.
    words[96 + 4 * 22 + 2], words[96 + 4 * 22 + 3] = 0x00040000, 0x000C0008
    halves = words[96 + 128 :].view(torch.float16)
    # Blocks of two fields: 8g + r and 8g + 4 + r, from 0 and 64; the last field from 128: 4g + r.
    halves[34], halves[38], halves[64 + 34], halves[64 + 38], halves[128 + 18] = 1.0, 0.5, -1.0, 2.0, 10.0
    key, value = decode_page(words, layout, torch.float32)
    assert value[20].tolist() == [-1.0] * 32 + [10.0] * 12 + [10.0, 12.0, 14.0, 16.0] + [10.0] * 16
    scale, lowest = 1.0, levels(3, 32, "beta")[0]
    torch.testing.assert_close(key[20].norm(), scale * lowest.abs() * math.sqrt(32))


def test_without_norm_correction_the_scale_is_the_norm() -> None:
    key = vectors(32, 64) * torch.linspace(0.1, 5, 32).unsqueeze(-1)
    for scale in ("norm", "norm_corrected"):
        config = TurboQuantConfig.from_preset("paper_mse", page_size=32, scale=scale)
        page = unpack_page(encoded(key, key, config.layout(64, 64, torch.float32))[0], _layout(config), torch.float32)
        assert page.key_scale is not None
        length = 8.0 if scale == "norm" else page.key.norm(dim=-1)
        torch.testing.assert_close(page.key_scale * length, key.norm(dim=-1), rtol=2**-10, atol=0)


def _layout(config: TurboQuantConfig, dim: int = 64) -> PageLayout:
    return config.layout(dim, dim, torch.float32)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [16, 34, 64, 80, 256])
def test_grouped_values_are_within_half_a_step_of_their_group(bits: int, dim: int) -> None:
    layout = TurboQuantConfig.from_preset("paper_mse", value_bits=bits).layout(64, dim, torch.float32)
    value = vectors(4, 64, dim) + 20 * torch.arange(dim).div(32, rounding_mode="floor") + 7  # padding would be far off
    words, flags = encoded(vectors(4, 64, 64), value, layout)
    assert not flags.any()
    got = decode_page(words, layout, torch.float32)[1]
    for start in range(0, dim, 32):
        group, image = value[..., start : start + 32], got[..., start : start + 32]
        step = (group.amax(-1) - group.amin(-1)) / (2**bits - 1)
        rounding = group.abs().amax(-1) * 2**-10  # of scale and minimum to fp16
        assert ((image - group).abs().amax(-1) <= step / 2 + rounding).all()


@pytest.mark.parametrize("preset", PAPER)
def test_scales_and_residuals_beyond_fp16_are_flagged_and_finite(preset: str) -> None:
    layout = _layout(PRESETS[preset])
    key, value = vectors(5, 64, 64), vectors(5, 64, 64, seed=1)
    key[1, 0] *= 1e7
    key[2, 3] = torch.finfo(torch.float32).max
    value[3, 0, 40:] *= 1e7
    words, flags = encoded(key, value, layout)
    assert flags.tolist() == [0, SATURATED, SATURATED, SATURATED, 0]
    got_key, got_value = decode_page(words, layout, torch.float32)
    assert got_key.isfinite().all() and got_value.isfinite().all()
    error = (got_key[1, 1:] - key[1, 1:]).square().sum() / key[1, 1:].square().sum()
    assert error < 0.25  # the others in the page are as ever


# -- attention ---------------------------------------------------------------------------------------------------------
# (head_dim, value head_dim, query heads a KV head, queries, committed tokens, new tokens, first real token of each row)
SHAPES = [
    (16, 16, 1, 1, 193, 1, (0,)),
    (34, 34, 7, 3, 257, 3, (0, 17)),
    (64, 64, 3, 1, 999, 1, (0, 70)),
    (80, 40, 2, 5, 321, 5, (3, 141)),
    (96, 128, 1, 40, 450, 40, (0, 9)),
    (128, 128, 4, 2, 515, 2, (0, 300)),
    (192, 64, 2, 1, 260, 0, (0,)),
    (256, 256, 2, 1, 300, 1, (1, 0)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [(2, 4), (3, 2), (4, 3)], ids=str)
@pytest.mark.parametrize("preset", PAPER)
def test_attention_is_that_over_what_gathering_gives(preset: str, bits: tuple[int, int], shape: tuple[Any, ...]) -> None:
    dim, value_dim, group, queries, length, new, starts = shape
    config = TurboQuantConfig.from_preset(preset, key_bits=bits[0], value_bits=bits[1])
    state = PackedState(config, dim=dim, value_dim=value_dim, capacity=1024, row_start=starts)
    state.commit(*state.tokens(length))
    assert int(state.counters[2]) == (length - config.recent_window) // config.page_size > 0
    check(state, query_for(state, group, queries), new)


@pytest.mark.parametrize("preset", ["tq4", "3bit_nc"])
def test_any_preset_can_take_the_random_rotation(preset: str) -> None:
    config = TurboQuantConfig.from_preset(preset, rotation="qr", scale="norm", **sizes(preset))
    state = PackedState(config, dim=80, row_start=(0, 5))
    key, value = state.tokens(300)
    state.commit(key, value)
    check(state, query_for(state, 2, 3), 3)
    got_key, got_value = state.gather()
    for got, given in ((got_key, key), (got_value, value)):
        assert (got - given)[0].square().sum() / given[0].square().sum() < 0.05


# -- through the cache -------------------------------------------------------------------------------------------------
def options(tokens: int, pad: int = 0) -> dict[str, Any]:
    ids = prompt(2, tokens)
    mask = torch.ones_like(ids)
    ids[1, :pad], mask[1, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
@pytest.mark.parametrize(("tokens", "pad"), [(191, 0), (303, 77)])
@pytest.mark.parametrize("preset", PAPER)
def test_generate(tiny_model: PreTrainedModel, preset: str, tokens: int, pad: int, attention: str) -> None:
    tiny_model.set_attn_implementation(attention)
    caches = [TurboQuantCache(tiny_model.config, preset), TurboQuantCache(tiny_model.config, preset, max_cache_len=400)]
    out = [tiny_model.generate(**options(tokens, pad), past_key_values=cache) for cache in caches]
    assert torch.equal(*out)  # the static cache, which is uncompiled on the CPU, stores the same bytes
    cached, size = tokens + 40 - 1, PRESETS[preset].page_size
    pages = (cached - PRESETS[preset].recent_window) // size
    hidden = pad // size  # pages of nothing but padding are not stored, where the length is known on the host
    assert pages > hidden
    assert caches[0].report().packed_tokens == 3 * size * (2 * pages - hidden)
    caches[0].check()


@pytest.mark.parametrize("preset", PAPER)
def test_more_bits_are_nearer_to_the_model(preset: str) -> None:
    model, ids = tiny_models.tiny_model("qwen3_qk_norm"), prompt(2, 420)

    def logits(cache: Any) -> Tensor:
        with torch.no_grad():
            model(ids[:, :-8], past_key_values=cache)
            return model(ids[:, -8:], past_key_values=cache).logits

    exact = logits(DynamicCache(config=model.config))
    errors = []
    for bits in (2, 3, 4):
        cache = TurboQuantCache(model.config, preset, key_bits=bits, value_bits=bits)
        errors.append(((logits(cache) - exact).square().sum() / exact.square().sum()).item())
    assert 0.05 > errors[0] > 2 * errors[1] > 4 * errors[2] > 1e-6


# -- which machine does the work ---------------------------------------------------------------------------------------
def test_only_the_papers_own_options_lack_kernels() -> None:
    assert KERNEL_PRESETS == [name for name in PRESETS if name not in PAPER]
    for name, change, expected in [
        ("tq4", {"rotation": "qr"}, False),
        ("tq4", {"scale": "norm"}, False),
        ("tq4", {"value_format": "grouped"}, False),
        ("k8v4", {"rotation": "qr", "scale": "norm"}, True),  # nothing is rotated, and no norm is stored
        ("k8v4", {"value_format": "lloyd_max", "rotation": "qr"}, False),
        ("raw", {"rotation": "qr"}, True),
    ]:
        assert ops.has_kernels(_layout(TurboQuantConfig.from_preset(name, **change)).name) == expected, (name, change)


@pytest.mark.parametrize("op", ["attend", "commit", "gather"])
def test_on_cuda_the_reference_runs_what_the_kernels_do_not_know(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tq_hf.kernels", SimpleNamespace(**{op: lambda *args: ("kernels", args)}))
    monkeypatch.setattr("tq_hf.kernels", sys.modules["tq_hf.kernels"], raising=False)
    launch = ops._on_cuda(op, lambda *args: ("reference", args))
    names = [argument.name for argument in getattr(torch.ops.tq_hf, op).default._schema.arguments]
    for preset, where in (("paper_prod", "reference"), ("tq4", "kernels")):
        args = tuple(_layout(PRESETS[preset]).name if name == "layout" else name for name in names)
        assert launch(*args) == (where, args)


@pytest.mark.parametrize("preset", PAPER)
def test_a_static_cache_on_a_gpu_is_refused_before_anything_changes(preset: str) -> None:
    with FakeTensorMode():  # tensors that say they are on a GPU, where there may be none
        states = torch.empty(1, 2, 3, 64, device="cuda")
        cache = TurboQuantCache(CONFIG, preset, max_cache_len=400)
        layer = cache.packed_layers[0]
        for first_use in (layer.update, layer.lazy_initialization):
            with pytest.raises(ValueError, match=r"max_cache_len=400 on cuda:0 needs Triton kernels.*leave max_cache_len"):
                first_use(states, states)
            assert not layer.is_initialized and cache.table.batch_size is None
        for other in (TurboQuantCache(CONFIG, preset), TurboQuantCache(CONFIG, "tq4", max_cache_len=400)):
            other.packed_layers[0]._validate(states, states)  # raises nothing
