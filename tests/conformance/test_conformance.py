"""Every decoding mode on every model family gives what it gives with `DynamicCache`.

Each cell of modes × families is a test, with one attention function; they rotate, so that each mode and each family meets
all of them. Greedy decoding runs with all. A cell counts only if tokens were packed.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

from tests.conformance.cells import CELLS, QUANTIZED_CELLS, Cell
from tests.conformance.modes import MODES, Outcome, left_padded
from tests.conformance.subjects import Packed, Stock
from tests.tiny_models import attentions, prompt, use_attention


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


def marked(cell: Cell) -> Any:
    """Greedy decoding and a third of the others, of each mode and each family, run with old releases of transformers too."""
    return pytest.param(cell, marks=() if cell.mode == "greedy" or cell.turn % 3 == 0 else pytest.mark.newest)


@pytest.mark.parametrize("cell", map(marked, CELLS), ids=str)
def test_cell(cell: Cell) -> None:
    names = attentions(cell.family)
    used = names if cell.mode == "greedy" else [names[cell.turn % len(names)]]
    if cell.refusal is not None:
        theirs = [Stock(cell.family, static=True)] if cell.refusal.theirs else []
        ours = [Packed(cell.family, name) for name in used] if cell.refusal.ours else []
        for subject in (*theirs, *ours):
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


@pytest.mark.parametrize("cell", QUANTIZED_CELLS, ids=str)
def test_quantized(cell: Cell) -> None:
    """Attention over `tq4` pages equals the model's eager attention over the same bytes, dequantized: to 2e-3."""
    ids, mask = left_padded(66)
    one_more = {"new": 1, "return_dict_in_generate": True, "output_logits": True}
    attention = attentions(cell.family)[0]
    with Packed(cell.family, attention, preset="tq4") as subject:
        cache = subject.cache()
        subject.read(subject.inputs(ids[:, :60], mask[:, :60]), cache)
        exact = Packed(cell.family, attention)
        unquantized = exact.cache()
        exact.read(exact.inputs(ids[:, :60], mask[:, :60]), unquantized)
        assert (subject.packed_tokens()[0] > 0) == (cell.unpacked is None)
        for length in (61, 66):
            inputs = subject.inputs(ids[:, :length], mask[:, :length])
            twin = copy.deepcopy(cache)
            ours = subject.generate(inputs, cache, **one_more).logits[0]
            quantization = ours - subject.generate(inputs, unquantized, **one_more).logits[0]
            use_attention(subject.model, "eager")
            reference = subject.generate(inputs, twin, **one_more).logits[0]
            use_attention(subject.model, attention)
            assert (ours - reference).norm() <= 2e-3 * reference.norm()
            assert cell.unpacked or quantization.norm() > 1e-5 * reference.norm()  # quantized bytes were read


def test_static_cache_compiled() -> None:
    """What `generate` compiles on a GPU, compiled here: on a family with static layers of two kinds."""
    config = CompileConfig(fullgraph=True, mode="default", backend="eager")
    config._compile_all_devices = True
    with Stock("gemma3_hybrid") as stock:
        expected = stock.generate(prompt(2, 60), stock.cache())
    with Packed("gemma3_hybrid", "turboquant") as subject:
        torch._dynamo.reset()
        cache = subject.cache(max_cache_len=100)
        assert torch.equal(subject.generate(prompt(2, 60), cache, compile_config=config), expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert subject.packed_tokens()[0] > 0
