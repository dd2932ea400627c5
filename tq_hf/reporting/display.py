"""Tables for notebooks, and sizes for people."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table under a title; the first column is text, the others are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ["left", *["right"] * (len(cells) - 1)]
        return "".join(f"<{tag} style='text-align: {s}'>{escape(c)}</{tag}>" for s, c in zip(sides, cells))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{line(columns, 'th')}</tr></thead>"
    return f"<p><code>{escape(title)}</code></p><table>{head}<tbody>{body}</tbody></table>"


def mib(nbytes: float) -> str:
    """Bytes in MiB: 14.1 MiB, 0.042 MiB."""
    return f"{nbytes / 2**20:,.{1 if nbytes >= 10 * 2**20 else 3}f} MiB"
