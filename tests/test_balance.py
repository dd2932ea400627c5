"""The balance of key channels in a cache: every way in which rows and tokens come and go."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache

# The first page is packed at 2 + 32 + 8 tokens.
SMALL = {"page_size": 32, "recent_window": 8, "sink_tokens": 2}


def uneven_model(attention: str = "turboquant") -> Any:
    """A model whose keys and queries have channels of very different sizes, and keys a bias."""
    model = tiny_model("qwen2_bias", hidden_size=128, head_dim=32)
    scales = torch.linspace(-1.5, 1.5, 32).exp()
    for layer in model.model.layers:
        attend = layer.self_attn
        for projection, factors in ((attend.k_proj, scales), (attend.q_proj, scales.flip(0))):
            repeated = factors.repeat(len(projection.weight) // 32)
            projection.weight.data *= 3 * repeated[:, None]
        attend.k_proj.bias.data *= 10
    model.set_attn_implementation(attention)
    return model


def balances(cache: TurboQuantCache) -> list[Tensor]:
    for layer in cache.packed_layers:
        layer.flush()
    return [layer.balance.clone() for layer in cache.packed_layers]


def feed(model: Any, ids: Tensor, cache: Any, sizes: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    start, logits = 0, []
    with torch.no_grad():
        for n in sizes:
            part = None if mask is None else mask[:, : start + n]
            positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, start : start + n]
            out = model(ids[:, start : start + n], past_key_values=cache, attention_mask=part, position_ids=positions)
            logits.append(out.logits)
            start += n
    return torch.cat(logits, 1)


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("max_cache_len", [None, 128])
def test_it_brings_scores_nearer_to_the_exact_ones(attention: str, max_cache_len: int | None) -> None:
    model = uneven_model(attention)
    ids = prompt(2, 110)
    exact = feed(model, ids, DynamicCache(config=model.config), (110,))
    errors = []
    for balance_keys in (True, False):
        options = {**SMALL, "balance_keys": balance_keys, "value_format": "raw", "value_bits": 16}
        cache = TurboQuantCache(model.config, "tq2", max_cache_len=max_cache_len, **options)
        logits = feed(model, ids, cache, (50, *[1] * 60))
        errors.append((logits[:, 60:] - exact[:, 60:]).norm().item())
    assert errors[0] < 0.87 * errors[1]


@pytest.mark.parametrize("sizes", [(41, 1, 58), (42, 58), (10, 20, 13, 57), (1,) * 100])
def test_chunks_give_the_same_factors(sizes: tuple[int, ...]) -> None:
    """One-token steps read exact tokens in other products: the last bits of keys may differ, no more."""
    model = uneven_model()
    ids = prompt(2, 100)
    whole, parts = (TurboQuantCache(model.config, "tq4", **SMALL) for _ in range(2))
    feed(model, ids, whole, (100,))
    feed(model, ids, parts, sizes)
    for ours, theirs in zip(balances(parts), balances(whole), strict=True):
        assert theirs.all() and theirs.max() > 1.5 * theirs.min()
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("max_cache_len", [None, 128])
def test_a_padded_row_has_the_factors_of_its_first_page(attention: str, max_cache_len: int | None) -> None:
    """Row 1 starts where a page of the batch does, so it equals the row alone."""
    model = uneven_model(attention)
    ids, mask = prompt(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[1, :32] = 0
    batch = TurboQuantCache(model.config, "tq4", max_cache_len=max_cache_len, **SMALL)
    feed(model, ids, batch, (60, *[1] * 40), mask)
    for row, start in ((0, 0), (1, 32)):
        alone = TurboQuantCache(model.config, "tq4", **SMALL)
        feed(model, ids[row : row + 1, start:], alone, (60 - start, *[1] * 40))
        for ours, theirs in zip(balances(batch), balances(alone), strict=True):
            torch.testing.assert_close(ours[row], theirs[0], rtol=1e-3, atol=0)


def test_rows_take_their_factors_along() -> None:
    model = uneven_model()
    cache = TurboQuantCache(model.config, "tq4", **SMALL)
    ids = prompt(3, 90)
    feed(model, ids, cache, (90,))
    before = balances(cache)
    assert (before[0][0] != before[0][2]).any()
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    for ours, theirs in zip(balances(cache), before, strict=True):
        assert torch.equal(ours, theirs[[2, 0, 0]])
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    for ours, theirs in zip(balances(cache), before, strict=True):
        assert torch.equal(ours, theirs[[2, 2]])
    for ours, theirs in zip(balances(copied), before, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        alone = TurboQuantCache(model.config, "tq4", **SMALL)
        feed(model, ids[2:], alone, (90,))
        token = ids[:1, :1]
        ours = model(token.expand(2, 1), past_key_values=cache).logits
        theirs = model(token, past_key_values=alone).logits
    torch.testing.assert_close(ours, theirs.expand_as(ours), rtol=0, atol=1e-3)


@pytest.mark.parametrize("tokens", [30, 60])  # before the first page and after it
@pytest.mark.parametrize("max_cache_len", [None, 128])
def test_a_saved_cache_goes_on_as_if_it_had_not_been(tokens: int, max_cache_len: int | None) -> None:
    model = uneven_model()
    ids, mask = prompt(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[1, :9] = 0
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=max_cache_len, **SMALL)
    feed(model, ids, cache, (tokens,), mask)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        rest = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)[:, tokens:]}
        ours, theirs = (model(ids[:, tokens:], past_key_values=c, **rest).logits for c in (loaded, cache))
    assert torch.equal(ours, theirs)
    assert all(a.all() and torch.equal(a, b) for a, b in zip(balances(loaded), balances(cache), strict=True))


def test_rows_reordered_before_their_first_page_take_their_statistics_along() -> None:
    model = uneven_model()
    ids = prompt(2, 60)
    ids[:, 30:] = ids[0, 30:]
    cache, alone = (TurboQuantCache(model.config, "tq4", **SMALL) for _ in range(2))
    feed(model, ids[:, :30], cache, (30,))
    cache.reorder_cache(torch.tensor([1, 1]))
    feed(model, ids[:, 30:], cache, (30,))
    feed(model, ids[1:], alone, (30, 30))
    for ours, theirs in zip(balances(cache), balances(alone), strict=True):
        torch.testing.assert_close(ours, theirs.expand_as(ours), rtol=1e-3, atol=0)


@pytest.mark.parametrize("max_cache_len", [None, 128])
def test_they_stay_when_pages_are_cropped_and_go_with_the_last_token(max_cache_len: int | None) -> None:
    model = uneven_model()
    ids = prompt(1, 100)
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=max_cache_len, **SMALL)
    feed(model, ids, cache, (100,))
    first = balances(cache)
    cache.crop(-40)
    feed(model, ids[:, 60:], cache, (40,))
    assert all(torch.equal(a, b) for a, b in zip(balances(cache), first, strict=True))
    cache.crop(-100)
    assert not any(b.any() for b in balances(cache))
    feed(model, ids.flip(1), cache, (100,))
    assert not torch.equal(balances(cache)[0], first[0])
    cache.reset()
    feed(model, ids, cache, (100,))
    assert all(torch.equal(a, b) for a, b in zip(balances(cache), first, strict=True))


@pytest.mark.parametrize("tokens", [*range(1, 9), 41, 42, 43, 127])
@pytest.mark.parametrize("max_cache_len", [None, 200])
def test_short_prompts(tokens: int, max_cache_len: int | None) -> None:
    model = uneven_model()
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=max_cache_len, **SMALL)
    steps = max(46 - tokens, 12)  # over the edge of a page: at 42 tokens, or at 138
    logits = feed(model, prompt(1, tokens + steps), cache, (tokens, *[1] * steps))
    assert logits.isfinite().all()
    assert all(b.all() and b.isfinite().all() for b in balances(cache))
    assert cache.report().packed_tokens > 0


def test_eager_attention_shows_no_queries_and_leaves_keys_as_they_are() -> None:
    model = uneven_model("eager")
    ids = prompt(1, 100)
    cache, plain = (TurboQuantCache(model.config, "tq4", **SMALL, balance_keys=on) for on in (True, False))
    ours, theirs = (feed(model, ids, c, (60, 20, 20)) for c in (cache, plain))
    assert all(b.eq(1).all() for b in balances(cache))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{"key_format": "fp8", "key_bits": 8, "center_keys": False}, {"balance_keys": 1}])
def test_what_cannot_be_balanced_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="balance_keys="):
        TurboQuantCache(tiny_model().config, "tq4", **options)


@pytest.mark.parametrize("max_cache_len", [None, 128])
def test_factors_go_with_the_last_page(max_cache_len: int | None) -> None:
    """What is left of the old text is exact, so the new one gets factors of its own."""
    model = uneven_model()
    ids, other = prompt(1, 100), prompt(1, 100, seed=9)
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=max_cache_len, **SMALL)
    feed(model, ids, cache, (100,))
    first = balances(cache)
    cache.crop(-98)  # to the sinks
    assert not any(b.any() for b in balances(cache))
    feed(model, other, cache, (60,))
    assert all(b.all() for b in balances(cache))
    assert not any(torch.equal(a, b) for a, b in zip(balances(cache), first, strict=True))


def test_a_cut_first_prompt_takes_a_mask_of_its_length() -> None:
    """A static cache's handle, cut to the prompt, goes the packed way with a mask as well, and shows its queries."""
    config = tiny_model().config
    head_dim = config.hidden_size // config.num_attention_heads
    cache = TurboQuantCache(config, "tq4", max_cache_len=128, **SMALL)
    query, key, value = (
        torch.randn(1, heads, 60, head_dim, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)
    )
    handles = cache.update(key, value, 0)
    cut = [handle[:, :, :60, :] for handle in handles]
    mask = torch.ones(60, 60, dtype=torch.bool).tril()
    out = torch.nn.functional.scaled_dot_product_attention(query, *cut, attn_mask=mask, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    layer = cache.packed_layers[0]
    assert layer.pending is None and layer.query_energy.all() and not layer.balance.eq(1).all()
    with pytest.raises(ValueError, match="does not fit"):
        torch.nn.functional.scaled_dot_product_attention(
            query, *(handle[:, :, :60, :] for handle in cache.update(key, value, 1)), attn_mask=mask[:, :59]
        )
