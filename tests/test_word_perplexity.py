"""The table of lm-eval's word perplexities, from results files as lm-eval writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval import word_perplexity


def write(folder: Path, date: float, value: float, **ours: Any) -> None:
    read = {"packed_share": 0.9, "cache_ratio": 3.5, "quantized_layers": 4, "layers": 6, "versions": {"torch": "2"}}
    config: dict[str, Any] = {"model": "tq-hf" if ours else "hf", "model_args": {"pretrained": "some/Small-Instruct"}}
    if ours:
        config["tq_hf"] = read | ours
    found = {
        "results": {"wikitext_local": {"word_perplexity,none": value}},
        "n-samples": {"wikitext_local": {"original": 62, "effective": 62}},
        "config": config, "date": date, "max_length": 2048, "lm_eval_version": "0.4.13", "transformers_version": "5.17.0",
    }  # fmt: skip
    path = folder / str(date) / "some__Small" / f"results_{date}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(found))


def test_runs_become_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    write(runs, 1.0, 20.0)
    write(runs, 2.0, 99.0, preset="tq3", mode="decode")
    write(runs, 3.0, 20.2, preset="tq3", mode="decode")  # the newer one counts
    write(runs, 4.0, 22.0, preset="3bit_nc", mode="packed")
    (runs / "results_other.json").write_text('{"results": {"gsm8k": {}}}')
    assert word_perplexity.main([str(runs), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| Small | bf16 | 20.000 |  | 1 | 0 |  |",
        "| Small | tq3 | 20.200 | +1.00 | 3.50 | 90 | 4 of 6 |",
        "| Small | 3bit_nc, as published | 22.000 | +10.00 | 3.50 | 90 | 4 of 6 |",
    ]
    assert (out / "word_perplexity.md").read_text().splitlines() == lines
    kept = json.loads((out / "word_perplexity.json").read_text())
    assert [run["setting"] for run in kept] == ["bf16", "tq3", "3bit_nc, as published"]
    assert kept[1]["mode"] == "decode" and kept[1]["versions"] == {"torch": "2"}


def test_what_holds_no_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert word_perplexity.main([str(tmp_path), "--out", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no results of wikitext" in capsys.readouterr().err
    (tmp_path / "results_1.json").write_text('{"results": {"wikitext": {}}}')
    assert word_perplexity.main([str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "results_1.json is no results file of lm-eval" in capsys.readouterr().err
