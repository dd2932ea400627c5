"""`tq_hf bench`: speed and memory of a user's own model, with transformers' cache and with presets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RequestError, is_out_of_memory
from . import options
from .output import print_json, print_table, say, size

if TYPE_CHECKING:
    from torch import Tensor

    from ..commands import Loaded

CONTEXTS = [512, 2048]
WARM_UP = 4  # new tokens of the run that is not measured


def bench(
    model: options.Model = None,
    cache: Annotated[
        list[str] | None,
        typer.Option("--cache", "-c", help="A preset, or bf16. Repeatable.", show_default="bf16, tq4, tq3, tq3v2, tq2"),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of the prompt. Repeatable.", show_default=", ".join(map(str, CONTEXTS))),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Tokens to decode.")] = 32,
    device: options.Device = None,
    dtype: options.Dtype = "bfloat16",
    as_json: options.Json = False,
) -> None:
    """Decoding speed, time to the first token and cache bytes on your own model, one cache after the other.

    Each is warmed up at each context before it is measured, and generates the full number of tokens greedily from the same
    prompt of random tokens. Where memory does not suffice, the row says OOM and the others go on.

    tq_hf bench --model Qwen/Qwen3-0.6B --context 4096 --context 16384

    tq_hf bench --cache bf16 --cache tq4 --json
    """
    from .estimate import OWN

    names = cache or [options.BF16, *OWN]
    for name in names:
        options.require_cache(name, {})
    if short := [n for n in context or () if n < 1]:
        raise RequestError(f"--context {short[0]} is not possible: expected at least 1.")
    loaded = options.load_model(model, device, dtype)
    from ..commands import versions
    from ..generation.conversation import context_length

    limit = context_length(loaded.model.config)
    # Without --context, what fits into the model's.
    contexts = context or [n for n in CONTEXTS if limit is None or n + max_new_tokens <= limit] or CONTEXTS[:1]
    for n in contexts:
        if limit is not None and n + max_new_tokens > limit:
            raise RequestError(
                f"--context {n} and {max_new_tokens} new tokens are more than the model's context of {limit}."
            )
    rows = []
    for n in contexts:
        ids = _prompt(loaded, n)
        for name in names:
            say(f"{name} at {n:,} tokens ...")
            with options.as_requests():
                rows.append({"cache": name, "context": n, **_measure(loaded, name, ids, max_new_tokens)})
    where = _where(loaded.model.device)
    if as_json:
        print_json(
            {
                "model": loaded.name,
                "device": where,
                "dtype": dtype,
                "new_tokens": max_new_tokens,
                "rows": rows,
                "versions": versions(),
            }
        )
        return
    print_table(
        f"{loaded.name}, {dtype} on {where}; {max_new_tokens} new tokens each",
        ["cache", "context", "decode, tokens/s", "first token", "cache bytes", "ratio"],
        [_cells(row, rows) for row in rows],
    )


def _prompt(loaded: Loaded, tokens: int) -> Tensor:
    """Random ids [1, tokens] of the vocabulary, the same for every cache."""
    import torch

    generator = torch.Generator().manual_seed(tokens)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, tokens), generator=generator).to(loaded.model.device)


def _measure(loaded: Loaded, name: str, ids: Tensor, new_tokens: int) -> dict[str, Any]:
    """One cache at one context; `oom` where memory does not suffice."""
    try:
        return _timed(loaded, name, ids, new_tokens)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    _free()  # now that the error, which held the failed run's tensors, is gone
    return {"oom": True, "tokens_per_s": None, "first_token_seconds": None, "cache_bytes": None}


def _timed(loaded: Loaded, name: str, ids: Tensor, new_tokens: int) -> dict[str, Any]:
    """A warm-up, then the run that counts."""
    from ..generation.comparison import cache_nbytes, generate_timed

    generate_timed(loaded.model, ids, options.new_cache(loaded.model.config, name), min(WARM_UP, new_tokens))
    cache = options.new_cache(loaded.model.config, name)
    run = generate_timed(loaded.model, ids, cache, new_tokens)
    return {
        "oom": False,
        "tokens_per_s": run.tokens_per_s,
        "first_token_seconds": run.first_token_seconds,
        "cache_bytes": cache_nbytes(cache),
    }


def _free() -> None:
    """Give back what a failed run has left, so that it does not count against the next one."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _where(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def _cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """A row of the table; the ratio is to `bf16` at the same context, where that was measured."""
    start = [row["cache"], f"{row['context']:,}"]
    if row["oom"]:
        return [*start, "OOM", "", "", ""]
    exact = [r["cache_bytes"] for r in rows if r["cache"] == options.BF16 and r["context"] == row["context"]]
    ratio = f"{exact[0] / row['cache_bytes']:.2f}" if exact and exact[0] is not None else ""
    return [
        *start,
        f"{row['tokens_per_s']:.1f}",
        f"{row['first_token_seconds']:.2f} s",
        size(row["cache_bytes"]),
        ratio,
    ]
