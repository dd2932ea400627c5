#!/usr/bin/env python3
"""Times decoding on one GPU, over two by a device map, and over two by tensor parallelism, with one cache or another.

    python scripts/bench_multi_gpu.py --json eval/results/bench_multi_gpu_h200.json [--page scripts/MULTI_GPU.md]
    python scripts/bench_multi_gpu.py --json PATH --report [--page scripts/MULTI_GPU.md]     tables of what PATH holds
    python scripts/bench_multi_gpu.py --json PATH --smoke                                   a dry run on two CPU ranks

Runs from the checkout with the Python that starts it, on a machine with two GPUs of one kind; it is planned for 8 minutes
there and ends by then (`--budget`). The model has the shape of Llama-3-8B and random bfloat16 weights. A cell is a
placement, a cache, and a point (batch x tokens): the cache is filled with random states, and 33 tokens are decoded behind
them by `generate()`, after a warm-up that compiles everything. Static caches are compiled by `generate()` itself; over a
device map they are not measured, because CUDA graphs do not span devices. Running out of memory is a result.

PATH is written after every cell, and the same command goes on where it stopped. `--page` writes the tables between the marks
of a page. The exit code is 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from bench_generate import require_point
from generate_bench.caches import CACHES
from generate_bench.process import ROOT
from generate_bench.report import Results
from multi_bench.placements import MAP, ONE, PARALLEL, PLACEMENTS
from multi_bench.report import bench_hash, tables, write_page
from tqdm import tqdm

from tq_hf.commands import Parser, RequestError, serve

GPUS = 2
POINTS = ("8x32k", "1x128k")
SMOKE_POINTS = ("2x300", "1x500")
STATIC, DYNAMIC = ("tq4, static", "StaticCache"), ("tq4", "DynamicCache")
BUDGET_S = 470.0
POLL_S = 0.2
Cell = tuple[str, str, str]  # placement, point, cache
Worker = tuple[subprocess.Popen[bytes], Path, Path]  # with the file that it appends cells to, and its log


@dataclass(frozen=True)
class Phase:
    """Workers that run beside each other: what each of them measures, and which GPUs it sees (None: all of them)."""

    placement: str
    shares: tuple[tuple[Cell, ...], ...]
    gpus: tuple[int | None, ...]


def phases(cells: Sequence[Cell]) -> list[Phase]:
    """On one GPU, each point has its own; all others take both."""
    found = []
    for placement in PLACEMENTS:
        own = [cell for cell in cells if cell[0] == placement]
        if not own:
            continue
        if placement == ONE:
            points = list(dict.fromkeys(point for _, point, _ in own))
            shares = [tuple(cell for cell in own if points.index(cell[1]) % GPUS == gpu) for gpu in range(GPUS)]
            used = [gpu for gpu in range(GPUS) if shares[gpu]]
            found.append(Phase(placement, tuple(shares[gpu] for gpu in used), tuple(used)))
        else:
            found.append(Phase(placement, (tuple(own),), (None,)))
    return found


def command(placement: str, arguments: Sequence[str]) -> list[str]:
    """A worker, or with tensor parallelism as many as there are GPUs."""
    python = [sys.executable]
    if placement == PARALLEL:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GPUS)]
    return [*python, "-m", "multi_bench.worker", placement, *arguments]


def environment(gpu: int | None) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    made = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "8"),
    }
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        made["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    return made


@contextmanager
def workers(phase: Phase, shape: str, device: str, folder: Path) -> Iterator[list[Worker]]:
    """The processes of a phase; all of them end here."""
    started: list[Worker] = []
    try:
        for number, (share, gpu) in enumerate(zip(phase.shares, phase.gpus)):
            cells, log = folder / f"{phase.placement} {number}.jsonl", folder / f"{phase.placement} {number}.log"
            asked = json.dumps([[point, cache] for _, point, cache in share])
            argv = command(phase.placement, [shape, device, asked, str(cells)])
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    argv, cwd=ROOT, env=environment(gpu), stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
                )
            started.append((process, cells, log))
        yield started
    finally:
        for process, _, _ in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # ranks, and the compiler's processes
            process.wait()


def run_phase(phase: Phase, shape: str, device: str, results: Results, until: float, bar: tqdm[Any]) -> int:
    """Measure a phase's cells and keep each as soon as it is there.

    Returns:
        How many failed.
    """
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, workers(phase, shape, device, Path(folder)) as started:
        taken = [0] * len(started)
        while True:
            ended = [process.poll() is not None for process, _, _ in started]
            for number, (_, path, _) in enumerate(started):
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
                for line in lines[taken[number] :]:
                    if not line.endswith("\n"):
                        break
                    taken[number] += 1
                    wrong += keep(json.loads(line), results, bar)
            if all(ended):
                break
            if time.monotonic() > until:
                bar.write(f"{phase.placement}: out of time, the same command goes on")
                return wrong
            time.sleep(POLL_S)
        for number, (share, (process, _, log)) in enumerate(zip(phase.shares, started)):
            for placement, point, cache in share[taken[number] :]:
                last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
                error = f"the worker ended with exit code {process.returncode}: {''.join(last)[:200]}"
                wrong += keep({"placement": placement, "point": point, "cache": cache, "error": error}, results, bar)
            if process.returncode:
                bar.write(log.read_text(errors="replace")[-3000:])
    return wrong


def keep(row: dict[str, Any], results: Results, bar: tqdm[Any]) -> bool:
    """Store a cell; whether it failed."""
    key = {name: row[name] for name in ("placement", "point", "cache")} | {"bench": bench_hash()}
    results.put("cells", key, row)
    told = row.get("error") or (f"OOM: {row['oom']}" if "oom" in row else f"{1e3 * row['step_s']:.2f} ms a step")
    bar.write(f"{row['placement']:16} {row['point']:8} {row['cache']}: {told}")
    bar.update()
    return "error" in row


def wanted(args: argparse.Namespace) -> list[Cell]:
    points = args.points.split(",") if args.points else SMOKE_POINTS if args.smoke else POINTS
    caches = [name.strip() for name in args.caches.split(";")] if args.caches else [*STATIC, *DYNAMIC]
    placements = [name.strip() for name in args.placements.split(",")] if args.placements else list(PLACEMENTS)
    for given, known in ((caches, tuple(CACHES)), (placements, PLACEMENTS)):
        for name in given:
            if name not in known:
                raise RequestError(f"{name!r} is unknown: expected some of {', '.join(known)}.")
    points = [require_point(point) for point in points]
    return [
        (placement, point, cache)
        for placement in placements
        for point in points
        for cache in caches
        if placement != MAP or not CACHES[cache].compiled
    ]


def require_gpus() -> dict[str, Any]:
    """What the machine is.

    Raises:
        RequestError: it has fewer GPUs than are needed, or several kinds of them.
    """
    count = torch.cuda.device_count()
    if count < GPUS:
        raise RequestError(
            f"torch sees {count} CUDA {'device' if count == 1 else 'devices'}, and {GPUS} are needed: run this on a machine"
            f" with {GPUS} GPUs, or with --smoke for a dry run on the CPU."
        )
    kinds = {torch.cuda.get_device_name(i) for i in range(GPUS)}
    if len(kinds) > 1:
        found = " and ".join(sorted(kinds))
        raise RequestError(f"the first {GPUS} GPUs are of different kinds, {found}: expected the same.")
    return {"gpu": kinds.pop(), "memory_bytes": torch.cuda.get_device_properties(0).total_memory}


def run(argv: Sequence[str]) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", required=True, help="results, written after every cell")
    parser.add_argument("--points", metavar="LIST", help=f"default: {','.join(POINTS)}")
    parser.add_argument("--caches", metavar="LIST", help=f"default: {'; '.join([*STATIC, *DYNAMIC])}")
    parser.add_argument("--placements", metavar="LIST", help=f"default: {', '.join(PLACEMENTS)}")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on two CPU ranks: a dry run, no measurement")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    parser.add_argument("--page", type=Path, metavar="PATH", help="write the tables between the marks of this page")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="end by then; default: %(default)s")
    args = parser.parse_args(argv)
    began, wrong, cells = time.monotonic(), 0, wanted(args)
    results = Results(args.json)
    if not args.report:
        shape, device = ("tiny", "cpu") if args.smoke else ("8b", "cuda")
        facts = {"gpu": "no GPU", "memory_bytes": 0} if args.smoke else require_gpus()
        results.take(
            {
                **facts,
                "gpus": GPUS,
                "shape": shape,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            }
        )
        current = bench_hash()
        results.found["cells"] = [row for row in results.found["cells"] if row.get("bench") == current]
        names = ("placement", "point", "cache")
        left = [cell for cell in cells if not results.has("cells", dict(zip(names, cell)))]
        with tqdm(total=len(left), desc="cells", disable=None) as bar:
            for phase in phases(left):
                wrong += run_phase(phase, shape, device, results, began + args.budget, bar)
                if time.monotonic() > began + args.budget:
                    break
    if not results.found["cells"]:
        raise RequestError(f"{args.json} holds no results: run this without --report first.")
    text = tables(results.found)
    print(text)
    if args.page is not None:
        if results.found["gpu"] == "no GPU":
            raise RequestError(f"{args.json} is of a dry run, whose times are none: nothing was written to {args.page}.")
        try:
            write_page(args.page, text)
        except (OSError, ValueError) as error:
            raise RequestError(str(error)) from error
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(serve(run, None))
