"""What the benchmarks measured, beside the bars, and the figure drawn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bars
import pytest


def decode_row(shape: str, preset: str, counted: float, heads: str = bars.USUAL_HEADS, **more: Any) -> dict[str, Any]:
    row = {"heads": heads, "shape": shape, "preset": preset, "forward_combine": counted, "total": counted + 3}
    return row | {"bytes": 4e7, "error": 1.7e-3, "sdpa": {"flash": 40.0, "cudnn": 30.0}} | more


DECODE = {
    "gpu": "some GPU",
    "copy_bytes_per_second": 4e12,
    "results": [
        decode_row("1x8k", "tq4", 14.0),
        decode_row("8x32k", "k8v4", 16.0),
        decode_row("8x32k", "tq4", 14.9, heads="2x7x64", error=2.1e-3),
        decode_row("1x8k", "3bit_nc", 14.0),
        decode_row("ragged", "tq4", 8.0, sdpa={}, even=10.0),
    ],
}


def by_name(found: list[bars.Bar]) -> dict[str, tuple[float, bool]]:
    return {bar.what: (pytest.approx(bar.value), bar.is_met) for bar in found}


def test_decode() -> None:
    assert by_name(list(bars.decode_bars(DECODE))) == {
        "1x8k tq4: SDPA / (fwd + comb)": (30 / 14, True),
        "8x32k k8v4: share of the copy's speed": (0.625, False),
        "8x32k tq4, heads 2x7x64: SDPA / (fwd + comb)": (30 / 14.9, True),
        "ragged tq4: times an even batch": (1.1, True),
        "decode: largest error of 5 rows": (2.1e-3, False),
    }


def test_extend_store_and_host() -> None:
    usual = {"shape": "8x32k", "preset": "tq4", "error": 1e-3}
    extend = [
        usual | {"queries": 512, "attend": 10.0, "flash": 5.0, "extra_bytes": 2**25},
        *(usual | {"queries": queries, "attend": time} for queries, time in ((1, 10.0), (2, 12.0), (8, 30.0), (16, 26.0))),
    ]
    assert by_name(list(bars.extend_bars({"results": extend}))) == {
        "8x32k tq4, 512 queries: share of flash SDPA's speed": (0.5, False),
        "8x32k tq4, 512 queries: MiB beside the output": (32, True),
        "8x32k tq4, 2 queries: times one": (1.2, True),
        "8x32k tq4, 16 queries: times one": (2.6, False),
        "extend: largest error of 5 rows": (1e-3, True),
    }
    store = [
        {"preset": "tq4", "case": "prefill 65536 tokens", "us": 300.0, "input_gb_s": 805.0},
        {"preset": "tq4", "case": "decode step, batch 1, no page due", "us": 5.5},
        {"preset": "tq4", "case": "decode step, batch 1, a page due", "us": 9.0},
    ]
    assert [bar.is_met for bar in bars.store_bars({"rows": store})] == [True, False, True]
    steps = [
        {"attention": name, "shape": "1x8192", "padding": 0, "page": False, "update_us": 6.0, "total_us": 61.0}
        for name in ("packed_attention", "sdpa")
    ]
    assert by_name(list(bars.host_bars({"steps": steps}))) == {
        "1x8192, 0 padding: host µs of a layer's update, attention and storing": (61, False)
    }


def test_lm_eval() -> None:
    seconds = {"rolling": 0.1, "generate": 2.0}
    found = {"hf": seconds, "tq-hf, packed": {"rolling": 0.19}, "tq-hf, decode": {"rolling": 0.5, "generate": 2.8}}
    assert by_name(list(bars.lm_eval_bars({"seconds": found}))) == {
        "lm-eval, rolling, mode packed: times hf": (1.9, True),
        "lm-eval, rolling, mode decode: times hf": (5.0, True),
        "lm-eval, generate, mode decode: times hf": (1.4, False),
    }


def test_the_table_of_a_folder_ends_with_what_is_missed(tmp_path: Path) -> None:
    (tmp_path / "bench_decode.json").write_text(json.dumps(DECODE))
    lines = bars.table(bars.read_bars(tmp_path)).splitlines()
    assert [line.split()[0] for line in lines] == ["met"] * 3 + ["MISSED"] * 2 + ["3"]
    assert lines[3] == "MISSED     0.625 >= 0.7     8x32k k8v4: share of the copy's speed"


def test_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the extra `eval` installs it")
    from eval import plot_decode

    path = tmp_path / "bench_decode.json"
    path.write_text(json.dumps(DECODE))
    assert plot_decode.main([str(path), "--image", str(tmp_path / "figure.svg")]) == 0
    text = (tmp_path / "figure.svg").read_text()
    for part in ("tq4", "k8v4", "best SDPA", "4.00 TB/s", "8x32k", "some GPU"):
        assert part in text


def test_no_figure_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="only the extra `eval` installs it")
    from eval import plot_decode

    path = tmp_path / "bench_decode.json"
    for content, message in (("{", "cannot be read as JSON"), (json.dumps({"results": []}), "run scripts/bench_decode.py")):
        path.write_text(content)
        assert plot_decode.main([str(path)]) == 2
        assert message in capsys.readouterr().err
