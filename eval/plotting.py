"""Figures without a display, whose files depend on nothing but what is drawn."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tq_hf.commands import Parser, RequestError


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


def parser_of(name: str, description: str | None, default: str) -> Parser:
    """A parser for `python -m eval.NAME`, which has `--image` already; `default` says where the figure goes without it."""
    parser = Parser(
        prog=f"python -m eval.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", type=Path, metavar="FILE", help=f"the .svg or .png to write (default: {default})")
    return parser


def read_json(path: Path) -> Any:
    """What a benchmark wrote.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise RequestError(f"{path} cannot be read as JSON: {error}") from error


def write(draw: Callable[[Path], None], path: Path) -> int:
    """Draw into `path`, print it, and give the command's exit code.

    Raises:
        RequestError: matplotlib is not installed.
    """
    try:
        draw(path)
    except ImportError as error:
        raise RequestError(f"drawing needs matplotlib ({error}): pip install -e '.[eval]'.") from error
    print(path)
    return 0
