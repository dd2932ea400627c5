"""The command `tq_hf`: `tq_hf lm-eval ...` is lm-eval's own command line with the model `tq-hf`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

USAGE = """tq_hf lm-eval run --model tq-hf --model_args pretrained=MODEL,preset=tq4 --tasks gsm8k,wikitext ...
       tq_hf lm-eval --help"""


def lm_eval(argv: Sequence[str]) -> int:
    """Register `tq-hf` and hand `argv` to lm-eval's command line."""
    try:
        from lm_eval.__main__ import cli_evaluate

        from . import lm_eval_model  # noqa: F401  (registers the model)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tq_hf"):
            raise
        print(f"error: {error.name} is not installed: pip install 'tq-hf[eval]'.", file=sys.stderr)
        return 2
    sys.argv = ["lm-eval", *argv]  # lm-eval reads it from there
    cli_evaluate()
    return 0


COMMANDS = {"lm-eval": lm_eval}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="tq_hf", usage=USAGE, description=__doc__)
    parser.add_argument("command", choices=COMMANDS, help="what to run; further arguments are its own")
    command = parser.parse_args(argv[:1]).command
    return COMMANDS[command](argv[1:])
