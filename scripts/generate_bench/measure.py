"""One cell: a cache at a point, warmed up and then timed through `generate()`."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

from tq_hf import decode_ahead
from tq_hf.errors import first_line, is_out_of_memory
from tq_hf.generation.comparison import Generation, cache_nbytes, generate_timed

from .caches import BenchCache, warm_up_prompt
from .shapes import WARM_UP_PROMPT, Point, prompt, weight_bytes, weight_bytes_read

NEW_TOKENS = 33  # of the timed run: the first and 32 steps
WARM_UP_TOKENS = 6  # compiles, records CUDA graphs, replays them
Result = dict[str, Any]


@dataclass
class Prepared:
    """A cache at a point whose kernels are compiled.

    Attributes:
        made: a static cache, whose addresses graphs know; another kind is made anew for each measurement.
        base: bytes that were allocated before it was made: weights, libraries' workspaces, what other caches left behind.
        seconds: how long preparing took, beside others that do the same.
    """

    cache: BenchCache
    point: Point
    made: Any = None
    base: int = 0
    seconds: float = 0.0

    def drop(self) -> None:
        """Let go of a cache that is not static: others are measured next."""
        if not self.cache.compiled:
            self.made = None


class Memory:
    """Peaks of a CUDA device's allocator beyond `base`; zeros on the CPU."""

    def __init__(self, device: torch.device, base: int) -> None:
        self.device, self.base = device, base

    def restart(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> dict[str, int]:
        """Bytes beyond the base since the last `restart`: allocated, and reserved (with CUDA graphs' private pools)."""
        if self.device.type != "cuda":
            return {"allocated": 0, "reserved": 0}
        used, held = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return {"allocated": used - self.base, "reserved": held - self.base}


def prepare(model: Any, cache: BenchCache, point: Point) -> Prepared:
    """Run two prompts with as many rows and as much capacity as the timed run has.

    A short one, behind which a page falls due; and one as long as the timed one, or `WARM_UP_PROMPT`, since the number of
    tokens decides which kernels run.
    """
    began = time.perf_counter()
    prepared = Prepared(cache, point)
    _empty(model, prepared)
    short = min(point.tokens, warm_up_prompt(cache, prepared.made))
    generate(model, prompt(model, point.rows, short), cache, prepared.made, WARM_UP_TOKENS)
    _empty(model, prepared)
    long = min(point.tokens, WARM_UP_PROMPT // point.rows)
    generate(model, prompt(model, point.rows, long), cache, prepared.made, WARM_UP_TOKENS)
    prepared.drop()
    free(model.device)  # others may have to read their prompts meanwhile
    prepared.seconds = time.perf_counter() - began
    return prepared


def _empty(model: Any, prepared: Prepared) -> None:
    """A cache without tokens: a static one stays at its addresses, another kind is made when all others are gone."""
    prepared.drop()
    if prepared.made is not None:
        prepared.made.reset()
        return
    free(model.device)
    prepared.base = allocated(model.device)
    model.set_attn_implementation(prepared.cache.attention)
    prepared.made = prepared.cache.make(model.config, prepared.point.capacity)


def measure(
    model: Any, prepared: Prepared, new_tokens: int = NEW_TOKENS, watch: Callable[[int], None] = lambda count: None
) -> Result:
    """Time `generate()` over a whole prompt.

    Args:
        watch: called with the number of new tokens whenever there is one more.

    Returns:
        Seconds, bytes and counts; see the table's head in `report.py`.

    Raises:
        RuntimeError: something was not measured that should have been: decoding was not compiled, pages were not packed or
            were read dequantized.
    """
    _empty(model, prepared)
    cache, point, made = prepared.cache, prepared.point, prepared.made
    ids = prompt(model, point.rows, point.tokens)
    memory = Memory(model.device, prepared.base)
    peaks: list[dict[str, int]] = []

    count = 0

    def at_token(new: int) -> None:
        nonlocal count
        count += new
        if count == 1:  # the prompt has been read
            peaks.append(memory.peaks())
            memory.restart()
        watch(count)

    before = compilations()
    memory.restart()
    run = generate(model, ids, cache, made, new_tokens, at_token)
    peaks.append(memory.peaks())
    result = summary(run, point) | {
        "prefill_bytes": peaks[0]["allocated"],
        "decode_bytes": peaks[1]["allocated"],
        "prefill_reserved": peaks[0]["reserved"],
        "decode_reserved": peaks[1]["reserved"],
        "kept_bytes": max(0, prepared.base - weight_bytes(model)),
        "cache_bytes": cache_nbytes(made),
        "weight_bytes_read": weight_bytes_read(model),
        "prepare_s": prepared.seconds,
    }
    if cache.packed:
        result |= packed_facts(made)
    if cache.compiled:
        result |= compiled_facts(before)
    return result


def generate(
    model: Any, ids: Tensor, cache: BenchCache, made: Any, new_tokens: int, progress: Any = None, ahead: bool = False
) -> Generation:
    options: dict[str, Any] = {"custom_generate": decode_ahead} if ahead else {}
    if cache.compiled and model.device.type == "cpu":  # where generate() compiles on request only: dry runs trace
        options["compile_config"] = CompileConfig(mode="default", backend="eager")
        options["compile_config"]._compile_all_devices = True
    with torch.no_grad():
        return generate_timed(model, ids, made, new_tokens, progress, **options)


def summary(run: Generation, point: Point) -> Result:
    steps = run.step_seconds
    median = statistics.median(steps)
    return {
        "first_token_s": run.first_token_seconds,
        "step_s": median,
        "mean_step_s": statistics.fmean(steps),
        "tokens_per_s": point.rows / median,
        "mean_tokens_per_s": point.rows * run.tokens_per_s,
        "steps_ms": [round(1e3 * step, 3) for step in steps],
    }


def packed_facts(made: Any) -> Result:
    report = made.report()
    made.check()
    if any(table.dense_read_noted for table in made.tables):
        raise RuntimeError("a handle was unpacked: attention read a dequantized copy, and this is no time of packed pages.")
    share = report.packed_tokens / (report.packed_tokens + report.exact_tokens)
    if not share > 0:
        raise RuntimeError("no page was packed: this is no time of packed pages.")
    return {"packed_share": share}


def compilations() -> dict[str, int]:
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }


def compiled_facts(before: dict[str, int]) -> Result:
    after = compilations()
    if after["graphs"] == 0:
        raise RuntimeError("generate() compiled nothing, with a cache of which it should compile the decode step.")
    return {**after, "recompiled": after["graphs"] - before["graphs"]}


def allocated(device: torch.device) -> int:
    """Bytes of all tensors on a CUDA device; 0 on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def failure(error: BaseException) -> Result:
    """How a cell that could not be measured is kept: running out of memory is a result."""
    text = str(error)
    if is_out_of_memory(error):
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
        free = re.search(r"of which ([\d.]+ \w+) is free", text)
        return {"oom": f"{asked[1] if asked else 'memory'} more" + (f", {free[1]} free" if free else "")}
    return {"error": f"{type(error).__name__}: {first_line(error)}"}
