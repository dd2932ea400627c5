"""Runs cells: which worker does what, and when, so that one measures while all others wait.

Compilation is what takes long, so compiled cells go in rounds: each in a process of its own, as many as fit on the GPU
compile at the same time, and when all are done they are timed one after another. Caches without compilation share a
process: at each point they are warmed up once and then take turns, since the host limits them and changes its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .caches import CACHES
from .capacity import largest
from .process import Deadline, Reply, WorkerProcess
from .repeats import combined, repeats
from .shapes import Point, estimated_needs

READY_S, PREPARE_S, MEASURE_S = 240.0, 300.0, 240.0
SPARE = 0.96  # of a GPU's memory may be planned with
COMPILE_THREADS = 4  # processes of a worker that compile kernels
Keep = Callable[[str, str, Reply], None]


@dataclass(frozen=True)
class Job:
    """Caches that one worker measures at a point: one that is compiled, or those without compilation, in turn."""

    point: str
    caches: tuple[str, ...]

    @property
    def compiled(self) -> bool:
        return CACHES[self.caches[0]].compiled


def cells_left(caches: Sequence[str], points: Sequence[str], has: Callable[[str, str], bool]) -> list[tuple[str, str]]:
    """(cache, point) pairs that are to be measured, by point.

    Caches without compilation can only be compared if they took turns: where one of them is left, all are measured anew,
    but the slow ones.
    """
    left: list[tuple[str, str]] = []
    for point in points:
        missing = {cache for cache in caches if not has(cache, point)}
        in_turn = {cache for cache in caches if not (CACHES[cache].compiled or CACHES[cache].slow)}
        wanted = missing | in_turn if missing & in_turn else missing
        left += [(cache, point) for cache in caches if cache in wanted]
    return left


def jobs_of(cells: Sequence[tuple[str, str]]) -> list[Job]:
    """Jobs for (cache, point) pairs: compiled ones first, by point, so that what is compared is measured together."""
    compiled: list[Job] = []
    eager: list[Job] = []
    for point in dict.fromkeys(point for _, point in cells):
        caches = [cache for cache, at in cells if at == point]
        compiled += [Job(point, (cache,)) for cache in caches if CACHES[cache].compiled]
        if turns := tuple(cache for cache in caches if not CACHES[cache].compiled):
            eager.append(Job(point, turns))
    return compiled + eager


def workers_of(jobs: Sequence[Job]) -> int:
    """Processes that the jobs take: compiled ones one each, all others one."""
    compiled = sum(job.compiled for job in jobs)
    return compiled + (compiled < len(jobs))


def rounds_of(jobs: Sequence[Job], shape: str, memory: float, parallel: int) -> Iterator[list[Job]]:
    """Jobs that run beside each other: all warm up at once, and hold what they have prepared while one reads its prompt."""
    taken: list[Job] = []
    for job in jobs:
        if not job.compiled:
            continue
        if taken and (len(taken) == parallel or _needed(shape, [*taken, job]) > SPARE * memory):
            yield taken
            taken = []
        taken = [*taken, job]
    if taken:
        yield taken
    yield from ([job] for job in jobs if not job.compiled)


def _needed(shape: str, jobs: Sequence[Job]) -> int:
    """Bytes that a round takes on the GPU, at most."""
    needs = [estimated_needs(shape, Point(job.point), CACHES[job.caches[0]].packed) for job in jobs]
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
        eager = None
        for jobs in rounds:
            if jobs[0].compiled:
                for job in self._compiled(jobs):
                    self._compiled([job])
            else:
                eager = self._in_turn(jobs[0], eager)
        if eager is not None:
            eager.end()

    def _compiled(self, jobs: list[Job]) -> list[Job]:
        workers = [self.worker() for _ in jobs]
        for job, worker in zip(jobs, workers):
            worker.send(do="prepare", cache=job.caches[0], point=job.point)
        replies = [worker.receive(PREPARE_S) for worker in workers]
        again = []
        for job, worker, reply in zip(jobs, workers, replies):
            if not reply:
                reply = worker.ask(MEASURE_S, do="measure", cache=job.caches[0])
            worker.end()
            if "oom" in reply and len(jobs) > 1:
                again.append(job)
            else:
                self._keep(job.caches[0], job.point, reply, worker)
        return again

    def _in_turn(self, job: Job, worker: WorkerProcess | None) -> WorkerProcess | None:
        """Measure caches of a point with that worker, and with new ones where one has ended; returns what goes on."""
        left: dict[str, list[Reply]] = {cache: [] for cache in job.caches}
        while left:
            worker = worker or self.worker()
            if not self._rounds(job.point, left, worker):
                worker.end()
                worker = None
        return worker

    def _rounds(self, point: str, left: dict[str, list[Reply]], worker: WorkerProcess) -> bool:
        """Prepare the caches that are left and measure each once a round; `left` holds their runs until they are kept.

        Returns:
            Whether the worker goes on: an error ends it.
        """
        for cache in list(left):
            reply = worker.ask(PREPARE_S, do="prepare", cache=cache, point=point)
            if reply:
                del left[cache]
                self._keep(cache, point, reply, worker)
                if "error" in reply:
                    return False
        while left:
            round_ = min(len(runs) for runs in left.values())  # which another worker may have begun
            for cache in [cache for cache, runs in left.items() if len(runs) == round_]:
                reply = worker.ask(MEASURE_S, do="measure", cache=cache)
                failed = "step_s" not in reply
                if not failed:
                    left[cache].append(reply)
                if failed or len(left[cache]) == repeats(CACHES[cache], Point(point)):
                    runs = left.pop(cache)
                    self._keep(cache, point, reply if failed else combined(runs), worker)
                if "error" in reply:
                    return False
        return True

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
