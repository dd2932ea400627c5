#!/usr/bin/env python3
"""Times decode attention over packed pages on a GPU, beside torch's SDPA over bf16 keys and values.

Pages are written by the package's own commit, and one row and head of every measured configuration is checked against the
reference. Times are per call, from CUDA-graph replay over as many copies of the cache as exceed the L2 cache.

    python scripts/bench_decode.py [--json PATH] [--presets tq4,tq3] [--shapes 1x8k,8x32k]
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tq_hf import reference
from tq_hf.config import TurboQuantConfig
from tq_hf.kernels.commit import commit

attend_module = importlib.import_module("tq_hf.kernels.attend")
attend = attend_module.attend

KV_HEADS, GROUP, DIM = 8, 4, 128
PRESETS = "tq4,tq3,tq2,4bit_nc,3bit_nc,k8v4"
SHAPES = "1x8k,1x32k,8x8k,8x32k"
CHUNK = 4096
ROTATED_BYTES = 2.5e8  # several times the largest L2 cache
TOLERANCE = 5e-3  # bf16 outputs
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Time of one call: the calls are captured into one graph and replayed, best of five."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = max(1, math.ceil(10 / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * repeats:
            call()
    graph.replay()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (len(calls) * repeats))
    return min(times)


def copy_ceiling() -> float:
    """Bytes read and written a second by a device copy (a kernel's, not a copy engine's)."""
    source = torch.empty(1 << 28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    for _ in range(200):  # an idle GPU takes a moment to raise its clocks
        torch.neg(source, out=target)
    return 2 * source.nbytes / microseconds([lambda: torch.neg(source, out=target)]) * 1e6


def copies(size: int) -> int:
    return min(32, max(1, math.ceil(ROTATED_BYTES / size)))


def tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys with a mean of their own in every channel, and values: bf16 [rows, heads, length, dim]."""
    shape = (rows, KV_HEADS, length, DIM)
    key = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    key += 3 * torch.randn(1, KV_HEADS, 1, DIM, dtype=torch.bfloat16, device="cuda")
    return key, torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def sdpa_times(rows: int, length: int) -> dict[str, float]:
    key, value = tokens(rows, length)
    query = torch.randn(rows, KV_HEADS * GROUP, 1, DIM, dtype=torch.bfloat16, device="cuda")
    pairs = [(key.clone(), value.clone()) for _ in range(copies(2 * key.nbytes))]
    calls = [lambda k=k, v=v: scaled_dot_product_attention(query, k, v, enable_gqa=True) for k, v in pairs]
    times = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                times[name] = microseconds(calls)
        except RuntimeError:  # this backend does not support the GPU or the call
            torch.cuda.synchronize()
    return times


def filled_state(preset: str, rows: int, length: int) -> tuple[str, dict[str, Any], tuple[Tensor, Tensor]]:
    """Layout, state after committing `length` tokens, and the next token's key and value."""
    config = TurboQuantConfig.from_preset(preset)
    layout = config.layout(DIM, DIM, torch.bfloat16)
    page, sinks, window = config.page_size, config.sink_tokens, config.recent_window
    entries = length // page + 1
    ints = {"dtype": torch.int32, "device": "cuda"}
    exact = {"dtype": torch.bfloat16, "device": "cuda"}
    starts = sinks + page * torch.arange(entries, **ints)
    state = {
        "pool": torch.empty(rows * entries, KV_HEADS, layout.page_words, **ints),
        "ring_key": torch.empty(rows, KV_HEADS, window + page, DIM, **exact),
        "ring_value": torch.empty(rows, KV_HEADS, window + page, DIM, **exact),
        "sink_key": torch.empty(rows, KV_HEADS, sinks, DIM, **exact),
        "sink_value": torch.empty(rows, KV_HEADS, sinks, DIM, **exact),
        "page_ids": torch.randperm(rows * entries, device="cuda").int().view(rows, entries),
        "entries": torch.stack([starts, torch.full_like(starts, page)], 1),
        "row_start": torch.zeros(rows, **ints),
        "counters": torch.tensor([0, sinks, 0], **ints),
        "balance": torch.randn(rows, KV_HEADS, DIM, device="cuda").div(2).exp() if config.balance_keys else None,
    }
    flags = torch.zeros(KV_HEADS, **ints)
    key, value = tokens(rows, CHUNK)
    for start in range(0, length, CHUNK):
        n = min(CHUNK, length - start)
        key[:, :, :n].mul_(0.999)  # a little different every time
        commit(key[:, :, :n], value[:, :, :n], *state.values(), flags, None, layout.name, window, CHUNK // page + 1)
    if flags.any():
        raise RuntimeError(f"{preset}: commit raised flags {flags.tolist()}")
    return layout.name, state, (key[:, :, :1], value[:, :, :1])


def error_of(
    out: Tensor, query: Tensor, new: tuple[Tensor, Tensor], state: dict[str, Any], rest: list[Any]
) -> float:
    """Relative RMS error of the last row's last KV head against the reference."""
    one = {name: x[-1:, -1:] for name, x in state.items() if name.startswith(("ring", "sink"))}
    one |= {"pool": state["pool"][:, -1:], "page_ids": state["page_ids"][-1:], "row_start": state["row_start"][-1:]}
    one |= {"entries": state["entries"], "counters": state["counters"]}
    one["balance"] = None if state["balance"] is None else state["balance"][-1:, -1:]
    inputs = [query[-1:, -GROUP:], *(x[-1:, -1:] for x in new)]
    expected = reference.attend(*(x.float() for x in inputs), *(one[name] for name in state), *rest)
    actual = out[-1:, :, -GROUP:].float()
    return float((actual - expected).norm() / expected.norm())


class _Skipped:
    """Stands for a kernel that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


def measure(preset: str, rows: int, length: int) -> dict[str, Any]:
    """Times of one configuration in microseconds, bytes of its pages and the error against the reference."""
    layout, state, new = filled_state(preset, rows, length)
    pages = int(state["counters"][2])
    size = pages * rows * state["pool"][0].nbytes
    query = torch.randn(rows, KV_HEADS * GROUP, 1, DIM, dtype=torch.bfloat16, device="cuda")
    rest = [None, None, layout, DIM**-0.5, 0.0, True, state["page_ids"].shape[1]]
    states = [state] + [state | {"pool": state["pool"].clone()} for _ in range(copies(size) - 1)]
    error = error_of(attend(query, *new, *state.values(), *rest), query, new, state, rest)
    if not error <= TOLERANCE:
        raise RuntimeError(f"{preset} {rows}x{length}: relative RMS error {error:.1e} against the reference")
    calls = [lambda s=s: attend(query, *new, *s.values(), *rest) for s in states]
    total = microseconds(calls)
    with mock.patch.object(attend_module, "attend_exact", _Skipped()):
        packed = microseconds(calls)
    return {
        "preset": preset,
        "rows": rows,
        "length": length,
        "attend": total,
        "packed": packed,
        "bytes": size,
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--presets", default=PRESETS, help=f"default: {PRESETS}")
    parser.add_argument("--shapes", default=SHAPES, help=f"rows x thousands of tokens, default: {SHAPES}")
    parser.add_argument("--programs", type=int, help="programs of the packed kernel a multiprocessor, to tune it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_decode.py needs a GPU: torch.cuda.is_available() is False.")
    torch.manual_seed(0)
    if args.programs:
        attend_module.PROGRAMS_PER_SM = dict.fromkeys(attend_module.PROGRAMS_PER_SM, args.programs)
    ceiling = copy_ceiling()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {ceiling / 1e12:.2f} TB/s")
    print(f"{KV_HEADS} KV heads, {KV_HEADS * GROUP} query heads, head_dim {DIM}; times in microseconds\n")
    print("| shape | preset | attend | packed + combine | MB | share of copy | best SDPA | SDPA / attend | error |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    results = []
    for shape in args.shapes.split(","):
        rows, length = (int(x) for x in shape.removesuffix("k").split("x"))
        length *= 1024
        sdpa = sdpa_times(rows, length)
        backend = min(sdpa, key=lambda name: sdpa[name])
        for preset in args.presets.split(","):
            result = measure(preset, rows, length)
            share = result["bytes"] / result["packed"] * 1e6 / ceiling
            ratio = sdpa[backend] / result["attend"]
            results.append(result | {"sdpa": sdpa, "share_of_copy": share, "times_faster_than_sdpa": ratio})
            print(
                f"| {shape} | {preset} | {result['attend']:.1f} | {result['packed']:.1f} | {result['bytes'] / 1e6:.1f} |"
                f" {share:.2f} | {sdpa[backend]:.1f} ({backend}) | {ratio:.2f} | {result['error']:.1e} |",
                flush=True,
            )
    if args.json:
        device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_second": ceiling}
        args.json.write_text(json.dumps(device | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
