"""`scripts/gpu_check`: a slow or failing part does not lose the others' results."""

from __future__ import annotations

import json
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "gpu_check"
    loader = SourceFileLoader("gpu_check", str(path))
    spec = spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def test_a_part_that_ends_in_time(gpu_check: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert gpu_check.run_part([sys.executable, "-c", "import tq_hf.layout; print('done')"], log, 60)[0] == "ok"
    assert gpu_check.last_line(log) == "done"
    assert gpu_check.run_part([sys.executable, "-c", "raise SystemExit(3)"], log, 60)[0] == "failed (exit code 3)"


def test_a_part_that_runs_out_of_time_can_still_report(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('3 passed')"
    status, seconds = gpu_check.run_part([sys.executable, "-c", code], tmp_path / "log", 2)
    assert status == "out of time" and seconds < 20
    assert gpu_check.last_line(tmp_path / "log") == "3 passed"
    monkeypatch.setattr(gpu_check, "GRACE_SECONDS", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    status, seconds = gpu_check.run_part([sys.executable, "-c", deaf], tmp_path / "log", 1)
    assert status == "out of time" and seconds < 20


def test_every_gpu_test_is_in_a_file_that_is_run(gpu_check: ModuleType) -> None:
    for path in Path(__file__).parent.rglob("test_*.py"):
        if path != Path(__file__) and "mark.gpu" in path.read_text():
            assert any(path.match(f"tests/{pattern}") for pattern in gpu_check.GPU_TESTS), path


def test_rows_are_found_and_tabulated(gpu_check: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    assert gpu_check.read_rows(path) == []
    path.write_text("{ cut off")
    assert gpu_check.read_rows(path) == []
    rows = [{"shape": "8x32k", "us": 41.25}, {"shape": "1x8k", "us": None, "sdpa": {"flash": 2.0}}]
    path.write_text(json.dumps({"gpu": "any", "results": rows}))
    assert gpu_check.read_rows(path) == rows
    lines = gpu_check.table(rows).splitlines()
    assert [line.split() for line in lines] == [["shape", "us", "sdpa"], ["8x32k", "41.25", "-"], ["1x8k", "-", "flash=2"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(
    gpu_check: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err
