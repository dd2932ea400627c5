"""`scripts/bench_generate.py` on the CPU, with a tiny model: cells, what is kept of them, and what goes wrong."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bars
import bench_generate
import pytest
import torch
from generate_bench import measure as measuring
from generate_bench import repeats as repeating
from generate_bench import report, runs
from generate_bench.caches import CACHES, DEFAULT, QUICK, BenchCache
from generate_bench.capacity import decodes_with, largest
from generate_bench.measure import Memory, failure, measure, prepare
from generate_bench.profile import profile_step, traced
from generate_bench.shapes import (
    Point,
    build_model,
    estimated_needs,
    model_config,
    weight_bytes,
    weight_bytes_read,
)
from generate_bench.worker import Worker

from tests.bench_workers import FakeWorker
from tq_hf import TurboQuantCache

POINT = Point("2x300")
HQQ = "QuantizedCache hqq, 4 bits"


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model("tiny", "sdpa", torch.device("cpu"))


def test_a_model_is_random_in_bfloat16_and_leaves_the_rng_alone() -> None:
    before = torch.random.get_rng_state()
    model = build_model("tiny", "sdpa", torch.device("cpu"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.dtype == torch.bfloat16 and not model.training
    assert weight_bytes(model) - weight_bytes_read(model) == 2 * 96 * 64  # the embedding, which is not the output layer


@pytest.mark.parametrize(("shape", "billions"), [("8b", 8.03), ("1.5b", 1.54)])
def test_shapes_have_as_many_weights_as_their_namesakes(shape: str, billions: float) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(billions * 1e9, rel=5e-3)
    assert estimated_needs(shape, Point("1x1"), False).held == pytest.approx(2 * count + (3 << 30), rel=0.01)


@pytest.mark.parametrize("name", ["DynamicCache", "StaticCache", "tq4", "tq4, static"])
def test_a_cell(model: Any, name: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = CACHES[name]
    prepared = prepare(model, cache, POINT)
    assert (prepared.made is None) == (not cache.compiled)  # one that takes turns leaves the memory to others
    result = measure(model, prepared, new_tokens=9)
    assert len(result["steps_ms"]) == 8
    assert result["tokens_per_s"] == pytest.approx(2 / result["step_s"]) and result["first_token_s"] > 0
    assert result["prepare_s"] > 0
    held = POINT.tokens + (128 if name == "StaticCache" else 8)
    if not cache.packed:
        assert result["cache_bytes"] == pytest.approx(2 * 2 * 2 * 2 * 2 * 16 * held, rel=0.01)  # K, V, rows, layers, heads
    else:
        assert 0.5 < result["packed_share"] < 1
    assert ("graphs" in result) == cache.compiled
    if cache.compiled:
        assert result["graphs"] == 1 and result["graph_breaks"] == result["recompiled"] == 0


@pytest.mark.parametrize("name", ["StaticCache", "tq4, static"])
def test_a_compiled_cell_is_timed_three_times_behind_one_prompt(
    model: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    lengths: list[int] = []
    generated = measuring.generate

    def generate(model: Any, ids: Any, cache: BenchCache, made: Any, *rest: Any, **options: bool) -> Any:
        lengths.append(int(made.get_seq_length()))
        assert ids.shape == (2, max(POINT.tokens, lengths[-1] + 1))
        assert options.get("ahead", False) == (len(lengths) == 3)
        return generated(model, ids, cache, made, *rest, **options)

    prepared = prepare(model, CACHES[name], POINT)
    for module in (measuring, repeating):
        monkeypatch.setattr(module, "generate", generate)
    result = repeating.measure_compiled(model, prepared)
    assert lengths == [0, POINT.tokens + 32, POINT.tokens + 65]
    assert int(prepared.made.get_seq_length()) == POINT.tokens + 98 <= POINT.capacity
    assert len(result["ahead_steps_ms"]) == 32 and result["ahead_step_s"] > 0
    assert len(result["repeats_ms"]) == 2 and 1e3 * result["step_s"] == pytest.approx(min(result["repeats_ms"]), abs=1e-3)
    assert len(result["steps_ms"]) == 32 and result["graphs"] == 1 and result["recompiled"] == 0


def test_what_the_second_run_compiles_is_marked(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    prepared = prepare(model, CACHES["StaticCache"], POINT)
    generated = repeating.generate

    def generate(*arguments: Any, ahead: bool = False) -> Any:
        torch._dynamo.reset()
        return generated(*arguments, ahead=ahead)

    monkeypatch.setattr(repeating, "generate", generate)
    assert repeating.measure_compiled(model, prepared, new_tokens=3)["recompiled"] == 2


def test_of_several_runs_the_fastest_is_kept() -> None:
    found = [{"step_s": s / 1e3, "first_token_s": f, "steps_ms": [s]} for s, f in ((78, 1.5), (26, 1.6), (31.5, 1.4))]
    best = {"step_s": 0.026, "first_token_s": 1.4, "steps_ms": [26]}
    assert repeating.combined(found) == best | {"repeats_ms": [78, 26, 31.5]}


@pytest.mark.parametrize(
    ("cache", "point", "count"),
    [("tq4", "8x8k", 3), ("DynamicCache", "1x32k", 3), ("DynamicCache", "8x32k", 2), ("tq4", "1x128k", 2)]
    + [(name, "1x2k", 1) for name in ("QuantizedCache quanto, 4 bits", "QuantizedCache hqq, 4 bits")],
)
def test_repeats(cache: str, point: str, count: int) -> None:
    assert repeating.repeats(CACHES[cache], Point(point)) == count


def test_peaks_are_beyond_what_there_was_before_the_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weight_bytes(model)
    prepared = prepare(model, CACHES["DynamicCache"], POINT)
    monkeypatch.setattr(measuring, "allocated", lambda device: weights + 500)  # as if another had left 500 bytes
    result = measure(model, prepared, new_tokens=3)
    assert prepared.base == weights + 500 and result["kept_bytes"] == 500

    memory = Memory(torch.device("cuda"), prepared.base)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: weights + 507)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: weights + 512)
    assert memory.peaks() == {"allocated": 7, "reserved": 12}


def live_bytes() -> int:
    """Of all tensors in this process, without what Python would free by itself."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def test_caches_that_take_turns_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever one is made, another that was measured, or ran out of memory, is gone."""
    worker = Worker("tiny", "cpu")
    before: list[int] = []

    def watched(cache: BenchCache) -> BenchCache:
        def make(config: Any, capacity: int) -> Any:
            before.append(live_bytes())
            return cache.make(config, capacity)

        return replace(cache, make=make)

    for name in ("DynamicCache", "tq4"):
        assert worker.answer({"do": "prepare", "cache": name, "point": "2x300"}) == {}
        monkeypatch.setitem(CACHES, name, watched(CACHES[name]))
        worker.prepared[name].cache = CACHES[name]
    sizes = [worker.answer({"do": "measure", "cache": name})["cache_bytes"] for name in ("DynamicCache", "tq4")]
    assert min(sizes) > 40_000

    def short_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "packed_facts", short_of_memory)  # when the cache is full
        with pytest.raises(torch.OutOfMemoryError):
            worker.answer({"do": "measure", "cache": "tq4"})
    worker.release()
    assert worker.answer({"do": "measure", "cache": "DynamicCache"})["step_s"] > 0
    # What a preset's tables take, which outlive its caches, was there from its preparation on.
    assert len(before) == 4 and max(before) - min(before) < 2_000


def test_a_cell_that_reads_dequantized_copies_fails(model: Any) -> None:
    cache = BenchCache("eager", CACHES["tq4"].make, "eager", packed=True)
    with pytest.raises(RuntimeError, match="a handle was unpacked"):
        measure(model, prepare(model, cache, POINT), new_tokens=3)


def test_a_cell_that_packs_nothing_fails(model: Any) -> None:
    cache = CACHES["tq4"]
    with pytest.raises(RuntimeError, match="no page was packed"):
        measure(model, prepare(model, cache, Point("1x20")), new_tokens=3)


def test_a_cell_that_compiles_in_the_timed_run_is_marked(model: Any) -> None:
    torch._dynamo.reset()
    cache = CACHES["tq4, static"]
    prepared = prepare(model, cache, POINT)
    torch._dynamo.reset()
    assert measure(model, prepared, new_tokens=3)["recompiled"] == 1


def test_a_compiled_cell_that_is_not_compiled_fails(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *_: False)
    with pytest.raises(RuntimeError, match="compiled nothing"):
        measure(model, prepare(model, CACHES["tq4, static"], POINT), new_tokens=3)


@pytest.mark.parametrize("name", ["DynamicCache", "tq4", "tq4, static"])
def test_a_profile_has_the_parts_of_a_step(model: Any, name: str) -> None:
    torch._dynamo.reset()
    result = profile_step(model, prepare(model, CACHES[name], Point("1x210")))
    profile = result["profile"]
    host = profile["host_s"]
    inside = host["cache.update"] + host["attention"]
    assert 0 < host["forward"] < profile["step_s"] and profile["traced_step_s"] > 0
    assert inside == 0 if "static" in name else 0 < inside < host["forward"]
    text = report.profile_table({"shape": "tiny", "point": "1x210", "cache": name} | result)
    assert "One decode step" in text
    if "static" not in name:
        for part, seconds in (("cache.update", host["cache.update"]), ("attention function", host["attention"])):
            assert f"|   {part} | {1e3 * seconds:.2f} | {1e6 * seconds / 2:.1f} |" in text  # of one of two layers
    model.set_attn_implementation("sdpa")
    assert TurboQuantCache.update is not None and not model._forward_hooks  # nothing stays watched


def test_a_trace_is_summed() -> None:
    def event(category: str, name: str, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}

    events = [
        event("kernel", "matmul", 10, 30), event("kernel", "matmul", 50, 10), event("kernel", "decode", 35, 10),
        event("gpu_memcpy", "copy", 80, 5), event("cuda_runtime", "cudaLaunchKernel", 0, 4),
        event("cuda_runtime", "cudaGraphLaunch", 5, 4), event("cuda_runtime", "cudaStreamSynchronize", 20, 60),
        event("cpu_op", "aten::mm", 0, 90), {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    summed = traced(events, 100e-6)
    assert summed["kernels"] == [
        ["matmul", 2, pytest.approx(40e-6)], ["decode", 1, pytest.approx(10e-6)], ["copy", 1, pytest.approx(5e-6)]
    ]  # fmt: skip
    assert summed["busy_s"] == pytest.approx(50e-6) and summed["idle_s"] == pytest.approx(50e-6)
    assert summed["launches"] == 2 and summed["waiting_s"] == pytest.approx(60e-6)


def test_out_of_memory_is_a_result() -> None:
    text = "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a capacity of 139.80 GiB of which 3.10 GiB is free."
    assert failure(torch.OutOfMemoryError(text)) == {"oom": "8.00 GiB more, 3.10 GiB free"}
    assert failure(RuntimeError(f"InductorError: {text}")) == {"oom": "8.00 GiB more, 3.10 GiB free"}
    assert failure(ValueError("no\nsuch thing")) == {"error": "ValueError: no"}


@pytest.mark.parametrize("name", ["DynamicCache", "tq4", "tq2"])
def test_a_filled_cache_decodes(model: Any, name: str) -> None:
    model.set_attn_implementation(CACHES[name].attention)
    assert decodes_with(model, CACHES[name], rows=2, tokens=300)


def test_a_cache_that_does_not_fit(model: Any) -> None:
    def short_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert not decodes_with(model, BenchCache("huge", short_of_memory), rows=2, tokens=300)
    with pytest.raises(ZeroDivisionError):
        decodes_with(model, BenchCache("broken", lambda *_: 1 / 0), rows=2, tokens=300)


@pytest.mark.parametrize("most", [0, 1, 2, 27, 28, 29, 107, 1000])
@pytest.mark.parametrize("guess", [0, 1, 28, 200])
def test_the_largest_batch_is_found(most: int, guess: int) -> None:
    tried: list[int] = []

    def fits(rows: int) -> bool:
        assert rows not in tried
        tried.append(rows)
        return rows <= most

    assert largest(fits, guess) == most
    assert len(tried) <= 24


def test_a_worker_answers_and_outlives_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("tiny", "cpu")
    assert worker.answer({"do": "facts"})["copy_bytes_per_second"] > 0
    assert worker.answer({"do": "capacity", "cache": "tq4", "rows": 1, "tokens": 200}) == {"fits": True}
    assert worker.answer({"do": "prepare", "cache": "DynamicCache", "point": "1x200"}) == {}
    assert worker.answer({"do": "prepare", "cache": "tq4", "point": "1x200"}) == {}
    for cache in ("DynamicCache", "tq4", "DynamicCache"):  # each with its attention function
        assert worker.answer({"do": "measure", "cache": cache})["step_s"] > 0
        assert worker.model.config._attn_implementation == CACHES[cache].attention


FACTS = {"gpu": "some GPU", "torch": "2", "transformers": "5", "memory_bytes": 1 << 37, "copy_bytes_per_second": 4e12}


def row(cache: str, point: str, step_ms: float, **more: Any) -> dict[str, Any]:
    rows, thousands = point.removesuffix("k").split("x")
    size = int(rows) * int(thousands) * 1024 * 131072
    share = {"tq4": 0.27, "tq3": 0.23, "tq2": 0.14}.get(cache.removesuffix(", static"), 1.0)
    times = {"step_s": step_ms / 1e3, "mean_step_s": step_ms / 1e3, "tokens_per_s": int(rows) * 1e3 / step_ms}
    sizes = {"cache_bytes": share * size, "prefill_bytes": 2 * size, "decode_bytes": share * size + 1e9}
    base = {"shape": "8b", "cache": cache, "point": point, "first_token_s": 1.0, "weight_bytes_read": 15e9}
    return base | times | sizes | more


def turns(cache: str, point: str, step_ms: float, **more: Any) -> dict[str, Any]:
    """Of a cache without compilation."""
    return row(cache, point, step_ms, repeats_ms=[2 * step_ms, step_ms], **more)


FOUND = {
    **FACTS,
    "cells": [
        turns("DynamicCache", "8x32k", 76.0), row("StaticCache", "8x32k", 86.0, ahead_step_s=0.08),
        turns("tq4", "8x32k", 75.0, first_token_s=1.04, packed_share=0.98, kept_bytes=2**28),
        row("tq4, static", "8x32k", 10.0, packed_share=0.99, graphs=1, recompiled=2, ahead_step_s=0.008),
        turns("tq3", "8x32k", 76.0),
        turns(HQQ, "8x32k", 300.0),
        {"shape": "8b", "cache": "tq2", "point": "8x32k", "error": "E: x"},
        turns("DynamicCache", "1x2k", 70.0), turns("tq4", "1x2k", 80.0, first_token_s=1.2),
        {"shape": "8b", "cache": "StaticCache", "point": "1x2k", "oom": "8 GiB more"}, row("tq4", "1x4k", 1.0, shape="1.5b"),
    ],
    "capacity": [
        {"shape": "8b", "tokens": "32768", "cache": "DynamicCache", "rows": 28},
        {"shape": "8b", "tokens": "32768", "cache": "tq4", "rows": 98},
    ],
    "profiles": [], "missing": {"StaticCache, flash_attention_2": "not installed"},
}  # fmt: skip


def test_bars() -> None:
    found = {bar.what: (pytest.approx(bar.value, rel=1e-3), bar.is_met) for bar in bars.generate_bars(FOUND)}
    assert found == {
        "8x32k tq4, static: step / floor": (10e-3 / ((15e9 + 0.27 * 2**35) / 4e12), False),
        "8x32k tq4, static: times StaticCache": (8.6, True),
        "8x32k tq4, static: times the fastest bf16": (7.6, True),
        "8x32k tq4, static, ahead: step / floor": (8e-3 / ((15e9 + 0.27 * 2**35) / 4e12), True),
        "8x32k tq4, static, ahead: times StaticCache": (10, True),
        "8x32k tq4, static, ahead: times the fastest bf16": (9.5, True),
        "8x32k tq4: times DynamicCache": (76 / 75, True),
        "8x32k tq4: times the best QuantizedCache": (4.0, True),
        "8x32k tq4: first token / DynamicCache's": (1.04, True),
        "8x32k tq4, static: first token / DynamicCache's": (1.0, True),
        "8x32k tq4: cache bytes / DynamicCache's": (0.27, True),
        "8x32k tq4, static: cache bytes / DynamicCache's": (0.27, True),
        "8x32k tq3: cache bytes / DynamicCache's": (0.23, False),
        "8x32k tq4: peak of decode / DynamicCache's": ((0.27 * 2**35 + 1e9) / (2**35 + 1e9), True),
        "8x32k tq4, static: peak of decode / DynamicCache's": ((0.27 * 2**35 + 1e9) / (2**35 + 1e9), True),
        "1x2k tq4: times DynamicCache": (0.875, False),
        "1x2k tq4: first token / DynamicCache's": (1.2, False),
        "tq4: largest batch / DynamicCache's": (3.5, True),
    }


@pytest.mark.parametrize("cache", ["DynamicCache", "tq4", HQQ])
def test_bars_compare_no_cache_that_took_no_turns(cache: str) -> None:
    found = {**FOUND, "cells": [dict(row) for row in FOUND["cells"]]}  # type: ignore[attr-defined]
    for row in found["cells"]:
        if row["cache"] == cache:
            row.pop("repeats_ms", None)
    names = {bar.what for bar in bars.generate_bars(found)}
    gone = {bar.what for bar in bars.generate_bars(FOUND)} - names
    if cache == HQQ:
        assert gone == {"8x32k tq4: times the best QuantizedCache"}
        return
    expected = {f"{point} tq4: {what}" for point in ("8x32k", "1x2k")
                for what in ("times DynamicCache", "first token / DynamicCache's")}  # fmt: skip
    more = {"8x32k tq4: times the best QuantizedCache", "8x32k tq4, static: first token / DynamicCache's"}
    assert gone == expected | {name for name in more if ("DynamicCache" in name) == (cache == "DynamicCache")}
    if cache == "DynamicCache":
        fastest = {bar.what: bar.value for bar in bars.generate_bars(found)}["8x32k tq4, static: times the fastest bf16"]
        assert fastest == pytest.approx(8.6)  # StaticCache's: it is compiled


def test_tables() -> None:
    text = report.tables(FOUND)
    assert "| 8 × 32k | tq4, static | 800.0 | 10.00 | 10.00 | 8.00 | 6.07 | 1.65 | 1.32 |" in text
    assert "| 1 × 2k | StaticCache | OOM: 8 GiB more |" in text and "| tq2 | failed: E: x |" in text
    assert "| 2 runs: 75.00 to 150.00 ms, 98.0 % packed, 0.25 GiB beside the weights before |" in text
    assert "| 99.0 % packed, recompiled: 2 |" in text and "| 8b | 32768 | tq4 | 98 | 3.50 |" in text
    assert "flash_attention_2: not installed" in text and text.index("1 × 2k") < text.index("8 × 32k")


def test_results_are_kept_by_code_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out" / "results.json"
    results = report.Results(path)
    results.take(FACTS)
    key = {"shape": "8b", "cache": "tq4", "point": "1x2k"}
    for result in ({"error": "E"}, {"oom": "1 GiB more"}, {"step_s": 1.0}):
        results.put("cells", key, result)
        assert report.Results(path).has("cells", key) == ("error" not in result)
    assert len(report.Results(path).found["cells"]) == 1
    again = report.Results(path)
    again.take(FACTS | {"copy_bytes_per_second": 3e12})
    assert again.has("cells", key) and again.found["copy_bytes_per_second"] == 4e12
    monkeypatch.setattr(report, "code_hash", lambda cache: "other")
    assert not again.has("cells", key)
    again.take(FACTS | {"gpu": "another GPU"})
    assert again.found["cells"] == [] and json.loads(path.read_text())["gpu"] == "another GPU"


def test_the_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "facts":
            return FACTS
        if request["do"] == "prepare":
            asked.append((request["cache"], request["point"]))
            return {}
        return row(request["cache"], "1x2k", 10.0)

    started: list[int] = []
    monkeypatch.setattr(runs.Runner, "start", lambda _, count: started.append(count))
    monkeypatch.setattr(runs.Runner, "worker", lambda _: FakeWorker(answer))
    command = ["--json", str(tmp_path / "r.json"), "--points", "1x2k,2x300", "--caches", "DynamicCache; tq4, static"]
    assert bench_generate.run(command) == 0
    caches, points = ("DynamicCache", "tq4, static"), ("1x2k", "2x300")
    assert sorted(asked) == [(cache, point) for cache in caches for point in points]
    assert started == [4]  # the machine's facts, two compiled cells, and one for what takes turns
    assert bench_generate.run([*command[:3], "1x2k,1x300", *command[4:]]) == 0
    assert sorted(asked[4:]) == [("DynamicCache", "1x300"), ("tq4, static", "1x300")]
    assert bench_generate.run([*command[:3], "1x2k", "--caches", "DynamicCache; tq4"]) == 0
    assert asked[6:] == [("DynamicCache", "1x2k"), ("tq4", "1x2k")]  # which take turns
    capsys.readouterr()
    assert bench_generate.run([*command[:2], "--report"]) == 0
    assert "tq4, static" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--caches", "tq5"], "--caches 'tq5' is unknown: expected some of StaticCache;"),
        (["--points", "8by32k"], "point '8by32k' is not understood"),
        (["--report"], "holds no results"),
        (["--shape", "7b"], "invalid choice: '7b'"),
    ],
)
def test_mistakes_are_named(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs.Runner, "facts", lambda _: FACTS)
    monkeypatch.setattr(sys, "argv", ["bench_generate.py", "--json", str(tmp_path / "r.json"), *options])
    assert bench_generate.serve(bench_generate.run, None) == 2
    assert message in capsys.readouterr().err


def test_caches_by_default() -> None:
    assert set(QUICK) <= set(DEFAULT) and {"tq3", "tq2", "tq4, static"} <= set(DEFAULT)
    missing = [name for name in DEFAULT if CACHES[name].missing() is not None]
    assert not {"DynamicCache", "StaticCache", "tq4"} & set(missing)


def test_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the extra `eval` installs it")
    from eval import plot_generate

    path = tmp_path / "bench_generate.json"
    path.write_text(json.dumps(FOUND))
    assert plot_generate.main([str(path), "--image", str(tmp_path / "figure.svg")]) == 0
    text = (tmp_path / "figure.svg").read_text()
    for part in ("tq4, static", "DynamicCache", "8 × 32k", "GiB of cache", "some GPU"):
        assert part in text
    assert plot_generate.main([str(path), "--shape", "tiny"]) == 2
