"""The README says what the code does: its Python runs, its table is the layout's, its files exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import tq_hf as package
from eval import headline, word_perplexity
from eval.results import read_all
from eval.summary import tables
from tests.command_line import CommandLine
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.cli.presets import row as preset_row
from tq_hf.config import DEFAULT_PRESET

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EVAL = (ROOT / "eval" / "README.md").read_text(encoding="utf-8")
PLACES = ("eval", "scripts", "scripts/space", "tests/conformance", "tq_hf")
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
        assert table in EVAL, f"{name}: print it with python -m eval.summary"


def test_the_table_of_presets_costs_is_what_was_measured() -> None:
    assert headline.table(ROOT / "eval/results") in README, "print it with python -m eval.headline eval/results"


def test_the_studies_tables_are_what_was_measured() -> None:
    folder = ROOT / "eval/results/studies_h200"
    found = {
        name: re.findall(r"^(.*):\n\n((?:\|.*\n)+)", (folder / f"{name}.md").read_text("utf-8"), flags=re.M)
        for name in ("gsm8k", "longctx")
    }
    strict = [(heading, table) for heading, table in found["gsm8k"] if "strict-match" in heading]
    assert len(strict) == 2 and len(found["longctx"]) == 1
    for heading, table in [*strict, *found["longctx"]]:
        assert table in EVAL, heading
    words = json.loads((folder / "word_perplexity.json").read_text("utf-8"))
    assert word_perplexity.table(words) == (folder / "word_perplexity.md").read_text("utf-8")
    assert word_perplexity.table(words) in EVAL


def test_the_preset_table_is_the_layouts() -> None:
    rows = table()
    assert list(rows) == list(PRESETS)
    for name, written in rows.items():
        said = preset_row(name, PRESETS[name])
        assert written == [said["keys"], said["values"], said["exact"], f"{said['bytes']:g}", f"{said['ratio']:.2f}"]
        layout = PRESETS[name].layout(128, 128, torch.bfloat16)
        assert (float(written[3]), written[4]) == (layout.bytes_per_token, f"{512 / layout.bytes_per_token:.2f}")


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


def test_the_estimate_is_what_the_command_prints(
    tmp_path: Path, tq_hf: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 3.1 8B's shape."""
    config = LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    (command,) = re.findall(r"\(`(--config Llama-3.1-8B .*)`\)", README)
    config.save_pretrained(tmp_path / "Llama-3.1-8B")
    monkeypatch.chdir(tmp_path)
    printed = [line.rstrip() for line in tq_hf("estimate", *command.split()).out.splitlines()]
    assert "\n".join(printed) + "\n" in blocks("")


def test_the_commands_exist_and_are_executable() -> None:
    for name in ("scripts/run", "scripts/test", "scripts/gpu_check", "scripts/ablation", "scripts/conformance", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_the_documented_names_exist() -> None:
    for name in ("TurboQuantCache", "TurboQuantConfig", "PRESETS", "enable", "disable"):
        assert hasattr(package, name) and name in package.__all__


def test_the_version_is_the_packages() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{package.__version__}"' in project


def test_what_readmes_link_to_exists() -> None:
    shown = set()
    pages = (ROOT / "README.md", *(ROOT / place / "README.md" for place in PLACES), ROOT / "scripts/MULTI_GPU.md")
    for readme in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", readme.read_text(encoding="utf-8")):
            if not link.startswith("https://"):
                target = readme.parent / link
                assert target.exists(), f"{readme}: {link}"
                if target.suffix == ".png":
                    assert target.stat().st_size < 300_000, target
                    shown.add(target.name)
    assert {f"demo_{page}_desktop.png" for page in ("chat", "side_by_side", "memory")} <= shown
