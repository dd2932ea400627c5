"""`attend` of the reference against a plain softmax over everything that `gather` returns."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from test_reference_state import PRESET_NAMES, PackedState, filled
from torch import Tensor

from tests.presets import sized
from tq_hf.config import PRESETS, TurboQuantConfig

# (preset, head_dim, query heads a KV head, queries, committed tokens, new tokens, first real token of each row)
CASES = [
    (preset, (64, 80, 128, 256)[(i + j) % 4], group, queries, length, new, starts)
    for i, preset in enumerate(PRESET_NAMES)
    for j, (group, queries, length, new, starts) in enumerate(
        [
            (1, 1, 200, 1, (0,)),
            (3, 3, 133, 3, (0, 17)),
            (8, 40, 264, 40, (0, 3, 141)),
            (5, 1, 1000, 1, (0, 70)),
        ]
    )
]
LENGTHS = (0, 1, 3, 4, 5, 31, 32, 63, 64, 65, 67, 68, 131, 132, 133, 195, 196, 200, 1000)


def dense(
    state: PackedState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    aux_sinks: Tensor | None = None,
    scaling: float | None = None,
    softcap: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """Attention over the gathered history and the new tokens, every score at once, in fp64."""
    past_key, past_value = state.gather()
    group, queries = query.shape[1] // key.shape[1], query.shape[2]
    keys = torch.cat((past_key, key), 2).double().repeat_interleave(group, 1)
    values = torch.cat((past_value, value), 2).double().repeat_interleave(group, 1)
    total = keys.shape[2]
    position = torch.arange(total)
    keep = (position >= state.row_start[:, None])[:, None, None]
    if causal:
        keep = keep & (position <= (total - queries + torch.arange(queries))[:, None])
    if mask is not None:
        keep = keep & (mask[..., :total] != 0)
    scores = query.double() @ keys.mT * (state.dims[0] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~keep, -math.inf)
    if aux_sinks is not None:
        sinks = aux_sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
        values = torch.cat((values, torch.zeros_like(values[:, :, :1])), 2)
    values = values.masked_fill(~values.isfinite(), 0)
    return (scores.softmax(-1).nan_to_num(0) @ values).transpose(1, 2)


def query_for(state: PackedState, group: int, queries: int, seed: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (state.rows, state.heads * group, queries, state.dims[0])
    return (1.5 * torch.randn(shape, generator=generator)).to(state.dtype)


def check(state: PackedState, query: Tensor, new: int, atol: float = 1e-5, **options: Any) -> Tensor:
    key, value = state.tokens(new, seed=12)
    got = state.attend(query, key, value, **options)
    expected = dense(state, query, key, value, **options)
    assert got.shape == expected.shape and got.dtype == query.dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol)
    return got


@pytest.mark.parametrize("preset, dim, group, queries, length, new, starts", CASES)
def test_presets_dims_and_groups(
    preset: str, dim: int, group: int, queries: int, length: int, new: int, starts: tuple[int, ...]
) -> None:
    state, _, _ = filled(preset, length, (100,), dim=dim, capacity=1024, row_start=starts)
    check(state, query_for(state, group, queries), new)


@pytest.mark.parametrize("preset", ["tq4", "3bit_nc"])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(preset: str, length: int) -> None:
    state, _, _ = filled(preset, length, (100,), dim=32, capacity=1024)
    for queries, new in ((1, 1), (3, 3), (1, 0), (40, 40)):
        if length + new >= queries:
            check(state, query_for(state, 3, queries), new)


@pytest.mark.parametrize("group", [*range(1, 9), 16])
def test_groups(group: int) -> None:
    state, _, _ = filled("tq3v2", 140, dim=64, value_dim=32)
    check(state, query_for(state, group, 2), 2)


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_keys_and_values_of_different_dims(preset: str) -> None:
    state, _, _ = filled(preset, 200, dim=96, value_dim=48, row_start=(0, 30))
    check(state, query_for(state, 2, 3), 3)


@pytest.mark.parametrize("page_size", [32, 128, 256])
@pytest.mark.parametrize("preset", ["tq4", "k8v4"])
def test_page_sizes(preset: str, page_size: int) -> None:
    config = TurboQuantConfig.from_preset(preset, page_size=page_size, recent_window=20, sink_tokens=3)
    state = PackedState(config, capacity=640, row_start=(0, 40))
    for chunk in (60, 500, 1):
        state.commit(*state.tokens(chunk))
    check(state, query_for(state, 2, 2), 2)


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_raw_is_exact_and_the_others_are_near(preset: str) -> None:
    config = PRESETS[preset]
    packed, tail = 3 * config.page_size, config.page_size // 2
    count = config.sink_tokens + packed + config.recent_window + tail
    state, past_key, past_value = filled(config, count, (77,), capacity=count)
    assert int(state.counters[1]) == config.sink_tokens + packed
    query = query_for(state, 3, 4)
    key, value = state.tokens(4, seed=12)
    keys, values = (torch.cat(pair, 2) for pair in ((past_key, key), (past_value, value)))
    keep = torch.ones(4, count + 4, dtype=torch.bool).tril(count)
    exact = torch.nn.functional.scaled_dot_product_attention(query, keys, values, keep, enable_gqa=True).transpose(1, 2)
    got = state.attend(query, key, value)
    error = (got - exact).square().sum() / exact.square().sum()
    if preset == "raw":
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-6)
    else:
        bounds = {"tq2": 0.25, "tq3v2": 0.2, "3bit_nc": 0.15, "paper_mse": 0.2, "paper_prod": 0.35}
        assert 1e-5 < error < bounds.get(preset, 0.1)


@pytest.mark.parametrize("what", ["zero", "long", "constant channels", "alike"])
@pytest.mark.parametrize("preset", ["tq4", "tq3", "tq3v2", "tq2"])
def test_odd_keys_cost_little_more_than_random_ones(preset: str, what: str) -> None:
    config = PRESETS[preset]
    count = config.sink_tokens + 4 * config.page_size + config.recent_window
    errors = []
    for odd in (True, False):
        state = PackedState(config, dim=80, capacity=count)
        key, value = state.tokens(count)
        query = query_for(state, 2, 1)
        if odd and what == "zero":
            key[:, :, ::3] = 0
        elif odd and what == "long":  # norms of 1e4
            key, query = key * (1e4 / 80**0.5), query * (80**0.5 / 1e4)
        elif odd and what == "constant channels":
            key[..., ::2] = 0.3
        elif odd:
            key = key[:, :, :1].expand_as(key).contiguous()
        state.commit(key, value)
        exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)
        got = state.attend(query, key[:, :, :0], value[:, :, :0])
        errors.append(((got - exact).square().sum() / exact.square().sum()).item())
        assert not state.flags.any()
    assert 0 < errors[0] < 2 * errors[1]  # flatter attention averages values to less, of which their error is more


class TestCausal:
    def test_not_causal_sees_all_new_tokens(self) -> None:
        state, _, _ = filled("tq4", 150)
        got = check(state, query_for(state, 2, 5), 5, causal=False)
        key, value = state.tokens(5, seed=12)
        assert not torch.allclose(got, state.attend(query_for(state, 2, 5), key, value), atol=1e-3)

    @pytest.mark.parametrize("queries, new", [(40, 3), (3, 40), (150, 0)])
    def test_other_query_than_token_counts(self, queries: int, new: int) -> None:
        """More queries than new tokens stand in the history, in pages even."""
        state, _, _ = filled("tq4", 150)
        check(state, query_for(state, 2, queries), new)
        check(state, query_for(state, 2, queries), new, causal=False)

    def test_heads_folded_into_queries(self) -> None:
        """GQA decode, folded: the G heads of a KV head come as G queries of one head, not causal."""
        state, _, _ = filled("tq4", 200, row_start=(0, 9))
        query = query_for(state, 4, 1)
        key, value = state.tokens(1, seed=12)
        folded = state.attend(query.reshape(2, 2, 4, 64), key, value, causal=False)
        apart = state.attend(query, key, value)
        torch.testing.assert_close(folded.transpose(1, 2).reshape(2, 1, 8, 64), apart, rtol=0, atol=5e-6)

    def test_no_queries(self) -> None:
        state, _, _ = filled("tq4", 150)
        assert state.attend(query_for(state, 2, 0), *state.tokens(2)).shape == (1, 0, 4, 64)


class TestMask:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
    @pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 1, 5), (2, 1, 5)], ids=str)
    @pytest.mark.parametrize("causal", [True, False])
    def test_shapes(self, shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
        state, _, _ = filled("tq3", 210, row_start=(0, 6))
        mask = (torch.rand(*shape, 230, generator=torch.Generator().manual_seed(2)) < 0.7).to(dtype)
        mask[..., :3] = 0  # sinks too
        got = check(state, query_for(state, 2, 5), 5, mask=mask, causal=causal)
        assert not torch.allclose(got, state.attend(query_for(state, 2, 5), *state.tokens(5, seed=12), causal=causal))

    def test_any_strides_and_values(self) -> None:
        state, _, _ = filled("4bit_nc", 210, row_start=(0, 6))
        mask = (torch.rand(215, 5, 1, 2, generator=torch.Generator().manual_seed(2)) < 0.7).to(torch.uint8) * 255
        check(state, query_for(state, 2, 5), 5, mask=mask.permute(3, 2, 1, 0))

    def test_a_query_with_nothing_to_attend_to_gives_zeros(self) -> None:
        state, _, _ = filled("tq4", 210)
        mask = torch.ones(1, 1, 3, 213, dtype=torch.bool)
        mask[:, :, 1] = False
        got = check(state, query_for(state, 2, 3), 3, mask=mask)
        assert not got[:, 1].any() and got[:, 0].any() and got[:, 2].any()
        empty = PackedState(sized("tq4"))
        assert not empty.attend(query_for(empty, 2, 1), *empty.tokens(0)).any()


class TestPadding:
    @pytest.mark.parametrize("preset", PRESET_NAMES)
    def test_garbage_before_a_row_starts_does_not_show(self, preset: str) -> None:
        starts = (0, 1, 5, 66, 140, 200)
        state = PackedState(sized(preset), dim=32, row_start=starts)
        key, value = state.tokens(206)
        clean_key, clean_value = key.clone(), value.clone()
        for row, first in enumerate(starts):
            key[row, :, :first], value[row, :, :first] = math.nan, math.inf
        for chunk in (slice(0, 150), slice(150, 206)):
            state.commit(key[:, :, chunk], value[:, :, chunk])
        assert not state.flags.any()
        query = query_for(state, 2, 2)
        got = check(state, query, 2)
        for row, first in enumerate(starts):
            if PRESETS[preset].key_format == "raw":  # where pages differ, quantized rows differ
                alone = PackedState(sized(preset), dim=32)
                alone.commit(clean_key[row : row + 1, :, first:], clean_value[row : row + 1, :, first:])
                new_key, new_value = state.tokens(2, seed=12)
                one = slice(row, row + 1)
                expected = alone.attend(query[one], new_key[one], new_value[one])
                torch.testing.assert_close(got[one], expected, rtol=0, atol=1e-6)

    def test_new_padding_of_a_first_prompt(self) -> None:
        state = PackedState(sized("tq4"), row_start=(0, 7))
        key, value = state.tokens(20)
        key[1, :, :7] = value[1, :, :7] = math.nan
        query = query_for(state, 2, 20)
        got = state.attend(query, key, value)
        assert not got[1, :7].any() and got.isfinite().all()
        expected = dense(state, query, key.nan_to_num(0), value, causal=True)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=3e-6)

    def test_a_row_without_any_page(self) -> None:
        state, _, _ = filled("tq4", 300, row_start=(250, 0))
        assert state.page_ids[0, :3].tolist() == [-1, -1, -1]
        check(state, query_for(state, 2, 2), 2)
        both, _, _ = filled("tq4", 300, row_start=(250, 240))
        check(both, query_for(both, 2, 2), 2)


class TestOptions:
    @pytest.mark.parametrize("preset", ["tq4", "k3v4_nc", "raw"])
    @pytest.mark.parametrize("softcap", [0.5, 20.0])
    def test_softcap(self, preset: str, softcap: float) -> None:
        state, _, _ = filled(preset, 200, row_start=(0, 5))
        check(state, query_for(state, 2, 3), 3, softcap=softcap, scaling=0.4)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_aux_sinks(self, dtype: torch.dtype) -> None:
        state, _, _ = filled("tq4", 200, row_start=(0, 5))
        aux = torch.tensor([-2.0, 0.0, 3.0, 8.0, 30.0, -math.inf]).to(dtype)
        got = check(state, query_for(state, 3, 3), 3, aux_sinks=aux)
        assert got[:, :, 4].abs().max() < 1e-4  # nearly all weight is on the sink
        nothing = torch.zeros(1, 1, 1, 203, dtype=torch.bool)
        assert not check(state, query_for(state, 3, 3), 3, aux_sinks=aux, mask=nothing).any()

    @pytest.mark.parametrize("scaling", [0.0, 1.0, 0.01])
    def test_scaling(self, scaling: float) -> None:
        state, _, _ = filled("tq2", 200)
        check(state, query_for(state, 2, 3), 3, scaling=scaling)

    def test_large_scores_do_not_overflow(self) -> None:
        state, _, _ = filled("tq4", 200)
        got = check(state, query_for(state, 2, 3), 3, scaling=50.0, atol=1e-2)
        assert got.isfinite().all()

    def test_strided_inputs(self) -> None:
        """A model hands in `[B, q, heads, D]` transposed, and slices of a fused projection."""
        state, _, _ = filled("tq4", 200, row_start=(0, 5))
        query = query_for(state, 2, 3)
        key, value = state.tokens(3, seed=12)
        expected = state.attend(query, key, value)
        fused = torch.cat((query, key, value), 1).transpose(1, 2).contiguous().transpose(1, 2)
        got = state.attend(fused[:, :4], fused[:, 4:6], fused[:, 6:])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)

    def test_too_small_a_bound_is_refused(self) -> None:
        state, _, _ = filled("tq4", 300)
        with pytest.raises(ValueError, match="max_entries=2 is too small: 3"):
            state.attend(query_for(state, 1, 1), *state.tokens(1), max_entries=2)


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("length", [5, 69, 100, 130])
def test_short_pages_after_a_crop(preset: str, length: int) -> None:
    state, _, _ = filled(preset, 364, row_start=(0, 80))
    state.crop(length)
    check(state, query_for(state, 2, 2), 2)
    state.commit(*state.tokens(170, seed=5))
    check(state, query_for(state, 2, 2), 2)


@pytest.mark.parametrize("preset", ["tq4", "k8v4", "raw"])
def test_a_missing_page_holds_nothing(preset: str) -> None:
    state, _, _ = filled(preset, 300, row_start=(0, 0))
    state.page_ids[1, 1] = -1
    start, count = state.entries[1].tolist()
    missing = slice(start, start + count)
    key, value = state.gather()
    assert not key[1, :, missing].any() and not value[1, :, missing].any()
    assert key[0, :, missing].any() and key[1, :, missing.stop :].any()
    query, new = query_for(state, 2, 2), state.tokens(2, seed=12)
    mask = torch.ones(2, 1, 1, 302, dtype=torch.bool)
    mask[1, ..., missing] = False
    got = state.attend(query, *new)
    torch.testing.assert_close(got.double(), dense(state, query, *new, mask=mask), rtol=0, atol=1e-5)


def test_values_of_dead_slots_of_a_short_page_do_not_show() -> None:
    """Raw pages have no scale to zero: a NaN beyond the page's count must be selected away."""
    state, _, _ = filled("raw", 300)
    state.crop(100)
    last = int(state.page_ids[0, 1])
    state.pool[last, :, state.page.group_words :] = -1  # tokens 32.. of the page, NaN: positions 100 on
    got = check(state, query_for(state, 2, 2), 2)
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype, atol", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("preset", ["tq4", "k8v4", "raw"])
def test_half_precision(preset: str, dtype: torch.dtype, atol: float) -> None:
    state, _, _ = filled(preset, 200, row_start=(0, 9), dtype=dtype)
    check(state, query_for(state, 2, 3), 3, atol=atol)


class TestTiles:
    def test_unpacks_no_more_than_a_tile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module("tq_hf.reference.attend")
        unpack, sizes = module.unpack_page, []

        def counting(words: Tensor, *rest: Any) -> Any:
            content = unpack(words, *rest)
            sizes.append((words.shape[2] * state.page.page_size, content.key.numel()))
            return content

        monkeypatch.setattr(module, "unpack_page", counting)
        state, _, _ = filled("tq4", 3000, dim=32, capacity=3200, row_start=(0, 20))
        check(state, query_for(state, 2, 1), 1)
        assert [tokens for tokens, _ in sizes] == [1024, 1024, 832]
        sizes.clear()
        monkeypatch.setattr("tq_hf.reference.state.TILE_ELEMENTS", 2 * 2 * 32 * 200)  # rows, heads, dims, 200 tokens
        check(state, query_for(state, 2, 1), 1)
        assert [tokens for tokens, _ in sizes] == [192] * 15
        assert max(elements for _, elements in sizes) == 2 * 2 * 32 * 192

    @pytest.mark.parametrize("elements", [1, 5000, 40_000])
    def test_queries_in_chunks(self, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module("tq_hf.reference.attend")
        monkeypatch.setattr(module, "SCORE_ELEMENTS", elements)
        monkeypatch.setattr(module, "TILE_TOKENS", 16)
        state, _, _ = filled("tq4", 200, dim=32, row_start=(0, 9))
        mask = torch.rand(1, 1, 37, 237, generator=torch.Generator().manual_seed(0)) < 0.8
        check(state, query_for(state, 3, 37), 37, mask=mask, aux_sinks=torch.arange(6.0))

    def test_a_long_second_prompt(self) -> None:
        state, _, _ = filled("tq3", 1500, dim=32, capacity=1920)
        check(state, query_for(state, 1, 1100), 1100)
