"""`tq_hf.generation.comparison`: bytes, speeds and the agreement of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig
from tq_hf.generation.chunks import first_page_tokens, text_chunks
from tq_hf.generation.comparison import cache_argument, cache_nbytes, generate_timed, logit_agreement
from tq_hf.reporting.memory import storage_bytes


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 99, (1, length), generator=torch.Generator().manual_seed(seed))


def test_bytes_of_a_dynamic_cache_are_those_of_its_tokens(tiny_model: Any) -> None:
    cache = DynamicCache(config=tiny_model.config)
    tiny_model(ids(17), **{cache_argument(tiny_model): cache})
    assert cache_nbytes(cache) == 3 * 2 * 17 * (32 + 32) * 4  # layers, heads, tokens, K and V, float32


def test_bytes_count_what_is_allocated_and_each_storage_once(tiny_model: Any) -> None:
    cache = StaticCache(tiny_model.config, max_cache_len=50)
    tiny_model(ids(17), **{cache_argument(tiny_model): cache})
    counters = cache_nbytes(cache) - 3 * 2 * 50 * (32 + 32) * 4
    assert 0 <= counters <= 3 * 64
    cache.layers[0].again = cache.layers[0].keys[:, :, :3]  # a view into memory that is counted already
    assert cache_nbytes(cache) - 3 * 2 * 50 * (32 + 32) * 4 == counters


def test_bytes_of_a_packed_cache_are_those_of_its_report(tiny_model: Any) -> None:
    """Its pages lie in a pool that no layer owns."""
    cache = TurboQuantCache(tiny_model.config, preset="4bit_nc", boundary_layers=0)
    tiny_model(ids(640), **{cache_argument(tiny_model): cache})
    layout = PRESETS["4bit_nc"].layout(32, 32, torch.float32)
    assert cache_nbytes(cache) == cache.report().nbytes >= 3 * 2 * 640 * layout.bytes_per_token


class Wrapping(torch.Tensor):
    """A tensor without a storage of its own, as quantized weights are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (1000,), dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    __torch_dispatch__ = None  # nothing is computed with it


def test_bytes_of_a_tensor_that_wraps_others_are_theirs() -> None:
    codes = torch.zeros(50, dtype=torch.uint8)
    assert storage_bytes({"a": Wrapping(codes), "b": [codes[:10]]}) == 50


def test_generation_is_greedy_to_full_length_and_timed(tiny_model: Any) -> None:
    prompt, ticks = ids(20), []
    result = generate_timed(tiny_model, prompt, DynamicCache(config=tiny_model.config), 9, ticks.append)
    tokens = prompt
    for _ in range(9):
        logits = tiny_model(tokens).logits[:, -1].clone()
        logits[:, tiny_model.config.eos_token_id] = -torch.inf  # suppressed, so that all runs are equally long
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    assert result.tokens.tolist() == tokens[0, 20:].tolist()
    assert ticks == [1] * 9
    assert result.first_token_seconds > 0 and result.tokens_per_s > 0


def test_a_single_new_token_has_no_decode_speed(tiny_model: Any) -> None:
    assert generate_timed(tiny_model, ids(20), DynamicCache(config=tiny_model.config), 1).tokens_per_s == 0.0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("more", [0, 1, 64, 368])
@pytest.mark.parametrize("positions", [None, 1, 100, 500])
def test_chunks_cover_the_text_and_end_where_pages_fall_due(preset: str, more: int, positions: int | None) -> None:
    config = PRESETS[preset]
    length = first_page_tokens(config) + more
    chunks = text_chunks(length, config, positions)
    first = chunks[0][1]
    assert chunks[0][0] == 0 and chunks[-1][1] == length
    assert all(before[1] == after[0] for before, after in zip(chunks, chunks[1:]))
    most = length - first_page_tokens(config)
    assert length - first >= min(positions or most, most)
    assert positions is None or first == first_page_tokens(config) or length - first < positions + config.page_size
    for start, end in chunks[1:]:
        assert 0 < end - start <= config.page_size
        assert (start - config.sink_tokens - config.recent_window) % config.page_size == 0


def test_unquantized_pages_agree_completely(tiny_model: Any) -> None:
    packed = TurboQuantCache(tiny_model.config, preset="raw")
    result = logit_agreement(tiny_model, ids(400), DynamicCache(config=tiny_model.config), packed)
    assert result.positions == 400 - first_page_tokens(PRESETS["raw"])
    assert result.top1 == 1.0
    assert result.kl == pytest.approx(0.0, abs=1e-6)


def test_fewer_bits_agree_less(tiny_model: Any) -> None:
    def kl(preset: str) -> float:
        packed = TurboQuantCache(tiny_model.config, preset=preset)
        result = logit_agreement(tiny_model, ids(400), DynamicCache(config=tiny_model.config), packed)
        assert 0.0 <= result.top1 <= 1.0
        return result.kl

    assert 1e-6 < kl("tq4") < kl("tq2")


def test_feeding_chunks_equals_feeding_single_tokens(tiny_model: Any) -> None:
    """The claim that makes the measurement cheap: no chunk hides a page from a position that would have read it."""
    config = PRESETS["tq2"]
    first, argument = first_page_tokens(config), cache_argument(tiny_model)
    length = first + 2 * config.page_size + 40
    text = ids(length)
    chunked, single = (TurboQuantCache(tiny_model.config, preset="tq2") for _ in range(2))
    with torch.no_grad():
        a = [tiny_model(text[:, i:j], **{argument: chunked}).logits for i, j in text_chunks(length, config)]
        b = [tiny_model(text[:, :first], **{argument: single}).logits]
        b += [tiny_model(text[:, i : i + 1], **{argument: single}).logits for i in range(first, length)]
    torch.testing.assert_close(torch.cat(a, dim=1), torch.cat(b, dim=1), rtol=1e-3, atol=1e-3)


def test_a_text_that_reads_no_packed_page_is_refused(tiny_model: Any) -> None:
    config = TurboQuantConfig.from_preset("tq4")
    text = ids(first_page_tokens(config))
    caches = DynamicCache(config=tiny_model.config), TurboQuantCache(tiny_model.config, preset="tq4")
    with pytest.raises(ValueError, match=rf"{text.shape[1]} tokens reads no packed page"):
        logit_agreement(tiny_model, text, *caches)
