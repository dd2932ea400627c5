"""Times the store path on a GPU: a long prefill, and decode steps in a CUDA graph.

    python scripts/bench_store.py [--presets tq4 tq2] [--json results.json]

Prints a Markdown table. A prefill counts all that happens to a new prompt's keys and values: statistics of queries and keys,
the balance made from them, page means, packing, exact tokens. A decode step has no statistics to take. Each row's packed
pages are compared with the torch reference, on a sample, before it is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tq_hf import kernels, ops, reference
from tq_hf.config import PRESETS, TurboQuantConfig
from tq_hf.layout import PageLayout
from tq_hf.quantizer.conditioning import partners
from tq_hf.quantizer.rotary import Rotary
from tq_hf.reference.codec import decode_page

HEADS, QUERY_HEADS, DIM, DTYPE = 8, 32, 128, torch.bfloat16
PREFILL_TOKENS, SAMPLE_TOKENS, LAYERS = 65536, 4096, 32
DEFAULT_PRESETS = ["tq4", "tq3", "tq3v2", "tq2", "4bit_nc"]

commit: Callable[..., None] = kernels.commit
observe: Callable[..., None] = kernels.observe
reference_commit: Callable[..., None] = reference.commit


def median_seconds(run: Callable[[], object], reset: Callable[[], object] = lambda: None, repeats: int = 20) -> float:
    """The median time of `run` between two events; `reset` goes before each, outside of the time."""
    times = []
    for i in range(repeats + 3):
        reset()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a device-to-device copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source))


def state(config: TurboQuantConfig, layout: PageLayout, batch: int, tokens: int) -> dict[str, Any]:
    """The state tensors of one empty layer with room for `tokens`, in the order of `commit`'s arguments."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    capacity = tokens // layout.page_size + 1
    starts = config.sink_tokens + layout.page_size * torch.arange(capacity, **ints)
    exact: dict[str, Any] = {"dtype": DTYPE, "device": "cuda"}
    slots = config.recent_window + layout.page_size
    return {
        "pool": torch.zeros(batch * capacity, HEADS, layout.page_words, **ints),
        "ring_key": torch.zeros(batch, HEADS, slots, DIM, **exact),
        "ring_value": torch.zeros(batch, HEADS, slots, DIM, **exact),
        "sink_key": torch.zeros(batch, HEADS, config.sink_tokens, DIM, **exact),
        "sink_value": torch.zeros(batch, HEADS, config.sink_tokens, DIM, **exact),
        "page_ids": torch.arange(batch * capacity, **ints).view(batch, capacity),
        "entries": torch.stack([starts, torch.full_like(starts, layout.page_size)], 1),
        "row_start": torch.zeros(batch, **ints),
        "counters": torch.tensor([0, config.sink_tokens, 0], **ints),
        "balance": torch.full((batch, HEADS, DIM), 1.5, device="cuda") if config.balance_keys else None,
        "flags": torch.zeros(HEADS, **ints),
    }


def random_tokens(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values as a model gives them: [B, H, tokens, D], of which [B, tokens, H, D] is contiguous."""
    shape = (batch, tokens, HEADS, DIM)
    key = torch.randn(shape, device="cuda", dtype=DTYPE) + torch.randn(HEADS, DIM, device="cuda", dtype=DTYPE)
    return key.transpose(1, 2), torch.randn(shape, device="cuda", dtype=DTYPE).transpose(1, 2)


def verify(got: dict[str, Any], expected: dict[str, Any], layout: PageLayout) -> float:
    """The relative difference between both states' decoded pages, as many as `expected` has; raises if it is too much.

    One coordinate in a thousand may have a neighbouring code: it stood next to the boundary between both.
    """
    used = int(expected["counters"][2])
    worst = 0.0
    pools = (s["pool"][s["page_ids"][0, :used].long()] for s in (got, expected))
    for mine, theirs in zip(*(decode_page(words, layout, DTYPE) for words in pools), strict=True):
        worst = max(worst, ((mine - theirs).norm() / theirs.norm()).item())
    if not worst <= 2e-2:
        raise AssertionError(f"decoded pages differ from the reference by {worst:.1e}: expected at most 2e-2.")
    return worst


def bench_prefill(preset: str, copy_rate: float) -> dict[str, Any]:
    """A new prompt of `PREFILL_TOKENS` tokens."""
    config = TurboQuantConfig.from_preset(preset)
    layout = config.layout(DIM, DIM, DTYPE)
    key, value = random_tokens(1, PREFILL_TOKENS)
    query = torch.randn(1, PREFILL_TOKENS, QUERY_HEADS, DIM, device="cuda", dtype=DTYPE).transpose(1, 2)
    layer = state(config, layout, 1, PREFILL_TOKENS)
    energy = torch.zeros(1, HEADS, DIM, device="cuda")
    pairs = partners(Rotary(tuple((10_000.0 ** -(torch.arange(0, DIM, 2) / DIM)).tolist()), False), DIM, key.device)
    empty = layer["counters"].clone()
    rest: tuple[Any, ...] = (None, layout.name, config.recent_window, PREFILL_TOKENS // layout.page_size)
    sizes = (layout.page_size, config.sink_tokens, config.recent_window, layout.center_keys)
    statistics_of = [layer[name] for name in ("ring_key", "row_start", "counters", "balance")]

    def reset() -> None:
        layer["counters"].copy_(empty)
        if layer["balance"] is not None:
            layer["balance"].zero_()
            energy.zero_()

    def condition() -> None:
        if layer["balance"] is not None:
            observe(query, key, *statistics_of, energy, pairs.channel, pairs.share, None, *sizes)

    def store() -> None:
        condition()
        commit(key, value, *layer.values(), *rest)

    seconds = median_seconds(store, reset)
    conditioning = 0.0 if layer["balance"] is None else median_seconds(condition, reset)
    reset()
    store()
    sample = state(config, layout, 1, SAMPLE_TOKENS) | {"balance": layer["balance"]}
    reference_commit(key[:, :, :SAMPLE_TOKENS], value[:, :, :SAMPLE_TOKENS], *sample.values(), *rest)
    read = 2 * key.numel() * key.element_size()
    written = PREFILL_TOKENS * HEADS * layout.bytes_per_token
    return {
        "preset": preset,
        "case": f"prefill {PREFILL_TOKENS} tokens",
        "us": seconds * 1e6,
        "conditioning_us": conditioning * 1e6,
        "input_gb_s": read / seconds / 1e9,
        "share_of_copy": (read + written) / seconds / copy_rate,
        "error": verify(layer, sample, layout),
    }


def host_seconds(run: Callable[[], object], reset: Callable[[], object], calls: int = 20, repeats: int = 10) -> float:
    """CPU time of a call: few of them between synchronizations, so that none waits for a place in the queue."""
    times = []
    for _ in range(repeats):
        reset()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - began) / calls)
    torch.cuda.synchronize()
    return statistics.median(times)


def bench_decode(preset: str, batch: int, due: bool) -> dict[str, Any]:
    """One token, in a graph of `LAYERS` layers; the time is that of one layer. `due`: whether it completes a page."""
    config = TurboQuantConfig.from_preset(preset)
    layout = config.layout(DIM, DIM, DTYPE)
    history = config.sink_tokens + config.recent_window + 2 * layout.page_size - (1 if due else 20)
    key, value = random_tokens(batch, history + 1)
    layers = [state(config, layout, batch, history + 1) for _ in range(LAYERS)]
    rest: tuple[Any, ...] = (None, layout.name, config.recent_window)
    for layer in layers:
        commit(key[:, :, :history], value[:, :, :history], *layer.values(), *rest, 2)
    before = [layer["counters"].clone() for layer in layers]

    def step() -> None:
        for layer in layers:
            commit(key[:, :, history:], value[:, :, history:], *layer.values(), *rest, 1)

    def reset() -> None:
        for layer, counters in zip(layers, before, strict=True):
            layer["counters"].copy_(counters)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    seconds = median_seconds(graph.replay, reset) / LAYERS
    expected = state(config, layout, batch, history + 1)
    reference_commit(key, value, *expected.values(), *rest, 3)
    assert torch.equal(layers[-1]["counters"], expected["counters"])
    error = verify(layers[-1], expected, layout)

    def first_token() -> None:  # of an empty layer: the host does the same for every token
        commit(key[:, :, history:], value[:, :, history:], *layers[0].values(), *rest, int(due))

    empty = torch.tensor([0, config.sink_tokens, 0], dtype=torch.int32, device="cuda")
    return {
        "preset": preset,
        "case": f"decode step, batch {batch}, {'a page' if due else 'no page'} due",
        "us": seconds * 1e6,
        "host_us": host_seconds(first_token, lambda: layers[0]["counters"].copy_(empty)) * 1e6,
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    with_kernels = [name for name in sorted(PRESETS) if ops.has_kernels(PRESETS[name].layout(DIM, DIM, DTYPE).name)]
    parser.add_argument("--presets", nargs="+", default=DEFAULT_PRESETS, choices=with_kernels)
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    copy_rate = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for preset in args.presets:
        rows.append(bench_prefill(preset, copy_rate))
        rows += [bench_decode(preset, batch, due) for batch in (1, 8) for due in (False, True)]
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, {HEADS} KV heads, head_dim {DIM}, bf16")
    print(f"device-to-device copy {copy_rate / 1e12:.2f} TB/s\n")
    print("| preset | case | µs | of it conditioning | input GB/s | share of copy | host µs | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        cells = [row["preset"], row["case"], f"{row['us']:.1f}"]
        forms = {"conditioning_us": ".1f", "input_gb_s": ".0f", "share_of_copy": ".2f", "host_us": ".0f"}
        cells += [format(row[name], form) if name in row else "–" for name, form in forms.items()]
        print(f"| {' | '.join(cells)} | {row['error']:.1e} |")
    report = {"gpu": gpu, "torch": torch.__version__, "copy_bytes_per_s": copy_rate, "rows": rows}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
    print("\n" + json.dumps(report))


if __name__ == "__main__":
    main()
