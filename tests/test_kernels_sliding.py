"""The kernels on the state of a sliding layer: a first page that begins before the origin, entries without a page, a mask
with hidden columns. In Triton's interpreter: run this file in a process of its own with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import Tensor

from tests.kernel_states import State, assert_same_state
from tests.test_cache import states
from tests.test_kernels_attend import INTERPRETED, TOLERANCE, interpreted
from tq_hf import TurboQuantCache, reference
from tq_hf.layers.sliding import SlidingLayer
from tq_hf.layout import PageLayout

if INTERPRETED:
    from tq_hf import kernels

WINDOW = 96


def slid_layer(preset: str, chunks: list[int]) -> SlidingLayer:
    """A layer after these chunks and one token more, which nobody has read yet."""
    config = tf.MistralConfig(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        sliding_window=WINDOW,
    )  # fmt: skip
    cache = TurboQuantCache(config, preset, page_size=32, recent_window=8, boundary_layers=0)
    for i, size in enumerate([*chunks, 1]):
        cache.update(*(states(size, 2, seed=2 * i + j, dtype=torch.float16) for j in range(2)), 0)
    (layer,) = cache.layers
    return layer


def close(actual: Tensor, expected: Tensor) -> bool:
    error = (actual.double() - expected.double()).pow(2).mean().sqrt()
    return bool(error <= TOLERANCE * expected.double().pow(2).mean().sqrt())


@interpreted
@pytest.mark.parametrize(
    ("preset", "queries", "heads"),
    [  # each kernel, and both widths of one
        *(("tq4", 1, 4), ("tq4", 1, 16), ("tq4", 3, 4), ("tq4", 9, 4)),
        *(("4bit_nc", 1, 4), ("4bit_nc", 9, 4)),
        *(("raw", 1, 4), ("raw", 1, 16), ("raw", 3, 4), ("raw", 9, 4)),
    ],
)
def test_attention_over_a_slid_state(preset: str, queries: int, heads: int) -> None:
    layer = slid_layer(preset, [60, 30, 1, 75] if preset == "4bit_nc" else [150, 37])
    table, step = layer.table, layer.pending
    assert step is not None
    assert table.origin > 0
    assert table.spans[0][0] < 0  # the page across the origin
    hidden, total = layer.hidden(step), layer.length + 1
    assert hidden > 0
    position = torch.arange(total)
    own = position[total - queries :, None]
    mask = ((position <= own) & (position > own - WINDOW) & (position >= hidden))[None, None]
    query = states(queries, 2, heads=heads, seed=9, dtype=torch.float16)
    key, value = (
        torch.cat([states(queries - 1, 2, seed=50 + i, dtype=torch.float16), new], 2)
        for i, new in enumerate((step.key, step.value))
    )
    mask = torch.nn.functional.pad(mask, (0, queries - 1))
    rest = (*layer._state(), mask, None, layer.layout_name, 0.125, 0.0, False, len(table.spans))
    expected = reference.attend(query.float(), key.float(), value.float(), *rest)
    assert close(kernels.attend(query, key, value, *rest), expected)


@interpreted
@pytest.mark.parametrize("preset", ["tq4", "raw"])
def test_commit_and_gather_of_a_slid_state(preset: str) -> None:
    """A chunk that skips pages, and a read of all that is left."""
    layer = slid_layer(preset, [150, 37])
    layer.table.advance(layer.length, 0)
    layer.flush()
    key, value = (states(200, 2, seed=70 + i, dtype=torch.float16) for i in range(2))
    layer.table.announce(layer.length, 200)
    due = layer.table.due(layer.length + 200, layer.packed_end)
    layer.table.reserve(layer.packed_end + 32 * due)
    layer.table.pages.grow(layer.slot, layer.table.pages.capacity)
    assert any(page < 0 for page in layer.table.rows[0][-due:])
    expected, got = (State(*layer._state(), layer.flags).to("cpu") for _ in range(2))
    for module, state in ((reference, expected), (kernels, got)):
        module.commit(key, value, *state.read, state.flags, None, layer.layout_name, 8, due)
        assert state.counters.tolist()[0] == layer.length + 200
    assert_same_state(got, expected, PageLayout.from_name(layer.layout_name))
    dense = (module.gather(*expected.read, layer.layout_name, layer.length + 200) for module in (kernels, reference))
    for ours, theirs in zip(*dense, strict=True):
        assert close(ours[:, :, -WINDOW:], theirs[:, :, -WINDOW:])


@interpreted
@pytest.mark.parametrize("queries", [1, 9])
def test_attention_where_no_page_is_left(queries: int) -> None:
    """Entries without a page and a pool that has none, as a crop into long padding leaves them."""
    layer = slid_layer("tq4", [150, 37])
    step, spans = layer.pending, layer.table.spans
    assert step is not None and len(spans) > 0
    state = State(*layer._state(), layer.flags)
    state.pool, state.page_ids = state.pool[:0], torch.full_like(state.page_ids, -1)
    query = states(queries, 2, heads=4, seed=9, dtype=torch.float16)
    rest = (*state.read, None, None, layer.layout_name, 0.125, 0.0, False, len(spans))
    expected = reference.attend(query.float(), step.key.float(), step.value.float(), *rest)
    assert close(kernels.attend(query, step.key, step.value, *rest), expected)
