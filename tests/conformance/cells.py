"""The cells of the table: modes × families, and the reasons of those that are not simply green."""

from __future__ import annotations

from dataclasses import dataclass

from tests.conformance.modes import MODES
from tests.tiny_models import FAMILIES


@dataclass(frozen=True)
class Refusal:
    """Something that `DynamicCache` cannot do either.

    Attributes:
        reason: for the README.
        match: a regular expression for the error that both raise.
    """

    reason: str
    match: str


# A family none of whose layers can be packed, and why: its cells must agree with `DynamicCache`, and pack nothing.
UNPACKED: dict[str, str] = {}
REFUSED: dict[tuple[str, str], Refusal] = {}
QUANTIZED = "quantized"  # the row of `test_quantized`, which compares a cache with itself


@dataclass(frozen=True)
class Cell:
    """A mode on a family.

    Attributes:
        turn: which of the attention functions it uses, modulo their number.
    """

    mode: str
    family: str
    turn: int

    @property
    def refusal(self) -> Refusal | None:
        return REFUSED.get((self.mode, self.family))

    @property
    def unpacked(self) -> str | None:
        return UNPACKED.get(self.family)

    @property
    def reason(self) -> str:
        """Why it isn't simply green, or nothing."""
        return self.refusal.reason if self.refusal else self.unpacked or ""

    def __str__(self) -> str:
        return f"{self.mode}-{self.family}"


CELLS = [Cell(mode, family, i + j) for i, mode in enumerate(MODES) for j, family in enumerate(FAMILIES)]
QUANTIZED_CELLS = [Cell(QUANTIZED, family, 0) for family in FAMILIES]
