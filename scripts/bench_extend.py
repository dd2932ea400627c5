#!/usr/bin/env python3
"""Times attention of many queries over packed pages on a GPU: chunks of a long prompt beside torch's flash SDPA over an
unpacked bf16 copy, and short chunks beside one query.

    python scripts/bench_extend.py [--json PATH] [--preset tq4]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_decode import DIM, GROUP, KV_HEADS, attend, error_of, filled_state, microseconds, tokens
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HISTORY = 131072
CHUNKS = (512, 2048, 8192)
SHORT_ROWS, SHORT_HISTORY = 8, 32768
SHORT_CHUNKS = (1, 2, 4, 8, 16, 32)
CHECKED = 128  # the last queries, which are compared with the reference
TOLERANCE = 2e-3  # relative RMS error of bf16 outputs


def event_time(call: Callable[[], Any]) -> float:
    """Microseconds of a call that takes much longer than its launch: the better of two after one to warm up."""
    call()
    times = []
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return min(times)


def flash_time(query: Tensor) -> float:
    key, value = tokens(1, HISTORY + query.shape[2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return event_time(lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True))


def prepared(state: dict[str, Any], layout: str, rows: int, queries: int) -> tuple[Callable[[], Tensor], Tensor, float]:
    """A call with new tokens for all its queries, the queries, and the error of the last ones."""
    new = tokens(rows, queries)
    query = torch.randn(rows, KV_HEADS * GROUP, queries, DIM, dtype=torch.bfloat16, device="cuda")
    rest = [None, None, layout, DIM**-0.5, 0.0, True, state["page_ids"].shape[1]]

    def call() -> Tensor:
        return attend(query, *new, *state.values(), *rest)

    error = error_of(call()[:, -CHECKED:], query[:, :, -CHECKED:], new, state, rest)
    if not error <= TOLERANCE:
        raise RuntimeError(f"{queries} queries: relative RMS error {error:.1e} against the reference")
    return call, query, error


def measure_chunk(state: dict[str, Any], layout: str, queries: int) -> dict[str, Any]:
    call, query, error = prepared(state, layout, 1, queries)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = call().nbytes
    extra = torch.cuda.max_memory_allocated() - before - output
    time = event_time(call)
    flops = 4 * KV_HEADS * GROUP * DIM * queries * HISTORY
    return {
        "rows": 1,
        "length": HISTORY,
        "queries": queries,
        "attend": time,
        "flash": flash_time(query),
        "tflops": flops / time / 1e6,
        "extra_bytes": extra,
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--preset", default="tq4", help="default: tq4")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_extend.py needs a GPU: torch.cuda.is_available() is False.")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.preset}; times in microseconds")
    print(f"\nChunks over {HISTORY} packed tokens; memory beyond the output, prepared queries included\n")
    print("| queries | attend | flash SDPA | share of its speed | TFLOP/s | MiB | error |")
    print("| ---: " * 7 + "|")
    layout, state, _ = filled_state(args.preset, 1, HISTORY)
    long = []
    for queries in CHUNKS:
        row = measure_chunk(state, layout, queries)
        long.append(row)
        print(
            f"| {queries} | {row['attend']:.0f} | {row['flash']:.0f} | {row['flash'] / row['attend']:.2f} |"
            f" {row['tflops']:.0f} | {row['extra_bytes'] / 2**20:.0f} | {row['error']:.1e} |",
            flush=True,
        )
    del state
    print(f"\nShort chunks over {SHORT_ROWS} x {SHORT_HISTORY} packed tokens\n")
    print("| queries | attend | times one query | error |\n" + "| ---: " * 4 + "|")
    layout, state, _ = filled_state(args.preset, SHORT_ROWS, SHORT_HISTORY)
    short: list[dict[str, Any]] = []
    for queries in SHORT_CHUNKS:
        call, _, error = prepared(state, layout, SHORT_ROWS, queries)
        time = microseconds([call])
        short.append({"rows": SHORT_ROWS, "length": SHORT_HISTORY, "queries": queries, "attend": time, "error": error})
        print(f"| {queries} | {time:.1f} | {time / short[0]['attend']:.2f} | {error:.1e} |", flush=True)
    if args.json:
        device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "preset": args.preset}
        args.json.write_text(json.dumps(device | {"results": long + short}, indent=1) + "\n")


if __name__ == "__main__":
    main()
