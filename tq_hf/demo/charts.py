"""Charts as HTML: they follow the page's width and its colours, light or dark, and need no library.

Text stays text (SVG that is stretched to the page's width would stretch it), so only lines and areas are SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1000.0, 300.0
MAX_POINTS = 600


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, its CSS class (which gives the colour) and its points, x ascending."""

    name: str
    css: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """A bar: its name, its CSS class, its length and what is written beside it."""

    name: str
    css: str
    value: float
    text: str


def mib(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"


def thin(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most so many points, and the first and the last: of each stretch the highest, so that no peak is lost."""
    step = -(-len(points) // most) or 1
    highest = [max(points[i : i + step], key=lambda point: point[1]) for i in range(1, len(points) - 1, step)]
    return [*points[:1], *highest, *points[1:][-1:]]


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    y_text: Callable[[float], str],
    *,
    filled: bool = True,
    mark: tuple[float, str] | None = None,
) -> str:
    """Lines from (0 or the first x, 0). A single point is drawn as a level.

    Args:
        title: above the chart; with the lines' last values it is also what a screen reader says.
        y_text: how values are written.
        filled: fill below the lines.
        mark: a vertical line, and what is written beside it.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0

    def place(x: float) -> float:
        return (x - left) / ((right - left) or 1) * WIDTH

    shapes = []
    for line in lines:
        drawn = [(place(x), HEIGHT * (1 - y / top)) for x, y in thin(line.points)]
        if left == right:
            drawn = [(0.0, drawn[0][1]), (WIDTH, drawn[0][1])]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        if filled:
            ends = drawn[0][0], drawn[-1][0]
            shapes.append(f'<polygon class="{line.css}" points="{ends[0]:.1f},{HEIGHT} {path} {ends[1]:.1f},{HEIGHT}"/>')
        shapes.append(f'<polyline class="{line.css}" points="{path}"/>')
    note = ""
    if mark is not None and left < mark[0] < right:
        at = place(mark[0])
        shapes.append(f'<line class="tq-mark" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{HEIGHT}"/>')
        side = f"right:{100 - at / 10:.1f}%" if at > WIDTH / 2 else f"left:{at / 10:.1f}%"
        note = f'<span class="tq-note" style="{side}">{escape(mark[1])}</span>'
    legend = "".join(
        f'<span class="tq-key {line.css}">{escape(line.name)} <b>{escape(y_text(line.points[-1][1]))}</b></span>'
        for line in lines if line.name
    )  # fmt: skip
    spoken = "; ".join([title, *(f"{line.name} {y_text(line.points[-1][1])}" for line in lines if line.name)])
    return (
        f'<figure class="tq-chart"><figcaption><span>{escape(title)}</span>{legend}</figcaption>'
        f'<div class="tq-plot" role="img" aria-label="{escape(spoken)}">'
        f'<span class="tq-y">{escape(y_text(top))}</span>{note}'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>'
        f'</div><div class="tq-x"><span>{left:,.0f}</span><span>{escape(x_label)}</span><span>{right:,.0f}</span></div>'
        "</figure>"
    )


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Horizontal bars, the longest as wide as the chart."""
    longest = max((bar.value for bar in bars), default=0) or 1
    rows = "".join(
        f'<div class="tq-bar"><span class="tq-name">{escape(bar.name)}</span><span class="tq-track">'
        f'<span class="tq-fill {bar.css}" style="width:{max(bar.value / longest * 100, 0.4):.2f}%"></span></span>'
        f'<span class="tq-value">{escape(bar.text)}</span></div>'
        for bar in bars
    )
    return f'<figure class="tq-chart"><figcaption><span>{escape(title)}</span></figcaption>{rows}</figure>'
