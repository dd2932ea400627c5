"""The README says what the code does: its Python runs, its table is the layout's, its files exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tq_hf
from tq_hf import PRESETS
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
def test_the_python_example_runs(embedded_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    assert MODEL_ID in example
    names: dict[str, Any] = {}
    exec(example.replace(MODEL_ID, str(embedded_folder)), names)
    assert names["cache"].report().packed_tokens > 0
    assert len(names["output"][0]) == names["inputs"]["input_ids"].shape[1] + 20
    assert "| all |" in capsys.readouterr().out


def measured(model: str, window: str | int) -> dict[str, Any]:
    path = ROOT / f"eval/results/ablation_h200/{model}-Instruct-w{str(window).replace(',', '')}.json"
    return json.loads(path.read_text(encoding="utf-8"))["settings"]


def markdown_table(first_cell: str) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the README's table whose head starts with that cell."""
    found = re.search(rf"^\| {first_cell} \|.*\n\| ---.*\n((?:\|.*\n)+)", README, flags=re.M)
    assert found is not None
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[0].strip().split("\n"))
    return head, rows


def shown(result: dict[str, Any] | None) -> str:
    return "" if result is None else f"{result['kl']:.4f} ({result['ppl_delta_percent']:+.1f})"


def test_the_quality_table_is_what_was_measured() -> None:
    head, rows = markdown_table("setting")
    assert [row[0] for row in rows][:4] == ["tq4", "tq3", "tq3v2", "tq2"]
    for column, title in enumerate(head[1:], 1):
        settings = measured(*title.split(", "))
        for row in rows:
            assert row[column] == shown(settings.get(row[0])), (title, row[0])


def test_the_ablation_table_is_what_was_measured() -> None:
    changes = {
        "as it is": "", "neither": ", no page mean, no balance", "no sinks": ", sink_tokens=0",
        "1 sink": ", sink_tokens=1", "16 sinks": ", sink_tokens=16",
        "2 exact layers at each end": ", boundary_layers=2",
    }  # fmt: skip
    head, rows = markdown_table("change")
    for column, title in enumerate(head[1:], 1):
        preset, model = re.fullmatch(r"`(\w+)`, (.*)", title).groups()  # type: ignore[union-attr]
        for change, *cells in rows:
            suffix = changes.get(change, f", {change}")
            suffix = re.sub("window (\\d+)", r"recent_window=\1", re.sub("pages of (\\d+)", r"page_size=\1", suffix))
            expected = measured(model, 2048)[preset + suffix]["kl_second_half"]
            assert cells[column - 1] == f"{expected:.4f}", (title, change)


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


def test_the_commands_exist_and_are_executable() -> None:
    for name in ("scripts/run", "scripts/test", "scripts/gpu_check", "scripts/ablation", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_the_documented_names_exist() -> None:
    for name in ("TurboQuantCache", "TurboQuantConfig", "PRESETS"):
        assert hasattr(tq_hf, name) and name in tq_hf.__all__


def test_the_version_is_the_packages() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{tq_hf.__version__}"' in project
