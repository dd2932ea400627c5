"""`scripts/bench_multi_gpu.py` on the CPU: its cells, its phases, and what becomes of its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bench_multi_gpu
import pytest
import torch
from generate_bench.shapes import Point
from multi_bench.placements import MAP, ONE, PARALLEL, device_map, place
from multi_bench.report import BEGIN, END, bench_hash, reckoned, tables
from multi_bench.worker import measure_cell

from tests.multi import on_ranks
from tests.multi.ranks import Ranks
from tq_hf.commands import serve

POINT = "2x300"
ROOT = Path(__file__).parents[2]


def row(placement: str, step_ms: float, cache: str = "tq4", devices: int = 1, **more: Any) -> dict[str, Any]:
    device = {"weight_bytes": 2**30, "cache_bytes": 2**31, "peak_bytes": 2**32}
    return {"placement": placement, "point": "8x32k", "cache": cache, "step_s": step_ms / 1e3,
            "tokens_per_s": 8e3 / step_ms, "devices": [device] * devices, "bench": bench_hash(), **more}  # fmt: skip


@pytest.mark.parametrize(("placement", "cache"), [(MAP, "tq4"), (ONE, "StaticCache")])
def test_a_cell(placement: str, cache: str) -> None:
    torch._dynamo.utils.counters.clear()  # of other tests
    model = place(placement, "tiny", "cpu")
    found = measure_cell(model, "cpu", Point(POINT), cache)
    assert len(found["steps_ms"]) == 32 and found["tokens_per_s"] == pytest.approx(2 / found["step_s"])
    (device,) = found["devices"]
    assert device["weight_bytes"] == sum(parameter.nbytes for parameter in model.parameters())
    if cache == "tq4":
        assert 0.5 < found["packed_share"] < 1
        # 300 tokens and those that were decoded, of 2 rows, 2 layers and 2 heads of 16: pages are smaller than in bfloat16.
        assert device["cache_bytes"] < 0.9 * 2 * 2 * 2 * 2 * 2 * 16 * 340
    else:
        assert found["graphs"] == 1 and found["graph_breaks"] == found["recompiled"] == 0 and found["ahead_step_s"] > 0
        assert device["cache_bytes"] == pytest.approx(2 * 2 * 2 * 2 * 2 * 16 * 428, rel=0.01)


def test_a_cell_on_two_ranks(ranks: Ranks) -> None:
    alone = measure_cell(place(ONE, "tiny", "cpu"), "cpu", Point(POINT), "tq4")
    first, second = ranks.run(on_ranks.bench_cell, POINT, "tq4")
    assert len(first["devices"]) == 2 and first["devices"] == second["devices"]
    for device in first["devices"]:
        assert device["cache_bytes"] == pytest.approx(alone["devices"][0]["cache_bytes"] / 2, rel=0.02)
        assert device["weight_bytes"] < 0.6 * alone["devices"][0]["weight_bytes"]


def test_layers_are_shared_out_in_order() -> None:
    model = place(ONE, "tiny", "cpu")
    first, second = 0, 1
    found = device_map(model, [first, second])
    assert found == {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first,
                     "model.layers.1": second, "model.norm": second, "lm_head": second}  # fmt: skip


def test_phases_give_each_point_a_gpu_of_its_own_where_one_is_enough() -> None:
    cells = [(placement, point, "tq4") for placement in (ONE, MAP, PARALLEL) for point in ("8x32k", "1x128k")]
    one, spread, parallel = bench_multi_gpu.phases(cells)
    assert one.gpus == (0, 1) and one.shares == ((cells[0],), (cells[1],))
    assert spread.gpus == parallel.gpus == (None,) and parallel.shares == (tuple(cells[4:]),)
    assert bench_multi_gpu.phases(cells[1:2])[0].gpus == (0,)
    assert "--nproc-per-node" in bench_multi_gpu.command(PARALLEL, []) and "torch" not in " ".join(
        bench_multi_gpu.command(ONE, [])
    ).replace(sys.executable, "")


def test_each_worker_sees_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert bench_multi_gpu.environment(1)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert bench_multi_gpu.environment(1)["CUDA_VISIBLE_DEVICES"] == "6"
    assert bench_multi_gpu.environment(None)["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_what_more_gpus_would_take_is_arithmetic() -> None:
    """20 ms on one and 12 on two: 16 are shared and 4 are not, so that four take 8 ms and eight 6."""
    cells = [row(ONE, 20.0), row(PARALLEL, 12.0, devices=2), row(ONE, 5.0, "tq3"), row(PARALLEL, 6.0, "tq3", devices=2)]
    assert reckoned(cells) == [["8 × 32k", "tq4", "16.00", "4.00", "1000", "1333"]]
    assert reckoned(cells[:1]) == []


def store(path: Path, cells: list[dict[str, Any]], gpu: str = "Some GPU") -> Path:
    facts = {"gpu": gpu, "gpus": 2, "shape": "8b", "torch": "2", "transformers": "5"}
    path.write_text(json.dumps({**facts, "cells": cells}), encoding="utf-8")
    return path


def test_tables_go_between_the_marks_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"placement": MAP, "point": "8x32k", "cache": "tq4", "oom": "2 GiB more"}
    parallel = row(PARALLEL, 12.0, devices=2, recompiled=3, ahead_step_s=8e-3)
    found = store(tmp_path / "found.json", [row(ONE, 20.0), parallel, failed])
    page = tmp_path / "page.md"
    page.write_text(f"Before\n\n{BEGIN}\nold\n{END}\n\nafter\n", encoding="utf-8")
    for _ in range(2):
        assert serve(bench_multi_gpu.run, ["--json", str(found), "--report", "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"Before\n\n{BEGIN}\n\n2 × Some GPU, ") and "old" not in text
    assert text.endswith(f"\n\n{END}\n\nafter\n")
    shown = "8 × 32k | tq4 | tensor parallel × 2, recompiled: 3 | 12.00 | 8.00 | 1000.0 | 2.50 | 1.00 | 2.00 | 4.00"
    assert f"| {shown} |" in text
    assert "Not measured: device_map, 8x32k, tq4: OOM: 2 GiB more." in text and tables(json.loads(found.read_text())) in text
    page.write_text("no marks", encoding="utf-8")
    assert serve(bench_multi_gpu.run, ["--json", str(found), "--report", "--page", str(page)]) == 2
    assert "page.md has no lines <!-- measured -->" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "torch sees 0 CUDA devices, and 2 are needed: run this on a machine with 2 GPUs, or with --smoke"),
        (["--caches", "tq9"], "'tq9' is unknown: expected some of StaticCache"),
        (["--placements", "three"], "'three' is unknown: expected some of one GPU, device_map, tensor parallel"),
        (["--points", "8by3"], "point '8by3' is not understood"),
        (["--report"], "holds no results: run this without --report first"),
    ],
)
def test_what_it_refuses(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert serve(bench_multi_gpu.run, ["--json", str(tmp_path / "out.json"), *argv]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_figures_of_a_dry_run_come_on_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = store(tmp_path / "found.json", [row(ONE, 20.0)], gpu="no GPU")
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    assert serve(bench_multi_gpu.run, ["--json", str(found), "--report", "--page", str(page)]) == 2
    assert "is of a dry run" in capsys.readouterr().err and page.read_text(encoding="utf-8") == f"{BEGIN}\n{END}\n"


def test_a_worker_that_dies_costs_its_cells_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote before is kept, and so is what the other one measures."""
    done = json.dumps(row(ONE, 20.0) | {"point": "2x300"})
    dies = [
        sys.executable,
        "-c",
        f"import sys; open(sys.argv[1], 'a').write({done + chr(10)!r}); sys.exit('out of luck')",
    ]
    monkeypatch.setattr(bench_multi_gpu, "command", lambda placement, arguments: [*dies, arguments[-1]])
    out = tmp_path / "out.json"
    argv = ["--json", str(out), "--smoke", "--placements", ONE, "--points", "2x300", "--caches", "tq4;DynamicCache"]
    assert serve(bench_multi_gpu.run, argv) == 1
    cells = {cell["cache"]: cell for cell in json.loads(out.read_text())["cells"]}
    assert cells["tq4"]["step_s"] == 0.02 and "exit code 1: out of luck" in cells["DynamicCache"]["error"]
    left: list[Any] = []
    monkeypatch.setattr(bench_multi_gpu, "phases", lambda cells: left.extend(cells) or [])
    serve(bench_multi_gpu.run, argv)
    assert left == [(ONE, "2x300", "DynamicCache")]  # what failed is tried again, and what was measured is not


def test_the_page_shows_what_was_measured_and_nothing_else() -> None:
    measured, page = ROOT / "eval/results/bench_multi_gpu_h200.json", ROOT / "scripts/MULTI_GPU.md"
    text = page.read_text(encoding="utf-8")
    shown = text.split(BEGIN)[1].split(END)[0].strip()
    assert shown == tables(json.loads(measured.read_text(encoding="utf-8"))).strip()
    assert f"scripts/bench_multi_gpu.py --json {measured.relative_to(ROOT)} --page {page.relative_to(ROOT)}" in text
