"""Times the lm-eval model `tq-hf` beside lm-eval's own `hf` on the same requests.

    python scripts/bench_lm_eval.py [--model NAME_OR_FOLDER] [--text FILE] [--json results.json]

Rolling log-likelihoods of whole windows in each mode, and greedy generation of a fixed length. Each is run once to warm up
(kernels are compiled then); of the further runs, in which the models take turns, since a shared host changes its speed, the
fastest counts. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tq_hf.commands import versions
from tq_hf.config import DEFAULT_PRESET
from tq_hf.embedded_model import embedded_model
from tq_hf.lm_eval_model import TurboQuantLM

PROMPT = Path(__file__).parents[1] / "tq_hf" / "handbook.txt"


def windows(model: HFLM, text: str, rows: int, length: int) -> list[str]:
    """`rows` pieces of a text, which is repeated where it is too short; about `length` tokens each."""
    ids = model.tok_encode(text)
    ids = (ids * (rows * length // len(ids) + 1))[: rows * length]
    return [model.tok_decode(ids[i : i + length]) for i in range(0, rows * length, length)]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, 0, metadata=("bench", i, 1)) for i, each in enumerate(arguments)]


class Bench:
    """A model with its requests: `runs` are what is timed, by name."""

    def __init__(self, model: HFLM, text: str, args: argparse.Namespace) -> None:
        self.model = model
        rolling = requests("loglikelihood_rolling", [(piece,) for piece in windows(model, text, args.rows, args.length)])
        settings = {"until": [], "max_gen_toks": args.new_tokens, "min_new_tokens": args.new_tokens, "do_sample": False}
        pieces = windows(model, text, args.generate_rows, args.generate_length)
        generating = requests("generate_until", [(piece, settings) for piece in pieces])
        self.runs: dict[str, Callable[[], object]] = {
            "rolling": lambda: self._batched(args.rows).loglikelihood_rolling(rolling, True)
        }
        if getattr(model, "mode", None) is None or model.mode.kind == "decode":
            self.runs["generate"] = lambda: self._batched(args.generate_rows).generate_until(generating, True)

    def _batched(self, rows: int) -> HFLM:
        self.model.batch_size_per_gpu = rows
        return self.model


def seconds(benches: dict[str, Bench], repeats: int) -> dict[str, dict[str, list[float]]]:
    """What each run of each model took, `repeats` times after one that warms up; the models take turns."""
    taken: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in bench.runs} for name, bench in benches.items()}
    for repeat in range(repeats + 1):
        for kind in ("rolling", "generate"):
            for name, bench in benches.items():
                if kind in bench.runs:
                    began = time.perf_counter()
                    bench.runs[kind]()  # its answers are numbers on the host: nothing is left to wait for
                    if repeat:
                        taken[name][kind].append(time.perf_counter() - began)
                    gc.collect()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--text", type=Path, default=PROMPT, help="a text file (%(default)s)")
    parser.add_argument("--preset", default=DEFAULT_PRESET)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=8, help="windows in a batch (%(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="tokens a window (%(default)s)")
    parser.add_argument("--generate-rows", type=int, default=32, help="prompts in a batch (%(default)s)")
    parser.add_argument("--generate-length", type=int, default=1024, help="tokens a prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="to generate (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs after the first (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    source, text = args.model or str(embedded_model()), args.text.read_text(encoding="utf-8")
    common = {"pretrained": source, "device": args.device, "batch_size": args.rows, "max_length": args.length}
    makers: dict[str, Callable[[], HFLM]] = {"hf": lambda: HFLM(**common)}
    for mode in ("packed", "decode"):
        makers[f"tq-hf, {mode}"] = lambda mode=mode: TurboQuantLM(preset=args.preset, mode=mode, **common)
    benches = {name: Bench(make(), text, args) for name, make in makers.items()}
    runs = seconds(benches, args.repeats)
    results = {name: {kind: min(each) for kind, each in taken.items()} for name, taken in runs.items()}
    print(f"\n{source}, preset {args.preset}, {args.device}: seconds, and in brackets times those of hf\n")
    print(f"| | rolling, {args.rows} × {args.length} | generate, {args.generate_rows} × {args.new_tokens} |")
    print("| --- | --- | --- |")
    for name, taken in results.items():
        cells = [f"{taken[k]:.2f} ({taken[k] / results['hf'][k]:.2f})" if k in taken else "" for k in results["hf"]]
        print(f"| {name} | {' | '.join(cells)} |")
    if args.json is not None:
        facts = {key: str(value) for key, value in vars(args).items()} | {"versions": versions()}
        found = {"settings": facts, "seconds": results, "runs": runs}
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
