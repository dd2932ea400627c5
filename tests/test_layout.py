"""The format's sizes and positions, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tq_hf.config import PRESETS, TurboQuantConfig
from tq_hf.layout import LANES, PageLayout, lane_word_offset

BYTES = {
    #          64     80     96    128    192    256
    "k8v4": (100, 148, 148, 196, 292, 388),
    "4bit_nc": (70, 102, 102, 134, 198, 262),
    "k3v4_nc": (62, 90, 90, 118, 174, 230),
    "3bit_nc": (54, 78, 78, 102, 150, 198),
    "tq4": (70, 102.5, 103, 136, 202, 268),
    "tq3": (56, 81, 82, 108, 160, 212),
    "tq3v2": (48, 69, 70, 92, 136, 180),
    "tq2": (40, 57, 58, 76, 112, 148),
    "paper_mse": (50, 74, 74, 98, 146, 194),
    "paper_prod": (52, 76, 76, 100, 148, 196),
}
DIMS = (64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("preset", BYTES)
def test_bytes_per_token(preset: str) -> None:
    for dim, expected in zip(DIMS, BYTES[preset], strict=True):
        assert PRESETS[preset].layout(dim, dim, torch.bfloat16).bytes_per_token == expected, dim


def test_bytes_of_raw_and_of_different_dims() -> None:
    raw = PRESETS["raw"]
    assert raw.layout(128, 64, torch.bfloat16).bytes_per_token == 2 * (128 + 64)
    assert raw.layout(128, 64, torch.float32).bytes_per_token == 4 * (128 + 64)
    # tq4, K 96 / V 64: codes 48 + 32, two scales 4, header 192 / 64
    assert TurboQuantConfig.from_preset("tq4", page_size=64).layout(96, 64, torch.float16).bytes_per_token == 87
    # a 32-token page bears the header twice as heavily
    assert TurboQuantConfig.from_preset("tq4", page_size=32).layout(128, 128, torch.float16).bytes_per_token == 140


@pytest.mark.parametrize(
    ("preset", "key_bits", "value_bits", "expected"),
    [
        ("paper_mse", 2, 2, 82),  # 32 + 2 and 32 + 4 * 4
        ("paper_mse", 4, 4, 146),  # 64 + 2 and 64 + 4 * 4
        ("paper_prod", 2, 4, 116),  # 32 + 4 and 64 + 4 * 4
        ("paper_prod", 4, 2, 116),  # 64 + 4 and 32 + 4 * 4
        ("paper_prod", 4, 4, 148),
    ],
)
def test_bytes_of_the_papers_schemes(preset: str, key_bits: int, value_bits: int, expected: int) -> None:
    config = TurboQuantConfig.from_preset(preset, key_bits=key_bits, value_bits=value_bits)
    assert config.layout(128, 128, torch.bfloat16).bytes_per_token == expected


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dim", [16, 48, 80, 256])
def test_parts_fill_the_page_and_stay_aligned(preset: str, dim: int) -> None:
    layout = PRESETS[preset].layout(dim, dim, torch.float16)
    assert layout.page_words == layout.header_words + layout.page_size // 32 * layout.group_words
    assert layout.group_words == layout.key_words + layout.value_words + layout.metadata_words
    for words in (layout.header_words, layout.key_words, layout.value_words, layout.metadata_words):
        assert words % 4 == 0  # 16 bytes
    assert 2 * layout.header_words >= (dim if layout.center_keys else 0)


@pytest.mark.parametrize("words_per_lane", range(1, 65))
def test_lane_words_fill_a_group_once(words_per_lane: int) -> None:
    offsets = sorted(lane_word_offset(lane, p, words_per_lane) for lane in range(LANES) for p in range(words_per_lane))
    assert offsets == list(range(LANES * words_per_lane))


@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "tq4", "paper_mse", "paper_prod"])
def test_metadata_fills_its_words_once(preset: str) -> None:
    layout = PRESETS[preset].layout(64, 64, torch.float16)
    offsets = sorted(layout.metadata_offset(field, token) for field in layout.metadata for token in range(32))
    assert offsets == list(range(2 * layout.metadata_words))


def test_a_single_field_has_its_own_block() -> None:
    layout = PageLayout(64, 64, 64, "raw", 16, "lloyd_max", 4, False, "gaussian")
    assert [layout.metadata_offset("value_scale", token) for token in (0, 8, 1, 31)] == [0, 1, 4, 31]


def test_fields_go_in_pairs() -> None:
    layout = PRESETS["paper_prod"].layout(64, 64, torch.float16)
    fields = ("key_scale", "key_residual", "value_scale_0", "value_min_0", "value_scale_1", "value_min_1")
    assert layout.metadata == fields
    assert [layout.metadata_offset(field, 13) for field in fields] == [41, 45, 105, 109, 169, 173]  # g=5, r=1
    odd = PRESETS["paper_mse"].layout(64, 64, torch.float16)
    assert odd.metadata_offset("value_min_1", 13) == 2 * 64 + 4 * 5 + 1


@pytest.mark.parametrize("preset", PRESETS)
def test_a_name_stands_for_the_layout(preset: str) -> None:
    layout = PRESETS[preset].layout(96, 64, torch.float32)
    assert PageLayout.from_name(layout.name) == layout
    for change in ({"rotation": "qr"}, {"scale": "norm"}):
        other = replace(layout, **change)
        assert PageLayout.from_name(other.name) == other
