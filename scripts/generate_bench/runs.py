"""Runs cells: which worker does what, and when, so that one measures while all others wait.

Compilation is what takes long, so compiled cells go in rounds: each in a process of its own, as many as fit on the GPU
compile at the same time, and when all are done they are timed one after another. Caches without compilation have a
process each, which goes through their points alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .caches import CACHES
from .capacity import largest
from .process import Deadline, Reply, WorkerProcess
from .shapes import Point, estimated_needs

READY_S, PREPARE_S, MEASURE_S = 240.0, 300.0, 240.0
SPARE = 0.96  # of a GPU's memory may be planned with
COMPILE_THREADS = 4  # processes of a worker that compile kernels
Keep = Callable[[str, str, Reply], None]


@dataclass(frozen=True)
class Job:
    """A cache's points for one worker."""

    cache: str
    points: tuple[str, ...]


def jobs_of(cells: Iterable[tuple[str, str]]) -> list[Job]:
    """Jobs for (cache, point) pairs: compiled ones first, by point, so that what is compared is measured together."""
    cells = list(cells)
    compiled = [(cache, point) for cache, point in cells if CACHES[cache].compiled]
    order = list(dict.fromkeys(point for _, point in cells))
    jobs = [Job(cache, (point,)) for cache, point in sorted(compiled, key=lambda cell: order.index(cell[1]))]
    for cache in dict.fromkeys(cache for cache, _ in cells if not CACHES[cache].compiled):
        jobs.append(Job(cache, tuple(point for name, point in cells if name == cache)))
    return jobs


def rounds_of(jobs: Sequence[Job], shape: str, memory: float, parallel: int) -> Iterator[list[Job]]:
    """Jobs that run beside each other: all warm up at once, and hold what they have prepared while one reads its prompt."""
    taken: list[Job] = []
    for job in jobs:
        if not CACHES[job.cache].compiled:
            continue
        if taken and (len(taken) == parallel or _needed(shape, [*taken, job]) > SPARE * memory):
            yield taken
            taken = []
        taken = [*taken, job]
    if taken:
        yield taken
    yield from ([job] for job in jobs if not CACHES[job.cache].compiled)


def _needed(shape: str, jobs: Sequence[Job]) -> int:
    """Bytes that a round takes on the GPU, at most."""
    needs = [estimated_needs(shape, Point(job.points[0]), CACHES[job.cache].packed) for job in jobs]
    return sum(each.held for each in needs) + max(
        max(each.reading for each in needs), sum(each.warming_up for each in needs)
    )


class Runner:
    """Runs jobs with workers that were started ahead, since imports take long too.

    Args:
        keep: called with a cell's cache and point and how it ended, at once.
        logs: a folder for what workers print.
    """

    def __init__(self, shape: str, device: str, deadline: Deadline, keep: Keep, logs: Path) -> None:
        self.shape, self.device, self.deadline, self.keep, self.logs = shape, device, deadline, keep, logs
        self.idle: list[WorkerProcess] = []
        self.all: list[WorkerProcess] = []

    def start(self, workers: int, environment: dict[str, str] | None = None) -> None:
        """Start workers and wait until all have imported what they need."""
        variables = {"TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS), **(environment or {})}
        started = []
        for _ in range(workers):
            log = self.logs / f"{len(self.all)}.log"
            worker = WorkerProcess(self.shape, self.device, log, self.deadline, variables)
            self.all.append(worker)
            started.append(worker)
        for worker in started:
            if "ready" not in (reply := worker.receive(READY_S)):
                raise RuntimeError(f"a worker did not start: {reply}\n{worker.last_words()}")
        self.idle += started

    def worker(self) -> WorkerProcess:
        if not self.idle:
            self.start(1)
        return self.idle.pop()

    def facts(self) -> Reply:
        """Of the machine, from a worker that is ended then: it has a context on the GPU."""
        worker = self.worker()
        reply = worker.ask(READY_S, do="facts")
        worker.end()
        if "error" in reply or "oom" in reply:
            raise RuntimeError(f"{reply}\n{worker.last_words()}")
        return reply

    def run(self, rounds: Iterable[list[Job]]) -> None:
        """Run all rounds. A compiled cell that was short of memory beside others is tried again alone.

        Raises:
            OutOfTime: cells that are not kept yet are to be run by another call.
        """
        for jobs in rounds:
            if CACHES[jobs[0].cache].compiled:
                for job in self._compiled(jobs):
                    self._compiled([job])
            else:
                self._eager(jobs[0])

    def _compiled(self, jobs: list[Job]) -> list[Job]:
        workers = [self.worker() for _ in jobs]
        for job, worker in zip(jobs, workers):
            worker.send(do="prepare", cache=job.cache, point=job.points[0])
        replies = [worker.receive(PREPARE_S) for worker in workers]
        again = []
        for job, worker, reply in zip(jobs, workers, replies):
            if not reply:
                reply = worker.ask(MEASURE_S, do="measure", cache=job.cache)
            worker.end()
            if "oom" in reply and len(jobs) > 1:
                again.append(job)
            else:
                self._keep(job.cache, job.points[0], reply, worker)
        return again

    def _eager(self, job: Job) -> None:
        worker = None
        for point in job.points:
            worker = worker or self.worker()
            reply = worker.ask(PREPARE_S, do="prepare", cache=job.cache, point=point)
            if not reply:
                reply = worker.ask(MEASURE_S, do="measure", cache=job.cache)
            self._keep(job.cache, point, reply, worker)
            if "error" in reply:  # it has ended
                worker.end()
                worker = None
        if worker is not None:
            worker.end()

    def _keep(self, cache: str, point: str, reply: Reply, worker: WorkerProcess) -> None:
        if "error" in reply:
            print(worker.last_words(), flush=True)
        self.keep(cache, point, reply)

    def profile(self, cache: str, point: str) -> Reply:
        """A cell with the profile of one of its steps."""
        worker = self.worker()
        reply = worker.ask(PREPARE_S, do="prepare", cache=cache, point=point, profiled=True)
        if not reply:
            reply = worker.ask(MEASURE_S, do="profile", cache=cache)
        worker.end()
        if "error" in reply:
            print(worker.last_words(), flush=True)
        return reply

    def capacity(self, cache: str, tokens: int, guess: int, most: int) -> Reply:
        """The most rows of `tokens` tokens that fit and decode; `most` at most."""
        self.start(1, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})  # a full GPU has no room for fragments
        worker = self.idle.pop()
        tried: dict[int, bool] = {}

        def fits(rows: int) -> bool:
            if rows > most:
                return False
            reply = worker.ask(MEASURE_S, do="capacity", cache=cache, rows=rows, tokens=tokens)
            if "fits" not in reply and "oom" not in reply:
                raise RuntimeError(reply["error"])
            tried[rows] = reply.get("fits", False)
            print(f"  {cache}: {rows} x {tokens} {'fits' if tried[rows] else 'does not fit'}", flush=True)
            return tried[rows]

        try:
            return {"rows": largest(fits, guess), "tried": len(tried)}
        except RuntimeError as error:
            print(worker.last_words(), flush=True)
            return {"error": str(error)}
        finally:
            worker.end()

    def end(self) -> None:
        for worker in self.all:
            worker.end()
