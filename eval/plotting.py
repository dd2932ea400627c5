"""Figures without a display, whose files depend on nothing but what is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def figure_of(rows: int, columns: int, size: tuple[float, float] = (4.6, 3.8)) -> tuple[Any, Any]:
    """A figure of panels of `size` inches, and its panels [rows][columns].

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tq_hf"  # the same results give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    whole = (size[0] * columns, size[1] * rows + 0.4)
    return plt.subplots(rows, columns, figsize=whole, squeeze=False, layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write the figure (the suffix of `path` tells the format) and forget it."""
    import matplotlib.pyplot as plt

    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
