"""The README says what the code does: its Python runs, its table is the layout's, its files exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import tq_hf
from eval import word_perplexity
from eval.results import read_all
from eval.summary import tables
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.config import DEFAULT_PRESET

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def table() -> dict[str, list[str]]:
    """The preset table: name -> the other cells."""
    rows = re.findall(r"^\| `(\w+)`( \(default\))? \|(.*)\|$", README, flags=re.M)
    assert [name for name, default, _ in rows if default] == [DEFAULT_PRESET]
    return {name: [cell.strip() for cell in cells.split("|")] for name, _, cells in rows}


@pytest.mark.network
def test_the_python_examples_run(embedded_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = blocks("python")  # each goes on where the one before ended
    assert MODEL_ID in first
    names: dict[str, Any] = {}
    exec(first.replace(MODEL_ID, str(embedded_folder)), names)
    assert names["cache"].report().packed_tokens > 0
    assert len(names["output"][0]) == names["inputs"]["input_ids"].shape[1] + 20
    assert "| all |" in capsys.readouterr().out
    for example in others:
        exec(example, names)
    assert "The tide tables of Sarn Point" in capsys.readouterr().out


def test_the_quality_tables_are_what_was_measured() -> None:
    shown = tables(read_all(ROOT / "eval/results/ablation_h200"))
    assert list(shown) == ["windows of 2,048", "windows of 8,192", "single changes"]
    for name, table in shown.items():
        assert table in README, f"{name}: print it with python -m eval.summary"


def test_the_studies_tables_are_what_was_measured() -> None:
    folder = ROOT / "eval/results/studies_h200"
    found = {
        name: re.findall(r"^(.*):\n\n((?:\|.*\n)+)", (folder / f"{name}.md").read_text("utf-8"), flags=re.M)
        for name in ("gsm8k", "longctx")
    }
    strict = [(heading, table) for heading, table in found["gsm8k"] if "strict-match" in heading]
    assert len(strict) == 2 and len(found["longctx"]) == 1
    for heading, table in [*strict, *found["longctx"]]:
        assert table in README, heading
    words = json.loads((folder / "word_perplexity.json").read_text("utf-8"))
    assert word_perplexity.table(words) == (folder / "word_perplexity.md").read_text("utf-8")
    assert word_perplexity.table(words) in README


def test_the_preset_table_is_the_layouts() -> None:
    rows = table()
    assert list(rows) == list(PRESETS)
    for name, (keys, values, exact, size, ratio) in rows.items():
        config = PRESETS[name]
        layout = config.layout(128, 128, torch.bfloat16)
        assert float(size) == layout.bytes_per_token
        assert ratio == f"{512 / layout.bytes_per_token:.2f}"
        widths = {"fp8": "fp8", "raw": "the model's dtype"}
        assert keys.startswith(widths.get(config.key_format, f"{config.key_bits} bits"))
        assert values.startswith(widths.get(config.value_format, f"{config.value_bits} bits"))
        assert ("centred" in keys) == config.center_keys
        assert ("QJL" in keys) == (config.key_format == "qjl")
        assert ("min/max" in values) == (config.value_format in ("min_max", "grouped"))
        assert ("in groups of 32" in values) == (config.value_format == "grouped")
        assert ("rotated" in values) == (config.value_format == "lloyd_max")
        sinks = f", first {config.sink_tokens} tokens" if config.sink_tokens else " tokens"
        window = f"newest {config.recent_window}{sinks}"
        boundary = f"first and last {config.boundary_layers} layers"
        assert exact == (boundary if config.boundary_layers else window)


def test_the_ratios_of_a_whole_cache_are_those_of_its_report() -> None:
    """SmolLM2-135M's shape, with one token to come of the 1,960."""
    config = LlamaConfig(num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    text = " ".join(README.split())
    for preset, said in (
        ("tq4", "default preset takes (.{4}) times less"),
        ("4bit_nc", "`4bit_nc` gives (.{4}) in all"),
        ("tq4", "where `tq4` gives (.{4})"),
        ("tq2", "and `tq2` (.{4})[.]"),
    ):
        cache = TurboQuantCache(config, preset)
        states = torch.zeros(1, 3, 1959, 64, dtype=torch.bfloat16)
        for layer in range(30):
            cache.update(states, states, layer)
        (ratio,) = re.findall(said, text)
        assert ratio == f"{cache.report().ratio:.2f}", said


def test_the_commands_exist_and_are_executable() -> None:
    for name in ("scripts/run", "scripts/test", "scripts/gpu_check", "scripts/ablation", "scripts/conformance", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_the_documented_names_exist() -> None:
    for name in ("TurboQuantCache", "TurboQuantConfig", "PRESETS", "enable", "disable"):
        assert hasattr(tq_hf, name) and name in tq_hf.__all__


def test_the_version_is_the_packages() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{tq_hf.__version__}"' in project
