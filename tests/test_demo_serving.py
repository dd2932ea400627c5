"""The command `tq_hf demo`, and the Space's folder: they serve, and refuse in one line."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("gradio", reason="the demo needs the extra demo")

from tests.word_model import save_word_model
from tq_hf.cli import main
from tq_hf.commands import RequestError
from tq_hf.demo.app import build, launch

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("words")
    save_word_model(path)
    return str(path)


def test_the_app_refuses_what_it_cannot_begin_with(folder: str) -> None:
    with pytest.raises(RequestError, match="preset='tq9' is unknown"):
        build(CPU, folder, "tq9")
    with pytest.raises(RequestError, match="does not exist"):
        build(CPU, "/no/model")


def test_only_one_visitor_at_a_time_uses_the_model(folder: str) -> None:
    blocks = build(CPU, folder)
    limits = {fn.concurrency_id: fn.concurrency_limit for fn in blocks.fns.values() if fn.concurrency_id == "model"}
    assert limits == {"model": 1} and blocks.analytics_enabled is False
    assert sum(fn.concurrency_id == "model" for fn in blocks.fns.values()) == 2
    assert all(not fn.queue for fn in blocks.fns.values() if fn.name in ("stop", "begin", "restart"))


def test_nobody_can_leave_files_on_the_server(folder: str) -> None:
    blocks = build(CPU, folder)
    _, address, _ = launch(blocks, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\nmany bytes\r\n--x--\r\n'
    upload = urllib.request.Request(f"{address}gradio_api/upload", body)
    upload.add_header("Content-Type", "multipart/form-data; boundary=x")
    try:
        with pytest.raises(urllib.error.HTTPError, match="413"):
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(upload, timeout=20)
    finally:
        blocks.close(verbose=False)


@pytest.mark.parametrize(("host", "public"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_who_listens_to_all_addresses_has_strangers(
    folder: str, monkeypatch: pytest.MonkeyPatch, host: str, public: bool
) -> None:
    def built(*args: Any, **options: Any) -> Any:
        assert options == {"public": public}
        raise RequestError("as far as this")

    monkeypatch.setattr("tq_hf.demo.build", built)
    assert main(["demo", "--model", folder, "--host", host]) == 2


def test_the_command_refuses_in_one_line(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["demo", "--model", "/no/model"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: the model folder /no/model does not exist.")
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["demo"]) == 2
    assert "pip install 'tq-hf[demo]'" in capsys.readouterr().err


def test_the_command_serves_until_ctrl_c(folder: str) -> None:
    command = [sys.executable, "-m", "tq_hf", "demo", "--model", folder, "--device", "cpu"]
    # Where the tests run in a shell's background, Ctrl-C is ignored, and what they start would inherit that.
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, preexec_fn=hear) as process:
        assert "tq_hf: a packed KV cache" in fetch(served_at(process, process.stderr))
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()


def test_a_port_that_is_taken_is_one_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["demo", "--model", folder, "--device", "cpu", "--port", str(port)]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"error: --port {port} cannot be listened on: choose another")


def served_at(process: subprocess.Popen[str], output: Any) -> str:
    """The address that a server prints; a server that says nothing is killed after a while."""
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        for line in output:
            if match := re.search(r"http://127\.0\.0\.1:\d+", line):
                return match[0]
        return pytest.fail("the server ended without an address")
    finally:
        watchdog.cancel()


def fetch(address: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(address, timeout=20).read().decode()


SPACE = ROOT / "scripts" / "space"


def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_spaces_header_is_complete() -> None:
    _, header, text = (SPACE / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    found = yaml.safe_load(header)
    pinned = re.search(r"^gradio==(\S+)$", (ROOT / "scripts/constraints.txt").read_text(), flags=re.M)
    assert found["sdk"] == "gradio" and found["sdk_version"] == pinned[1] and (SPACE / found["app_file"]).is_file()
    assert found["license"] == "apache-2.0" and len(found["short_description"]) <= 60
    assert found["suggested_hardware"] == "cpu-basic" and isinstance(found["python_version"], str)
    assert {found["colorFrom"], found["colorTo"]} <= {
        "red",
        "yellow",
        "green",
        "blue",
        "indigo",
        "purple",
        "pink",
        "gray",
    }
    assert "tq_hf demo" in text


def test_the_spaces_requirements_are_the_packages() -> None:
    project = pyproject()
    extras = project["optional-dependencies"]
    needed = {*project["dependencies"], *extras["demo"], *extras["embedded"]}
    needed = {line for line in needed if not line.startswith(("gradio", "tq-hf"))}
    lines = (SPACE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert {line for line in lines if not line.startswith("#")} == needed


def test_the_space_runs_from_a_folder_with_only_the_package_beside_it(tmp_path: Path, folder: str) -> None:
    shutil.copytree(SPACE, tmp_path / "space")
    shutil.copytree(ROOT / "tq_hf", tmp_path / "space" / "tq_hf", ignore=shutil.ignore_patterns("__pycache__"))
    # Instead of the embedded model, which would have to be fetched, the one in a folder.
    code = (
        "import runpy, sys, tq_hf.embedded_model as e, pathlib\n"
        f"e.embedded_model = lambda: pathlib.Path({folder!r})\n"
        "runpy.run_path('app.py', run_name='__main__')\n"
    )
    names = ("PATH", "HOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "PYTHONPATH": ".",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], cwd=tmp_path / "space", env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert "tq_hf: a packed KV cache" in fetch(served_at(process, process.stdout))
        finally:
            process.terminate()
