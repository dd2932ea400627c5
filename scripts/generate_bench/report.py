"""The benchmark's JSON: what it holds, and as Markdown tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.results import markdown
from eval.stored import replace_text

from .caches import CACHES
from .process import ROOT
from .shapes import POINTS, model_config

Row = dict[str, Any]
HEAD = (
    "batch × prompt", "cache", "tokens/s", "step, ms", "mean", "ahead, ms", "floor, ms", "step / floor", "ahead / floor",
    "first token, s", "cache, GiB", "peak, prompt", "peak, decode", "notes",
)  # fmt: skip
IDENTITY = ("gpu", "torch", "transformers")
NOTED_BYTES = 1 << 27  # more than libraries' workspaces take: something was left in memory before the cache was made


class Results:
    """Rows by shape, point and cache in a JSON file, which is written with every row.

    Attributes:
        found: what the file holds: facts of the machine, `cells`, `capacity`, `profiles` and what is `missing` there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {}
        if path.exists():
            self.found = json.loads(path.read_text())
        self._complete()

    def _complete(self) -> None:
        for name, empty in (("cells", []), ("capacity", []), ("profiles", []), ("missing", {})):
            self.found.setdefault(name, empty)

    def take(self, facts: Row) -> None:
        """Note what the machine is. Rows of another machine or release are dropped; its copy ceiling stays the first."""
        if any(self.found.get(name) not in (None, facts[name]) for name in IDENTITY):
            self.found = {}
            self._complete()
        self.found = {**facts, **self.found}
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.path, json.dumps(self.found, indent=1) + "\n")

    def put(self, kind: str, key: dict[str, str], result: Row) -> None:
        """Keep a result in place of an older one with the same key."""
        others = [row for row in self.found[kind] if any(row.get(name) != value for name, value in key.items())]
        self.found[kind] = [*others, {**key, "code": code_hash(key["cache"]), **result}]
        self.write()

    def has(self, kind: str, key: dict[str, str]) -> bool:
        """Whether there is a result of the same code; one that failed is none."""
        return any(
            all(row.get(name) == value for name, value in key.items())
            and row["code"] == code_hash(key["cache"])
            and "error" not in row
            for row in self.found[kind]
        )


def code_hash(cache: str) -> str:
    """Changes with all that a result depends on: for other projects' caches, this benchmark and how it generates."""
    generation = ROOT / "tq_hf" / "generation"
    files = [*(ROOT / "scripts" / "generate_bench").glob("*.py"), generation / "ahead.py", generation / "comparison.py"]
    if CACHES[cache].packed:
        files += (ROOT / "tq_hf").rglob("*.py")
    return hash_of(files)


def hash_of(files: Iterable[Path]) -> str:
    """Changes with the files' contents."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(set(files)))).hexdigest()[:16]


def floor_s(row: Row, rate: float) -> float:
    """Seconds that reading the weights and the cache once takes, at a device copy's speed."""
    return (row["weight_bytes_read"] + row["cache_bytes"]) / rate


def tables(found: dict[str, Any]) -> str:
    """All that was found, as Markdown."""
    parts = [
        f"{found['gpu']}, torch {found['torch']}, transformers {found['transformers']}; a device copy moves"
        f" {found['copy_bytes_per_second'] / 1e12:.2f} TB/s. Tokens/s: batch by the median step of the fastest run; notes"
        " tell the medians of all. Ahead: the step with `custom_generate=decode_ahead`. Floor: weights and cache read once"
        " at that speed. Peaks: GiB allocated beyond what was before the cache was made, the weights above all."
    ]
    for shape in dict.fromkeys(row["shape"] for row in found["cells"]):
        rows = sorted((row for row in found["cells"] if row["shape"] == shape), key=_place)
        parts.append(f"### {shape}\n\n" + markdown(HEAD, [_cells(row, found["copy_bytes_per_second"]) for row in rows]))
    if found["missing"]:
        parts.append("Not measured: " + "; ".join(f"{name}: {why}" for name, why in found["missing"].items()) + ".")
    if found["capacity"]:
        head = ("shape", "tokens", "cache", "largest batch", "times DynamicCache")
        parts.append("### Largest batch that fits and decodes\n\n" + markdown(head, list(_capacities(found["capacity"]))))
    parts += [profile_table(row) for row in found["profiles"]]
    return "\n\n".join(parts)


def _place(row: Row) -> tuple[int, str, int]:
    points, names = list(POINTS), list(CACHES)
    place = points.index(row["point"]) if row["point"] in points else len(points)
    return place, row["point"], names.index(row["cache"]) if row["cache"] in names else len(names)


def _cells(row: Row, rate: float) -> list[str]:
    start = [row["point"].replace("x", " × "), row["cache"]]
    if "oom" in row:
        return [*start, f"OOM: {row['oom']}", *[""] * (len(HEAD) - 3)]
    if "error" in row:
        return [*start, f"failed: {row['error']}", *[""] * (len(HEAD) - 3)]
    floor, ahead = floor_s(row, rate), row.get("ahead_step_s")
    return [
        *start,
        f"{row['tokens_per_s']:.1f}",
        f"{1e3 * row['step_s']:.2f}",
        f"{1e3 * row['mean_step_s']:.2f}",
        f"{1e3 * ahead:.2f}" if ahead else "",
        f"{1e3 * floor:.2f}",
        f"{row['step_s'] / floor:.2f}",
        f"{ahead / floor:.2f}" if ahead else "",
        f"{row['first_token_s']:.3f}",
        *(f"{row[name] / 2**30:.2f}" for name in ("cache_bytes", "prefill_bytes", "decode_bytes")),
        _notes(row),
    ]


def _notes(row: Row) -> str:
    """How far runs differ, what share was packed, what was in memory, and what went wrong with compilation.

    One graph without breaks is what it should be.
    """
    notes = []
    if len(steps := row.get("repeats_ms", ())) > 1:
        notes.append(f"{len(steps)} runs: {min(steps):.2f} to {max(steps):.2f} ms")
    if "packed_share" in row:
        notes.append(f"{100 * row['packed_share']:.1f} % packed")
    if (kept := row.get("kept_bytes", 0)) >= NOTED_BYTES:
        notes.append(f"{kept / 2**30:.2f} GiB beside the weights before")
    if row.get("graphs", 1) > 1:
        notes.append(f"{row['graphs']} graphs")
    for name in ("graph_breaks", "cudagraph_skips", "recompiled"):
        if row.get(name):
            notes.append(f"{name.replace('_', ' ')}: {row[name]}")
    return ", ".join(notes)


def _capacities(rows: Sequence[Row]) -> Iterator[list[str]]:
    bases = {row["shape"]: row.get("rows") for row in rows if row["cache"] == "DynamicCache"}
    for row in rows:
        base, most = bases.get(row["shape"]), row.get("rows")
        times = f"{most / base:.2f}" if most and base else ""
        yield [
            row["shape"],
            row["tokens"],
            row["cache"],
            f"failed: {row['error']}" if most is None else str(most),
            times,
        ]


def _part(name: str, seconds: float, layers: int = 0) -> list[str]:
    """A part of a step, and of a layer where it has one call in each."""
    return [name, f"{1e3 * seconds:.2f}", f"{1e6 * seconds / layers:.1f}" if layers else ""]


def profile_table(row: Row) -> str:
    """One step's time as Markdown: the host's by part, the GPU's by kernel, and what is neither."""
    title = f"### One decode step: {row['shape']}, {row['point']}, {row['cache']}\n\n"
    if "profile" not in row:
        return title + f"{'OOM: ' + row['oom'] if 'oom' in row else 'failed: ' + row['error']}\n"
    profile, step = row["profile"], row["profile"]["step_s"]
    host = profile["host_s"]
    inside = host["cache.update"] + host["attention"]
    layers = model_config(row["shape"]).num_hidden_layers
    lines = [_part("whole step", step), _part("forward, host", host["forward"])]
    if inside:
        lines += [
            _part("  cache.update", host["cache.update"], layers),
            _part("  attention function", host["attention"], layers),
            _part("  the model's own code", host["forward"] - inside),
        ]
    lines += [
        _part("sampling, streamer, waiting for the GPU", step - host["forward"]),
        _part(f"traced step ({profile['launches']} launches)", profile["traced_step_s"]),
        _part("  host in calls that may wait", profile["waiting_s"]),
        _part("  GPU busy", profile["busy_s"]),
        _part("  GPU idle", profile["idle_s"]),
    ]
    parts = markdown(("part", "ms", "µs a layer"), lines)
    kernels = [
        [f"`{name[:90]}`".replace("|", " "), str(calls), f"{1e3 * time:.3f}"] for name, calls, time in profile["kernels"]
    ]
    calls, time = profile["other_kernels"]
    if calls:
        kernels.append(["others", str(calls), f"{1e3 * time:.3f}"])
    return title + parts + ("\n" + markdown(("kernel", "calls", "ms"), kernels) if kernels else "")
