"""What the benchmark over several GPUs found, as Markdown: the measured cells, and what follows for more GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from generate_bench.report import hash_of

from eval.results import markdown

from .placements import ONE, PARALLEL, PLACEMENTS

Row = dict[str, Any]
MORE = (4, 8)  # GPUs that are reckoned for
SIZES = ("weight_bytes", "cache_bytes", "peak_bytes")
WARNINGS = ("graph_breaks", "cudagraph_skips", "recompiled")
BEGIN, END = "<!-- measured -->", "<!-- end of what was measured -->"


def bench_hash() -> str:
    """Changes with this benchmark's own code."""
    return hash_of([*Path(__file__).parent.glob("*.py"), Path(__file__).parents[1] / "bench_multi_gpu.py"])


def tables(found: dict[str, Any]) -> str:
    """All that was found. A share is what one device has, the largest of them."""
    cells = [row for row in found["cells"] if "step_s" in row]
    failed = [row for row in found["cells"] if "step_s" not in row]
    parts = [
        f"{found['gpus']} × {found['gpu']}, torch {found['torch']}, transformers {found['transformers']}; random weights in"
        f" the shape {found['shape']}, caches filled with random states, 32 steps through `generate()` timed. Tokens/s:"
        " batch by the median step, the one ahead (with `custom_generate=decode_ahead`) where there is one. GiB are those of"
        " the GPU that has most."
    ]
    head = ("batch × tokens", "cache", "placement", "step, ms", "ahead, ms", "tokens/s", "times one GPU", "weights, GiB",
            "cache, GiB", "peak, GiB")  # fmt: skip
    parts.append(markdown(head, [_cells(row, cells) for row in sorted(cells, key=_place)]))
    if rows := reckoned(cells):
        parts.append(
            "From the measured steps on one and on two GPUs with tensor parallelism: what GPUs share takes 2 (t1 - t2) on"
            " one, what they do not takes 2 t2 - t1 on any number, so that a step on N takes the first by N and the second."
            " That is arithmetic, not a measurement: it leaves out that an all-reduce over more GPUs takes longer."
        )
        more = [f"tokens/s on {count}" for count in MORE]
        parts.append(markdown(["batch × tokens", "cache", "shared, ms", "not shared, ms", *more], rows))
    if failed:
        parts.append("Not measured: " + "; ".join(map(_failure, failed)) + ".")
    return "\n\n".join(parts)


def reckoned(cells: list[Row]) -> list[list[str]]:
    """Steps of tensor parallelism on more GPUs, from those on one and on two."""
    rows = []
    for one in (row for row in cells if row["placement"] == ONE):
        two = _same(one, cells, PARALLEL)
        if two is None or len(two["devices"]) != 2:
            continue
        shared, fixed = 2 * (_step(one) - _step(two)), 2 * _step(two) - _step(one)
        if shared <= 0:
            continue  # two GPUs are not faster: more would not be either
        batch = one["tokens_per_s"] * one["step_s"]
        more = [f"{batch / (shared / count + fixed):.0f}" for count in MORE]
        rows.append([_point(one), one["cache"], f"{1e3 * shared:.2f}", f"{1e3 * fixed:.2f}", *more])
    return rows


def write_page(path: Path, text: str) -> None:
    """Put the tables between the two marks of a page, in place of what is there.

    Raises:
        ValueError: the page has no such marks.
    """
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}, between which the tables go.")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _cells(row: Row, cells: list[Row]) -> list[str]:
    one = _same(row, cells, ONE)
    times = "" if one is None else f"{_step(one) / _step(row):.2f}"
    ahead = f"{1e3 * row['ahead_step_s']:.2f}" if "ahead_step_s" in row else ""
    largest = [max(device[name] for device in row["devices"]) / 2**30 for name in SIZES]
    notes = "".join(f", {name.replace('_', ' ')}: {row[name]}" for name in WARNINGS if row.get(name))
    count = "" if row["placement"] == ONE else f" × {len(row['devices'])}"
    shown = row["placement"] + count + notes
    tokens = row["tokens_per_s"] * row["step_s"] / _step(row)
    sizes = (f"{size:.2f}" for size in largest)
    return [_point(row), row["cache"], shown, f"{1e3 * row['step_s']:.2f}", ahead, f"{tokens:.1f}", times, *sizes]


def _step(row: Row) -> float:
    """Seconds of a step, of one ahead where there is one."""
    return float(row["ahead_step_s"] if "ahead_step_s" in row else row["step_s"])


def _failure(row: Row) -> str:
    why = row.get("error") or f"OOM: {row['oom']}"
    return f"{row['placement']}, {row['point']}, {row['cache']}: {why}"


def _point(row: Row) -> str:
    return str(row["point"]).replace("x", " × ")


def _same(row: Row, cells: list[Row], placement: str) -> Row | None:
    """The same cache at the same point in another placement."""
    wanted = (row["point"], row["cache"], placement)
    return next((other for other in cells if (other["point"], other["cache"], other["placement"]) == wanted), None)


def _place(row: Row) -> tuple[str, str, int]:
    return row["point"], row["cache"], PLACEMENTS.index(row["placement"])
