"""The command `tq_hf` as a whole: help, exit codes, presets, lm-eval."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.test_readme import table
from tq_hf import PRESETS, __version__
from tq_hf.cli import options, presets
from tq_hf.errors import RequestError, is_out_of_memory

ROOT = Path(__file__).parents[1]
COMMANDS = ("chat", "generate", "estimate", "bench", "presets", "demo", "lm-eval")


def python(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, cwd=ROOT, timeout=120, **options)  # type: ignore[call-overload]


def test_help_names_the_commands(tq_hf: CommandLine) -> None:
    result = tq_hf("--help")
    assert result.code == 0
    for name in COMMANDS:
        assert name in result.out


@pytest.mark.parametrize("name", COMMANDS[:-2])
def test_each_command_has_help_with_an_example(tq_hf: CommandLine, name: str) -> None:
    result = tq_hf(name, "--help")
    assert result.code == 0
    assert name == "presets" or f"tq_hf {name}" in result.out
    assert "--json" in result.out


def test_the_module_runs_as_well() -> None:
    done = python("-m", "tq_hf", "--version")
    assert (done.returncode, done.stdout) == (0, f"tq_hf {__version__}\n")
    done = python("-m", "tq_hf", "nothing")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: No such command 'nothing' (--help lists the options).\n"


def test_completion_is_there(tq_hf: CommandLine) -> None:
    done = python("-m", "tq_hf", env={"_TQ_HF_COMPLETE": "complete_bash", "COMP_WORDS": "tq_hf est", "COMP_CWORD": "1"})
    assert "estimate" in done.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["estimate", "--context", "many"], "Invalid value for '--context'"),
        (["estimate", "--nope"], "No such option: --nope"),
        (["generate", "--max-new-tokens", "0", "x"], "Invalid value for '--max-new-tokens'"),
        (["presets", "tq4"], "unexpected extra argument"),
    ],
)
def test_mistakes_are_one_line(tq_hf: CommandLine, argv: list[str], said: str) -> None:
    assert said in tq_hf(*argv).error


def test_presets_are_those_of_the_readme(tq_hf: CommandLine) -> None:
    rows = tq_hf("presets", "--json").json["presets"]
    assert [row["preset"] for row in rows] == list(PRESETS)
    written = table()
    for row in rows:
        cells = [row["keys"], row["values"], row["exact"], f"{row['bytes']:g}", f"{row['ratio']:.2f}"]
        assert cells == written[row["preset"]]
    shown = tq_hf("presets").out
    for row in rows:
        (line,) = [line for line in shown.splitlines() if line.split()[:1] == [row["preset"]]]
        assert row["keys"] in line and row["values"] in line and line.split()[-1] == f"{row['ratio']:.2f}"
    assert list(presets.PURPOSES) == list(PRESETS)


def test_a_narrow_terminal_wraps_text_and_cuts_no_number(
    tq_hf: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")
    shown = tq_hf("presets").out
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines()]
    assert max(map(len, lines)) == 90 and len(lines) > 20
    assert "3.76" in shown and "tq3v2" in shown and "…" not in shown


def test_lm_eval_takes_all_that_follows(tq_hf: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    import lm_eval.__main__

    seen: list[list[str]] = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: seen.append(sys.argv[:]))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    for argv in (["run", "--model", "tq-hf", "--tasks", "a,b", "-h"], ["--help"], []):
        assert tq_hf("lm-eval", *argv).code == 0
        assert seen.pop() == ["lm-eval", *argv]


def test_failures_have_codes_of_their_own(tq_hf: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def fail_with(error: BaseException) -> None:
        def failing(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(presets, "print_table", failing)

    fail_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual."))
    result = tq_hf("presets")
    assert result.code == 1
    assert result.err.startswith("error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB): take a shorter")
    fail_with(KeyboardInterrupt())
    assert tq_hf("presets").code == 130
    fail_with(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        tq_hf("presets")


def test_what_counts_as_out_of_memory() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value) and is_out_of_memory(MemoryError())
    for said in (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",  # pinned memory
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(RuntimeError("shapes do not fit")) and not is_out_of_memory(OSError("out of memory"))


def test_a_reader_that_has_seen_enough(tq_hf: CommandLine) -> None:
    """A closed pipe is no error to talk about."""
    code = "import sys, tq_hf.cli; sys.exit(tq_hf.cli.main(['presets', '--json']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tq_hf", "presets", "--json"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device: make room on the disk.\n"


def test_no_command_shows_the_help_and_no_empty_error() -> None:
    done = python("-m", "tq_hf")
    assert done.returncode == 2 and "Usage: tq_hf" in done.stdout and "error" not in done.stderr


def test_a_seed_that_torch_does_not_take() -> None:
    with pytest.raises(RequestError, match="--seed 100000000000000000000 is not possible"):
        options.sampling(1.0, 1.0, 10**20)
