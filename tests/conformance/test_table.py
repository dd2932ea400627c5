"""The conformance table says what was measured, and each of its cells is a test."""

from __future__ import annotations

from tests import tiny_models
from tests.conformance import table
from tests.conformance.cells import CELLS, NO_ATTENTION, QUANTIZED_CELLS, REFUSED, UNPACKED
from tests.conformance.modes import MODES, title

REMEDY = "run scripts/conformance"


def test_every_cell_was_measured_and_is_green_or_has_its_reason() -> None:
    expected = table.results({str(cell): "passed" for cell in [*CELLS, *QUANTIZED_CELLS]}, table.read()["transformers"])
    assert table.read() == expected, REMEDY


def test_the_readme_shows_the_results() -> None:
    assert table.README.read_text(encoding="utf-8") == table.markdown(table.read()), REMEDY


def test_modes_have_titles_and_reasons_have_cells() -> None:
    assert len({title(mode) for mode in MODES}) == len(MODES)
    assert {*UNPACKED, *NO_ATTENTION} == set(tiny_models.UNPACKED)
    assert all(mode in MODES and family in tiny_models.FAMILIES for mode, family in REFUSED)


def test_a_failure_shows_in_the_table() -> None:
    outcomes = {str(cell): "passed" for cell in [*CELLS, *QUANTIZED_CELLS]}
    outcomes[str(CELLS[0])] = "failed"
    del outcomes[str(CELLS[-1])]
    shown = table.markdown(table.results(outcomes, "5"))
    assert "\n1. failed\n" in shown and ". missing\n" in shown
