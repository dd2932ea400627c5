#!/usr/bin/env python3
"""Times whole-model decoding with one cache or another on a GPU, through `generate()`.

    python scripts/bench_generate.py --json PATH [--shape 8b] [--points 1x2k,8x32k] [--caches "DynamicCache;tq4"]
    python scripts/bench_generate.py --json PATH --quick           four caches at three points
    python scripts/bench_generate.py --json PATH --capacity        the largest batch at 32k that fits and decodes
    python scripts/bench_generate.py --json PATH --profile "tq4, static" 8x32k
    python scripts/bench_generate.py --json PATH --report          the tables of what PATH holds

Runs from the checkout with the Python that starts it. Models have the shapes of Llama-3-8B and Qwen2.5-1.5B and random
bfloat16 weights. A cell is a cache at a point (batch x tokens of the prompt): greedy `generate()` of one prompt and 33 new
tokens, after a warm-up that compiles everything. Static caches are compiled by `generate()` itself; a cell fails if
pages of a packed cache were not read packed, and is marked if a timed run compiled anything. Running out of memory is a
result. The exit code is 1 if a cell failed or is marked.

The fastest of several runs is kept, with the median step of each as `repeats_ms`. A compiled cell is timed twice behind its
prompt, and a third time with `custom_generate=decode_ahead` (`ahead_step_s`). Other caches are limited by the host, which
changes its speed from minute to minute: those of a point take turns in one process, three times (twice where a prompt is
long; a QuantizedCache once). They are comparable only within a point.

On an H200 the whole grid of a shape is estimated to take 20 minutes (8b) and 10 (1.5b), `--quick` under 4, `--capacity` 4.
PATH is written after every cell, and the same command goes on where it stopped: cells that were measured on this GPU with
the same code are not measured again, except beside others that have to take turns with them. `--budget SECONDS` ends a run
in time. `bars.py` says what the cells are to reach, and `python -m eval.plot_generate PATH` draws them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from generate_bench.caches import CACHES, DEFAULT, QUICK
from generate_bench.process import Deadline, OutOfTime, Reply
from generate_bench.report import Results, profile_table, tables
from generate_bench.runs import Job, Runner, cells_left, jobs_of, rounds_of, workers_of
from generate_bench.shapes import POINTS, SHAPES, Point, estimated_needs

from tq_hf.commands import Parser, RequestError, serve

QUICK_POINTS = ("1x2k", "1x32k", "8x8k")
CAPACITY_CACHES = ("DynamicCache", "tq4", "tq3", "tq2")
CAPACITY_TOKENS = 32768
# Bytes of a token against bfloat16, roughly: where the search for the largest batch begins.
SHARES = {"tq4": 0.27, "tq3": 0.215, "tq2": 0.15}
PARALLEL = 6


def chosen(text: str | None, known: Sequence[str], usual: Sequence[str], what: str, separator: str) -> list[str]:
    """Names of a list that the command line gives, or the usual ones."""
    names = [name.strip() for name in text.split(separator)] if text else list(usual)
    for name in names:
        if name not in known:
            raise RequestError(f"--{what} {name!r} is unknown: expected some of {(separator + ' ').join(known)}.")
    return names


def require_point(name: str) -> str:
    rows, _, tokens = name.partition("x")
    if not (rows.isdigit() and tokens.removesuffix("k").isdigit() and int(rows) and int(tokens.removesuffix("k"))):
        raise RequestError(f"point {name!r} is not understood: expected rows x tokens, as 8x32k or 2x300.")
    return name


def measure_cells(runner: Runner, results: Results, args: argparse.Namespace) -> None:
    caches = chosen(args.caches, tuple(CACHES), QUICK if args.quick else DEFAULT, "caches", ";")
    usual = QUICK_POINTS if args.quick else POINTS
    points = [require_point(name) for name in (args.points.split(",") if args.points else usual)]
    missing = {name: why for name in caches if (why := CACHES[name].missing()) is not None}

    def jobs() -> list[Job]:
        here = [cache for cache in caches if cache not in missing]
        return jobs_of(cells_left(here, points, lambda cache, point: results.has("cells", key_of(args.shape, cache, point))))

    began = time.monotonic()
    runner.start(workers_of(jobs()) + 1)
    print(f"imports took {time.monotonic() - began:.0f} s", flush=True)
    results.take(runner.facts())  # of another machine: then all cells are to be measured
    results.found["missing"].update(missing)
    left = jobs()
    print(f"{sum(len(job.caches) for job in left)} cells to measure; not here: {missing or 'nothing'}", flush=True)
    runner.run(rounds_of(left, args.shape, results.found["memory_bytes"], args.parallel))


def key_of(shape: str, cache: str, point: str) -> dict[str, str]:
    return {"shape": shape, "cache": cache, "point": point}


def measure_capacity(runner: Runner, results: Results, args: argparse.Namespace) -> None:
    caches = chosen(args.caches, tuple(CACHES), CAPACITY_CACHES, "caches", ";")
    results.take(runner.facts())
    tokens = Point(f"1x{args.capacity}").tokens
    for cache in caches:
        key = {"shape": args.shape, "cache": cache, "tokens": str(tokens)}
        if results.has("capacity", key):
            continue
        weights = estimated_needs(args.shape, Point("1x1"), False).held
        row = estimated_needs(args.shape, Point(f"1x{tokens}"), False).held - weights
        guess = (results.found["memory_bytes"] - weights) / (row * SHARES.get(cache, 1.0))
        results.put("capacity", key, runner.capacity(cache, tokens, int(guess), args.most_rows))


def measure_profile(runner: Runner, results: Results, args: argparse.Namespace) -> None:
    (cache,) = chosen(args.profile[0], tuple(CACHES), (), "profile", ";")
    key = key_of(args.shape, cache, require_point(args.profile[1]))
    runner.start(2)
    results.take(runner.facts())
    results.put("profiles", key, runner.profile(cache, key["point"]))
    print(profile_table(results.found["profiles"][-1]))


def run(argv: Sequence[str]) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", required=True, help="results, written after every cell")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="default: %(default)s; tiny is for dry runs")
    parser.add_argument("--points", metavar="LIST", help=f"default: {','.join(POINTS)}")
    parser.add_argument("--caches", metavar="LIST", help=f"separated by semicolons; default: {'; '.join(DEFAULT)}")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help=f"{'; '.join(QUICK)} at {', '.join(QUICK_POINTS)}")
    what.add_argument("--capacity", nargs="?", const="32k", metavar="TOKENS", help="the largest batch (default: at 32k)")
    what.add_argument("--profile", nargs=2, metavar=("CACHE", "POINT"), help="one decode step by host, kernels, gaps")
    what.add_argument("--report", action="store_true", help="only print the tables")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="end in time; the same command goes on")
    parser.add_argument("--parallel", type=int, default=PARALLEL, help="cells that compile at once, at most: %(default)s")
    parser.add_argument("--most-rows", type=int, default=4096, help="where --capacity stops: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for dry runs")
    args = parser.parse_args(argv)
    results = Results(args.json)
    if args.report:
        if not results.found["cells"] and not results.found["capacity"] and not results.found["profiles"]:
            raise RequestError(f"{args.json} holds no results: run this without --report first.")
        print(tables(results.found))
        return 0
    began, wrong = time.monotonic(), 0

    def keep(cache: str, point: str, reply: Reply) -> None:
        nonlocal wrong
        wrong += bool(reply.get("error") or reply.get("recompiled"))
        results.put("cells", key_of(args.shape, cache, point), reply)
        ended = reply.get("error") or (f"OOM: {reply['oom']}" if "oom" in reply else None)
        ended = ended or f"{1e3 * reply['step_s']:.2f} ms a step, first token {reply['first_token_s']:.2f} s"
        print(f"{time.monotonic() - began:6.0f} s  {point:8} {cache}: {ended}", flush=True)

    with tempfile.TemporaryDirectory() as logs:
        runner = Runner(args.shape, args.device, Deadline(args.budget), keep, Path(logs))
        try:
            if args.capacity:
                measure_capacity(runner, results, args)
            elif args.profile:
                measure_profile(runner, results, args)
            else:
                measure_cells(runner, results, args)
        except OutOfTime:
            print(f"out of time after {time.monotonic() - began:.0f} s: the same command goes on.", flush=True)
        finally:
            runner.end()
    if not args.profile:
        print(tables(results.found))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(serve(run, None))
