"""Draw bytes against time: `python -m eval.plot_decode JSON [--image FILE]`, from the JSON of `scripts/bench_decode.py`.

A mark is a decode step of one layer: the bytes of its pages, and the time of what reads them (packed pages, exact tokens and
the combination). The line is what a device copy of as many bytes takes; nothing that reads them can be below it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tq_hf.commands import RequestError, serve

from .plotting import figure_of, parser_of, read_json, save, write

HEADS = "8x4x128"
COLORS = ("#0b6e4f", "#3a6ea5", "#6a4c93", "#b23a48", "#d98c21", "#8d6e63", "#00838f")


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the figure; the suffix of `path` tells the format."""
    rows = [row for row in found["results"] if row["heads"] == HEADS and row["sdpa"]]
    if not rows:
        raise RequestError(f"no row has {HEADS} heads and a time of SDPA: run scripts/bench_decode.py with its defaults.")
    rate = found["copy_bytes_per_second"] / 1e6  # bytes a microsecond
    figure, ((panel,),) = figure_of(1, 1, size=(7.2, 4.6))
    for preset, color in zip(dict.fromkeys(row["preset"] for row in rows), COLORS):
        its = sorted((row for row in rows if row["preset"] == preset), key=lambda row: row["bytes"])
        megabytes, times = [row["bytes"] / 1e6 for row in its], [row["forward_combine"] for row in its]
        panel.plot(megabytes, times, "o-", color=color, markersize=4, linewidth=0.8, label=preset)
    shapes = {row["shape"]: row for row in rows}
    unpacked = sorted((_bf16_bytes(row), min(row["sdpa"].values()), shape) for shape, row in shapes.items())
    panel.plot(
        [size / 1e6 for size, _, _ in unpacked], [time for _, time, _ in unpacked], "s-", color="grey", markersize=4,
        linewidth=0.8, label="best SDPA, bfloat16",
    )  # fmt: skip
    for size, time, shape in unpacked:
        panel.annotate(shape, (size / 1e6, time), textcoords="offset points", xytext=(4, -9), fontsize=8, color="grey")
    ends = [min(row["bytes"] for row in rows), max(size for size, _, _ in unpacked)]
    speed = f"device copy, {rate / 1e6:.2f} TB/s"
    panel.plot([x / 1e6 for x in ends], [x / rate for x in ends], "k--", linewidth=0.8, label=speed)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("MB read")
    panel.set_ylabel("µs")
    panel.set_title(f"Decode attention of one layer, {found['gpu']}", fontsize=10)
    panel.grid(which="major", linewidth=0.3)
    panel.legend(frameon=False, fontsize=8)
    save(figure, path)


def _bf16_bytes(row: dict[str, Any]) -> int:
    batch, thousands = row["shape"].removesuffix("k").split("x")
    heads, _, dim = row["heads"].split("x")
    return 2 * 2 * 1024 * int(batch) * int(thousands) * int(heads) * int(dim)


def run(argv: Sequence[str]) -> int:
    parser = parser_of("plot_decode", __doc__, "JSON's name with .png")
    parser.add_argument("results", type=Path, metavar="JSON", help="what scripts/bench_decode.py --json wrote")
    args = parser.parse_args(argv)
    return write(partial(draw, read_json(args.results)), args.image or args.results.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)


if __name__ == "__main__":
    sys.exit(main())
