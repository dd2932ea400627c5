"""Where one decode step's time goes: the host by part, kernels by name, and how long the GPU waits.

Host times are those of steps without a profiler; kernels and gaps are those of one step under torch's profiler, which
slows the host. So *idle* is an upper bound where the host is what limits a step.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .measure import NEW_TOKENS, Prepared, Result, measure

TRACED_TOKEN = 12  # after this many, one step is traced; host times are of the steps behind it
GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync")
TOP = 12
PARTS = ("forward", "cache.update", "attention")


class Parts:
    """Seconds that calls took, by part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds[name] += perf_counter() - began

        return call

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


@contextmanager
def watched(model: Any, prepared: Prepared, parts: Parts) -> Iterator[None]:
    """Time the model's forward as a whole and, in an eager step, the cache's updates and attention in it.

    A compiled step is one call: what happens inside is not the host's work, and to wrap it would compile it anew.
    """
    cache = prepared.cache
    if cache.compiled:
        compiled = model.get_compiled_call
        with mock.patch.object(model, "get_compiled_call", lambda config: parts.timed("forward", compiled(config))):
            yield
        return
    made_by = type(cache.make(model.config, prepared.point.capacity))
    update = made_by.update
    attention = ALL_ATTENTION_FUNCTIONS[cache.attention]
    patched_attention = {cache.attention: parts.timed("attention", attention)}
    # Not on the module's own `forward`: generate() inspects its signature.
    began: list[float] = []
    before = model.register_forward_pre_hook(lambda *_: began.append(perf_counter()))
    after = model.register_forward_hook(lambda *_: _add(parts, "forward", began.pop()))
    try:
        with (
            mock.patch.object(made_by, "update", lambda *args, **kwargs: _timed_update(parts, update, args, kwargs)),
            mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, patched_attention),
        ):
            yield
    finally:
        before.remove()
        after.remove()


def _add(parts: Parts, name: str, began: float) -> None:
    parts.seconds[name] += perf_counter() - began


def _timed_update(parts: Parts, update: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return parts.timed("cache.update", update)(*args, **kwargs)


def _profiler() -> profile:
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])])


def initialize() -> None:
    """Load what traces a GPU: CUDA graphs that were recorded before cannot be relied on to be traced."""
    with _profiler():
        pass


def profile_step(model: Any, prepared: Prepared) -> Result:
    """The profile of one decode step, as `report` takes it; the cell is measured on the way."""
    parts = Parts()
    taken: list[dict[str, float]] = []
    profiler = _profiler()
    spans: list[float] = []

    def at_token(count: int) -> None:
        taken.append(parts.take())
        if count == TRACED_TOKEN:
            profiler.start()
            spans.append(perf_counter())
        elif count == TRACED_TOKEN + 1:
            spans.append(perf_counter())
            profiler.stop()

    with watched(model, prepared, parts):
        result = measure(model, prepared, NEW_TOKENS, at_token)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    later = slice(TRACED_TOKEN + 2, None)  # the step right after the trace pays for its end
    host = {name: statistics.median(step.get(name, 0.0) for step in taken[later]) for name in PARTS}
    step = statistics.median(result["steps_ms"][TRACED_TOKEN + 1 :]) / 1e3
    return result | {"profile": {"step_s": step, "host_s": host, **traced(events, spans[1] - spans[0])}}


def traced(events: list[dict[str, Any]], span: float) -> Result:
    """Sum a Chrome trace of one step that took `span` seconds.

    Returns:
        `kernels`: [name, calls, seconds] by time; `busy_s` and `idle_s`: when the GPU ran anything and when nothing;
        `launches` and `waiting_s`: calls that launch something, and the host's time in calls that may wait for the GPU.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    gpu = sorted((e["ts"], e["ts"] + e["dur"]) for e in whole if e.get("cat") in GPU_KINDS)
    busy, end = 0.0, float("-inf")
    for start, stop in gpu:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    times: dict[str, list[float]] = defaultdict(list)
    for event in whole:
        if event.get("cat") in GPU_KINDS:
            times[event["name"]].append(event["dur"] / 1e6)
    calls = [event for event in whole if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    kernels: list[list[Any]] = [
        [name, len(its), sum(its)] for name, its in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        "traced_step_s": span,
        "kernels": kernels[:TOP],
        "other_kernels": [
            sum(len(times[name]) for name, *_ in kernels[TOP:]),
            sum(spent for *_, spent in kernels[TOP:]),
        ],
        "busy_s": busy / 1e6,
        "idle_s": max(0.0, span - busy / 1e6),
        "launches": sum("Launch" in event["name"] for event in calls),
        "waiting_s": sum(event["dur"] for event in calls if event["name"] in WAITS) / 1e6,
    }
