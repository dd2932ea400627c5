"""Draw whole-model decoding: `python -m eval.plot_generate JSON [--shape 8b] [--image FILE]`.

From the JSON of `scripts/bench_generate.py`: tokens/s at each point, and the bytes of the cache. Points of the same batch
are joined, by a solid line where `generate()` compiles decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tq_hf.commands import RequestError, serve

from .plotting import figure_of, parser_of, read_json, save, write

COLORS = ("#808080", "#0b6e4f", "#3a6ea5", "#6a4c93", "#b23a48", "#d98c21", "#8d6e63", "#00838f")
COMPILED = ("static", "StaticCache")  # drawn solid, the others dashed


def draw(found: dict[str, Any], shape: str, path: Path) -> None:
    """Write the figure; the suffix of `path` tells the format."""
    rows = [row for row in found["cells"] if row["shape"] == shape and "step_s" in row]
    if not rows:
        raise RequestError(f"no cell of shape {shape} was measured: run scripts/bench_generate.py --shape {shape}.")
    sizes = {row["point"]: _size(row) for row in rows}
    points = sorted(sizes, key=lambda point: sizes[point])
    batches = list(dict.fromkeys(sizes[point][0] for point in points))
    place = {point: i + 0.6 * batches.index(sizes[point][0]) for i, point in enumerate(points)}  # a gap between batches
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    figure, ((speed, memory),) = figure_of(1, 2, size=(7.0, 4.6))
    for panel, value, label in (
        (speed, lambda row: row["tokens_per_s"], "tokens/s of the batch"),
        (memory, lambda row: row["cache_bytes"] / 2**30, "GiB of cache"),
    ):
        for cache, color in zip(caches, COLORS * 3):
            style = "o-" if any(word in cache for word in COMPILED) else "o--"
            for batch in batches:  # a line for each, and one entry of the legend
                its = sorted((place[row["point"]], value(row)) for row in rows if _is_of(row, cache, batch))
                name = cache if batch == batches[0] else None
                panel.plot(*zip(*its) if its else ([], []), style, color=color, markersize=4, linewidth=0.9, label=name)
        panel.set_yscale("log")
        panel.set_xticks(list(place.values()), [point.replace("x", " × ") for point in place], fontsize=8)
        panel.set_xlabel("batch × tokens of a prompt")
        panel.set_ylabel(label)
        panel.grid(which="major", axis="y", linewidth=0.3)
    memory.legend(frameon=False, fontsize=8)
    figure.suptitle(f"Decoding with a model of shape {shape}, {found['gpu']}", fontsize=10)
    save(figure, path)


def _is_of(row: dict[str, Any], cache: str, batch: int) -> bool:
    return row["cache"] == cache and _size(row)[0] == batch


def _size(row: dict[str, Any]) -> tuple[int, int]:
    """Rows, and tokens of a prompt."""
    rows, tokens = row["point"].split("x")
    return int(rows), 1024 * int(tokens[:-1]) if tokens.endswith("k") else int(tokens)


def run(argv: Sequence[str]) -> int:
    parser = parser_of("plot_generate", __doc__, "JSON's name with .png")
    parser.add_argument("results", type=Path, metavar="JSON", help="what scripts/bench_generate.py --json wrote")
    parser.add_argument("--shape", default="8b", help="default: %(default)s")
    args = parser.parse_args(argv)
    found = read_json(args.results)
    return write(partial(draw, found, args.shape), args.image or args.results.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)


if __name__ == "__main__":
    sys.exit(main())
