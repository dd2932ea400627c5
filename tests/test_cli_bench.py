"""`tq_hf bench`: each cache at each context in one run, and OOM as a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.command_line import CommandLine
from tq_hf import estimate_memory
from tq_hf.generation import comparison


def test_rows_and_bytes(tq_hf: CommandLine, word_folder: Path) -> None:
    argv = ["bench", "--model", word_folder, "-n", 5, "--context", 200, "--context", 300, "-c", "bf16", "-c", "tq4"]
    result = tq_hf(*argv, "--json").json
    assert [(r["cache"], r["context"]) for r in result["rows"]] == [(c, n) for n in (200, 300) for c in ("bf16", "tq4")]
    config = AutoConfig.from_pretrained(word_folder)
    for row in result["rows"]:
        made = estimate_memory(config, "tq4", row["context"] + 4, new_tokens=4)  # the newest is not cached
        assert row["cache_bytes"] == (made.bytes_dynamic if row["cache"] == "bf16" else made.nbytes)
        assert row["tokens_per_s"] > 0 and row["first_token_seconds"] > 0 and not row["oom"]
    assert (result["new_tokens"], result["dtype"]) == (5, "bfloat16")
    assert result["versions"]["torch"] == torch.__version__
    text = tq_hf(*argv).out
    last = [line for line in text.splitlines() if line.strip()][-1].split()
    assert last[:2] == ["tq4", "300"]
    assert last[-1] == f"{result['rows'][2]['cache_bytes'] / result['rows'][3]['cache_bytes']:.2f}"


def test_each_run_is_warmed_up(tq_hf: CommandLine, word_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, int]] = []
    timed = comparison.generate_timed

    def noted(model: Any, ids: Any, cache: Any, new: int) -> Any:
        runs.append((type(cache).__name__, new))
        return timed(model, ids, cache, new)

    monkeypatch.setattr(comparison, "generate_timed", noted)
    tq_hf("bench", "--model", word_folder, "-n", 6)  # 2,048 tokens and 6 new ones are more than its context
    assert runs == [(name, n) for name in ("DynamicCache", *["TurboQuantCache"] * 4) for n in (4, 6)]


def test_out_of_memory_is_a_row(tq_hf: CommandLine, word_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = comparison.generate_timed

    def small(model: Any, ids: Any, cache: Any, new: int) -> Any:
        if ids.shape[1] > 200 and type(cache).__name__ == "DynamicCache":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return timed(model, ids, cache, new)

    monkeypatch.setattr(comparison, "generate_timed", small)
    argv = ["bench", "--model", word_folder, "-n", 3, "--context", 300, "-c", "bf16", "-c", "tq2"]
    full, fits = tq_hf(*argv, "--json").json["rows"]
    assert full == {"cache": "bf16", "context": 300, "oom": True, "tokens_per_s": None, "first_token_seconds": None,
                    "cache_bytes": None}  # fmt: skip
    assert not fits["oom"]
    result = tq_hf(*argv)
    assert result.code == 0
    (row,) = [line for line in result.out.splitlines() if "OOM" in line]
    assert row.split() == ["bf16", "300", "OOM"]

    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(comparison, "generate_timed", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        tq_hf(*argv)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-c", "tq9"], "preset='tq9' is unknown"),
        (["--context", "0"], "--context 0 is not possible: expected at least 1."),
        (["--context", "290"], "--context 290 and 32 new tokens are more than the model's context of 300."),
        (["-n", "1"], "Invalid value for '--max-new-tokens'"),
        ([], "--context 512 and 32 new tokens are more than the model's context of 300."),
    ],
)
def test_requests_that_cannot_be_served(tq_hf: CommandLine, base_folder: Path, argv: list[str], said: str) -> None:
    assert said in tq_hf("bench", "--model", base_folder, *argv).error
