"""Scoring modes: what the positions of a text read, checked against feeding tokens one by one and against exact models."""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.test_generate_sliding import logits_after, sliding_model
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.generation.chunks import first_page_tokens, text_chunks
from tq_hf.generation.comparison import cache_argument
from tq_hf.layers.sliding import SlidingLayer
from tq_hf.scoring.at_once import AtOnceCache
from tq_hf.scoring.mode import ScoringMode
from tq_hf.scoring.token_scores import TokenScores, goes_on_in_chunks, score_tokens

LENGTHS = (190, 141, 96, 20, 1)
MODES = ("decode", "packed", "prefill=100")


@pytest.fixture
def model() -> Any:
    """Far-apart logits, and keys with a bias, which centring and balance are for."""
    model = tiny_model("qwen2_bias", initializer_range=0.2, head_dim=32, max_position_embeddings=1024)
    model.set_attn_implementation("turboquant")
    return model


@pytest.fixture
def texts() -> list[list[int]]:
    """Texts of unlike lengths, some of which end in token 0, which is also what pads them."""
    rows = [prompt(1, length, seed=length)[0].tolist() for length in LENGTHS]
    rows[1][-3:] = [0, 0, 0]
    return rows


def score(model: Any, texts: list[list[int]], mode: str, settings: TurboQuantConfig | str, **changes: Any) -> TokenScores:
    parsed = ScoringMode.parse(mode)
    cache = parsed.new_cache(model.config, parsed.settings(settings, **changes))
    return score_tokens(model, texts, parsed, cache, torch.float32)


def following(text: list[int], logits: torch.Tensor) -> torch.Tensor:
    """log p of each token of a text but the first, from logits [1, length, vocabulary]."""
    target = torch.tensor(text[1:]).view(1, -1, 1)
    return logits[:, :-1].float().log_softmax(-1).gather(-1, target).flatten()


@torch.no_grad()
def one_by_one(model: Any, text: list[int], settings: TurboQuantConfig, prefill: int = 1) -> torch.Tensor:
    """Logits [1, length, vocabulary] of feeding `prefill` tokens and then single ones, as `generate()` does."""
    ids, cache = torch.tensor([text]), TurboQuantCache(model.config, settings)
    parts = [ids[:, :prefill], *(ids[:, i : i + 1] for i in range(prefill, len(text)))]
    return torch.cat([model(part, **{cache_argument(model): cache}).logits for part in parts], 1)


@pytest.mark.parametrize("preset", ["tq2", "4bit_nc"])
@pytest.mark.parametrize("mode", ["decode", "prefill=100"])
def test_chunks_read_what_single_tokens_read(model: Any, texts: list[list[int]], preset: str, mode: str) -> None:
    changes = {"page_size": 32, "recent_window": 24}
    settings = TurboQuantConfig.from_preset(preset, **changes)
    scores = score(model, texts, mode, preset, **changes)
    for row, text in enumerate(texts):
        logits = one_by_one(model, text, settings, ScoringMode.parse(mode).prefill or 1)
        inside = scores.log_probs[row, : len(text) - 1]
        torch.testing.assert_close(inside, following(text, logits), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(scores.last[row], logits[0, -1].log_softmax(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["turboquant", "sdpa", "eager"])
def test_unquantized_pages_score_as_the_exact_model(model: Any, texts: list[list[int]], mode: str, attention: str) -> None:
    model.set_attn_implementation(attention)
    scores = score(model, texts, mode, "raw", page_size=32, **({} if mode == "packed" else {"recent_window": 16}))
    for row, text in enumerate(texts):
        with torch.no_grad():
            logits = model(torch.tensor([text]), use_cache=False).logits
        expected = following(text, logits)
        torch.testing.assert_close(scores.log_probs[row, : len(text) - 1], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores.last[row], logits[0, -1].log_softmax(-1), rtol=1e-4, atol=1e-4)
        greedy = logits[0, :-1].argmax(-1) == torch.tensor(text[1:])
        assert torch.equal(scores.greedy[row, : len(text) - 1], greedy)


@pytest.mark.parametrize("family", ["gemma2_softcap", "gpt_oss_sinks", "gemma3_hybrid", "falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_layer_is_scored(texts: list[list[int]], family: str, mode: str) -> None:
    model = tiny_model(family, initializer_range=0.1)
    model.set_attn_implementation("turboquant")
    scores = score(model, texts, mode, "raw", page_size=32, **({} if mode == "packed" else {"recent_window": 16}))
    for row, text in enumerate(texts):
        with torch.no_grad():
            expected = following(text, model(torch.tensor([text]), use_cache=False).logits)
        torch.testing.assert_close(scores.log_probs[row, : len(text) - 1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_forget_their_states_are_known(dtype: torch.dtype) -> None:
    for family in ("falcon_h1", "zamba2", "qwen3_next", "llama"):
        assert goes_on_in_chunks(tiny_model(family, initializer_range=0.1).to(dtype)), family
    assert not goes_on_in_chunks(tiny_model("jamba", initializer_range=0.1).to(dtype))


@pytest.mark.parametrize("preset", ["tq3", "4bit_nc"])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_packed_reads_nothing_exact(model: Any, texts: list[list[int]], preset: str, attention: str) -> None:
    """As page by page through a cache that packs first; a text in a batch scores as alone; unlike the other modes."""
    model.set_attn_implementation(attention)
    changes: dict[str, Any] = {"page_size": 32, "boundary_layers": 0}
    scores = score(model, texts, "packed", preset, **changes)
    settings = ScoringMode.parse("packed").settings(preset, **changes)
    for row, text in enumerate(texts):
        alone = score(model, [text], "packed", preset, **changes)
        end = len(text) - 1
        torch.testing.assert_close(scores.log_probs[row, :end], alone.log_probs[0, :end], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores.last[row], alone.last[0], rtol=1e-4, atol=1e-4)
        assert scores.read_from_pages[row] == len(text)
    whole, cache = texts[0][:160], AtOnceCache(model.config, settings)
    with torch.no_grad():
        parts = torch.tensor([whole]).split(32, 1)
        logits = torch.cat([model(part, **{cache_argument(model): cache}).logits for part in parts], 1)
    assert cache.report().exact_tokens == 0
    at_once = score(model, [whole], "packed", preset, **changes).log_probs[0, :159]
    torch.testing.assert_close(at_once, following(whole, logits), rtol=1e-3, atol=1e-3)
    decoded = score(model, texts, "decode", preset, **changes)
    assert (decoded.log_probs[0, :20] - scores.log_probs[0, :20]).abs().max() > 1e-3  # exact there, before the first page


@pytest.mark.parametrize("mode", MODES)
def test_what_was_read_is_what_the_mode_says(model: Any, texts: list[list[int]], mode: str) -> None:
    parsed = ScoringMode.parse(mode)
    settings = parsed.settings("tq4", page_size=32)
    scores = score(model, texts, mode, "tq4", page_size=32)
    expected = [parsed.read_from_pages(len(text), settings) for text in texts]
    assert scores.read_from_pages == expected
    if mode == "decode":
        # The last of 190 tokens, in the chunk from 164 on: 4 + 64 exact tokens before it, and 3 pages.
        assert expected == [96, 64, 0, 0, 0]


def test_padding_is_told_from_a_text_that_ends_in_the_same_token(model: Any) -> None:
    text = prompt(1, 150)[0].tolist()
    zeros = [*text, 0, 0, 0, 0]
    scores = score(model, [zeros, text], "packed", "tq3", page_size=32)
    for row, alone in enumerate((zeros, text)):
        last = score(model, [alone], "packed", "tq3", page_size=32).last[0]
        torch.testing.assert_close(scores.last[row], last, rtol=1e-4, atol=1e-4)


def test_a_continuation_is_summed_from_its_own_tokens(model: Any) -> None:
    text = prompt(1, 120)[0].tolist()
    scores = score(model, [text[:-1]], "decode", "tq4")
    log_prob, greedy = scores.continuation(0, len(text) - 1, text[-5:])
    expected = scores.log_probs[0, -5:-1].sum() + scores.last[0, text[-1]]
    assert log_prob == pytest.approx(expected.item(), abs=1e-5) and not greedy
    best = scores.last[0].argmax().item()
    assert scores.continuation(0, len(text) - 1, [best]) == (scores.last[0, best].item(), True)


def test_the_prompt_of_a_text_may_be_longer_than_its_first_page() -> None:
    settings = TurboQuantConfig.from_preset("tq4")
    first = first_page_tokens(settings)
    assert text_chunks(400, settings, prompt=150) == [(0, 150), (150, 196), (196, 260), (260, 324), (324, 388), (388, 400)]
    assert text_chunks(400, settings, prompt=first) == text_chunks(400, settings, prompt=5) == text_chunks(400, settings)
    assert text_chunks(400, settings, prompt=400) == text_chunks(400, settings, prompt=9999) == [(0, 400)]
    assert ScoringMode.parse("prefill=400").read_from_pages(400, settings) == 0


@pytest.mark.parametrize("name", ["decode", "packed", "prefill=1", "prefill=4096"])
def test_modes_have_names(name: str) -> None:
    assert str(ScoringMode.parse(name)) == name


@pytest.mark.parametrize("name", ["", "Decode", "prefill", "prefill=", "prefill=0", "prefill=-3", "prefill=x", "exact"])
def test_unknown_modes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"mode='{name}' is unknown: expected decode, packed or prefill=N"):
        ScoringMode.parse(name)


def test_packed_refuses_exact_tokens(model: Any) -> None:
    with pytest.raises(ValueError, match="sink_tokens=4 contradicts mode='packed'"):
        ScoringMode.parse("packed").settings("tq4", sink_tokens=4)
    assert ScoringMode.parse("packed").settings("tq4", sink_tokens=0).recent_window == 0


def test_virtual_tokens_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = model.forward

    @wraps(forward)
    def with_virtual_tokens(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return forward(torch.cat([input_ids[:, :1], input_ids], 1), **kwargs)

    monkeypatch.setattr(model, "forward", with_virtual_tokens)
    with pytest.raises(ValueError, match="logits for 11 positions where 10 tokens were fed"):
        score(model, [list(range(1, 11))], "decode", "tq4")


@torch.no_grad()
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa", "eager"])
@pytest.mark.parametrize("sizes", [(200, 64, 1, 1, 31, 33, 100), (64,) * 7])
def test_windows_read_what_was_stored_at_once(family: str, attention: str, sizes: tuple[int, ...]) -> None:
    """Every query of a chunk sees its whole window, though later tokens of the chunk are stored before it reads."""
    model = sliding_model(family, head_dim=32, sliding_window=96)
    ids = prompt(2, sum(sizes))
    logits = []
    for preset in ("raw", "4bit_nc"):
        cache = AtOnceCache(model.config, preset, page_size=32, recent_window=0, sink_tokens=0, boundary_layers=0)
        for kind in (attention, "turboquant"):
            model.set_attn_implementation(kind)
            parts = copy.deepcopy(cache)
            logits.append(logits_after(model, parts, ids, list(sizes)))
        assert all(layer.report(0).packed_tokens > 0 for layer in parts.packed_layers)
        assert any(isinstance(layer, SlidingLayer) for layer in parts.layers)
    expected = logits_after(model, DynamicCache(config=model.config), ids, list(sizes))
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[2], logits[3], rtol=2e-3, atol=2e-3)
    assert not torch.allclose(logits[2], expected, rtol=2e-3, atol=2e-3)
