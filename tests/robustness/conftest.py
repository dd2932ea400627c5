"""Prints the robustness tests' counts after pytest's own summary, and lets them run longer:

python -m pytest tests/robustness --soak
"""

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="every fault and every step: hours instead of a minute")


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether to try everything. A run of all tests does not read this file's option, and is a short one."""
    return bool(request.config.getoption("--soak", default=False))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        terminalreporter.section("robustness: what was tried")
        for what, number in sorted(COUNTS.items()):
            terminalreporter.write_line(f"{number:10,}  {what}")
