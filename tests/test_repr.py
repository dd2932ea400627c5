"""How caches, reports and configs show themselves: briefly, at any time, and without touching a device's tensors."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from tests.tiny_models import FAMILIES, tiny_model
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig, estimate_memory

CONFIG = LlamaConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


def fill(cache: TurboQuantCache, tokens: int, rows: int = 1, layers: int = 4, heads: int = 1, dim: int = 32) -> Any:
    for i in range(layers):
        states = torch.zeros(rows, heads, tokens, dim, dtype=torch.bfloat16)
        cache.update(states, states, i)
    return cache


def cells(shown: Any) -> list[list[str]]:
    """The rows of an HTML table, which must be well formed."""
    root = ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


def test_a_cache_in_a_line() -> None:
    assert repr(TurboQuantCache(CONFIG)) == "TurboQuantCache(preset='tq4', 4 of 4 layers packed, empty)"
    cache = fill(TurboQuantCache(CONFIG, "4bit_nc"), 5000, rows=2)
    report = cache.report()
    assert repr(cache) == (
        "TurboQuantCache(preset='4bit_nc', 4 of 4 layers packed, 5,000 tokens in each of 2 rows,"
        f" {report.nbytes / 2**20:.3f} MiB where bf16 takes 4.883 MiB)"
    )
    static = fill(TurboQuantCache(CONFIG, max_cache_len=300), 200)
    assert "max_cache_len=300, 4 of 4 layers packed, 200 tokens, " in repr(static)
    assert len(repr(static)) < 140


def test_its_numbers_are_the_reports() -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=4, num_key_value_heads=1, head_dim=32, sliding_window=300,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    config.dtype = torch.bfloat16
    cache = fill(TurboQuantCache(config), 1000)
    title, *kinds, total = cells(cache)
    assert title == ["kind", "layers", "bytes", "in bf16", "ratio"]
    assert [kind[0] for kind in kinds] == ["packed (tq4), window 300", "packed (tq4)"]
    pending = sum(layer.nbytes for layer in cache.packed_layers)
    assert sum(int(kind[2].replace(",", "")) for kind in kinds) == pending
    report = cache.report()  # which takes in what was pending
    for kind in cells(cache)[1:-1]:
        layers = [layer for layer in report.layers if layer.kind == kind[0]]
        assert kind[1:4] == ["2", f"{sum(r.nbytes for r in layers):,}", f"{sum(r.bytes_bf16 for r in layers):,}"]
    assert cells(cache)[-1][1:] == ["4", f"{report.nbytes:,}", f"{report.bytes_bf16:,}", f"{report.ratio:.2f}"]
    assert total[0] == "all, with block tables"


def test_looking_changes_nothing_and_reads_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, static = fill(TurboQuantCache(CONFIG), 300), fill(TurboQuantCache(CONFIG, max_cache_len=400), 300)
    reads: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "to", "__int__"):
        original = getattr(torch.Tensor, name)

        def counted(self: Any, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    for show in (repr, lambda shown: shown._repr_html_()):
        show(cache)
        assert reads == []
        show(static)
        assert len(reads) == 1
        reads.clear()
    assert all(layer.pending is not None for layer in cache.packed_layers)


@pytest.mark.parametrize("family", ["llama", "mamba", "gemma4_d512", "falcon_h1", "gemma3n_shared"])
def test_every_state_can_be_shown(family: str) -> None:
    if not hasattr(__import__("transformers"), FAMILIES[family]["config"]):
        pytest.skip(f"this release of transformers has no {family}")
    model = tiny_model(family)
    cache = TurboQuantCache(model.config)
    assert "empty" in repr(cache) and cells(cache)
    states = torch.zeros(1, 2, 40, 16)
    if family in ("llama", "falcon_h1"):
        cache.update(states, states, 0)  # in the middle of a forward pass
        assert "40 tokens" in repr(cache)
        cache.reset()
        assert "empty" in repr(cache)
    if family == "gemma4_d512":  # nothing is packed
        cache.update(torch.zeros(1, 1, 7, 512), torch.zeros(1, 1, 7, 512), 1)
        assert "0 of 2 layers packed, 7 tokens" in repr(cache)
    half = TurboQuantCache.__new__(TurboQuantCache)
    assert repr(half) == "TurboQuantCache(not built)" and cells(half)


def test_reports() -> None:
    report = fill(TurboQuantCache(CONFIG), 1000).report()
    assert repr(report) == (
        f"CacheReport('tq4', 4 layers, 3,584 tokens packed and 416 exact, {report.nbytes / 2**20:.3f} MiB,"
        f" {report.ratio:.2f} times smaller than bf16)"
    )
    rows = cells(report)
    assert len(rows) == 6 and rows[-1][-2:] == [f"{report.nbytes:,}", f"{report.ratio:.2f}"]
    estimate = estimate_memory(CONFIG, "tq4", 1000)
    assert repr(estimate).startswith("MemoryEstimate('tq4', 4 layers, 3,584 tokens packed")
    assert cells(estimate)[1:-1] == rows[1:-1]
    empty = TurboQuantCache(CONFIG).report()
    assert repr(empty) == "CacheReport('tq4', 4 layers, 0 tokens packed and 0 exact, 0.000 MiB)" and cells(empty)


@pytest.mark.parametrize("preset", PRESETS)
def test_configs(preset: str) -> None:
    config = PRESETS[preset]
    assert eval(repr(config)) == config
    assert "boundary_layers" not in repr(PRESETS["tq4"])
    assert dict(cells(config)[1:])["page_size"] == str(config.page_size)
    assert f"preset {preset}" in config._repr_html_()
    assert "preset" not in TurboQuantConfig.from_preset(preset, page_size=256)._repr_html_()


def test_names_are_escaped() -> None:
    cache = TurboQuantCache(CONFIG)
    cache.preset = "<script>"
    assert "<script>" not in cache._repr_html_() and "<script>" in repr(cache)
