"""McNemar's exact test: whether two ways of answering the same questions differ by more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Paired:
    """Two sets of answers to the same questions.

    Attributes:
        lost: questions that only the first answers right.
        gained: questions that only the second answers right.
        p: two-sided p-value of the hypothesis that a question on which they differ is lost or gained with even chances.
    """

    lost: int
    gained: int
    p: float


def mcnemar(first: Sequence[int], second: Sequence[int]) -> Paired:
    """Compare right (1) and wrong (0) answers question by question.

    The exact binomial form of McNemar (1947), doi:10.1007/BF02295996: under the hypothesis, the smaller count of the two is
    one tail of Binomial(lost + gained, 1/2), and both tails are alike.

    Raises:
        ValueError: not equally many answers.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} answers cannot be paired: expected the same questions.")
    lost = sum(a > b for a, b in zip(first, second))
    gained = sum(b > a for a, b in zip(first, second))
    n = lost + gained
    tail = sum(comb(n, i) for i in range(min(lost, gained) + 1))
    return Paired(lost, gained, min(1.0, 2 * tail / 2**n))
