"""`scripts/run`: its options, its results and its one-line errors, on a tiny model in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare  # scripts/compare.py
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from tq_hf import embedded_model

ROOT = Path(__file__).parents[1]
KEYS = ["model", "preset", "prompt_tokens", "new_tokens", "bytes_dynamic", "bytes_packed", "ratio", "packed_tokens"]
KEYS += ["exact_tokens", "kl", "top1_agreement", "tokens_per_s_dynamic", "tokens_per_s_packed", "versions"]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Any) -> Path:
    """A model folder: the tiny Llama, and a tokenizer with one token a word."""
    vocabulary = {"<unk>": 0} | {f"w{i}": i for i in range(1, 99)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tiny_model.save_pretrained(tmp_path / "tiny")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def prompt(tokens: int) -> str:
    return " ".join(f"w{3 + i * i % 90}" for i in range(tokens))


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a refused request prints."""
    assert compare.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in captured.err
    assert captured.err.rstrip().endswith(lines[0])
    return lines[0]


def test_results_have_the_documented_keys(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = ["--model", str(folder), "--prompt", prompt(300), "--max-new-tokens", "9", "--device", "cpu", "--json", str(out)]
    assert compare.main(argv) == 0
    result = json.loads(out.read_text())
    assert list(result) == KEYS
    assert result["model"] == str(folder) and result["preset"] == "tq4"
    assert (result["prompt_tokens"], result["new_tokens"]) == (300, 9)
    assert result["bytes_dynamic"] == 3 * 2 * 308 * 64 * 2  # layers, heads, tokens, K and V, bfloat16
    assert result["ratio"] == result["bytes_dynamic"] / result["bytes_packed"]
    # 4 sinks and a window of 64 stay exact; of the 240 tokens between, 3 pages of 64 are full.
    assert (result["packed_tokens"], result["exact_tokens"]) == (192, 116)
    assert 0 < result["kl"] < 1 and 0.5 < result["top1_agreement"] <= 1
    assert set(result["versions"]) >= {"python", "torch", "transformers"}
    text = capsys.readouterr().out
    for part in ("DynamicCache:", "TurboQuantCache:", "times smaller", "tokens/s", "top-1 agreement", "bfloat16 on cpu"):
        assert part in text


def test_a_prompt_file_and_another_preset(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text(prompt(200))
    out = tmp_path / "out.json"
    argv = ["--model", str(folder), "--prompt-file", str(tmp_path / "prompt.txt"), "--preset", "raw", "--json", str(out)]
    assert compare.main([*argv, "--max-new-tokens", "5", "--device", "cpu"]) == 0
    result = json.loads(out.read_text())
    assert result["preset"] == "raw" and result["prompt_tokens"] == 200
    assert result["top1_agreement"] > 0.98 and result["kl"] < 1e-3


def test_the_default_prompt_is_long_enough() -> None:
    assert len(compare.DEFAULT_PROMPT.read_text().split()) >= 1500


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--preset", "tq9"], "preset='tq9' is unknown: expected one of"),
        (["--model", "./nowhere/model"], "the model folder ./nowhere/model does not exist"),
        (["--model", "./nowhere"], "the model folder ./nowhere does not exist"),
        (["--model", "/nowhere"], "the model folder /nowhere does not exist"),
        (["--prompt-file", "nowhere.txt"], "the prompt file nowhere.txt cannot be read"),
        (["--device", "quantum"], "--device quantum is not available here"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 is not possible"),
        (["--max-new-tokens", "many"], "invalid int value: 'many'"),
        (["--json", "nowhere/out.json"], "the folder"),
        (["--prompt", "x", "--prompt-file", "y"], "not allowed with argument"),
        (["--colour"], "unrecognized arguments: --colour (--help lists the options)"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_a_wrong_request_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert expected in error(capsys, *argv)


def test_a_hub_id_without_a_connection_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*args: Any, **kwargs: Any) -> Any:
        raise OSError("We couldn't connect to the hub\nto load this file.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    assert "hub id (no folder of that name exists) some/model: We couldn't connect" in error(capsys, "--model", "some/model")


def test_no_embedded_model_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Path:
        raise embedded_model.EmbeddedModelError("no network.")

    monkeypatch.setattr(embedded_model, "embedded_model", failing)
    assert error(capsys) == "error: no network."


def test_a_folder_without_a_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no model could be loaded from the folder" in error(capsys, "--model", str(tmp_path))


def test_a_prompt_that_packs_nothing_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = error(capsys, "--model", str(folder), "--prompt", prompt(131), "--device", "cpu")
    assert "the prompt has 131 tokens, too few to pack a page: this preset needs at least 132" in line


def test_more_than_the_context_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = error(capsys, "--model", str(folder), "--prompt", prompt(1000), "--max-new-tokens", "25", "--device", "cpu")
    assert "1000 prompt tokens and 25 new ones are more than the model's context of 1024" in line


def test_the_command_itself_reports_and_exits_2() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "compare.py", "--preset", "tq9"],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: preset='tq9'") and done.stderr.count("\n") == 1


def test_the_shell_scripts_parse() -> None:
    for script in ("scripts/run", "scripts/test", "scripts/_venv", ".ci/run"):
        subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_a_wrong_python_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "run"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/no/python", "TQ_HF_VENV": str(tmp_path / "venv")},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: no Python 3.10 to 3.14 found at PYTHON=/no/python: install one, or set PYTHON to its path.\n"
    )
