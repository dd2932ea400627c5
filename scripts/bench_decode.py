#!/usr/bin/env python3
"""Times decode attention over packed pages on a GPU, beside torch's SDPA over bf16 keys and values.

Pages are written by the package's own commit, and one row and head of every measured configuration is checked against the
reference. Times are per call, from CUDA-graph replay over as many copies of the cache as exceed the L2 cache:

    total       everything that `attend` launches
    fwd + comb  packed pages, the exact tokens (window, sinks, new ones) and the combination: without the preparation
    prepare     what goes before: the queries, the scores of the pages' mean keys, the tokens that count
    fwd         packed pages and exact tokens alone

A kernel starts while the one ahead of it ends, so the parts add up to more than the total.

    python scripts/bench_decode.py [--json PATH] [--presets tq4,tq3] [--shapes 1x8k,8x32k] [--heads 2x7x64]

Rows that the JSON holds already are not measured again, if they were measured on this GPU with the same code. `bars.py` says
what the rows are to reach; an error above its bar makes the script fail.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bars import ERROR, decode_bars, table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tq_hf import reference
from tq_hf.config import TurboQuantConfig
from tq_hf.kernels import attend, commit
from tq_hf.kernels.attend import calls as kept_calls
from tq_hf.kernels.schedule import Launch

ROOT = Path(__file__).resolve().parents[1]
PRESETS = "tq4,tq3,tq3v2,tq2,4bit_nc,3bit_nc,k8v4"
SHAPES = "1x8k,1x32k,1x128k,8x8k,8x32k,32x32k"
HEADS = "8x8x128,4x7x128,2x6x128,2x7x64,3x3x64,1x4x256,32x1x96"  # besides 8x4x128
OTHER_HEADS = ("tq4", "8x32k")  # what they are measured with
RAGGED = (1, 2, 4, 8, 16, 32, 48, 64)  # thousands of tokens of a batch's rows
CHUNK = 4096
HOST_CALLS = 50
ROTATED_BYTES = 2.5e8  # several times the largest L2 cache
CHECKED = 128  # queries, at most, that are compared with the reference
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Case:
    """`heads`: KV heads x query heads for each x head_dim; `shape`: rows x thousands of tokens, or "ragged"."""

    heads: str
    shape: str
    preset: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """KV heads, query heads a KV head, head_dim."""
        kv_heads, group, dim = map(int, self.heads.split("x"))
        return kv_heads, group, dim

    @property
    def rows(self) -> int:
        return len(RAGGED) if self.shape == "ragged" else int(self.shape.split("x")[0])

    @property
    def length(self) -> int:
        return 1024 * (max(RAGGED) if self.shape == "ragged" else int(self.shape.split("x")[1].removesuffix("k")))


@dataclass
class State:
    """A filled layer, the next token, and the rest of `attend`'s arguments."""

    layout: str
    state: dict[str, Tensor]
    new: tuple[Tensor, Tensor]
    query: Tensor
    rest: list[Any]

    def attend(self, **changed: Tensor) -> Tensor:
        return attend(self.query, *self.new, *(self.state | changed).values(), *self.rest)


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


def tokens(case: Case, length: int) -> tuple[Tensor, Tensor]:
    """Keys with a mean of their own in every channel, and values: bf16 [rows, heads, length, dim]."""
    kv_heads, _, dim = case.sizes
    shape = (case.rows, kv_heads, length, dim)
    key = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    key += 3 * torch.randn(1, kv_heads, 1, dim, dtype=torch.bfloat16, device="cuda")
    return key, torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def sdpa_times(case: Case) -> dict[str, float]:
    kv_heads, group, dim = case.sizes
    key, value = tokens(case, case.length)
    query = torch.randn(case.rows, kv_heads * group, 1, dim, dtype=torch.bfloat16, device="cuda")
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


def empty_state(case: Case) -> State:
    """A layer with room for the case, without tokens."""
    config = TurboQuantConfig.from_preset(case.preset)
    kv_heads, group, dim = case.sizes
    layout = config.layout(dim, dim, torch.bfloat16)
    rows, page, sinks, window = case.rows, config.page_size, config.sink_tokens, config.recent_window
    entries = case.length // page + 1
    ints = {"dtype": torch.int32, "device": "cuda"}
    exact = {"dtype": torch.bfloat16, "device": "cuda"}
    starts = sinks + page * torch.arange(entries, **ints)
    state = {
        "pool": torch.empty(rows * entries, kv_heads, layout.page_words, **ints),
        "ring_key": torch.empty(rows, kv_heads, window + page, dim, **exact),
        "ring_value": torch.empty(rows, kv_heads, window + page, dim, **exact),
        "sink_key": torch.empty(rows, kv_heads, sinks, dim, **exact),
        "sink_value": torch.empty(rows, kv_heads, sinks, dim, **exact),
        "page_ids": torch.randperm(rows * entries, device="cuda").int().view(rows, entries),
        "entries": torch.stack([starts, torch.full_like(starts, page)], 1),
        "row_start": torch.zeros(rows, **ints),
        "counters": torch.tensor([0, sinks, 0], **ints),
        "balance": torch.randn(rows, kv_heads, dim, device="cuda").div(2).exp() if config.balance_keys else None,
    }
    query = torch.randn(rows, kv_heads * group, 1, dim, dtype=torch.bfloat16, device="cuda")
    rest = [None, None, layout.name, dim**-0.5, 0.0, True, entries]
    return State(layout.name, state, tokens(case, 1), query, rest)


def fill(case: Case, layer: State, length: int) -> None:
    """Commit `length` tokens."""
    config = TurboQuantConfig.from_preset(case.preset)
    flags = torch.zeros(case.sizes[0], dtype=torch.int32, device="cuda")
    key, value = tokens(case, CHUNK)
    due = CHUNK // config.page_size + 1
    for start in range(0, length, CHUNK):
        n = min(CHUNK, length - start)
        key[:, :, :n].mul_(0.999)  # a little different every time
        part = (key[:, :, :n], value[:, :, :n])
        commit(*part, *layer.state.values(), flags, None, layer.layout, config.recent_window, due)
    if flags.any():
        raise RuntimeError(f"{case}: commit raised flags {flags.tolist()}")


def error_of(case: Case, layer: State) -> float:
    """Relative RMS error of the last row's last KV head, and of its last queries, against the reference."""
    group, state = case.sizes[1], layer.state
    one = {name: x[-1:, -1:] for name, x in state.items() if name.startswith(("ring", "sink"))}
    one |= {"pool": state["pool"][:, -1:], "page_ids": state["page_ids"][-1:], "row_start": state["row_start"][-1:]}
    one |= {"entries": state["entries"], "counters": state["counters"]}
    one["balance"] = None if state["balance"] is None else state["balance"][-1:, -1:]
    inputs = [layer.query[-1:, -group:, -CHECKED:], *(x[-1:, -1:] for x in layer.new)]
    expected = reference.attend(*(x.float() for x in inputs), *(one[name] for name in state), *layer.rest)
    actual = layer.attend()[-1:, -CHECKED:, -group:].float()
    return float((actual - expected).norm() / expected.norm())


@contextmanager
def without(*kernels: str) -> Iterator[None]:
    """Meanwhile `attend` does not launch these kernels."""
    make = Launch.__call__

    def make_others(launch: Launch, *numbers: Any) -> Any:
        return None if launch.launcher.kernel.fn.__name__ in kernels else make(launch, *numbers)

    kept_calls.cache_clear()  # what is launched is kept for calls that look alike
    with mock.patch.object(Launch, "__call__", make_others):
        yield
    kept_calls.cache_clear()


def host_time(call: Callable[[], Any]) -> float:
    """Microseconds until a call returns, the GPU left behind."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed * 1e6 / HOST_CALLS


def measure(case: Case) -> dict[str, Any]:
    """Times of one case in microseconds, bytes of its pages and the error against the reference."""
    torch.manual_seed(0)
    layer = empty_state(case)
    fill(case, layer, case.length)
    state = layer.state
    size = int(state["counters"][2]) * case.rows * state["pool"][0].nbytes
    result: dict[str, Any] = asdict(case)
    if case.shape == "ragged":
        even = sum(RAGGED) * 1024 // len(RAGGED)
        state["row_start"].fill_(case.length - even)
        result["even"] = microseconds([layer.attend])
        state["row_start"].copy_(torch.tensor([case.length - 1024 * n for n in RAGGED]))
        size = size * even // case.length
    pools = [state["pool"]] + [state["pool"].clone() for _ in range(copies(size) - 1)]
    result["error"] = error_of(case, layer)
    calls = [lambda p=p: layer.attend(pool=p) for p in pools]
    result["total"] = microseconds(calls)
    with without("prepare"):
        result["forward_combine"] = microseconds(calls)
    with without("prepare", "combine"):
        result["forward"] = microseconds(calls)
    with without("decode", "combine"):
        result["prepare"] = microseconds(calls)
    result |= {"host": host_time(calls[0]), "bytes": size}
    return result


def compile_kernels(cases: list[Case], filling: bool) -> None:
    """Run what fills the first case's layer, or the attention of all cases, on layers without tokens, for Triton's cache."""
    torch.set_num_threads(1)
    for case in cases[:1] if filling else cases:
        layer = empty_state(case)
        if filling:
            fill(case, layer, min(CHUNK, case.length))
        else:
            layer.attend()
        torch.cuda.synchronize()


def compile_all(cases: list[Case]) -> None:
    """In processes beside each other, for cases that mostly share kernels."""
    attention: dict[Any, list[Case]] = {}
    filling: dict[Any, list[Case]] = {}
    for case in cases:
        attention.setdefault((case.heads, case.preset, case.rows > 1), []).append(case)
        filling.setdefault((case.heads, case.preset), []).append(case)
    workers = min(len(attention) + len(filling), os.cpu_count() or 1)
    if workers > 1:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(compile_kernels, its, False) for its in attention.values()]
            jobs += [pool.submit(compile_kernels, its, True) for its in filling.values()]
            for job in jobs:
                job.result()


def code_hash() -> str:
    """Changes with everything that a time depends on."""
    files = [Path(__file__), *sorted((ROOT / "tq_hf").rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def line(result: dict[str, Any], ceiling: float) -> str:
    sdpa = result["sdpa"]
    best = min(sdpa, key=lambda name: sdpa[name]) if sdpa else None
    total, counted = result["total"], result["forward_combine"]
    cells = [
        *(result[name] for name in ("heads", "shape", "preset")),
        *(f"{result[name]:.1f}" for name in ("total", "forward_combine", "prepare", "forward")),
        f"{result['bytes'] / 1e6:.1f}",
        f"{result['bytes'] / counted * 1e6 / ceiling:.2f}",
        f"{sdpa[best]:.1f} ({best})" if best else f"even: {result['even']:.1f}",
        *(f"{sdpa[best] / x:.2f}" if best else f"{result['even'] / total:.2f}" for x in (total, counted)),
        f"{result['host']:.0f}",
        f"{result['error']:.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here, row by row")
    parser.add_argument("--presets", default=PRESETS, help=f"default: {PRESETS}")
    parser.add_argument("--shapes", default=SHAPES, help=f"rows x thousands of tokens, default: {SHAPES}")
    parser.add_argument(
        "--heads", default=HEADS, help=f"KV heads x query heads for each x head_dim, for one shape, default: {HEADS}"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_decode.py needs a GPU: torch.cuda.is_available() is False.")
    usual = "8x4x128"
    cases = [Case(usual, shape, preset) for shape in args.shapes.split(",") for preset in args.presets.split(",")]
    preset, shape = OTHER_HEADS
    cases += [Case(heads, shape, preset) for heads in filter(None, args.heads.split(","))]
    cases.append(Case(usual, "ragged", preset))

    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "code": code_hash()}
    results: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        before = json.loads(args.json.read_text())
        if all(before.get(name) == value for name, value in found.items()):
            results = before["results"]
    done = {Case(*(result[name] for name in ("heads", "shape", "preset"))): result for result in results}
    compile_all([case for case in cases if case not in done])
    ceiling = copy_ceiling()
    found["copy_bytes_per_second"] = ceiling
    print(f"{found['gpu']}, torch {found['torch']}: copy {ceiling / 1e12:.2f} TB/s; times in microseconds\n")
    print(
        "| heads | shape | preset | total | fwd + comb | prepare | fwd | MB | share of copy | best SDPA | SDPA / total |"
        " SDPA / (fwd + comb) | host | error |"
    )
    print("| --- | --- | --- " + "| ---: " * 11 + "|")
    sdpa = {(result["heads"], result["shape"]): result["sdpa"] for result in results}
    for case in cases:
        if case not in done:
            where = (case.heads, case.shape)
            if where not in sdpa:
                sdpa[where] = {} if case.shape == "ragged" else sdpa_times(case)
                torch.cuda.empty_cache()
            done[case] = measure(case) | {"sdpa": sdpa[where]}
            torch.cuda.empty_cache()
            results.append(done[case])
            if args.json:
                args.json.write_text(json.dumps(found | {"results": results}, indent=1) + "\n")
        print(line(done[case], ceiling), flush=True)
    print("\n" + table(list(decode_bars(found | {"results": results}))))
    if not all(result["error"] <= ERROR for result in results):
        raise SystemExit(f"relative RMS error above {ERROR:.1e} against the reference")


if __name__ == "__main__":
    main()
