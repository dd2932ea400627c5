#!/usr/bin/env python3
"""Times attention of many queries over packed pages on a GPU: chunks of a long prompt beside torch's flash SDPA over an
unpacked bf16 copy, and short chunks beside one query.

    python scripts/bench_extend.py [--json PATH] [--preset tq4]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from bars import ERROR
from bench_decode import Case, State, empty_state, error_of, fill, microseconds, tokens
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS = "8x4x128"
LONG = "1x128k"
CHUNKS = (512, 2048, 8192)
SHORT = "8x32k"
SHORT_CHUNKS = (1, 2, 4, 8, 16, 32)


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


def flash_time(case: Case, query: Tensor) -> float:
    key, value = tokens(case, case.length + query.shape[2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return event_time(lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True))


def filled(case: Case) -> State:
    layer = empty_state(case)
    fill(case, layer, case.length)
    return layer


def with_queries(case: Case, layer: State, queries: int) -> tuple[State, float]:
    """The layer with so many new tokens and queries, and the error of the last ones."""
    kv_heads, group, dim = case.sizes
    query = torch.randn(case.rows, kv_heads * group, queries, dim, dtype=torch.bfloat16, device="cuda")
    layer = replace(layer, new=tokens(case, queries), query=query)
    return layer, error_of(case, layer)


def measure_chunk(case: Case, layer: State, queries: int) -> dict[str, Any]:
    layer, error = with_queries(case, layer, queries)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = layer.attend().nbytes
    extra = torch.cuda.max_memory_allocated() - before - output
    time = event_time(layer.attend)
    kv_heads, group, dim = case.sizes
    return asdict(case) | {
        "queries": queries,
        "attend": time,
        "flash": flash_time(case, layer.query),
        "tflops": 4 * kv_heads * group * dim * queries * case.length / time / 1e6,
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
    print(f"\nChunks over {LONG} packed tokens; memory beyond the output, prepared queries included\n")
    print("| queries | attend | flash SDPA | share of its speed | TFLOP/s | MiB | error |")
    print("| ---: " * 7 + "|")
    case = Case(HEADS, LONG, args.preset)
    layer = filled(case)
    long = []
    for queries in CHUNKS:
        row = measure_chunk(case, layer, queries)
        long.append(row)
        print(
            f"| {queries} | {row['attend']:.0f} | {row['flash']:.0f} | {row['flash'] / row['attend']:.2f} |"
            f" {row['tflops']:.0f} | {row['extra_bytes'] / 2**20:.0f} | {row['error']:.1e} |",
            flush=True,
        )
    del layer
    print(f"\nShort chunks over {SHORT} packed tokens\n")
    print("| queries | attend | times one query | error |\n" + "| ---: " * 4 + "|")
    case = Case(HEADS, SHORT, args.preset)
    layer = filled(case)
    short: list[dict[str, Any]] = []
    for queries in SHORT_CHUNKS:
        asking, error = with_queries(case, layer, queries)
        time = microseconds([asking.attend])
        short.append(asdict(case) | {"queries": queries, "attend": time, "error": error})
        print(f"| {queries} | {time:.1f} | {time / short[0]['attend']:.2f} | {error:.1e} |", flush=True)
    if args.json:
        device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "preset": args.preset}
        args.json.write_text(json.dumps(device | {"results": long + short}, indent=1) + "\n")
    if not all(row["error"] <= ERROR for row in long + short):
        raise SystemExit(f"relative RMS error above {ERROR:.1e} against the reference")


if __name__ == "__main__":
    main()
