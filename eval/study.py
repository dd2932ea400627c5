"""Run a study and write its results: `python -m eval.study CONFIG [--out DIR] [--data-dir DIR]`.

    python -m eval.study perplexity --model Qwen/Qwen2.5-Coder-0.5B-Instruct --out results
    python -m eval.study gsm8k --model some/folder --data-dir data --out results --part 1/4
    python -m eval.study needle --out results --report

CONFIG is a YAML file or the name of one in `eval/studies`: perplexity, gsm8k, needle, longctx, compare. It names the study
and changes its options, whose defaults are in `eval/measures`.

Each model has a JSON file in --out, written after every cell: run the command again to go on where it stopped. Cells that
failed are tried again; results of other code, text or releases are never mixed in. Several processes may share --out, each
with a --part of its own, on one GPU or on several. A Markdown file and plots of all models stand beside.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from tq_hf.commands import (
    Loaded,
    Parser,
    RequestError,
    choose_device,
    code_fingerprint,
    first_line,
    load,
    serve,
    versions,
)

from .isolated import measure_apart
from .measures import STUDIES
from .measures.base import Cell, Result, Study, failures
from .stored import StoredResults, locked, replace_text
from .study_config import find_config, options_of, read_config

PROGRAM = "python -m eval.study"
DTYPES = ("bfloat16", "float16", "float32")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of one in eval/studies")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="where results go; made if missing (%(default)s)",
    )
    parser.add_argument(
        "--model", action="append", help="hub id or folder; may be repeated (default: SmolLM2-135M-Instruct from PyPI)"
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="local data, see eval/tasks/local_data.py (default: from the Hub)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="the model's (default: %(default)s)")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="every Nth batch of cells, from the Ith on: one of N processes"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing: write tables and plots of what is there")
    args = parser.parse_args(argv)
    found = re.fullmatch(r"(\d+)/(\d+)", args.part)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise RequestError(f"--part {args.part} is not possible: expected I/N with I from 1 to N, such as 2/4.")
    args.part = int(found[1]), int(found[2])
    if args.data_dir is not None and not args.data_dir.is_dir():
        raise RequestError(f"--data-dir {args.data_dir} is no folder.")
    return args


def read_study(name: str) -> tuple[type[Study], Any]:
    """The study that a config names, and its options.

    Raises:
        RequestError: no such config or study, or options that are not its own.
    """
    path = find_config(name)
    given = read_config(path)
    kind = given.pop("study", None)
    if kind not in STUDIES:
        raise RequestError(f"{path}: study: {kind!r} is unknown: expected one of {', '.join(STUDIES)}.")
    return STUDIES[kind], options_of(STUDIES[kind].options_type, given, path)


def run_facts(study: Study) -> dict[str, Any]:
    """What the results of a file have in common."""
    model = study.loaded.model
    device = model.device
    return {
        "study": study.kind,
        "model": study.loaded.name,
        **study.facts(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions() | {"eval_code": code_fingerprint(Path(__file__).parent / "measures")},
    }


def file_of(kind: str, out: Path, model: str) -> Path:
    return out / f"{kind}-{Path(model).name}.json"


def measure_model(study: Study, results: StoredResults, part: tuple[int, int], command: str) -> int:
    """Measure what is missing in `results` of this part; how many cells failed."""
    index, parts = part
    mine = [cell for batch in study.batches(study.cells())[index - 1 :: parts] for cell in batch]
    missing = [cell for cell in mine if not is_there(results, cell)]
    order = {cell.name: place for place, cell in enumerate(study.cells())}
    failed = 0
    with tqdm(
        total=sum(map(study.work, missing)),
        desc=f"{study.kind}, {study.loaded.name}",
        unit=study.unit,
        unit_scale=True,
    ) as bar:
        for batch in study.batches(missing):
            for cell, result in zip(batch, measure_apart(batch, study.measure, study.work, bar)):
                facts = {"config": cell.config, "order": order[cell.name], "command": command}
                results.put(cell.name, facts | result)
                failed += "error" in result
                bar.write(f"{cell.name:40} {as_line(study, result)}", file=sys.stdout)
    print(f"{study.loaded.name}: {len(missing)} cells measured, {len(mine) - len(missing)} were there already")
    return failed


def is_there(results: StoredResults, cell: Cell) -> bool:
    """Whether a cell has a result. What lacked a package is tried again."""
    return results.holds(cell.name, cell.config) and "missing" not in results.entries[cell.name]


def as_line(study: Study, result: Result) -> str:
    if "error" in result:
        return f"FAILED  {result['error']}"
    return f"{study.line(result)}  {result['seconds']:.1f} s"


def report(kind: type[Study], out: Path) -> None:
    """Write the Markdown file and the plots of all models in a folder.

    Raises:
        RequestError: there are no results of this study, or a file cannot be read.
    """
    from . import plot_study

    found = [StoredResults.read(path) for path in sorted(out.glob(f"{kind.kind}-*.json"))]
    if not found:
        raise RequestError(f"{out} holds no results of {kind.kind}: run {PROGRAM} {kind.kind} --out {out} first.")
    text = f"# {kind.kind}\n"
    for heading, table in kind.tables(found).items():
        text += f"\n{heading}:\n\n{table}"
    parts = re.compile(r" --part \d+/\d+")
    commands = {parts.sub("", entry["command"]) for results in found for entry in results.entries.values()}
    text += "\nMeasured with:\n\n" + "".join(f"    {command}\n" for command in sorted(commands))
    if failed := failures(found):
        text += f"\nNot in the tables:\n\n{failed}"
    with locked(out):  # other processes write the same files
        replace_text(out / f"{kind.kind}.md", text)
        try:
            drawn = f"plots in {plot_study.draw(kind.kind, found, out)}"
        except ImportError as error:
            drawn = f"no plots, which need matplotlib ({first_line(error)}): pip install -e '.[eval]'"
    print(f"results in {out}, tables in {out / f'{kind.kind}.md'}, {drawn}")


def run(argv: Sequence[str]) -> int:
    args = parse(argv)
    kind, options = read_study(args.config)
    failed = 0
    if not args.report:
        device = choose_device(args.device)
        args.out.mkdir(parents=True, exist_ok=True)
        for name in args.model or [None]:
            loaded: Loaded = load(name, device, getattr(torch, args.dtype))
            study = kind(loaded, options, args.data_dir)
            results = StoredResults.opened(file_of(kind.kind, args.out, loaded.name), run_facts(study))
            failed += measure_model(study, results, args.part, f"{PROGRAM} {shlex.join(argv)}")
    report(kind, args.out)
    if failed:
        print(f"error: {failed} cells failed; the same command tries them again.", file=sys.stderr)
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)


if __name__ == "__main__":
    sys.exit(main())
