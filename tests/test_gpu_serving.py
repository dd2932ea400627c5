"""The demo's server, the Space and the command line with the model on a GPU, as users meet them: by HTTP, as processes."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("gradio", reason="the demo needs the extra demo")

from tests.test_demo_serving import SPACE, fetch, served_at
from tests.test_gpu_demo import DEVICE, ON_GPU, QUESTION, ROOT, TEXT, number
from tests.test_gpu_demo import folder as folder  # a fixture
from tq_hf.cli.bench import _where
from tq_hf.commands import load_config
from tq_hf.demo.app import build, launch
from tq_hf.sizing.estimate import estimate_memory

pytestmark = [pytest.mark.gpu, pytest.mark.network]
PYTHON = [sys.executable, "-u", "-X", "faulthandler"]
ENV = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_SERVER_NAME": "127.0.0.1"}
ENV["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class User:
    """A visitor's session, as the page's own script talks to the server."""

    def __init__(self, address: str) -> None:
        self.api, self.session = f"{address.rstrip('/')}/gradio_api", secrets.token_hex(6)
        config = json.loads(fetch(f"{address.rstrip('/')}/config"))
        self.handlers = {handler["api_name"]: handler for handler in config["dependencies"]}
        self.fields = {field["id"]: field for field in config["components"]}

    def call(self, name: str, **fields: Any) -> dict[str, Any]:
        """A handler's outputs by their elements' ids; inputs are `fields`, else what the page begins with."""
        handler, given = self.handlers[name], []
        for field in map(self.fields.get, handler["inputs"]):  # a `gr.State` stays with the server
            given.append(
                fields.get(field["props"].get("elem_id"), field["props"].get("value")) if field["type"] != "state" else None
            )
        body = {"data": given, "fn_index": handler["id"], "session_hash": self.session}
        if handler["queue"]:
            self.open("queue/join", body).close()
            events = (
                json.loads(line[6:]) for line in self.open(f"queue/data?session_hash={self.session}") if line[:5] == b"data:"
            )
            done = next(event for event in events if event["msg"] == "process_completed")
            assert done["success"], done
            values = done["output"]["data"]
        else:
            values = json.load(self.open("run/predict", body))["data"]
        return {self.fields[i]["props"].get("elem_id"): value for i, value in zip(handler["outputs"], values)}

    def open(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(f"{self.api}/{path}", None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=200)

    def ask(self, question: str, document: str = TEXT) -> dict[str, Any]:
        self.call("begin", message=question, document=document)
        return self.call("respond", limit=16)


def require_answered(end: dict[str, Any], question: str, folder: str) -> None:
    """The user's own question is answered, and the bytes are those of a cache of as many tokens."""
    assert [said["role"] for said in end["chat"]] == ["user", "assistant"] and question in json.dumps(end["chat"][0])
    new = int(re.search(r"(\d+) tokens, the first after", end["chat-status"])[1])
    made = estimate_memory(load_config(folder), "tq4", number(end["meter"], "tokens"), new_tokens=new - 1)
    assert number(end["meter"], "nbytes") == pytest.approx(made.nbytes, rel=0.02)
    assert made.packed_tokens > 0 and number(end["meter"], "bf16") == made.bytes_dynamic


def test_concurrent_users_wait_for_each_other(folder: str) -> None:
    blocks = build(DEVICE, folder)
    _, address, _ = launch(blocks, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    questions = [QUESTION, "Why was the station built?"]
    try:
        users = [User(address) for _ in questions]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(User.ask, users, questions))
    finally:
        blocks.close(verbose=False)
    for question, end in zip(questions, answers):
        require_answered(end, question, folder)


def said_until_the_end(process: subprocess.Popen[str]) -> str:
    """What a process prints that is about to end; the stacks of its threads if it does not."""
    try:
        return process.communicate(timeout=120)[0]
    except subprocess.TimeoutExpired:
        ended = process.poll()
        process.send_signal(signal.SIGABRT)
        pytest.fail(f"code {ended} after 120 s, {process.communicate(timeout=20)[0]}")


@pytest.mark.parametrize("name", ["command", "space"])
def test_servers_answer_until_ctrl_c(folder: str, name: str) -> None:
    command = ["-m", "tq_hf", "demo", "--device", DEVICE.type, "--model", folder] if name == "command" else ["app.py"]
    with subprocess.Popen(
        [*PYTHON, *command], cwd=SPACE, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            user = User(served_at(process, process.stdout))
            require_answered(user.ask(QUESTION), QUESTION, folder)
            # Only what runs on a CPU says so.
            assert ("This machine has no GPU" in json.dumps(list(user.fields.values()))) != ON_GPU
            process.send_signal(signal.SIGINT)
            said = said_until_the_end(process)
            assert process.returncode == (130 if name == "command" else 0) and "Traceback" not in said
        finally:
            process.kill()


def command(*argv: Any, lines: str = "") -> list[Any]:
    """What `python -m tq_hf ... --json` prints, line by line."""
    argv = [*PYTHON, "-m", "tq_hf", *map(str, argv), "--json"]
    done = subprocess.run(argv, cwd=ROOT, env=ENV, input=lines, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_generate_is_what_estimate_says(folder: str) -> None:
    (made,) = command("generate", "--model", folder, "--device", DEVICE.type, "-n", 12, lines=TEXT)
    assert torch.device(made["device"]).type == DEVICE.type and made["text"] and made["tokens_per_s"] > 0
    tokens = made["prompt_tokens"] + made["new_tokens"] - 1
    assert 0.5 * tokens < made["packed_tokens"] <= tokens and made["ratio"] > 1.5
    (counted,) = command(
        "estimate", "--config", folder, "-p", "tq4", "--context", tokens, "--new-tokens", made["new_tokens"] - 1
    )
    assert counted["presets"][0]["nbytes"] == pytest.approx(made["cache_bytes"], rel=0.02)
    assert counted["bytes_dynamic"] == made["cache_bytes_bf16"]


def test_bench_has_a_row_for_each_cache(folder: str) -> None:
    (found,) = command(
        "bench", "--model", folder, "--device", DEVICE.type, "-n", 8, "-c", "bf16", "-c", "tq4", "--context", 900
    )
    exact, packed = found["rows"]
    assert found["device"] == _where(DEVICE) and not exact["oom"] and not packed["oom"]
    assert exact["cache_bytes"] > 1.5 * packed["cache_bytes"] > 0 and packed["tokens_per_s"] > 0


def test_chat_answers_a_pipe(folder: str) -> None:
    lines = f"{' '.join(TEXT.split())}\n{QUESTION}\n/stats\n"
    first, second, stats = command("chat", "--model", folder, "--device", DEVICE.type, "-n", 8, lines=lines)
    assert first["text"] and second["tokens"] > first["tokens"] > 500 and stats["tokens"] == second["tokens"]
    assert stats["cache_bytes_bf16"] > stats["cache_bytes"] == second["cache_bytes"] > 0


def test_presets_are_listed() -> None:
    (found,) = command("presets")
    assert {"tq4", "tq3", "tq2"} <= {preset["preset"] for preset in found["presets"]}
