"""`tq_hf chat`: turns on one cache, and everything that may happen between them."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.command_line import CommandLine, Result
from tests.test_cli_generate import Stdin, interrupt_at
from tests.word_model import save_word_model, words
from tq_hf.generation.conversation import Conversation, encode_chat
from tq_hf.generation.streaming import Stream

ROOT = Path(__file__).parents[1]
LONG = " ".join((words() * 3)[:150])


class Chat:
    """`tq_hf chat` over these lines."""

    def __init__(self, tq_hf: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tq_hf, self.folder, self.monkeypatch = tq_hf, folder, monkeypatch

    def __call__(self, lines: list[str], *argv: Any) -> Result:
        self.monkeypatch.setattr("sys.stdin", Stdin("\n".join(lines) + "\n"))
        return self.tq_hf("chat", "--model", self.folder, "-n", 6, *argv)


@pytest.fixture
def chat(tq_hf: CommandLine, word_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    return Chat(tq_hf, word_folder, monkeypatch)


def answers(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.out.splitlines()]


def test_a_turn_goes_on_from_the_cache(chat: Chat, word_folder: Path) -> None:
    first, second = answers(chat([LONG, "", "Question :"], "--json"))
    tokenizer = AutoTokenizer.from_pretrained(word_folder)
    messages = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "Question :"},
    ]
    # The newest token of an answer is not cached yet.
    assert first["tokens"] == encode_chat(tokenizer, messages[:1]).shape[1] + first["new_tokens"] - 1
    assert second["tokens"] == encode_chat(tokenizer, messages).shape[1] + second["new_tokens"] - 1
    assert second["cache_bytes_bf16"] > first["cache_bytes_bf16"] > first["cache_bytes"] > 0


def test_only_what_is_new_is_computed(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, computed = LlamaForCausalLM.forward, []

    def counted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        computed.append(input_ids.shape[1])
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    chat([LONG, "Question :"])
    assert computed[0] > 150
    assert max(computed[1:]) < 20


def test_commands(chat: Chat) -> None:
    result = chat([LONG, "/stats", "/reset", "/stats", "/help", "/nothing", "Question", "/exit", "Answer"], "--json")
    first, stats, empty, last = answers(result)
    assert {name: stats[name] for name in ("tokens", "cache_bytes")} == {
        name: first[name] for name in ("tokens", "cache_bytes")
    }
    assert (empty["tokens"], empty["cache_bytes"]) == (0, 0)
    assert last["tokens"] < 20
    assert "The chat starts anew, with an empty cache." in result.err
    assert result.err.count("/stats shows the cache") == 3 and "/nothing is unknown." in result.err
    text = chat([LONG, "/stats"])
    assert "packed tokens" in text.out and "tokens in the cache" in text.out
    assert "where bfloat16 takes" in text.err


def test_a_system_message_survives_a_reset(chat: Chat) -> None:
    plain, with_system, again = (
        answers(chat(lines, *argv, "--json"))[-1]["tokens"] - answers(chat(lines, *argv, "--json"))[-1]["new_tokens"]
        for lines, argv in (
            (["Question"], []),
            (["Question"], ["--system", "Answer"]),
            ([LONG, "/reset", "Question"], ["--system", "Answer"]),
        )
    )
    assert plain < with_system == again


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 3)
    first, second = answers(chat([LONG, "Question"], "-n", "30", "--json"))
    assert first["stopped"] and first["new_tokens"] <= 4
    assert not second["stopped"] and second["tokens"] > first["tokens"]


def test_ctrl_c_again_while_the_answer_ends(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    close, presses = Stream.close, [KeyboardInterrupt, KeyboardInterrupt]

    def impatient(self: Stream) -> None:
        if presses:
            raise presses.pop()
        close(self)

    interrupt_at(monkeypatch, 3)
    monkeypatch.setattr(Stream, "close", impatient)
    result = chat([LONG, "Question"], "-n", "30", "--json")
    assert result.err.count("The answer ends after this step") == 2
    assert [answer["stopped"] for answer in answers(result)] == [True, False]


def test_ctrl_c_before_the_answer_begins(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    reply, presses = Conversation.reply, [None, KeyboardInterrupt, None]

    def interrupted(self: Conversation, *args: Any, **kwargs: Any) -> Stream:
        stream = reply(self, *args, **kwargs)  # which has cropped the cache
        if (press := presses.pop()) is not None:
            raise press
        return stream

    monkeypatch.setattr(Conversation, "reply", interrupted)
    result = chat(["Question", LONG, "Answer"], "--json")
    assert "Stopped before the answer began: this turn is taken back." in result.err
    monkeypatch.setattr(Conversation, "reply", reply)
    assert [a["text"] for a in answers(result)] == [a["text"] for a in answers(chat(["Question", "Answer"], "--json"))]


def test_input_that_is_no_text(tq_hf: CommandLine, word_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("chat", "generate"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
        assert "standard input is no UTF-8 text" in tq_hf(command, "--model", word_folder).error


def test_out_of_memory_takes_the_turn_back(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, passes = LlamaForCausalLM.forward, []

    def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        if len(passes) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", full)
    result = chat(["Question", LONG, "Answer"], "--json")
    assert "this turn is taken back; /reset, or take a shorter text" in result.err
    first, last = answers(result)
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    without = answers(chat(["Question", "Answer"], "--json"))[1]
    assert (last["text"], last["tokens"]) == (without["text"], without["tokens"])
    assert first["tokens"] < last["tokens"]


def test_other_errors_are_not_hidden(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(LlamaForCausalLM, "forward", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        chat(["Question"])


def test_a_full_context_says_what_to_do(tq_hf: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_word_model(tmp_path, max_position_embeddings=180)
    chat = Chat(tq_hf, tmp_path, monkeypatch)
    result = chat([LONG, LONG, "/reset", "Question"], "--json")
    assert "the context is full" in result.err and "/reset starts a new chat" in result.err
    assert len(answers(result)) == 2


def test_a_model_without_a_chat_template(tq_hf: CommandLine, base_folder: Path) -> None:
    error = tq_hf("chat", "--model", base_folder).error
    assert error.startswith("this model's tokenizer has no chat template: choose an instruction-tuned model")


def test_a_template_that_takes_no_system_message(tq_hf: CommandLine, tmp_path: Path) -> None:
    save_word_model(tmp_path)
    template = tmp_path / "chat_template.jinja"
    refusal = "{{ raise_exception('System role not supported') }}"
    template.write_text(f"{{% if messages[0]['role'] == 'system' %}}{refusal}{{% endif %}}{template.read_text()}")
    assert "System role not supported" in tq_hf("chat", "--model", tmp_path, "--system", "Answer").error


def test_an_unknown_preset(tq_hf: CommandLine, word_folder: Path) -> None:
    assert "preset='tq9' is unknown" in tq_hf("chat", "--model", word_folder, "-c", "tq9").error


def test_in_a_terminal(word_folder: Path) -> None:
    """Ctrl-C where nothing runs, and Ctrl-D."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tq_hf", "chat", "--model", str(word_folder), "-n", "4"],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = b""

    def wait_for(text: bytes, again: Callable[[], object] = lambda: None) -> None:
        """Read until `text` is there; `again` is called in each second without output."""
        nonlocal seen
        end = time.monotonic() + 90
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)
            else:
                again()
        seen = seen.partition(text)[2]

    def press_ctrl_c() -> None:
        process.send_signal(signal.SIGINT)

    try:
        wait_for(b"> ")
        press_ctrl_c()
        # Python's readline sees one only once it waits for keys, which it does a moment after the prompt.
        wait_for(b"Ctrl-D or /exit ends the chat.", again=press_ctrl_c)
        wait_for(b"> ")
        os.write(ours, b"Question\n")
        wait_for(b"no page is packed yet]")
        wait_for(b"> ")
        os.write(ours, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
