"""The tables of quality in README.md beside this file, from the JSON of `scripts/ablation`: `python -m eval.summary DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tq_hf.commands import Parser, serve

from .results import ModelResults, markdown, read_all
from .settings import ABLATED, OWN, PAPER

SHOWN = (
    *OWN,
    *(name + form for name in ("k8v4", "4bit_nc", "3bit_nc") for form in (", as published", "", " + window, sinks")),
    *PAPER,
    "raw",
)
# What is changed, and how a setting's name says it.
CHANGES = {
    "nothing": "",
    "no balance": ", no balance",
    "no page mean": ", no page mean",
    "neither": ", no page mean, no balance",
    "norm-corrected scales": ", norm-corrected scales",
    "min/max values": ", min/max values",
    "window 0": ", recent_window=0",
    "window 64": ", recent_window=64",
    "window 256": ", recent_window=256",
    "no sinks": ", sink_tokens=0",
    "1 sink": ", sink_tokens=1",
    "16 sinks": ", sink_tokens=16",
    "pages of 64": ", page_size=64",
    "pages of 128": ", page_size=128",
    "pages of 256": ", page_size=256",
    "2 exact layers at each end": ", boundary_layers=2",
}


def title(results: ModelResults) -> str:
    return Path(results.run["model"]).name.removesuffix("-Instruct")


def quality_table(models: Sequence[ModelResults]) -> str:
    """KL and, in brackets, the change of perplexity in percent: a row a setting that one of the models has."""
    rows = []
    for name in SHOWN:
        cells = [_kl_and_perplexity(results, name) for results in models]
        if any(cells):
            rows.append([name, *cells])
    return markdown(["setting", *map(title, models)], rows)


def change_table(models: Sequence[ModelResults]) -> str:
    """KL over the second half of the windows, where all settings count the same positions, with one change at a time."""
    columns = [(base, results) for base in ABLATED for results in models]
    rows = []
    for change, suffix in CHANGES.items():
        found = [results.settings.get(base + suffix, {}) for base, results in columns]
        if all("kl_second_half" in result for result in found):
            rows.append([change, *(f"{result['kl_second_half']:.4f}" for result in found)])
    return markdown(["change", *(f"`{base}`, {title(results)}" for base, results in columns)], rows)


def tables(models: Sequence[ModelResults]) -> dict[str, str]:
    """The tables by what they show. Single changes are shown for models that all of them were measured of."""
    shown = {}
    for window in sorted({results.run["window"] for results in models}):
        shown[f"windows of {window:,}"] = quality_table([r for r in models if r.run["window"] == window])
    ablated = [results for results in models if f"{ABLATED[0]}, recent_window=0" in results.settings]
    if ablated:
        shown["single changes"] = change_table(ablated)
    return shown


def _kl_and_perplexity(results: ModelResults, name: str) -> str:
    result = results.settings.get(name, {})
    return f"{result['kl']:.4f} ({result['ppl_delta_percent']:+.1f})" if "kl" in result else ""


def run(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m eval.summary", description=__doc__)
    parser.add_argument("results", type=Path, metavar="DIR", help="where scripts/ablation left its results")
    args = parser.parse_args(argv)
    for name, table in tables(read_all(args.results)).items():
        print(f"{name}:\n\n{table}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)


if __name__ == "__main__":
    sys.exit(main())
