"""Every decoding mode on every model family gives what it gives with `DynamicCache`.

Each cell of modes × families is a test, with one attention function; they rotate, so that each mode and each family meets
all of them. Greedy decoding runs with all. A cell counts only if tokens were packed.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.cells import CELLS, Cell
from tests.conformance.modes import MODES, Outcome
from tests.conformance.subjects import Packed, Stock, attentions, model_of


@functools.cache
def expected(mode: str, family: str) -> Outcome:
    with Stock(family) as subject:
        return MODES[mode](subject)


def require_equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor) and theirs.is_floating_point():
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)
    elif isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs), (ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell) -> None:
    names = attentions(model_of(cell.family))
    used = names if cell.mode == "greedy" else [names[cell.turn % len(names)]]
    if cell.refusal is not None:
        subjects = [Stock(cell.family), *(Packed(cell.family, name) for name in used)]
        for subject in subjects:
            with subject, pytest.raises(Exception, match=cell.refusal.match):
                MODES[cell.mode](subject)
        return
    for name in used:
        with Packed(cell.family, name) as subject:
            outcome = MODES[cell.mode](subject)
        theirs = expected(cell.mode, cell.family)
        assert len(outcome) == len(theirs)
        for one, other in zip(outcome, theirs, strict=True):
            require_equal(one, other)
        packed = subject.packed_tokens()
        assert packed, "no cache was made"
        if cell.unpacked is None:
            assert all(tokens > 0 for tokens in packed), packed
        else:
            assert not any(packed), packed
