"""Word perplexities of several lm-eval runs in one table: `python -m eval.word_perplexity RUNS --out DIR`.

RUNS is a folder with what lm-eval wrote for its task `wikitext` (`--output_path`), with `--model tq-hf` and `--model hf`.
What counts is kept in DIR/word_perplexity.json, the table in DIR/word_perplexity.md; of runs of a kind, the newest counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tq_hf.commands import Parser, RequestError, serve

from .results import markdown
from .stored import replace_text

TASKS = ("wikitext", "wikitext_local")
METRIC = "word_perplexity,none"
EXACT = "bf16"
READ = ("packed_share", "cache_ratio", "quantized_layers", "layers", "versions")


def read_run(path: Path) -> dict[str, Any] | None:
    """What a results file of lm-eval says; None if it is of another task.

    Raises:
        RequestError: no results file, or a model that is neither `hf` nor `tq-hf`.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        task = next((name for name in TASKS if name in found["results"]), None)
        if task is None:
            return None
        config = found["config"]
        arguments = config["model_args"]
        run = {
            "model": Path(arguments["pretrained"]).name,
            "setting": EXACT,
            "word_perplexity": found["results"][task][METRIC],
            "documents": found["n-samples"][task]["effective"],
            "max_length": found["max_length"],
            "lm_eval": found["lm_eval_version"],
            "transformers": found["transformers_version"],
            "date": found["date"],
        }
        if config["model"] == "tq-hf":
            ours = config["tq_hf"]
            packed = ours["mode"] == "packed"
            run["setting"] = ours["preset"] + (", as published" if packed else "")
            run |= {"mode": ours["mode"]} | {name: ours[name] for name in READ}
        elif config["model"] != "hf":
            raise RequestError(f"{path} is of the model {config['model']!r}: expected hf or tq-hf.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is no results file of lm-eval: {error}.") from error
    return run


def collect(folder: Path) -> list[dict[str, Any]]:
    """The newest run of each model and setting, by model, bf16 first.

    Raises:
        RequestError: there are none.
    """
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(folder.rglob("results_*.json")):
        run = read_run(path)
        if run is not None:
            key = run["model"], run["setting"]
            if key not in newest or newest[key]["date"] < run["date"]:
                newest[key] = run
    if not newest:
        raise RequestError(f"{folder} holds no results of {' or '.join(TASKS)}.")
    return sorted(newest.values(), key=lambda run: (run["model"], run["setting"] != EXACT, run["word_perplexity"]))


def table(runs: Sequence[dict[str, Any]]) -> str:
    exact = {run["model"]: run["word_perplexity"] for run in runs if run["setting"] == EXACT}
    rows = []
    for run in runs:
        value = run["word_perplexity"]
        row = [run["model"].removesuffix("-Instruct"), run["setting"], f"{value:.3f}"]
        if run["setting"] == EXACT:
            row += ["", "1", "0", ""]
        else:
            row.append(f"{100 * (value / exact[run['model']] - 1):+.2f}" if run["model"] in exact else "")
            layers = f"{run['quantized_layers']} of {run['layers']}"
            row += [f"{run['cache_ratio']:.2f}", f"{100 * run['packed_share']:.0f}", layers]
        rows.append(row)
    head = ["model", "setting", "word perplexity", "change, %", "times smaller", "packed, %", "layers"]
    return markdown(head, rows)


def run(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m eval.word_perplexity", description=__doc__)
    parser.add_argument("runs", type=Path, help="a folder with lm-eval's results files, at any depth")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the table goes")
    args = parser.parse_args(argv)
    runs = collect(args.runs)
    args.out.mkdir(parents=True, exist_ok=True)
    replace_text(args.out / "word_perplexity.json", json.dumps(runs, indent=1) + "\n")
    replace_text(args.out / "word_perplexity.md", table(runs))
    print(table(runs), end="")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)


if __name__ == "__main__":
    sys.exit(main())
