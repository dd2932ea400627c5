"""What the presets cost and save, in one table: `python -m eval.headline RESULTS`.

RESULTS holds `ablation_h200` (from `scripts/ablation`) and `studies_h200` (from `python -m eval.study`): perplexity in
windows of 2,048 tokens, and GSM8K.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tq_hf import PRESETS
from tq_hf.commands import Parser, serve

from .measures.base import EXACT, measured, title
from .measures.gsm8k import FILTERS
from .results import markdown, read_all
from .settings import OWN, PUBLISHED
from .stored import StoredResults

WINDOW = 2048
HEAD_DIM = 128


def table(folder: Path) -> str:
    """A row a preset, ours and the published ones; a column a model and measure."""
    models = [results for results in read_all(folder / "ablation_h200") if results.run["window"] == WINDOW]
    answers = [StoredResults.read(path) for path in sorted((folder / "studies_h200").glob("gsm8k-*.json"))]
    head = ["", "bytes", *(f"{title(each)}: perplexity" for each in models), *(f"{title(each)}: GSM8K" for each in answers)]
    shown = {EXACT: (EXACT, str(4 * HEAD_DIM))}
    for name in (*OWN, *PUBLISHED):
        layout = PRESETS[name].layout(HEAD_DIM, HEAD_DIM, torch.bfloat16)
        label = f"`{name}`" if name in OWN else f"`{name}`, as published"
        shown[name if name in OWN else f"{name}, as published"] = (label, f"{layout.bytes_per_token:g}")
    rows = []
    for name, (label, size) in shown.items():
        changes = [results.settings.get(name, {}).get("ppl_delta_percent") for results in models]
        row = [label, size, *("" if change is None else f"{change:+.1f} %" for change in changes)]
        for found in answers:
            row.append(f"{100 * measured(found)[name][FILTERS[0]]['exact_match']:.1f} %")
        rows.append(row)
    return markdown(head, rows)


def run(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m eval.headline", description=__doc__)
    parser.add_argument("results", type=Path, metavar="RESULTS", help="such as eval/results")
    print(table(parser.parse_args(argv).results), end="")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)


if __name__ == "__main__":
    sys.exit(main())
