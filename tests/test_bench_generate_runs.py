"""Which worker of `scripts/bench_generate.py` does what, and when; what becomes of cells when one fails or time is over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from generate_bench import runs
from generate_bench.caches import CACHES
from generate_bench.process import Deadline, OutOfTime, WorkerProcess
from generate_bench.shapes import POINTS, Point, estimated_needs

from tests.bench_workers import FakeWorker

HQQ = "QuantizedCache hqq, 4 bits"


def run_cells(
    monkeypatch: Any, answer: Any, cells: list[tuple[str, str]], memory: float
) -> tuple[dict[Any, Any], list[int]]:
    """What is kept of each cell, and how many jobs the rounds had."""
    kept: dict[Any, Any] = {}
    runner = runs.Runner("8b", "cpu", Deadline(None), lambda *cell: kept.update({cell[:2]: cell[2]}), Path())
    monkeypatch.setattr(runner, "worker", lambda: FakeWorker(answer))
    rounds = list(runs.rounds_of(runs.jobs_of(cells), "8b", memory, parallel=4))
    runner.run(rounds)
    return kept, [len(jobs) for jobs in rounds]


def test_a_cell_that_fails_does_not_lose_others(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = ("StaticCache", "tq4, static", "DynamicCache", "tq4")
    cells = [(cache, point) for point in ("1x2k", "8x32k") for cache in caches]
    prepared: dict[str, int] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        cache, point = request["cache"], request.get("point")
        if request["do"] == "prepare":
            prepared[cache] = prepared.get(cache, 0) + 1
            if (cache, point) == ("DynamicCache", "1x2k"):
                return {"error": "broken"}
            if (cache, point) == ("tq4", "8x32k"):
                return {"oom": "8 GiB more"}
            if (cache, point) == ("StaticCache", "8x32k") and prepared[cache] == 2:
                return {"oom": "beside others"}
            return {}
        return {"step_s": 1.0, "first_token_s": 2.0}

    kept, sizes = run_cells(monkeypatch, answer, cells, memory=140 * 2**30)
    assert set(kept) == set(cells)
    assert kept.pop(("DynamicCache", "1x2k")) == {"error": "broken"}
    assert kept.pop(("tq4", "8x32k")) == {"oom": "8 GiB more"}
    assert all(result["step_s"] == 1.0 for result in kept.values())
    assert prepared["StaticCache"] == 3  # once more, alone
    assert sizes == [3, 1, 1, 1]


class Turns:
    """Runs caches in turn with workers that answer the n-th measurement of a cache as `failures` say, else with n s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: dict[tuple[str, str, int], Any]) -> None:
        self.failures = failures
        self.asked: list[tuple[int, str, str]] = []  # worker, what, cache
        self.counts: dict[tuple[str, str], int] = {}
        self.kept: list[tuple[str, str, dict[str, Any]]] = []
        self.workers: list[FakeWorker] = []
        self.runner = runs.Runner("8b", "cpu", Deadline(None), lambda *cell: self.kept.append(cell), Path())
        monkeypatch.setattr(self.runner, "worker", self.worker)

    def worker(self) -> FakeWorker:
        number = len(self.workers)
        self.workers.append(FakeWorker(lambda request: self.answer(number, request)))
        return self.workers[-1]

    def answer(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        do, cache = request["do"], request["cache"]
        self.asked.append((number, do, cache))
        count = self.counts[do, cache] = self.counts.get((do, cache), 0) + 1
        failure = self.failures.get((do, cache, count), {})
        if isinstance(failure, Exception):
            raise failure
        return failure or ({} if do == "prepare" else {"step_s": float(count), "first_token_s": 1.0 / count})

    def run(self, *caches: str, points: tuple[str, ...] = ("1x2k",)) -> None:
        jobs = runs.jobs_of([(cache, point) for point in points for cache in caches])
        self.runner.run(runs.rounds_of(jobs, "8b", 140 * 2**30, parallel=4))


def test_caches_without_compilation_take_turns_in_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, {})
    turns.run("DynamicCache", HQQ, "tq4", points=("1x2k", "8x32k"))
    round_, both = ["DynamicCache", HQQ, "tq4"], ["DynamicCache", "tq4"]
    assert [cache for _, do, cache in turns.asked if do == "prepare"] == 2 * round_
    assert [cache for _, do, cache in turns.asked if do == "measure"] == round_ + both + both + round_ + both
    assert [do for _, do, _ in turns.asked[:3]] == 3 * ["prepare"]
    assert len(turns.workers) == 1 and turns.workers[0].ended
    assert [(point, cache) for cache, point, _ in turns.kept] == [
        (point, cache) for point in ("1x2k", "8x32k") for cache in (HQQ, "DynamicCache", "tq4")
    ]
    (slow, *_), (cache, point, kept) = turns.kept[0], turns.kept[1]
    assert slow == HQQ and turns.kept[0][2]["repeats_ms"] == [1000]
    assert (cache, point, kept) == (
        "DynamicCache", "1x2k", {"step_s": 1.0, "first_token_s": 1 / 3, "repeats_ms": [1000, 2000, 3000]}
    )  # fmt: skip
    assert turns.kept[-1][2]["repeats_ms"] == [4000, 5000]


def test_a_cache_that_runs_out_of_memory_loses_its_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    oom = {"oom": "8 GiB more"}
    turns = Turns(monkeypatch, {("prepare", "tq2", 1): oom, ("measure", "DynamicCache", 2): oom})
    turns.run("DynamicCache", "tq4", "tq3", "tq2")
    kept = {cache: result for cache, _, result in turns.kept}
    assert kept["tq2"] == kept["DynamicCache"] == oom
    assert kept["tq4"]["repeats_ms"] == kept["tq3"]["repeats_ms"] == [1000, 2000, 3000]
    assert len(turns.workers) == 1 and len(turns.kept) == 4


def test_after_an_error_the_caches_that_are_left_go_on_in_a_new_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, {("measure", "tq4", 2): {"error": "broken"}})
    turns.run("DynamicCache", "tq4", "tq3")
    assert [worker.ended for worker in turns.workers] == [True, True]
    assert turns.asked[-6:] == [
        (0, "measure", "tq4"), (1, "prepare", "DynamicCache"), (1, "prepare", "tq3"),
        (1, "measure", "tq3"), (1, "measure", "DynamicCache"), (1, "measure", "tq3"),
    ]  # fmt: skip
    kept = {cache: result for cache, _, result in turns.kept}
    assert kept.pop("tq4") == {"error": "broken"}
    assert all(result["repeats_ms"] == [1000, 2000, 3000] for result in kept.values()) and len(kept) == 2


def test_cells_are_kept_when_their_last_turn_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, {("measure", "tq4", 3): OutOfTime()})
    with pytest.raises(OutOfTime):
        turns.run("DynamicCache", HQQ, "tq4")
    assert [cache for cache, *_ in turns.kept] == [HQQ, "DynamicCache"]


def test_a_cache_that_is_left_has_others_beside_it() -> None:
    """Those it takes turns with are measured again, but no slow one, and nothing where none of them is left."""
    caches, points = ("StaticCache", "DynamicCache", HQQ, "tq4"), ("1x2k", "8x8k", "1x32k")
    left = {("tq4", "1x2k"), ("StaticCache", "8x8k"), (HQQ, "8x8k")}
    found = runs.cells_left(caches, points, lambda *cell: cell not in left)
    assert found == [("DynamicCache", "1x2k"), ("tq4", "1x2k"), ("StaticCache", "8x8k"), (HQQ, "8x8k")]
    jobs = runs.jobs_of(found)
    assert jobs == [
        runs.Job("8x8k", ("StaticCache",)), runs.Job("1x2k", ("DynamicCache", "tq4")), runs.Job("8x8k", (HQQ,))
    ]  # fmt: skip
    assert runs.workers_of(jobs) == 2 and runs.workers_of(jobs[:1]) == 1


def test_rounds_fit_the_gpu() -> None:
    cells = [(cache, point) for point in POINTS for cache in ("StaticCache", "tq4, static", "DynamicCache")]
    memory = 140 * 2**30
    rounds = list(runs.rounds_of(runs.jobs_of(cells), "8b", memory, parallel=6))
    jobs = [job for jobs in rounds for job in jobs]
    assert sorted((cache, job.point) for job in jobs for cache in job.caches) == sorted(cells)
    for its in rounds:
        needs = [estimated_needs("8b", Point(job.point), CACHES[job.caches[0]].packed) for job in its]
        held, warming_up = (sum(getattr(each, name) for each in needs) for name in ("held", "warming_up"))
        assert len(its) == 1 or held + max(warming_up, *(each.reading for each in needs)) < memory
    assert 3 <= sum(its[0].compiled for its in rounds) <= 6
    assert rounds[-1] == [runs.Job(POINTS[-1], ("DynamicCache",))]


def test_a_worker_out_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "sleep")  # with arguments that make it end with an error at once
    worker = WorkerProcess("tiny", "cpu", tmp_path / "log", Deadline(None), {})
    assert worker.receive(20) == {"error": "the worker ended with exit code 1"}
    worker.end()
    assert worker.last_words()
    for deadline, expected in ((Deadline(None), {"error": "no answer within 0 s"}), (Deadline(0.0), None)):
        monkeypatch.setattr(sys, "executable", str(_idle_program(tmp_path)))
        worker = WorkerProcess("tiny", "cpu", tmp_path / "log", deadline, {})
        if expected is None:
            with pytest.raises(OutOfTime):
                worker.receive(100)
        else:
            assert worker.receive(0.1) == expected
        assert worker.process.returncode is not None


def _idle_program(folder: Path) -> Path:
    path = folder / "idle"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    return path
