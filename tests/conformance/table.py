"""The conformance table: `scripts/conformance` runs the cells, writes `results.json` and, from it, README.md beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.cells import CELLS, QUANTIZED, QUANTIZED_CELLS
from tests.conformance.modes import title

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
README = HERE / "README.md"
HEADING = "# Conformance"
INTRODUCTION = """\
Each cell is a test (`tests/conformance`) on a small randomly initialised model of the family, in float32 on the CPU: with
preset `raw`, pages of 32 tokens and no window, the mode gives token for token what `DynamicCache` gives (✓), and its tokens
were packed. Attention functions rotate from cell to cell; greedy decoding runs with each that the model has. The last row is
about the quantizer: one step and several at once over `tq4` pages equal attention over the same bytes, dequantized, to 2e-3.
DoLa, contrastive search and grouped or constrained beams have left transformers for repositories on the Hub, and are not
tested. `scripts/conformance` makes this table (transformers {version}); `scripts/test` runs its cells."""

Results = dict[str, Any]


class Recorder:
    """A pytest plugin: notes which cells passed."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = re.search(r"::test_(?:cell|quantized)\[(.+)\]$", report.nodeid)
        if name and (report.when == "call" or report.outcome != "passed"):
            self.outcomes[name[1]] = report.outcome


def results(outcomes: dict[str, str], version: str) -> Results:
    """What `results.json` holds: of each mode and family the outcome, or the reason why it is not simply green."""
    cells: dict[str, dict[str, str]] = {}
    for cell in [*CELLS, *QUANTIZED_CELLS]:
        outcome = outcomes.get(str(cell), "missing")
        cells.setdefault(cell.mode, {})[cell.family] = cell.reason or outcome if outcome == "passed" else outcome
    return {"transformers": version, "cells": cells}


def markdown(found: Results) -> str:
    """The README."""
    cells = found["cells"]
    families = list(next(iter(cells.values())))
    reasons: list[str] = []

    def mark(outcome: str) -> str:
        if outcome == "passed":
            return "✓"
        if outcome not in reasons:
            reasons.append(outcome)
        return str(reasons.index(outcome) + 1)

    rows = [
        "| | " + " | ".join(name.replace("_", " ") for name in families) + " |",
        "| --- " * (len(families) + 1) + "|",
    ]
    for mode, outcomes in cells.items():
        name = "`tq4`, dequantized" if mode == QUANTIZED else title(mode)
        rows.append(f"| {name} | " + " | ".join(mark(outcomes[family]) for family in families) + " |")
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    introduction = INTRODUCTION.format(version=found["transformers"])
    return "\n".join([HEADING, "", introduction, "", *rows, *(["", *notes] if notes else []), ""])


def read() -> Results:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def write(found: Results) -> None:
    """Write `results.json` and the README."""
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    README.write_text(markdown(found), encoding="utf-8")
