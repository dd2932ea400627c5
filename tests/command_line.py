"""Running `tq_hf` in the process of a test."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tq_hf.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The only line on standard output."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def error(self) -> str:
        """The one line that a refused request prints."""
        assert self.code == 2 and self.out == "" and "Traceback" not in self.err
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert self.err.rstrip().endswith(line)
        return line.removeprefix("error: ")


class CommandLine:
    """`tq_hf` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *argv: str | Path | int) -> Result:
        self.capsys.readouterr()
        code = main([str(word) for word in argv])
        return Result(code, *self.capsys.readouterr())
