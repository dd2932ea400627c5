"""`tq_hf lm-eval ...`: lm-eval's own command line, with the model `tq-hf`."""

from __future__ import annotations

import sys

import typer

from ..errors import RequestError


def lm_eval(context: typer.Context) -> None:
    """lm-eval's own command line, with the model tq-hf.

    tq_hf lm-eval run --model tq-hf --model_args pretrained=MODEL,preset=tq4 --tasks gsm8k,wikitext
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        from .. import lm_eval_model  # noqa: F401  (registers the model)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tq_hf"):
            raise
        raise RequestError(f"{error.name} is not installed: pip install 'tq-hf[eval]'.") from error
    sys.argv = ["lm-eval", *context.args]  # lm-eval reads it from there
    cli_evaluate()
