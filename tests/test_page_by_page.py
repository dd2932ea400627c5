"""Long passes that pack pages in their middle, against passes that end where a page falls due and against single tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_models import prompt, tiny_model
from tq_hf import ATTENTION_NAME, TurboQuantCache, TurboQuantConfig
from tq_hf.generation.chunks import first_page_tokens, text_chunks
from tq_hf.generation.comparison import cache_argument
from tq_hf.scoring.mode import tokens_in_pages
from tq_hf.scoring.page_by_page import PageByPageCache, pages_at_once

SETTINGS = TurboQuantConfig.from_preset("tq2", page_size=32, recent_window=24, boundary_layers=0)
LENGTH = 290
FAMILIES = {
    "qwen2_bias": {"head_dim": 32, "max_position_embeddings": 1024},
    "mistral_sliding": {},  # packed: a window of 64, of which pages are freed while a pass goes on
    "gemma2_softcap": {"sliding_window": 96},
    "gemma3_hybrid": {},  # its window of 24 stays exact
    "gpt_oss_sinks": {"sliding_window": 96},
    "falcon_h1": {},
}


def sharp_model(family: str, **changes: Any) -> Any:
    model = tiny_model(family, initializer_range=0.2, **changes)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@torch.no_grad()
def feed(model: Any, cache: TurboQuantCache, ids: torch.Tensor, ends: list[int], mask: Any = None) -> torch.Tensor:
    """Logits [B, length, vocabulary] of passes that end there."""
    logits = []
    for start, end in zip([0, *ends], ends):
        more = {} if mask is None else {"attention_mask": mask[:, :end], "position_ids": mask.cumsum(1)[:, start:end] - 1}
        logits.append(model(ids[:, start:end], **{cache_argument(model): cache}, **more).logits)
    return torch.cat(logits, 1)


def ends(pages: int, length: int = LENGTH) -> list[int]:
    return [end for _, end in text_chunks(length, SETTINGS, pages=pages)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_long_pass_reads_what_short_ones_read(family: str, rows: int) -> None:
    model, ids = sharp_model(family, **FAMILIES[family]), prompt(rows, LENGTH)
    long, short = PageByPageCache(model.config, SETTINGS), TurboQuantCache(model.config, SETTINGS)
    found, expected = feed(model, long, ids, ends(4)), feed(model, short, ids, ends(1))
    assert len(ends(4)) < len(ends(1)) / 2
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert [layer.packed_tokens > 0 for layer in long.report().layers] == [
        layer.packed_tokens > 0 for layer in short.report().layers
    ]
    # What comes next reads the same cache.
    next_ids = prompt(rows, 3, seed=5)
    torch.testing.assert_close(
        feed(model, long, next_ids, [1, 2, 3]), feed(model, short, next_ids, [1, 2, 3]), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("family", ["qwen2_bias", "mistral_sliding"])
def test_padding_on_the_left(family: str) -> None:
    """Row starts differ, one behind the first pages; what padding holds means nothing."""
    model, ids = sharp_model(family, **FAMILIES[family]), prompt(3, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :7], mask[2, :75] = 0, 0
    cuts = [120, 290]
    found = feed(model, PageByPageCache(model.config, SETTINGS), ids, cuts, mask)
    due = first_page_tokens(SETTINGS)
    falls_due = [end for end in range(due, LENGTH, SETTINGS.page_size) if end > cuts[0]]
    expected = feed(model, TurboQuantCache(model.config, SETTINGS), ids, [cuts[0], *falls_due, LENGTH], mask)
    kept = mask.bool()
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-3, atol=1e-3)


def test_pages_hold_the_same_bytes() -> None:
    """In the first layer, whose states do not depend on what attention rounds."""
    model, ids = sharp_model("qwen2_bias", head_dim=32, max_position_embeddings=1024), prompt(2, LENGTH)
    long, short = PageByPageCache(model.config, SETTINGS), TurboQuantCache(model.config, SETTINGS)
    feed(model, long, ids, ends(4)), feed(model, short, ids, ends(1))
    a, b = long.packed_layers[0], short.packed_layers[0]
    used = [torch.tensor(each.table.rows) for each in (a, b)]
    assert torch.equal(a.counters, b.counters) and used[0].shape == used[1].shape == (2, 8)
    assert torch.equal(a.pool[used[0]], b.pool[used[1]])
    assert torch.equal(a.balance, b.balance) and torch.equal(a.ring_key, b.ring_key)


def test_what_a_position_reads_is_counted() -> None:
    model = sharp_model("qwen2_bias", head_dim=32, max_position_embeddings=1024)
    long = PageByPageCache(model.config, SETTINGS)
    feed(model, long, prompt(1, LENGTH), ends(9))
    for length in (61, 92, 93, 94, 289, 290):
        short = TurboQuantCache(model.config, SETTINGS)
        feed(model, short, prompt(1, length - 1), ends(1, length - 1))
        assert tokens_in_pages(long, length) == tokens_in_pages(short), length


def test_passes_are_long_where_attention_walks() -> None:
    model = sharp_model("llama")
    assert pages_at_once(model, 1024, SETTINGS) == 32 and pages_at_once(model, 0, SETTINGS) == 1
    model.set_attn_implementation("sdpa")
    assert pages_at_once(model, 1024, SETTINGS) == 1
    assert pages_at_once(sharp_model("gemma3n_shared"), 1024, SETTINGS) == 1


def test_what_cannot_walk_says_so() -> None:
    model, ids = sharp_model("llama"), prompt(1, LENGTH)
    cache = PageByPageCache(model.config, SETTINGS)
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match=r"170 tokens at once, in the middle of which pages fall due.*'turboquant'"):
        feed(model, cache, ids, [120, 290])
    assert cache.get_seq_length() == 120  # and goes on
    feed(model, cache, ids[:, 120:], [4])
    layer = cache.packed_layers[0]
    key, _ = layer.update(torch.randn(1, 2, 90, 16), torch.randn(1, 2, 90, 16))
    with pytest.raises(ValueError, match=r"3 queries for 90 new tokens, in which \d pages fall due: expected a query for"):
        layer.attend(key.step, torch.randn(1, 4, 3, 16), None, None, 1.0, 0.0, True)
    assert layer.get_seq_length() == 124
