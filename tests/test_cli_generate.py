"""`tq_hf generate`: text to standard output, one line about it to standard error, and prompts from everywhere."""

from __future__ import annotations

import io
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.command_line import CommandLine
from tests.word_model import words
from tq_hf import TurboQuantCache, commands
from tq_hf.generation.comparison import cache_argument
from tq_hf.generation.conversation import encode_prompt

PROMPT = " ".join((words() * 3)[:200])


class Stdin(io.StringIO):
    def __init__(self, text: str = "", is_terminal: bool = False) -> None:
        super().__init__(text)
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def expected(folder: Path, text: str, new: int) -> tuple[str, int]:
    """What `generate()` itself makes of it, and the cache's bytes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, cache = encode_prompt(tokenizer, text), TurboQuantCache(model.config, "tq4")
    given = {cache_argument(model): cache, "attention_mask": torch.ones_like(ids), "do_sample": False}
    output = model.generate(ids, max_new_tokens=new, **given)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True), cache.nbytes


def test_text_and_figures(tq_hf: CommandLine, word_folder: Path) -> None:
    text, nbytes = expected(word_folder, PROMPT, 12)
    argv = ["generate", "--model", word_folder, "--dtype", "float32", "-n", 12]
    result = tq_hf(*argv, PROMPT)
    assert (result.code, result.out.strip()) == (0, text.strip())
    last = result.err.splitlines()[-1]
    assert f"cache {nbytes / 1024:.2f} KiB where bfloat16 takes" in last and "tokens/s" in last
    figures = tq_hf(*argv, PROMPT, "--json").json
    assert (figures["text"].strip(), figures["cache_bytes"]) == (text.strip(), nbytes)
    assert figures["new_tokens"] <= 12 and figures["packed_tokens"] > 0 and not figures["stopped"]
    assert figures["ratio"] == figures["cache_bytes_bf16"] / nbytes


def test_prompts_from_files_and_pipes(
    tq_hf: CommandLine, word_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    argv = ["generate", "--model", word_folder, "-n", 3, "--json"]
    wanted = tq_hf(*argv, PROMPT).json
    counts = [tq_hf(*argv, "--prompt-file", file).json]
    for dash in ([], ["-"]):
        monkeypatch.setattr("sys.stdin", Stdin(PROMPT + "\n"))
        counts.append(tq_hf(*argv, *dash).json)
    assert [(c["prompt_tokens"], c["text"]) for c in counts] == [(wanted["prompt_tokens"], wanted["text"])] * 3
    assert tq_hf(*argv, PROMPT, "--plain").json["prompt_tokens"] == 200 < wanted["prompt_tokens"]


def test_bf16_and_sampling(tq_hf: CommandLine, word_folder: Path) -> None:
    argv = ["generate", "--model", word_folder, "-n", 8, PROMPT]
    result = tq_hf(*argv, "--cache", "bf16")
    assert "times smaller" not in result.err and "tokens/s" in result.err
    assert tq_hf(*argv, "--cache", "bf16", "--json").json["ratio"] == 1
    drawn = [tq_hf(*argv, "--temperature", 2, "--seed", seed, "--json").json["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert "no page is packed yet" in tq_hf("generate", "--model", word_folder, "-n", 2, "Question").err


def test_the_context_ends_the_answer(tq_hf: CommandLine, base_folder: Path) -> None:
    argv = ["generate", "--model", base_folder, "-n", 500]
    result = tq_hf(*argv, " ".join(PROMPT.split()[:190]), "--json")
    assert "The model's context leaves room for 110 new tokens." in result.err
    assert result.json["new_tokens"] <= 110
    error = tq_hf(*argv, f"{PROMPT} {PROMPT}").error
    assert error.startswith("the context is full: 400 tokens, and the model was made for 300")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["x", "--cache", "tq9"], "preset='tq9' is unknown: expected one of tq4"),
        (["x", "--cache", "bf16", "--set", "page_size=32"], "--set does not fit --cache bf16"),
        (["x", "--set", "page_size=48"], "page_size=48 is not allowed"),
        (["x", "--dtype", "int8"], "--dtype int8 is unknown"),
        (["x", "--device", "abacus"], "--device abacus is not available here"),
        (["x", "--prompt-file", "y"], "a prompt and --prompt-file are given: expected one of them."),
        (["--prompt-file", "no/such/file"], "the prompt file no/such/file cannot be read"),
        ([" "], "the prompt is empty: expected some text."),
    ],
)
def test_requests_that_cannot_be_served(tq_hf: CommandLine, word_folder: Path, argv: list[str], said: str) -> None:
    assert said in tq_hf("generate", "--model", word_folder, *argv).error


def test_no_prompt_at_a_terminal(tq_hf: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(is_terminal=True))
    assert tq_hf("generate").error.startswith('no prompt: give one as an argument (tq_hf generate "Once upon")')


def test_no_model_of_that_name(tq_hf: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "Without --model, a small embedded model is used."
    assert tq_hf("generate", "x", "--model", "no/such/folder").error == (
        f"the model folder no/such/folder does not exist. {hint}"
    )

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection.")

    monkeypatch.setattr(commands.AutoConfig, "from_pretrained", unreachable)
    error = tq_hf("generate", "x", "--model", "some/model").error
    assert "couldn't connect" in error and error.endswith(hint)


def test_out_of_memory(tq_hf: CommandLine, word_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(LlamaForCausalLM, "forward", full)
    result = tq_hf("generate", "--model", word_folder, "x", "--json")
    assert (result.code, result.out) == (1, "")
    assert result.err.splitlines()[-1].startswith("error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB):")


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_what_the_cache_refuses_is_no_traceback(
    tq_hf: CommandLine, word_folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("head_dim=300 (of the keys) has no packed layout: expected an even head_dim from 16 to 256.")

    monkeypatch.setattr(LlamaForCausalLM, "forward", refuse)
    monkeypatch.setattr("sys.stdin", Stdin("Question\n"))
    result = tq_hf(command, "--model", word_folder)
    assert (result.code, result.out) == (0 if command == "chat" else 2, "")
    assert "head_dim=300 (of the keys) has no packed layout" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("argv", [["--temperature", "nan"], ["--temperature", "inf"], ["--top-p", "nan"], ["--top-p", "0"]])
def test_sampling_at_the_edge(tq_hf: CommandLine, word_folder: Path, argv: list[str]) -> None:
    result = tq_hf("generate", "--model", word_folder, "-n", 2, "Question", "--temperature", 1, *argv)
    assert result.code in (0, 2) and "Traceback" not in result.err


def test_ctrl_c_shows_what_there_is(tq_hf: CommandLine, word_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 4)
    result = tq_hf("generate", "--model", word_folder, "-n", 300, PROMPT, "--json")
    assert result.code == 130
    assert result.json["stopped"] and 3 <= result.json["new_tokens"] <= 5


def interrupt_at(monkeypatch: pytest.MonkeyPatch, forward_pass: int) -> None:
    """Press Ctrl-C while the model computes its n-th forward pass."""
    forward, passes = LlamaForCausalLM.forward, []

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        if len(passes) == forward_pass:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", interrupted)
