"""Draw KL against bytes: `python -m eval.plot_ablation DIR [--image FILE]`, from the JSON that `scripts/ablation` wrote.

One panel a model and window. Marks stand at the bytes of a quantized layer, those of a published preset one below the other;
where a preset keeps layers exact, a line leads to the mean over all layers. The dotted line is what rounding in the model's
dtype costs by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tq_hf.commands import serve

from .plotting import figure_of, parser_of, save, write
from .results import ModelResults, read_all
from .settings import OWN, PUBLISHED

SERIES = (
    ("ours", "o", "#0b6e4f", {name: name for name in OWN}),
    ("published: every token packed", "s", "#b23a48", {f"{name}, as published": name for name in PUBLISHED}),
    ("published codes in these pages", "^", "#d98c21", {name: name for name in PUBLISHED}),
    ("published codes, our window and sinks", "D", "#3a6ea5", {f"{name} + window, sinks": name for name in PUBLISHED}),
)


def draw(models: Sequence[ModelResults], path: Path) -> None:
    """Write the figure (the suffix of `path` tells the format): a row a window, a column a model."""
    rows, columns = (sorted({results.run[name] for results in models}) for name in ("window", "model"))
    figure, axes = figure_of(len(rows), len(columns))
    for panel in axes.flat:
        panel.set_axis_off()
    for results in models:
        panel = axes[rows.index(results.run["window"])][columns.index(results.run["model"])]
        panel.set_axis_on()
        _draw_panel(panel, results)
    handles, labels = panel.get_legend_handles_labels()
    legend_columns = len(labels) if len(columns) > 1 else 1
    figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns, frameon=False, fontsize=9)
    save(figure, path)


def _draw_panel(panel: Any, results: ModelResults) -> None:
    heights: list[float] = []
    named: set[str] = set()
    for label, marker, color, shown in SERIES:
        found = [(short, results.settings[name]) for name, short in shown.items() if _measured(results, name)]
        heights += [point["kl"] for _, point in found]
        panel.plot(
            [point["page_bytes"] for _, point in found], [point["kl"] for _, point in found],
            marker, color=color, label=label, markersize=6,
        )  # fmt: skip
        for short, point in found:
            x, kl = point["page_bytes"], point["kl"]
            if short not in named:  # one below the other, at the same bytes: the highest has the name
                named.add(short)
                left = short == "3bit_nc"  # k3v4_nc is right beside it
                offset = {"xytext": (-5, 4), "ha": "right"} if left else {"xytext": (5, 4)}
                panel.annotate(short, (x, kl), textcoords="offset points", fontsize=8, color=color, **offset)
            if point["mean_bytes"] > x:
                panel.plot([x, point["mean_bytes"]], [kl, kl], "-|", color=color, linewidth=0.8)
    if _measured(results, "raw"):
        floor = results.settings["raw"]["kl"]
        panel.axhline(floor, color="grey", linewidth=0.8, linestyle=":", label="the model's dtype in pages (rounding)")
    panel.set_yscale("log")
    panel.margins(x=0.12)
    if heights:
        panel.set_ylim(min(heights) / 3, max(heights) * 2)
    panel.set_title(f"{Path(results.run['model']).name}, windows of {results.run['window']:,}", fontsize=10)
    panel.set_xlabel("bytes per token and KV head")
    panel.set_ylabel("KL(exact ‖ packed), nats")
    panel.grid(which="major", linewidth=0.3)


def _measured(results: ModelResults, name: str) -> bool:
    return "kl" in results.settings.get(name, {})


def run(argv: Sequence[str]) -> int:
    parser = parser_of("plot_ablation", __doc__, "DIR/ablation.svg")
    parser.add_argument("results", type=Path, metavar="DIR", help="where scripts/ablation left its results")
    args = parser.parse_args(argv)
    return write(partial(draw, read_all(args.results)), args.image or args.results / "ablation.svg")


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)


if __name__ == "__main__":
    sys.exit(main())
