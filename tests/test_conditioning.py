"""The balance of key channels: the formula, and the statistics behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_reference_state import PackedState
from torch import Tensor

from tests.presets import sized, usual_rotary
from tq_hf.config import TurboQuantConfig
from tq_hf.quantizer.conditioning import HORIZONS, Partners, balance_factors, or_ones, partners
from tq_hf.quantizer.rotary import Rotary
from tq_hf.reference import observe

GENERATOR = torch.Generator()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=GENERATOR.manual_seed(seed))


def error(factors: Tensor, energy: Tensor, spread: Tensor) -> float:
    """Of scores, with a quantizer whose error is even over balanced channels, relative to no balance."""
    balanced = (energy / factors.square()).sum() * (factors.square() * spread).sum()
    return (balanced / (energy.sum() * spread.sum())).item()


def mixed(dim: int) -> Partners:
    return partners(usual_rotary(dim), dim, torch.device("cpu"))


def turned(statistic: Tensor, positions: range) -> Tensor:
    """`[D]` at position 0, of channels that are independent there, as rotary embeddings show it on average at others."""
    first, second = statistic.chunk(2)
    frequency = torch.tensor(usual_rotary(len(statistic)).frequencies)
    stays = (torch.tensor(positions)[:, None] * frequency).cos().square().mean(0)
    return torch.cat((stays * first + (1 - stays) * second, stays * second + (1 - stays) * first))


class TestPartners:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_pairs_that_turn_often_become_alike_and_those_that_stay_do_not_change(self, interleaved: bool) -> None:
        pairs = partners(Rotary((1.0, 0.1, 1e-6, 0.0), interleaved), 10, torch.device("cpu"))
        statistic = torch.arange(1.0, 11.0)
        got = pairs.mix(torch.stack((statistic, statistic.flip(0))))[0].tolist()
        if interleaved:
            assert got == pytest.approx([1.5, 1.5, 3.5, 3.5, 5, 6, 7, 8, 9, 10], abs=0.01)
        else:
            assert got == pytest.approx([3, 4, 3, 4, 3, 4, 7, 8, 9, 10], abs=0.01)

    @pytest.mark.parametrize("frequency", [2e-5, 1e-4, 3e-4, 1e-3])
    def test_the_share_is_the_mean_over_the_distances(self, frequency: float) -> None:
        pairs = partners(Rotary((frequency,), False), 2, torch.device("cpu"))
        expected = sum((torch.arange(n) * frequency).sin().square().mean() for n in HORIZONS) / len(HORIZONS)
        torch.testing.assert_close(pairs.share, expected.expand(2), rtol=1e-3, atol=1e-4)

    def test_no_rotary_embeddings_and_a_head_that_is_too_small_for_them(self) -> None:
        for pairs in (partners(None, 8, torch.device("cpu")), partners(usual_rotary(16), 8, torch.device("cpu"))):
            assert torch.equal(pairs.mix(torch.arange(8.0)), torch.arange(8.0))

    def test_factors_serve_positions_where_channels_have_turned(self) -> None:
        """A quarter of a turn later, a pair's energy stands in the other channel: unmixed factors are worse than none."""
        energy, spread = torch.ones(64), torch.ones(64)
        energy[10], spread[10 + 32] = 100, 100
        early = energy, spread
        late = energy.roll(32), spread.roll(32)
        factors, unmixed = balance_factors(*early, mixed(64)), balance_factors(*early, partners(None, 64, energy.device))
        assert error(unmixed, *early) < 0.3
        assert error(unmixed, *late) > 10
        assert error(factors, *early) < 1.01 and error(factors, *late) < 1.01

    def test_in_a_head_of_all_frequencies_they_lose_little_early(self) -> None:
        start = normal(64).mul(1.5).exp(), normal(64, seed=1).mul(1.5).exp()
        observed, early, late = ([turned(x, at) for x in start] for at in (range(132), range(1156), range(7000, 8024)))
        factors, unmixed = (balance_factors(*observed, p) for p in (mixed(64), partners(None, 64, start[0].device)))
        assert error(factors, *late) < 0.8 * error(unmixed, *late)
        assert error(factors, *early) < 1.05 * error(unmixed, *early)


class TestFactors:
    def test_they_minimize_the_error_of_scores(self) -> None:
        """No change of a factor lowers the error that the mixed statistics expect."""
        energy, spread = mixed(64).mix(normal(64).exp()), mixed(64).mix(normal(64, seed=1).exp())
        floored = spread / spread.mean() + 0.05

        def cost(a: Tensor) -> float:
            return error(a, energy, floored)

        factors = balance_factors(normal(64).exp(), normal(64, seed=1).exp(), mixed(64))
        best = cost(factors)
        assert best < 0.9 * cost(torch.ones(64))
        for j in range(0, 64, 7):
            for change in (0.9, 1.1):
                other = factors.clone()
                other[j] *= change
                assert cost(other) > best

    def test_queries_keep_their_energy(self) -> None:
        energy, spread = normal(3, 80).exp(), normal(3, 80, seed=1).exp()
        factors = balance_factors(energy, spread, mixed(80))
        torch.testing.assert_close((mixed(80).mix(energy) / factors.square()).sum(-1), energy.sum(-1))

    @pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
    def test_only_proportions_matter(self, scale: float) -> None:
        energy, spread = normal(64).exp(), normal(64, seed=1).exp()
        expected = balance_factors(energy, spread, mixed(64))
        torch.testing.assert_close(balance_factors(energy * scale, spread, mixed(64)), expected)
        torch.testing.assert_close(balance_factors(energy, spread * scale, mixed(64)), expected)

    @pytest.mark.parametrize("what", ["energy", "spread"])
    @pytest.mark.parametrize("bad", [0.0, 1e-33, torch.inf, torch.nan])
    def test_without_statistics_nothing_is_scaled(self, what: str, bad: float) -> None:
        given = {"energy": torch.ones(2, 8), "spread": torch.ones(2, 8)}
        given[what][0] = bad
        given[what][1] *= 2 ** torch.arange(8)
        factors = balance_factors(given["energy"], given["spread"], partners(None, 8, torch.device("cpu")))
        assert factors[0].tolist() == [1.0] * 8
        assert len(factors[1].unique()) == 8

    def test_channels_that_are_constant_or_never_asked_for_stay_finite(self) -> None:
        energy, spread = torch.ones(64), torch.ones(64)
        energy[3], spread[5] = 0, 0
        energy[7] = spread[7] = 0
        factors = balance_factors(energy, spread, mixed(64))
        assert factors.isfinite().all() and factors.min() > 0.01 and factors.max() < 100
        assert factors[3] < factors[0] < factors[5]

    def test_zeros_mean_not_known_yet(self) -> None:
        balance = torch.tensor([[0.0, 0.0], [2.0, 0.5]])
        assert or_ones(balance).tolist() == [[1.0, 1.0], [2.0, 0.5]]


def spread_of(keys: Tensor) -> Tensor:
    return (keys - keys.mean(1, keepdim=True)).square().sum(1)


class TestObserve:
    """On states of `tq4` with pages of 64 tokens, a window of 64 and 4 sinks, with the keys themselves as queries."""

    def test_statistics_are_those_of_the_first_page_and_the_window(self) -> None:
        state = PackedState(sized("tq4"))
        key, value = state.tokens(300)
        key *= torch.linspace(0.1, 3, 64)
        state.commit(key, value)
        energy = key[0, :, 4:132].square().sum(1)
        torch.testing.assert_close(state.query_energy[0], energy)
        spread = spread_of(key[0, :, 4:68]) + spread_of(key[0, :, 68:132])
        torch.testing.assert_close(state.balance[0], balance_factors(energy, spread, mixed(64)))

    @pytest.mark.parametrize("chunks", [(1,), (50, 81, 1), (131, 1), (132,), (133,), (7, 300)])
    def test_chunks_do_not_matter(self, chunks: tuple[int, ...]) -> None:
        key, value = PackedState(sized("tq4")).tokens(200)
        key = key * torch.linspace(0.1, 3, 64) + 5
        balances = []
        for sizes in ((200,), chunks):
            state, start, turn = PackedState(sized("tq4")), 0, 0
            while start < 200:
                end = min(200, start + sizes[turn % len(sizes)])
                state.commit(key[:, :, start:end], value[:, :, start:end])
                start, turn = end, turn + 1
            balances.append(state.balance)
        assert torch.equal(*balances)

    def test_nothing_before_the_first_page_and_nothing_after(self) -> None:
        state = PackedState(sized("tq4"))
        key, value = state.tokens(400)
        state.commit(key[:, :, :131], value[:, :, :131])
        assert not state.balance.any()
        state.commit(key[:, :, 131:132], value[:, :, 131:132])
        balance, energy = state.balance.clone(), state.query_energy.clone()
        assert balance.all()
        state.commit(100 * key[:, :, 132:], value[:, :, 132:])
        assert torch.equal(state.balance, balance) and torch.equal(state.query_energy, energy)

    def test_rows_have_their_own_and_padding_does_not_count(self) -> None:
        state = PackedState(sized("tq4"), row_start=(0, 100, 9))
        key, value = state.tokens(400)
        key[1, :, :100] = 1e4
        key[2, :, :9] = torch.nan
        for chunk in (slice(0, 140), slice(140, 400)):
            state.commit(key[:, :, chunk], value[:, :, chunk])
        # Row 1 starts in the second page, which ends at 132: its statistics end with the window behind it.
        keys = key[1, :, 104:196]
        energy, spread = keys.square().sum(1), spread_of(keys[:, :28]) + spread_of(keys[:, 28:])
        torch.testing.assert_close(state.balance[1], balance_factors(energy, spread, mixed(64)))
        keys = key[2, :, 13:132]
        energy, spread = keys.square().sum(1), spread_of(keys[:, :55]) + spread_of(keys[:, 55:])
        torch.testing.assert_close(state.balance[2], balance_factors(energy, spread, mixed(64)))

    def test_hidden_and_bad_tokens_do_not_count(self) -> None:
        state = PackedState(sized("tq4"))
        key, value = state.tokens(200)
        keep = torch.ones(1, 200, dtype=torch.bool)
        keep[0, 30:60] = False
        key[0, :, 30:60] = 1e4
        key[0, 1, 70] = torch.inf
        state.commit(key, value, keep)
        page, window = [*range(4, 30), *range(60, 68)], [*range(68, 132)]
        for head, bad in ((0, []), (1, [70])):
            parts = [key[0, head : head + 1, [t for t in part if t not in bad]] for part in (page, window)]
            energy = sum(part.square().sum(1) for part in parts)
            expected = balance_factors(energy, spread_of(parts[0]) + spread_of(parts[1]), mixed(64))
            torch.testing.assert_close(state.balance[:, head], expected)

    def test_keys_that_are_not_centred_count_with_their_mean(self) -> None:
        """What is quantized then is the whole key, and a bias is part of it."""
        state = PackedState(replace(sized("tq4"), center_keys=False))
        key, value = state.tokens(140)
        key[..., 5] += 20
        state.commit(key, value)
        counted = key[0, :, 4:132]
        energy = counted.square().sum(1)
        torch.testing.assert_close(state.balance[0], balance_factors(energy, energy, mixed(64)))

    @pytest.mark.parametrize("size", [1.0, 1e4])
    def test_keys_that_are_all_alike_are_left_as_they_are(self, size: float) -> None:
        """Their variance is 0, and what remains behind the mean is rounding: nothing to make factors from."""
        state = PackedState(sized("tq4"))
        key, value = state.tokens(200)
        state.commit(size * key[:, :, :1].expand_as(key), value)
        assert state.balance.eq(1).all()
        got = state.gather()[0]
        torch.testing.assert_close(got, size * key[:, :, :1].expand_as(got), rtol=2**-10, atol=2**-10 * size)

    def test_grouped_queries_are_added(self) -> None:
        config = TurboQuantConfig.from_preset("tq4", page_size=32, recent_window=0, sink_tokens=0)
        state = PackedState(config)
        key, _ = state.tokens(32)
        query = normal(1, 6, 32, 64)
        args = (state.ring_key, state.row_start, state.counters, state.balance, state.query_energy)
        pairs = mixed(64)
        observe(query, key, *args, pairs.channel, pairs.share, None, 32, 0, 0, True)
        torch.testing.assert_close(state.query_energy[0, 1], query[0, 3:].square().sum((0, 1)))

    @pytest.mark.parametrize("query", ["none", "one token"])
    def test_without_queries_or_with_one_token_factors_are_ones(self, query: str) -> None:
        config = TurboQuantConfig.from_preset("tq4", page_size=32, recent_window=0, sink_tokens=0)
        state = PackedState(config, row_start=(0 if query == "none" else 31,))
        key, _ = state.tokens(32)
        args = (state.ring_key, state.row_start, state.counters, state.balance, state.query_energy)
        pairs = mixed(64)
        observe(None if query == "none" else key, key, *args, pairs.channel, pairs.share, None, 32, 0, 0, True)
        assert state.balance.eq(1).all()
