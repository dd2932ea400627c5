"""Prints the robustness tests' counts after pytest's own summary."""

from __future__ import annotations

import pytest

from tests.robustness.counts import COUNTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        terminalreporter.section("robustness: what was tried")
        for what, number in sorted(COUNTS.items()):
            terminalreporter.write_line(f"{number:10,}  {what}")
