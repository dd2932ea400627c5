"""Draw KL against bytes: `python -m eval.plot_ablation DIR [--image FILE]`, from the JSON that `scripts/ablation` wrote.

One panel a model and window. Filled marks stand at the bytes of a quantized layer; where a preset keeps layers exact, a line
leads to the mean over all layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tq_hf.commands import Parser, RequestError, serve

from .results import ModelResults, read_all
from .settings import OWN, PUBLISHED

SERIES = (
    ("ours", "o", "#0b6e4f", {name: name for name in OWN}),
    ("published", "s", "#b23a48", {name: name for name in PUBLISHED}),
    ("published + our window and sinks", "D", "#3a6ea5", {f"{name} + window, sinks": name for name in PUBLISHED}),
)


def draw(models: Sequence[ModelResults], path: Path) -> None:
    """Write the figure (the suffix of `path` tells the format)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tq_hf"  # the same results give the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(models), figsize=(4.6 * len(models), 4.2), squeeze=False, layout="constrained")
    for panel, results in zip(axes[0], models):
        _draw_panel(panel, results)
    axes[0][0].set_ylabel("KL(exact ‖ packed), nats")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels) if len(models) > 1 else 1, frameon=False
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _draw_panel(panel: Any, results: ModelResults) -> None:
    for label, marker, color, shown in SERIES:
        found = [(short, results.settings[name]) for name, short in shown.items() if _measured(results, name)]
        panel.plot(
            [point["page_bytes"] for _, point in found], [point["kl"] for _, point in found],
            marker, color=color, label=label, markersize=6,
        )  # fmt: skip
        for short, point in found:
            x, kl = point["page_bytes"], point["kl"]
            panel.annotate(short, (x, kl), textcoords="offset points", xytext=(5, 4), fontsize=8, color=color)
            if point["mean_bytes"] > x:
                panel.plot([x, point["mean_bytes"]], [kl, kl], "-|", color=color, linewidth=0.8)
    if _measured(results, "raw"):
        panel.axhline(results.settings["raw"]["kl"], color="grey", linewidth=0.8, linestyle=":")
    panel.set_yscale("log")
    panel.set_title(f"{Path(results.run['model']).name}, windows of {results.run['window']:,}", fontsize=10)
    panel.set_xlabel("bytes per token and KV head")
    panel.grid(which="major", linewidth=0.3)


def _measured(results: ModelResults, name: str) -> bool:
    return "kl" in results.settings.get(name, {})


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="python -m eval.plot_ablation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="DIR", help="where scripts/ablation left its results")
    parser.add_argument(
        "--image", type=Path, metavar="FILE", help="the .svg or .png to write (default: DIR/ablation.svg)"
    )
    args = parser.parse_args(argv)
    models = read_all(args.results)
    if not models:
        raise RequestError(f"{args.results} holds no results: run scripts/ablation --out {args.results} first.")
    path = args.image or args.results / "ablation.svg"
    try:
        draw(models, path)
    except ImportError as error:
        raise RequestError(f"drawing needs matplotlib ({error}): pip install -e '.[eval]'.") from error
    print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)


if __name__ == "__main__":
    sys.exit(main())
