"""The bars that the kernels and whole models are to reach on an H200, beside what the benchmarks measured.

python scripts/bars.py DIR     DIR: where `scripts/gpu_check --out` and `bench_*.py --json` left their JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ERROR = 2e-3  # relative RMS error of bf16 outputs against the reference
# Packed decode attention: how many times faster than the best SDPA over bf16 tensors, by shape and preset.
DECODE = {
    "1x8k": {"tq4": 2.0, "tq3": 2.2, "tq3v2": 2.2, "tq2": 2.25},
    "1x32k": {"tq4": 2.6, "tq3": 3.1, "tq3v2": 3.3, "tq2": 3.4},
    "1x128k": {"tq4": 3.05, "tq3": 3.7, "tq3v2": 4.0, "tq2": 4.5},
    "8x32k": {"tq4": 3.1, "tq3": 3.7, "tq3v2": 4.0, "tq2": 4.5},
    "32x32k": {"tq4": 3.3, "tq3": 3.9, "tq3v2": 4.2, "tq2": 4.6},
}
USUAL_HEADS = "8x4x128"
OTHER_HEADS = 2.0
COPY_SHARE, COPY_SHARE_OF = 0.7, ("tq4", "k8v4")  # of the device copy's speed, at 8x32k
RAGGED = 1.15  # times an even batch
STEP_US, PAGE_STEP_US, PREFILL_GB_S = 5.0, 10.0, 800.0
CHUNKS = {2: 1.3, 4: 1.3, 16: 2.5}  # times one query
FLASH_SHARE, EXTRA_MIB = 0.6, 64.0
HOST_US = 60.0  # update and attention of one layer
# Whole models of the 8B shape, by point: decode tokens/s of tq4 in a compiled static cache against StaticCache's.
GENERATE_SHAPE = "8b"
AGAINST_STATIC = {"1x2k": 1.0, "1x32k": 3.0, "8x8k": 4.0, "8x32k": 8.0}
AGAINST_DYNAMIC = 0.95  # eager tq4 against DynamicCache
OVER_FLOOR = 1.6  # a compiled step against reading all bytes once
AGAINST_FASTEST = {"8x32k": 1.5}  # compiled tq4 against the fastest bf16 cache
AGAINST_QUANTIZED = ((8192, 3.0), (0, 1.0))  # eager tq4 against the best QuantizedCache, by the tokens of a row
FIRST_TOKEN = ((8192, 1.05), (0, 1.15))  # against DynamicCache's time
CACHE_SHARE_FROM, CACHE_SHARES = 32768, {"tq4": 0.28, "tq3": 0.22, "tq2": 0.15}  # of bf16 bytes, from so many tokens on
DECODE_PEAK = {"8x32k": 0.32}  # of DynamicCache's, beyond weights
LARGEST_BATCH = {"tq4": 3.2}  # times DynamicCache's
LM_EVAL = {"packed": {"rolling": 2.0}, "decode": {"rolling": 6.0, "generate": 1.3}}  # by mode, times `hf`'s time


@dataclass(frozen=True)
class Bar:
    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def decode_bars(found: dict[str, Any]) -> Iterator[Bar]:
    for row in found["results"]:
        heads, shape, preset, counted = row["heads"], row["shape"], row["preset"], row["forward_combine"]
        name = f"{shape} {preset}" if heads == USUAL_HEADS else f"{shape} {preset}, heads {heads}"
        if shape == "ragged":
            yield Bar(f"{name}: times an even batch", row["total"] / row["even"], RAGGED)
        elif row["sdpa"]:
            limit = DECODE.get(shape, {}).get(preset) if heads == USUAL_HEADS else OTHER_HEADS
            if limit is not None:
                yield Bar(f"{name}: SDPA / (fwd + comb)", min(row["sdpa"].values()) / counted, limit, at_least=True)
        if (heads, shape) == (USUAL_HEADS, "8x32k") and preset in COPY_SHARE_OF:
            share = row["bytes"] / counted * 1e6 / found["copy_bytes_per_second"]
            yield Bar(f"{name}: share of the copy's speed", share, COPY_SHARE, at_least=True)
    yield _worst_error(found["results"], "decode")


def extend_bars(found: dict[str, Any]) -> Iterator[Bar]:
    one = next((row["attend"] for row in found["results"] if row["queries"] == 1), None)
    for row in found["results"]:
        queries = row["queries"]
        name = f"{row['shape']} {row['preset']}, {queries} queries"
        if "flash" in row:
            yield Bar(f"{name}: share of flash SDPA's speed", row["flash"] / row["attend"], FLASH_SHARE, at_least=True)
            yield Bar(f"{name}: MiB beside the output", row["extra_bytes"] / 2**20, EXTRA_MIB)
        elif one is not None and queries in CHUNKS:
            yield Bar(f"{name}: times one", row["attend"] / one, CHUNKS[queries])
    yield _worst_error(found["results"], "extend")


def store_bars(found: dict[str, Any]) -> Iterator[Bar]:
    for row in found["rows"]:
        name = f"{row['case']}, {row['preset']}"
        if "input_gb_s" in row:
            yield Bar(f"{name}: GB/s of input", row["input_gb_s"], PREFILL_GB_S, at_least=True)
        else:
            yield Bar(f"{name}: µs", row["us"], STEP_US if "no page" in name else PAGE_STEP_US)


def host_bars(found: dict[str, Any]) -> Iterator[Bar]:
    for row in found["steps"]:
        if row["attention"] == "packed_attention" and not row["page"]:
            name = f"{row['shape']}, {row['padding']} padding"
            # A token is stored in the same call: the aim was set without that.
            yield Bar(f"{name}: host µs of a layer's update, attention and storing", row["total_us"], HOST_US)


def generate_bars(found: dict[str, Any]) -> Iterator[Bar]:
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found["cells"]:
        if row["shape"] == GENERATE_SHAPE and "step_s" in row:
            rows.setdefault(row["point"], {})[row["cache"]] = row
    for point, its in rows.items():
        yield from _speed_bars(point, its, found["copy_bytes_per_second"])
        yield from _memory_bars(point, its)
    most = {row["cache"]: row["rows"] for row in found["capacity"] if row["shape"] == GENERATE_SHAPE and row.get("rows")}
    for cache, limit in LARGEST_BATCH.items():
        if cache in most and "DynamicCache" in most:
            yield Bar(f"{cache}: largest batch / DynamicCache's", most[cache] / most["DynamicCache"], limit, at_least=True)


def _speed_bars(point: str, its: dict[str, dict[str, Any]], rate: float) -> Iterator[Bar]:
    # Without compilation the host limits a step: only caches that took turns on it, repeatedly, are compared.
    its = {name: row for name, row in its.items() if "static" in name.lower() or "repeats_ms" in row}
    eager, static, dynamic = its.get("tq4"), its.get("tq4, static"), its.get("DynamicCache")
    quantized = [row for name, row in its.items() if name.startswith("QuantizedCache")]
    exact = [row for name, row in its.items() if name.startswith(("DynamicCache", "StaticCache"))]
    if static is not None:
        yield from _static_bars(point, "tq4, static", static, its.get("StaticCache"), exact, rate)
        # Both with `decode_ahead`, where both were measured so.
        ahead = {name: row | {"step_s": row["ahead_step_s"]} for name, row in its.items() if "ahead_step_s" in row}
        if "tq4, static" in ahead:
            others = [ahead.get(row["cache"], row) for row in exact]
            yield from _static_bars(
                point, "tq4, static, ahead", ahead["tq4, static"], ahead.get("StaticCache"), others, rate
            )
    if eager is not None and dynamic is not None:
        yield _faster(f"{point} tq4: times DynamicCache", eager, [dynamic], AGAINST_DYNAMIC)
    if eager is not None and quantized:
        limit = _from(AGAINST_QUANTIZED, point)
        yield _faster(f"{point} tq4: times the best QuantizedCache", eager, quantized, limit)
    for row in (eager, static):
        if row is not None and dynamic is not None:
            ratio = row["first_token_s"] / dynamic["first_token_s"]
            yield Bar(f"{point} {row['cache']}: first token / DynamicCache's", ratio, _from(FIRST_TOKEN, point))


def _static_bars(
    point: str, name: str, row: dict[str, Any], other: dict[str, Any] | None, exact: list[dict[str, Any]], rate: float
) -> Iterator[Bar]:
    floor = (row["weight_bytes_read"] + row["cache_bytes"]) / rate
    yield Bar(f"{point} {name}: step / floor", row["step_s"] / floor, OVER_FLOOR)
    if point in AGAINST_STATIC and other is not None:
        yield _faster(f"{point} {name}: times StaticCache", row, [other], AGAINST_STATIC[point])
    if point in AGAINST_FASTEST and exact:
        yield _faster(f"{point} {name}: times the fastest bf16", row, exact, AGAINST_FASTEST[point])


def _memory_bars(point: str, its: dict[str, dict[str, Any]]) -> Iterator[Bar]:
    dynamic = its.get("DynamicCache")
    for cache, row in its.items():
        preset = cache.removesuffix(", static")
        if dynamic is None or preset not in CACHE_SHARES:
            continue
        if _tokens(point) >= CACHE_SHARE_FROM:
            share = row["cache_bytes"] / dynamic["cache_bytes"]
            yield Bar(f"{point} {cache}: cache bytes / DynamicCache's", share, CACHE_SHARES[preset])
        if preset == "tq4" and point in DECODE_PEAK and dynamic["decode_bytes"]:
            share = row["decode_bytes"] / dynamic["decode_bytes"]
            yield Bar(f"{point} {cache}: peak of decode / DynamicCache's", share, DECODE_PEAK[point])


def _faster(what: str, row: dict[str, Any], others: list[dict[str, Any]], limit: float) -> Bar:
    return Bar(what, min(other["step_s"] for other in others) / row["step_s"], limit, at_least=True)


def lm_eval_bars(found: dict[str, Any]) -> Iterator[Bar]:
    for name, limits in LM_EVAL.items():
        for kind, limit in limits.items():
            taken = found["seconds"][f"tq-hf, {name}"][kind] / found["seconds"]["hf"][kind]
            yield Bar(f"lm-eval, {kind}, mode {name}: times hf", taken, limit)


def _tokens(point: str) -> int:
    text = point.split("x")[1]
    return 1024 * int(text.removesuffix("k")) if text.endswith("k") else int(text)


def _from(limits: tuple[tuple[int, float], ...], point: str) -> float:
    """The limit of the first that begins at so few tokens."""
    return next(limit for start, limit in limits if _tokens(point) >= start)


def _worst_error(rows: list[dict[str, Any]], name: str) -> Bar:
    return Bar(f"{name}: largest error of {len(rows)} rows", max((row["error"] for row in rows), default=0.0), ERROR)


BARS: dict[str, Callable[[dict[str, Any]], Iterator[Bar]]] = {
    "bench_decode": decode_bars,
    "bench_extend": extend_bars,
    "bench_store": store_bars,
    "bench_host": host_bars,
    "bench_generate": generate_bars,
    "bench_lm_eval": lm_eval_bars,
}


def read_bars(folder: Path) -> list[Bar]:
    """The bars of all benchmarks that have left a JSON."""
    bars: list[Bar] = []
    for name, bars_of in BARS.items():
        for path in sorted(folder.glob(f"{name}*.json")):
            bars += bars_of(json.loads(path.read_text()))
    return bars


def table(bars: list[Bar]) -> str:
    """Missed bars last, where they are seen."""
    lines = []
    for bar in sorted(bars, key=lambda bar: not bar.is_met):
        sign = ">=" if bar.at_least else "<="
        lines.append(f"{'met' if bar.is_met else 'MISSED':6}  {bar.value:8.3g} {sign} {bar.limit:<6.4g}  {bar.what}")
    met = sum(bar.is_met for bar in bars)
    return "\n".join([*lines, f"{met} of {len(bars)} bars met"])


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit(__doc__)
    found = read_bars(Path(sys.argv[1]))
    if not found:
        raise SystemExit(f"error: no JSON of {', '.join(BARS)} in {sys.argv[1]}.")
    print(table(found))
