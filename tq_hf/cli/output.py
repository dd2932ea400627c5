"""What commands print: results to standard output (text, a table or one JSON object), all else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def say(text: str) -> None:
    """A line of progress, or a remark."""
    print(text, file=sys.stderr, flush=True)


def print_json(result: Any) -> None:
    """One JSON object on a line of its own."""
    print(json.dumps(result, ensure_ascii=False), flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table. On a narrow terminal its text columns are wrapped; elsewhere it is as wide as it needs to be.

    Args:
        left: how many columns, from the first on, are text; the others are numbers.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        is_text = 0 < i < left
        table.add_column(column, justify="left" if i < left else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = Console(width=10_000).measure(table).maximum
    print(title)
    console.print(table)


def size(count: float) -> str:
    """Bytes in the unit that leaves at most four digits before the point."""
    i = 0
    while count >= 1024 and i + 1 < len(UNITS):
        count, i = count / 1024, i + 1
    return f"{count:.0f} {UNITS[i]}" if i == 0 else f"{count:.2f} {UNITS[i]}"
