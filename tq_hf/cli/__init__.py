"""The command `tq_hf`.

Exit codes: 0; 2 and one line for a request that cannot be served; 1 for a failure at run time (out of memory); 130 after
Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..errors import SMALLER, RequestError, first_line, is_out_of_memory
from . import bench, chat, demo, estimate, generate, lm_eval, presets
from .output import say

app = typer.Typer(
    help="Keys and values of Hugging Face transformers models at 2 to 4 bits.",
    epilog="Start with: tq_hf chat",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tq_hf {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


for command in (chat.chat, generate.generate, estimate.estimate, bench.bench, demo.demo, presets.presets):
    app.command()(command)
# Everything after the name is lm-eval's.
app.command(
    "lm-eval",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)(lm_eval.lm_eval)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    command = typer.main.get_command(app)
    try:
        result = command.main(list(sys.argv[1:] if argv is None else argv), prog_name="tq_hf", standalone_mode=False)
    except RequestError as error:
        say(f"error: {error}")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        say("\nInterrupted.")
        return 130
    except BrokenPipeError:  # the reader of our output (`| head`) has seen enough
        _drop_output()
        return 1
    except Exception as error:
        if (usage := getattr(error, "format_message", None)) is not None:
            if message := usage().rstrip("."):  # none where there was no command: the help has been printed
                say(f"error: {message} (--help lists the options).")
            return 2
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            say(f"error: {first_line(error)}: make room on the disk.")
            _drop_output()
            return 1
        if is_out_of_memory(error):
            say(f"error: out of memory ({first_line(error).rstrip('.')}): {SMALLER}.")
            return 1
        raise
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """What standard output still has to write goes nowhere, so that the interpreter does not fail at it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
