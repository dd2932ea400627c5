"""The command `tq_hf`.

Exit codes: 0; 2 and one line for a request that cannot be served; 1 for a failure at run time (out of memory); 130 after
Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..errors import RequestError, first_line
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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if (usage := getattr(error, "format_message", None)) is not None:
            say(f"error: {usage().rstrip('.')} (--help lists the options).")
            return 2
        if is_out_of_memory(error):
            say(f"error: out of memory ({first_line(error).rstrip('.')}): {SMALLER}.")
            return 1
        raise
    return result if isinstance(result, int) else 0


SMALLER = "take a shorter text, a preset with fewer bits, or a smaller model"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left: torch has a class for the one and a message for the other."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
