"""Times the host's share of an eager decode step on a GPU, a layer of a model's many: `cache.update`, attention, commit.

    python scripts/bench_host.py [--json results.json]

The GPU is let catch up before each step, so that no call waits for room in its queue. What is done once a step, by the first
layer, counts for all: a step's times are divided by its layers. Prints Markdown tables of medians, and of the fastest tenth
of all steps: a host that others share may take twice as long for a while.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from transformers import LlamaConfig

from tq_hf import TurboQuantCache, ops
from tq_hf.attention import turboquant_attention, turboquant_mask
from tq_hf.kernels.launch import Call, Launcher, launch

HEADS, QUERY_HEADS, DIM, DTYPE = 8, 32, 128, torch.bfloat16
LAYERS = 32
STEPS = 160
WARM_UP = 40  # steps: a page falls due
LAUNCHES, LAUNCHES_AT_ONCE = 100, 8
# Of an attention call, the ops' own names: the first alone, or the others.
PARTS = ("attend_and_commit", "attend", "observe", "commit")
MODULE = torch.nn.Module()  # attention functions ask it nothing that matters here


def states(batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, heads, tokens, D] as a model gives them: views of contiguous [B, tokens, heads, D]."""
    made = (torch.randn(batch, tokens, heads, DIM, device="cuda", dtype=DTYPE) for heads in (QUERY_HEADS, HEADS, HEADS))
    query, key, value = (x.transpose(1, 2) for x in made)
    return query, key, value


def left_padding(batch: int, tokens: int, padding: int) -> Tensor | None:
    """A compact mask whose first row starts with so much padding; None for none."""
    if padding == 0:
        return None
    given = torch.ones(batch, tokens, dtype=torch.int64, device="cuda")
    given[0, :padding] = 0
    return turboquant_mask(batch, 1, tokens, tokens - 1, attention_mask=given)


def packed_attention(query: Tensor, key: Any, value: Any, mask: Tensor | None) -> None:
    turboquant_attention(MODULE, query, key, value, mask, scaling=DIM**-0.5)


def sdpa(query: Tensor, key: Any, value: Any, mask: Tensor | None) -> None:
    F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


class Stopwatch:
    """Times an op by the host's clock, where the layer calls it."""

    def __init__(self, name: str) -> None:
        self.run: Callable[..., Any] = getattr(ops, name)
        self.nanoseconds = 0

    def __call__(self, *args: Any) -> Any:
        began = perf_counter_ns()
        result = self.run(*args)
        self.nanoseconds += perf_counter_ns() - began
        return result


def steps(
    cache: TurboQuantCache, attention: Callable[..., None], batch: int, padding: int, count: int
) -> list[dict[str, Any]]:
    """Nanoseconds of a layer in `count` decode steps by part, and whether pages were packed."""
    query, key, value = states(batch, 1)
    watches = {name: Stopwatch(name) for name in PARTS}
    layer, taken = cache.packed_layers[0], []
    for name, watch in watches.items():
        setattr(ops, name, watch)
    try:
        for _ in range(count):
            mask = left_padding(batch, layer.length + 1, padding)
            packed = layer.packed_end
            for watch in watches.values():
                watch.nanoseconds = 0
            torch.cuda.synchronize()
            updates, began = 0, perf_counter_ns()
            for i in range(LAYERS):
                before = perf_counter_ns()
                handles = cache.update(key, value, i)
                updates += perf_counter_ns() - before
                attention(query, *handles, mask)
            total = perf_counter_ns() - began
            parts = {name: watch.nanoseconds for name, watch in watches.items()}
            rest = total - updates - sum(parts.values())
            one = {"update": updates, **parts, "rest": rest, "total": total}
            taken.append({name: ns / LAYERS for name, ns in one.items()} | {"page": layer.packed_end > packed})
    finally:
        for name, watch in watches.items():
            setattr(ops, name, watch.run)
    return taken


def bench_step(preset: str, batch: int, tokens: int, attention: Callable[..., None], padding: int) -> list[dict[str, Any]]:
    """Microseconds of a layer in the steps without and with a page."""
    config = LlamaConfig(
        hidden_size=QUERY_HEADS * DIM,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=LAYERS,
    )
    cache = TurboQuantCache(config, preset)
    query, key, value = states(batch, tokens)
    mask = left_padding(batch, tokens, padding)
    for i in range(LAYERS):
        packed_attention(query, *cache.update(key, value, i), mask)
    steps(cache, attention, batch, padding, WARM_UP)  # compiles
    taken = steps(cache, attention, batch, padding, STEPS)
    rows = []
    for page in (False, True):
        chosen = [{name: ns / 1e3 for name, ns in step.items() if name != "page"} for step in taken if step["page"] == page]
        row: dict[str, Any] = {"preset": preset, "shape": f"{batch}x{tokens}", "attention": attention.__name__}
        row |= {"padding": padding, "page": page}
        row |= {f"{name}_us": statistics.median(step[name] for step in chosen) for name in chosen[0]}
        rows.append(row | {"fast_total_us": sorted(step["total"] for step in chosen)[len(chosen) // 10]})
    return rows


@triton.jit
def idle(
    p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, n_0, n_1, n_2, n_3, n_4, n_5, n_6, n_7, n_8, n_9,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """A kernel with as many arguments as those of attention have, which does nothing."""


def bench_launch() -> list[dict[str, Any]]:
    """A launch of a kernel with 10 tensors, 10 numbers and 6 constants, in four ways."""
    tensors = tuple(torch.zeros(16, device="cuda") for _ in range(10))
    numbers, constants, options = tuple(range(2, 12)), dict.fromkeys("ABCDEF", 8), {"num_warps": 1}
    compiled = idle[(4, 2, 1)](*tensors, *numbers, **constants, **options)
    call = Call(Launcher(idle, options, constants), (4, 2, 1), numbers)
    ways: dict[str, Callable[[], object]] = {
        "kernel[grid]": lambda: idle[(4, 2, 1)](*tensors, *numbers, **constants, **options),
        "compiled[grid]": lambda: compiled[(4, 2, 1)](*tensors, *numbers, *constants.values()),
        "launch": lambda: launch(idle, (4, 2), options, (*tensors, *numbers), **constants),
        "Call": lambda: call(*tensors),
    }
    rows = []
    for name, run in ways.items():
        times = []
        for i in range(LAUNCHES + 3):
            torch.cuda.synchronize()
            began = perf_counter_ns()
            for _ in range(LAUNCHES_AT_ONCE):
                run()
            if i >= 3:
                times.append((perf_counter_ns() - began) / LAUNCHES_AT_ONCE / 1e3)
        rows.append({"launch": name, "us": statistics.median(times)})
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| " + " | ".join(rows[0]) + " |\n" + "| --- " * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(f"{x:.1f}" if isinstance(x, float) else str(x) for x in row.values()) + " |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    launches = bench_launch()
    print_table(launches)
    rows = []
    with torch.no_grad():
        for batch, tokens, attention, padding in (
            (1, 8192, packed_attention, 0),
            (1, 8192, sdpa, 0),
            (8, 2048, packed_attention, 100),
        ):
            rows += bench_step("tq4", batch, tokens, attention, padding)
    print_table(rows)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "launches": launches, "steps": rows}, file, indent=1)


if __name__ == "__main__":
    main()
