"""How much the robustness tests tried: sequences, faults, files, steps. Printed at the end of a test run."""

from __future__ import annotations

from collections import Counter

COUNTS: Counter[str] = Counter()


def count(what: str, number: int = 1) -> None:
    """Add to the figure of that name, such as `count("faults injected")`."""
    COUNTS[what] += number
