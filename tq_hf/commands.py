"""What the commands in `scripts/` share: mistakes reported in one line, and a model with its tokenizer."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from . import embedded_model

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class RequestError(Exception):
    """A request that cannot be served; the message is one line."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message} (--help lists the options)")


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, its tokenizer, and the name to print for it."""

    name: str
    model: Any
    tokenizer: Any


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__


def choose_device(name: str | None) -> torch.device:
    """The device of that name; None: CUDA where there is one.

    Raises:
        RequestError: a device that is unknown, not there, or neither CPU nor CUDA.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type not in ("cpu", "cuda"):
            raise RequestError(f"--device {name} is not supported: expected cpu or cuda.")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RequestError(f"--device {name} is not available here: {first_line(error)}") from error
    return device


def load(name: str | None, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Loaded:
    """A model and its tokenizer.

    Args:
        name: a folder of `save_pretrained` or a hub id; None: the embedded model.
        dtype: the model's; bfloat16 is what packed bytes are compared with.

    Raises:
        RequestError: there is no such model, or it cannot be loaded.
    """
    if name is None:
        try:
            source, shown = str(embedded_model.embedded_model()), embedded_model.NAME
        except embedded_model.EmbeddedModelError as error:
            raise RequestError(str(error)) from error
    else:
        source = shown = name
        if not Path(name).is_dir() and not HUB_ID.fullmatch(name):
            raise RequestError(f"the model folder {name} does not exist.")
    print(f"Loading {shown} ...", file=sys.stderr, flush=True)
    try:
        AutoConfig.from_pretrained(source)  # where there is no model, this says so most clearly
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        kind = "folder" if Path(source).is_dir() else "hub id (no folder of that name exists)"
        raise RequestError(f"no model could be loaded from the {kind} {shown}: {first_line(error)}") from error
    return Loaded(shown, model.to(device).eval(), tokenizer)


def versions() -> dict[str, str]:
    """The releases that a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("tq-hf", "torch", "transformers", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[package.replace("-", "_")] = version(package)
    return found | {"tq_hf_code": code_fingerprint()}


def code_fingerprint(folder: Path = Path(__file__).parent) -> str:
    """12 hex digits that change with the source in a folder, this package's by default: which code a result was measured
    with."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def serve(run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a command and return its exit code: 2 and one line for a request that cannot be served."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry of a missing connection
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
