"""Times the store path on a GPU: a long prefill, and decode steps in a CUDA graph.

    python scripts/bench_store.py [--presets tq4 4bit_nc] [--json results.json]

Prints a Markdown table. Each row's packed pages are compared with the torch reference, on a sample, before it is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tq_hf import kernels, ops, reference
from tq_hf.config import PRESETS, TurboQuantConfig
from tq_hf.layout import PageLayout
from tq_hf.reference.codec import decode_page

HEADS, DIM, DTYPE = 8, 128, torch.bfloat16
PREFILL_TOKENS, SAMPLE_TOKENS, LAYERS = 65536, 4096, 32

commit: Callable[..., None] = kernels.commit
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
    """The relative error between both states' decoded pages, as many as `expected` has; raises if it is no rounding."""
    used = int(expected["counters"][2])
    worst = 0.0
    pools = (s["pool"][s["page_ids"][0, :used].long()] for s in (got, expected))
    for mine, theirs in zip(*(decode_page(words, layout, DTYPE) for words in pools), strict=True):
        worst = max(worst, ((mine - theirs).norm() / theirs.norm()).item())
    if not worst <= 5e-3:
        raise AssertionError(f"decoded pages differ from the reference by {worst:.1e}: expected at most 5e-3.")
    return worst


def bench_prefill(preset: str, copy_rate: float) -> dict[str, Any]:
    """One commit of `PREFILL_TOKENS` tokens to an empty layer."""
    config = TurboQuantConfig.from_preset(preset)
    layout = config.layout(DIM, DIM, DTYPE)
    key, value = random_tokens(1, PREFILL_TOKENS)
    layer = state(config, layout, 1, PREFILL_TOKENS)
    empty = layer["counters"].clone()
    rest: tuple[Any, ...] = (None, layout.name, config.recent_window, PREFILL_TOKENS // layout.page_size)
    seconds = median_seconds(lambda: commit(key, value, *layer.values(), *rest), lambda: layer["counters"].copy_(empty))
    sample = state(config, layout, 1, SAMPLE_TOKENS)
    reference_commit(key[:, :, :SAMPLE_TOKENS], value[:, :, :SAMPLE_TOKENS], *sample.values(), *rest)
    read = 2 * key.numel() * key.element_size()
    written = PREFILL_TOKENS * HEADS * layout.bytes_per_token
    return {
        "preset": preset,
        "case": f"prefill {PREFILL_TOKENS} tokens",
        "us": seconds * 1e6,
        "input_gb_s": read / seconds / 1e9,
        "share_of_copy": (read + written) / seconds / copy_rate,
        "error": verify(layer, sample, layout),
    }


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
    return {
        "preset": preset,
        "case": f"decode step, batch {batch}, {'a page' if due else 'no page'} due",
        "us": seconds * 1e6,
        "error": verify(layers[-1], expected, layout),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    with_kernels = [name for name in sorted(PRESETS) if ops.has_kernels(PRESETS[name].layout(DIM, DIM, DTYPE).name)]
    parser.add_argument("--presets", nargs="+", default=["tq4", "4bit_nc"], choices=with_kernels)
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
    print("| preset | case | µs | input GB/s | share of copy | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        rate = f"{row['input_gb_s']:.0f} | {row['share_of_copy']:.2f}" if "input_gb_s" in row else "– | –"
        print(f"| {row['preset']} | {row['case']} | {row['us']:.1f} | {rate} | {row['error']:.1e} |")
    report = {"gpu": gpu, "torch": torch.__version__, "copy_bytes_per_s": copy_rate, "rows": rows}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
    print("\n" + json.dumps(report))


if __name__ == "__main__":
    main()
