"""What all commands share: mistakes reported in one line, a model with its tokenizer, a config, a prompt."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
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
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from . import embedded_model
from .cpu_products import has_16_bit_products, multiply_in_float32
from .errors import RequestError as RequestError  # from here as well
from .errors import first_line as first_line

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


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


def load(name: str | None, device: torch.device, dtype: torch.dtype = torch.bfloat16, **trust: Any) -> Loaded:
    """A model and its tokenizer.

    Args:
        name: a folder of `save_pretrained` or a hub id; None: the embedded model.
        dtype: the model's; bfloat16 is what packed bytes are compared with.
        trust: for `from_pretrained`: which code, files and token may be used.

    Raises:
        RequestError: there is no such model, or it cannot be loaded.
    """
    source, shown = _source(name)
    print(f"Loading {shown} ...", file=sys.stderr, flush=True)
    try:
        AutoConfig.from_pretrained(source, **trust)  # where there is no model, this says so most clearly
        tokenizer = AutoTokenizer.from_pretrained(source, **trust)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **trust)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        kind = "folder" if Path(source).is_dir() else "hub id (no folder of that name exists)"
        raise RequestError(f"no model could be loaded from the {kind} {shown}: {first_line(error)}") from error
    if shown == embedded_model.NAME and device.type == "cpu" and not has_16_bit_products():
        multiply_in_float32(model)  # it is small
    return Loaded(shown, model.to(device).eval(), tokenizer)


def _source(name: str | None) -> tuple[str, str]:
    """Where `from_pretrained` finds a model, and what to call it. None and its name stand for the embedded model."""
    if name is None or (name == embedded_model.NAME and not Path(name).is_dir()):
        try:
            return str(embedded_model.embedded_model()), embedded_model.NAME
        except embedded_model.EmbeddedModelError as error:
            raise RequestError(str(error)) from error
    if not Path(name).is_dir() and not HUB_ID.fullmatch(name):
        raise RequestError(f"the model folder {name} does not exist.")
    return name, name


def load_config(name: str | None) -> PretrainedConfig:
    """A model's config: of a config.json, a folder that has one, or a hub id; None: the embedded model's.

    Raises:
        RequestError: there is none, or it is no config that transformers knows.
    """
    if name is not None and Path(name).is_file():
        try:
            return config_of(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, RequestError) as error:
            raise RequestError(f"{name} is no model's config: {first_line(error)}") from error
    if name is not None and name.endswith(".json"):
        raise RequestError(f"the file {name} does not exist.")
    source, shown = _source(name)
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        raise RequestError(f"no config could be loaded from {shown}: {first_line(error)}") from error


def config_of(text: str) -> PretrainedConfig:
    """The config that a config.json's text describes.

    Raises:
        RequestError: it is no JSON object, names a `model_type` that transformers does not know, or does not fit it.
    """
    try:
        described = json.loads(text)
    except ValueError as error:
        raise RequestError(f"not JSON: {first_line(error)}.") from error
    kind = described.get("model_type") if isinstance(described, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise RequestError(f"model_type={kind!r} is none that transformers {transformers.__version__} knows.")
    try:
        config: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(described)
    except Exception as error:  # each config checks its fields in its own way
        raise RequestError(f"its fields do not fit a {kind} model: {first_line(error)}") from error
    return config


def read_text(path: Path) -> str:
    """A prompt from a file.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompt file {path} cannot be read: {first_line(error)}") from error


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


def quiet() -> None:
    """No messages of libraries between those of a command."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry of a missing connection


def serve(run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a command and return its exit code: 2 and one line for a request that cannot be served."""
    quiet()
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
