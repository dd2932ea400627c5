"""The studies' plots, from their results: a panel a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .measures.base import EXACT, Result, measured, title
from .measures.gsm8k import FILTERS
from .measures.needle import by_setting, grid
from .measures.other_caches import DYNAMIC, OTHERS
from .plotting import figure_of, save
from .stored import StoredResults

PANELS = 5  # heatmaps in a row


def draw(kind: str, results: Sequence[StoredResults], out: Path) -> Path:
    """Write `out`/KIND.png.

    Raises:
        ImportError: matplotlib is not installed.
    """
    path = out / f"{kind}.png"
    save(DRAWN[kind](results), path)
    return path


def _curves(results: Sequence[StoredResults]) -> Any:
    """KL, change of perplexity and disagreement over positions: a row a model, a column a measure."""
    figure, axes = figure_of(len(results), 3)
    columns: tuple[tuple[str, Callable[[Result], float | None]], ...] = (
        ("KL(exact ‖ packed), nats", lambda point: point["kl"]),
        ("change of perplexity, %", _change),
        ("another likeliest token, %", lambda point: 100 * (1 - point["top1"])),
    )
    for found, row in zip(results, axes):
        for panel, (label, value) in zip(row, columns):
            for name, entry in measured(found).items():
                points = [(point["to"], value(point)) for point in entry["curve"]]
                points = [(x, y) for x, y in points if y is not None]
                panel.plot([x for x, _ in points], [y for _, y in points], marker=".", linewidth=1, label=name)
            panel.set_title(title(found), fontsize=10)
            panel.set_xlabel("position")
            panel.set_ylabel(label)
            if label.startswith("KL"):
                panel.set_yscale("log")
            panel.grid(which="major", linewidth=0.3)
    axes[0][-1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _curves_of_long_texts(results: Sequence[StoredResults]) -> Any:
    """The same, over positions each of which is twice the one before."""
    figure = _curves(results)
    places = sorted({point["to"] for found in results for entry in measured(found).values() for point in entry["curve"]})
    for panel in figure.axes:
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, [_short(place) for place in places])
        panel.minorticks_off()
    return figure


def _change(point: Result) -> float | None:
    if point["ppl_exact"] is None:
        return None
    return float(100 * (point["ppl_packed"] / point["ppl_exact"] - 1))


def _bars(results: Sequence[StoredResults]) -> Any:
    """Exact match with standard errors, and a line at bf16's."""
    figure, axes = figure_of(1, len(results))
    for found, panel in zip(results, axes[0]):
        shown = {name: entry[FILTERS[0]] for name, entry in measured(found).items()}
        heights = [100 * answers["exact_match"] for answers in shown.values()]
        errors = [100 * answers["stderr"] for answers in shown.values()]
        panel.bar(list(shown), heights, yerr=errors, color="#3a6ea5", capsize=3)
        if EXACT in shown:
            panel.axhline(100 * shown[EXACT]["exact_match"], color="grey", linewidth=0.8, linestyle=":")
        panel.tick_params(axis="x", rotation=75, labelsize=7)
        panel.set_title(title(found), fontsize=10)
        panel.set_ylabel(f"exact match ({FILTERS[0]}), %")
    return figure


def _heatmaps(results: Sequence[StoredResults]) -> Any:
    """The share of needles found, by depth and length: a panel a setting, five in a row; each model begins a row."""
    rows = [
        [(found, name) for name in names[i : i + PANELS]]
        for found in results
        for names in [list(by_setting(found))]
        for i in range(0, len(names), PANELS)
    ]
    figure, axes = figure_of(max(1, len(rows)), PANELS, size=(2.3, 2.3))
    for panel in axes.flat:
        panel.set_axis_off()
    for row, panels in zip(rows, axes):
        for (found, name), panel in zip(row, panels):
            panel.set_axis_on()
            settings = by_setting(found)[name]
            lengths = sorted(settings)
            cells = grid(settings, lengths)
            image = panel.imshow(cells, aspect="auto", cmap="RdYlGn", vmin=0, vmax=1, extent=(0, len(lengths), 100, 0))
            panel.set_xticks([i + 0.5 for i in range(len(lengths))], [_short(n) for n in lengths], fontsize=7)
            panel.tick_params(axis="y", labelsize=7)
            panel.set_title(f"{name}\n{title(found)}", fontsize=8)
        panels[0].set_ylabel("depth, %", fontsize=8)
    if rows:
        figure.colorbar(image, ax=axes, shrink=0.6, label="needles found")
    figure.supxlabel("tokens", fontsize=8)
    return figure


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _scatter(results: Sequence[StoredResults]) -> Any:
    """KL against bytes."""
    figure, axes = figure_of(len(results), 1)
    for found, (panel,) in zip(results, axes):
        for name, entry in measured(found).items():
            if name == DYNAMIC:  # nothing, or next to it, which a logarithmic axis has no place for
                continue
            color = "#b23a48" if name in OTHERS else "#0b6e4f"
            at = (entry["bytes"] / 2**20, entry["kl"])
            panel.plot(*at, "o", color=color, markersize=5)
            label = name.removeprefix("QuantizedCache ")
            panel.annotate(label, at, textcoords="offset points", xytext=(4, 3), fontsize=6, color=color)
        panel.set_yscale("log")
        panel.margins(x=0.2)  # for the names
        panel.set_title(title(found), fontsize=10)
        panel.set_xlabel("MiB")
        panel.set_ylabel("KL, nats")
        panel.grid(which="major", linewidth=0.3)
    return figure


DRAWN: dict[str, Callable[[Sequence[StoredResults]], Any]] = {
    "perplexity": _curves,
    "longctx": _curves_of_long_texts,
    "gsm8k": _bars,
    "needle": _heatmaps,
    "compare": _scatter,
}
