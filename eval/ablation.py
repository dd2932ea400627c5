"""Measure what settings of the packed cache cost in quality: models x settings -> perplexity, KL, agreement, bytes.

    scripts/ablation --out eval/results                              the embedded model, WikiText-2, every setting
    scripts/ablation --out results --model some/folder --text wiki.test.raw --group presets

Every position after the first page reads what decoding token by token would read, through the packed cache. Each model and
window has a JSON file in --out, written after every setting: run the command again to go on where it stopped, or several at
once with other groups, which spreads the compilation of kernels over processors. A Markdown table of all files stands
beside; `python -m eval.plot_ablation DIR` draws them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tq_hf.commands import Loaded, Parser, RequestError, choose_device, load, serve, versions

from .bos import BOS_CHOICES, starts_with_bos
from .isolated import measure_apart
from .measures.scoring import Result, lockstep_batches, measure
from .results import TABLE_NAME, ModelResults, read_all, table
from .settings import GROUPS, Setting, select
from .text import fingerprint, read_text, windows

SENSIBLE_PERPLEXITY = 1000.0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="scripts/ablation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go; made if missing")
    parser.add_argument(
        "--model", action="append", help="hub id or folder; may be repeated (default: SmolLM2-135M-Instruct from PyPI)"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text file (default: WikiText-2 raw test, from the hub)")
    parser.add_argument("--window", type=int, default=2048, metavar="N", help="tokens a window (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=65536, metavar="N", help="tokens in all (default: %(default)s)")
    parser.add_argument(
        "--bos", choices=BOS_CHOICES, default="auto", help="BOS before each window (default: where the model needs it)"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--group", action="append", metavar="NAME", help=f"{', '.join(GROUPS)}, all (default); may be repeated"
    )
    chosen.add_argument("--setting", action="append", metavar="NAME", help="a single setting; may be repeated")
    parser.add_argument(
        "--lockstep",
        type=int,
        default=4,
        metavar="N",
        help="settings that share a pass of the exact model (%(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="the model's; float32 takes the rounding of bfloat16 out of the comparison (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    args = parser.parse_args(argv)
    for name in ("window", "tokens", "lockstep"):
        if getattr(args, name) < 1:
            raise RequestError(f"--{name} {getattr(args, name)} is not possible: expected at least 1.")
    return args


def cut_text(loaded: Loaded, text: str, args: argparse.Namespace) -> tuple[Tensor, bool]:
    """Windows of token ids, and whether they start with BOS."""
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and args.window > context:
        raise RequestError(f"--window {args.window} is more than the context of {loaded.name}, {context}.")
    starts = starts_with_bos(loaded.model, loaded.tokenizer, text, args.bos)
    print(f"Windows start {'with' if starts else 'without'} BOS (--bos {args.bos}).", file=sys.stderr)
    return windows(loaded.tokenizer, text, args.window, args.tokens, starts), starts


def run_facts(loaded: Loaded, ids: Tensor, starts: bool, device: torch.device, text: Path | None) -> dict[str, Any]:
    """What the results of a file have in common."""
    return {
        "model": loaded.name,
        "window": ids.shape[1],
        "windows": ids.shape[0],
        "bos": starts,
        "text": "WikiText-2 raw test" if text is None else text.name,
        "token_ids": fingerprint(ids),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
    }


def measure_model(loaded: Loaded, ids: Tensor, settings: Sequence[Setting], results: ModelResults, lockstep: int) -> int:
    """Measure what is missing in `results`; how many settings failed."""
    missing = [setting for setting in settings if not results.has(setting)]
    failed, began = 0, time.perf_counter()
    with tqdm(total=len(missing) * ids.numel(), desc=f"{loaded.name}, {ids.shape[1]}", unit="token", unit_scale=True) as bar:
        for batch in lockstep_batches(missing, ids.shape[1], lockstep):
            found = measure_apart(batch, partial(measure, loaded.model, ids), lambda _: ids.numel(), bar)
            for setting, result in zip(batch, found):
                results.add(setting, result)
                failed += "error" in result
                bar.write(f"{setting.name:40} {as_line(result)}", file=sys.stdout)
    seconds = time.perf_counter() - began
    print(f"{loaded.name}: {len(missing)} settings in {seconds:.0f} s, {len(settings) - len(missing)} were there already")
    return failed


def warn_of_nonsense(results: ModelResults) -> None:
    """Say if the text means nothing to the exact model: then what quantization adds means nothing either."""
    worst = max((result["ppl_exact"] for result in results.settings.values() if "error" not in result), default=0.0)
    if worst > SENSIBLE_PERPLEXITY:
        hint = "though windows start with BOS" if results.run["bos"] else "is a BOS token missing? --bos always"
        print(f"warning: {results.run['model']}: the exact perplexity is {worst:,.0f}: {hint}.", file=sys.stderr)


def as_line(result: Result) -> str:
    if "error" in result:
        return f"FAILED  {result['error']}"
    return (
        f"{result['page_bytes']:6g} bytes  PPL {result['ppl_exact']:.3f} -> {result['ppl_packed']:.3f}"
        f" ({result['ppl_delta_percent']:+.2f} %)  KL {result['kl']:.5f}  top-1 {result['top1']:.2%}"
        f"  packed {result['packed_share']:.0%}  {result['seconds']:.1f} s"
    )


def run(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        settings = select(args.group or ["all"], args.setting or [])
    except ValueError as error:
        raise RequestError(str(error)) from error
    device = choose_device(args.device)
    text = read_text(args.text)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.model or [None]:
        loaded = load(name, device, getattr(torch, args.dtype))
        ids, starts = cut_text(loaded, text, args)
        ids = ids.to(device)
        results = ModelResults.open(args.out, run_facts(loaded, ids, starts, device, args.text))
        failed += measure_model(loaded, ids, settings, results, args.lockstep)
        warn_of_nonsense(results)
        (args.out / TABLE_NAME).write_text(table(read_all(args.out)), encoding="utf-8")
    print(f"results in {args.out}, all of them in {args.out / TABLE_NAME}")
    if failed:
        print(f"error: {failed} settings failed; the same command tries them again.", file=sys.stderr)
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)
