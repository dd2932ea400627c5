"""Data-parallel evaluation: processes share lm-eval's requests, and answer what a single one answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.multi import on_ranks
from tests.multi.ranks import Ranks
from tests.word_model import DATA

lm_eval = pytest.importorskip("lm_eval", reason="only the extra `eval` installs lm-eval")

from lm_eval.tasks import TaskManager  # noqa: E402

from tq_hf.lm_eval_model import TurboQuantLM  # noqa: E402

# Of three items each, so that one process has two and the other one, and a copy of it.
TASKS = {"tq_arithmetic_first": "exact_match,flexible-extract", "tq_arithmetic_choice_first": "acc,none",
         "tq_prose": "word_perplexity,none"}  # fmt: skip
ITEMS = 3
NUMBER = re.compile(r"-?\d+\.\d+(e-?\d+)?")


def two_processes(ranks: Ranks, folder: Path, out: Path) -> tuple[dict[str, Any], dict[str, dict[int, Any]], list[str]]:
    """Results, each item's answers, and what each process printed."""
    argv = ["lm-eval", "run", "--model", "tq-hf", "--batch_size", "1", "--model_args"]
    argv += [f"pretrained={folder},preset=tq4,dtype=float32", "--include_path", str(DATA), "--tasks", ",".join(TASKS)]
    argv += ["--limit", str(ITEMS), "--log_samples", "--output_path", str(out)]
    printed = ranks.run(on_ranks.command_line, argv)
    (results,) = out.rglob("results_*.json")
    items = {}
    for task in TASKS:
        (path,) = out.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        items[task] = {line["doc_id"]: line["filtered_resps"] for line in lines}
    return json.loads(results.read_text(encoding="utf-8")), items, printed


def test_two_processes_give_the_metrics_of_one(ranks: Ranks, word_folder: Path, tmp_path: Path) -> None:
    alone = lm_eval.simple_evaluate(
        model=TurboQuantLM(pretrained=str(word_folder), device="cpu", batch_size=1, preset="tq4"), tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(DATA), include_defaults=False), limit=ITEMS, bootstrap_iters=0,
    )  # fmt: skip
    shared, items, printed = two_processes(ranks, word_folder, tmp_path)
    for task, metric in TASKS.items():
        assert shared["results"][task][metric] == pytest.approx(alone["results"][task][metric], rel=1e-6)
        assert len(items[task]) == ITEMS
        for sample in alone["samples"][task]:
            assert as_numbers(items[task][sample["doc_id"]]) == as_numbers(sample["filtered_resps"])
        used, expected = (found["config"]["tq_hf"]["tasks"][task] for found in (shared, alone))
        assert used["texts"] == expected["texts"] == ITEMS
        assert used["packed_share"] == pytest.approx(expected["packed_share"], rel=1e-6) and used["packed_share"] > 0.5
        assert [text.count(f"tq-hf, {task}: ") for text in printed] == [1, 0]


def test_a_sharded_model_gives_the_metrics_of_a_whole_one(ranks: Ranks, word_folder: Path, tmp_path: Path) -> None:
    """lm-eval's own tensor parallelism: both ranks score all texts, and one of them reports."""
    task = "tq_prose"
    alone = lm_eval.simple_evaluate(
        model=TurboQuantLM(pretrained=str(word_folder), device="cpu", batch_size=1, preset="tq4"), tasks=[task],
        task_manager=TaskManager(include_path=str(DATA), include_defaults=False), limit=1, bootstrap_iters=0,
    )  # fmt: skip
    argv = ["lm-eval", "run", "--model", "tq-hf", "--batch_size", "1", "--model_args"]
    argv += [
        f"pretrained={word_folder},preset=tq4,dtype=float32,tp_plan=auto",
        "--include_path",
        str(DATA),
        "--tasks",
        task,
    ]
    printed = ranks.run(on_ranks.command_line, [*argv, "--limit", "1", "--output_path", str(tmp_path)])
    (path,) = tmp_path.rglob("results_*.json")
    shared = json.loads(path.read_text(encoding="utf-8"))
    for name in ("word_perplexity,none", "bits_per_byte,none"):
        assert shared["results"][task][name] == pytest.approx(alone["results"][task][name], rel=1e-3)
    used, whole = (found["config"]["tq_hf"]["tasks"][task] for found in (shared, alone))
    assert used["packed_share"] == whole["packed_share"] > 0.5
    assert used["cache_bytes"] == pytest.approx(whole["cache_bytes"] / 2, rel=0.01)  # tables are on both
    assert [text.count("tq-hf, tq_prose: ") for text in printed] == [1, 0]


def as_numbers(answers: Any) -> list[Any]:
    """An item's answers to be compared: texts, log-probabilities, and which of them are the greedy ones."""
    flat = [str(value) for answer in answers for value in (answer if isinstance(answer, (list, tuple)) else [answer])]
    return [pytest.approx(float(text), rel=1e-5) if NUMBER.fullmatch(text) else text for text in flat]
