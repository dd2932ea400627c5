"""Prints the robustness tests' counts after pytest's own summary."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.robustness.counts import COUNTS

# `pytest --hypothesis-profile=long`: some thousand random examples, other ones each time.
settings.register_profile(
    "long",
    max_examples=3000,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        terminalreporter.section("robustness: what was tried")
        for what, number in sorted(COUNTS.items()):
            terminalreporter.write_line(f"{number:10,}  {what}")
