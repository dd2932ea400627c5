"""`tq_hf estimate`: what a cache is going to take, before anything is downloaded or allocated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RequestError
from .options import Dtype, Json, Set, changes, dtype_of
from .output import print_json, print_table, size

if TYPE_CHECKING:
    from ..sizing.estimate import MemoryEstimate

OWN = ("tq4", "tq3", "tq3v2", "tq2")


def estimate(
    config: Annotated[
        str | None,
        typer.Option(help="A config.json, a model's folder, or a hub id.", show_default="SmolLM2-135M-Instruct's"),
    ] = None,
    preset: Annotated[
        list[str] | None, typer.Option("--preset", "-p", help="Repeatable.", show_default=", ".join(OWN))
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens a sequence in the cache.")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    dtype: Dtype = "bfloat16",
    new_tokens: Annotated[int, typer.Option(help="How many of the context's tokens come one by one after the prompt.")] = 1,
    max_cache_len: Annotated[
        int | None,
        typer.Option(help="Of a static cache, which allocates so many tokens at once.", show_default="grows"),
    ] = None,
    set_: Set = None,
    gpu: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Say how many sequences fit into so much memory beside the weights."),
    ] = None,
    weight_bits: Annotated[
        float | None, typer.Option(min=0.0, help="Of quantized weights, with --gpu.", show_default="those of --dtype")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a cache takes, from the model's config alone.

    Equal to the byte to the report of a real cache after a prompt and decoding.

    tq_hf estimate --config meta-llama/Llama-3.1-8B --context 131072 --gpu 80

    tq_hf estimate --config ./config.json --preset tq2 --batch 16 --json
    """
    if gpu is not None and not 0 < gpu < math.inf:
        raise RequestError(f"--gpu {gpu:g} is not possible: expected the GPU's memory in GiB, more than 0.")
    if weight_bits is not None and not weight_bits < math.inf:
        raise RequestError(f"--weight-bits {weight_bits:g} is not possible: expected bits a weight, e.g. 4.")
    from ..commands import load_config, quiet

    quiet()
    loaded = load_config(config)
    options, fields = {"new_tokens": new_tokens, "max_cache_len": max_cache_len}, changes(set_)
    estimates = [_estimate(loaded, name, context, batch, dtype, options, fields) for name in preset or OWN]
    weights, room = estimates[0].weight_bytes, None
    if weights is not None and weight_bits is not None:
        weights = round(weights * weight_bits / (8 * dtype_of(dtype).itemsize))
    if gpu is not None:
        room = max(0.0, gpu - (weights or 0) / 2**30)
    result = {
        "config": config or "SmolLM2-135M-Instruct",
        "context": context,
        "batch": batch,
        "dtype": dtype,
        "new_tokens": new_tokens,
        "max_cache_len": max_cache_len,
        "weight_bytes": weights,
        "bytes_dynamic": estimates[0].bytes_dynamic,
        "sequences_dynamic": None if room is None else estimates[0].largest_batch(room, dynamic=True),
        "gpu_gib": gpu,
        "presets": [_as_dict(e, None if room is None else e.largest_batch(room)) for e in estimates],
    }
    if as_json:
        print_json(result)
    else:
        _print(
            result,
            stock="DynamicCache" if max_cache_len is None else "StaticCache",
            width=f" in {dtype}" if weight_bits is None else f" at {weight_bits:g} bits",
        )


def _estimate(
    config: Any, preset: str, context: int, batch: int, dtype: str, options: dict[str, Any], fields: dict[str, Any]
) -> MemoryEstimate:
    from ..config import TurboQuantConfig
    from ..sizing.estimate import estimate_memory

    try:
        TurboQuantConfig.from_preset(preset, **fields)  # a field that is an argument of `estimate_memory` is none
        return estimate_memory(config, preset, context, batch, dtype_of(dtype), **options, **fields)
    except ValueError as error:
        raise RequestError(str(error)) from error


def _as_dict(made: MemoryEstimate, sequences: int | None) -> dict[str, Any]:
    return {
        "preset": made.preset,
        "nbytes": made.nbytes,
        "ratio": made.ratio,
        "packed_tokens": made.packed_tokens,
        "exact_tokens": made.exact_tokens,
        "table_bytes": made.table_bytes,
        "sequences": sequences,
        "layers": [vars(layer) for layer in made.layers],
    }


def _print(result: dict[str, Any], stock: str, width: str) -> None:
    rows = [[f"{stock}, bf16", result["bytes_dynamic"], 1.0, result["sequences_dynamic"]]]
    rows += [[made["preset"], made["nbytes"], made["ratio"], made["sequences"]] for made in result["presets"]]
    columns, gpu, batch = ["cache", "bytes", "a sequence", "ratio"], result["gpu_gib"], result["batch"]
    if gpu is not None:
        columns.append(f"fit into {gpu:g} GiB")
    cells = [
        [name, size(count), size(count / batch), f"{ratio:.2f}", *([f"{fit:,}"] if gpu is not None else [])]
        for name, count, ratio, fit in rows
    ]
    sequences = "1 sequence" if batch == 1 else f"{batch:,} sequences"
    print_table(f"{result['config']}: {sequences} of {result['context']:,} tokens", columns, cells)
    weights = result["weight_bytes"]
    if weights is not None:
        print(f"Weights{width}: {size(weights)}" + ("." if gpu is None else ", left out of what fits."))
    elif gpu is not None:
        print("The size of the weights is unknown: what fits is counted without them.")
