"""Scoring modes through the kernels, against the torch reference on the CPU; lm-eval on several GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tq_hf.scoring.mode import ScoringMode
from tq_hf.scoring.token_scores import TokenScores, score_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.network]
ROOT = Path(__file__).parents[1]
LENGTHS = (700, 650, 300, 90)


def texts(folder: Path) -> list[list[int]]:
    ids = AutoTokenizer.from_pretrained(folder)((ROOT / "tq_hf" / "handbook.txt").read_text()).input_ids
    return [ids[100 * i : 100 * i + length] for i, length in enumerate(LENGTHS)]


def score(folder: Path, device: str, mode: str, preset: str) -> TokenScores:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="turboquant")
    parsed = ScoringMode.parse(mode)
    cache = parsed.new_cache(model.config, parsed.settings(preset))
    return score_tokens(model.eval().to(device), texts(folder), parsed, cache, torch.float32)


@pytest.mark.parametrize("preset", ["tq4", "4bit_nc", "raw"])
@pytest.mark.parametrize("mode", ["decode", "packed", "prefill=500"])
def test_scores_are_those_of_the_cpu_reference(embedded_folder: Path, mode: str, preset: str) -> None:
    """Code words on the edge between two levels may fall either way, so single tokens differ more than their mean. Where
    nothing is exact, least of all the first token, that changes every later one: only the mean is the same then."""
    found, expected = (score(embedded_folder, device, mode, preset) for device in ("cuda", "cpu"))
    assert found.read_from_pages == expected.read_from_pages
    for row, length in enumerate(LENGTHS):
        difference = (found.log_probs - expected.log_probs)[row, : length - 1]
        if mode == "packed" and preset != "raw":
            assert length < 300 or difference.mean().abs() < 0.05
        else:
            assert difference.abs().mean() < (2e-3 if preset == "raw" else 3e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_processes_share_the_requests(embedded_folder: Path, tmp_path: Path) -> None:
    """`accelerate launch` gives what a single process gives."""
    pytest.importorskip("lm_eval", reason="only the extra `eval` installs lm-eval")
    facts: list[dict[str, Any]] = []
    for processes in (1, 2):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
        command += ["--multi_gpu"] if processes > 1 else []
        command += ["-m", "tq_hf", "lm-eval", "run", "--model", "tq-hf", "--batch_size", "2"]
        command += ["--model_args", f"pretrained={embedded_folder},preset=tq4,dtype=float32"]
        command += ["--include_path", str(ROOT / "tests" / "data" / "lm_eval")]
        command += ["--tasks", "tq_arithmetic_choice_first,tq_prose"]
        command += ["--output_path", str(tmp_path / f"{processes}.json")]
        subprocess.run(command, cwd=ROOT, check=True, timeout=500)
        (path,) = tmp_path.glob(f"{processes}_*.json")
        facts.append(json.loads(path.read_text()))
    alone, shared = facts
    for task, metric in (("tq_arithmetic_choice_first", "acc,none"), ("tq_prose", "word_perplexity,none")):
        assert shared["results"][task][metric] == pytest.approx(alone["results"][task][metric], rel=1e-3)
        used, expected = (each["config"]["tq_hf"]["tasks"][task] for each in (shared, alone))
        assert used["packed_share"] > 0.5 and used["texts"] >= expected["texts"]
