"""`commit` and `gather` of the reference: what is written where, whatever the sizes of the chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.presets import sized, usual_rotary
from tq_hf.config import PRESETS, TurboQuantConfig
from tq_hf.quantizer.conditioning import partners
from tq_hf.reference import attend, commit, gather, observe
from tq_hf.reference.codec import NON_FINITE_KEY, NON_FINITE_VALUE, encode_page

PRESET_NAMES = list(PRESETS)


class PackedState:
    """The tensors of one packed layer, and the bookkeeping of pages that a cache would do for them.

    Slots that were never written hold NaN, and pages -1 (NaN as fp16), so that reading one shows. `capacity` counts
    tokens.
    """

    def __init__(
        self,
        config: TurboQuantConfig,
        heads: int = 2,
        dim: int = 64,
        value_dim: int | None = None,
        capacity: int = 512,
        row_start: Sequence[int] = (0,),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.heads, self.dtype = config, heads, dtype
        self.dims = dim, dim if value_dim is None else value_dim
        self.rows = len(row_start)
        self.page = config.layout(*self.dims, dtype)
        ring, sinks = config.recent_window + config.page_size, config.sink_tokens
        pages = -(-capacity // config.page_size)

        def unwritten(slots: int, width: int) -> Tensor:
            return torch.full((self.rows, heads, slots, width), math.nan, dtype=dtype)

        self.pool = torch.full((self.rows * pages + 1, heads, self.page.page_words), -1, dtype=torch.int32)
        self.ring_key, self.ring_value = unwritten(ring, self.dims[0]), unwritten(ring, self.dims[1])
        self.sink_key, self.sink_value = unwritten(sinks, self.dims[0]), unwritten(sinks, self.dims[1])
        self.page_ids = torch.full((self.rows, pages), -1, dtype=torch.int32)
        self.entries = torch.zeros(pages, 2, dtype=torch.int32)
        self.row_start = torch.tensor(row_start, dtype=torch.int32)
        self.counters = torch.tensor([0, sinks, 0], dtype=torch.int32)
        self.balance = torch.zeros(self.rows, heads, dim) if config.balance_keys else None
        self.query_energy = torch.zeros(self.rows, heads, dim)
        self.rotary = usual_rotary(dim)
        self.flags = torch.zeros(heads, dtype=torch.int32)
        self.free = torch.randperm(len(self.pool), generator=torch.Generator().manual_seed(1)).tolist()

    @property
    def tensors(self) -> dict[str, Tensor]:
        names = "pool ring_key ring_value sink_key sink_value page_ids entries row_start counters balance"
        return {name: getattr(self, name) for name in names.split()}

    def commit(self, key: Tensor, value: Tensor, keep: Tensor | None = None) -> None:
        length, packed_end, used = self.counters.tolist()
        size, sinks = self.config.page_size, self.config.sink_tokens
        due = max(0, (length + key.shape[2] - packed_end - self.config.recent_window) // size)
        for entry in range(used, used + due):
            start = packed_end + (entry - used) * size
            self.entries[entry] = torch.tensor([start, size])
            for row, first in enumerate(self.row_start.tolist()):
                if start + size > first + sinks:
                    self.page_ids[row, entry] = self.free.pop()
        if self.balance is not None:  # queries like the keys, one head
            pairs = partners(self.rotary, key.shape[-1], key.device)
            state = (self.ring_key, self.row_start, self.counters, self.balance, self.query_energy)
            state += (pairs.channel, pairs.share)
            observe(key, key, *state, keep, size, sinks, self.config.recent_window, self.config.center_keys)
        self.commit_alone(key, value, keep, self.config.recent_window, due)

    def commit_alone(self, key: Tensor, value: Tensor, keep: Tensor | None, recent_window: int, max_due: int) -> None:
        """The op by itself: entries and pages are not provided for."""
        commit(
            key,
            value,
            **self.tensors,
            flags=self.flags,
            keep=keep,
            layout=self.page.name,
            recent_window=recent_window,
            max_due=max_due,
        )

    def crop(self, length: int) -> None:
        """Forget the positions from `length` on, which must lie in a page."""
        starts = self.entries[: int(self.counters[2]), 0]
        used = int((starts < length).sum())
        self.entries[used - 1, 1] = length - self.entries[used - 1, 0]
        self.page_ids[:, used:] = -1
        self.counters.copy_(torch.tensor([length, length, used]))

    def gather(self, length: int | None = None) -> tuple[Tensor, Tensor]:
        return gather(**self.tensors, layout=self.page.name, length=int(self.counters[0]) if length is None else length)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        defaults: dict[str, object] = {
            "mask": None,
            "aux_sinks": None,
            "scaling": self.dims[0] ** -0.5,
            "softcap": 0.0,
            "causal": True,
            "max_entries": self.page_ids.shape[1],
        }
        return attend(query, key, value, **self.tensors, layout=self.page.name, **{**defaults, **options})  # type: ignore[arg-type]

    def tokens(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of `count` tokens."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.rows, self.heads, count)
        key, value = (torch.randn(*shape, dim, generator=generator).to(self.dtype) for dim in self.dims)
        return key, value


def filled(
    preset: str | TurboQuantConfig, count: int, chunks: Sequence[int] = (), **options: object
) -> tuple[PackedState, Tensor, Tensor]:
    """A state with `count` tokens committed, in chunks that repeat until all are in; and the tokens.

    The name of a preset stands for it with pages of 64 and a window of 64 or none (`sized`).
    """
    config = sized(preset) if isinstance(preset, str) else preset
    state = PackedState(config, **options)  # type: ignore[arg-type]
    key, value = state.tokens(count)
    start, turn = 0, 0
    while start < count:
        end = min(count, start + (chunks[turn % len(chunks)] if chunks else count))
        state.commit(key[:, :, start:end], value[:, :, start:end])
        start, turn = end, turn + 1
    return state, key, value


class TestCommit:
    @pytest.mark.parametrize("preset", PRESET_NAMES)
    @pytest.mark.parametrize("chunks", [(1,), (7, 64, 3), (200, 1), (4, 63, 1, 65)], ids=str)
    def test_chunks_make_the_same_state(self, preset: str, chunks: tuple[int, ...]) -> None:
        config = PRESETS[preset]
        count = config.sink_tokens + config.recent_window + 3 * config.page_size + config.page_size // 2
        options = {"row_start": (0, 9), "heads": 2, "dim": 32, "value_dim": 64, "capacity": count}
        whole, _, _ = filled(config, count, **options)
        parts, _, _ = filled(config, count, chunks, **options)
        assert parts.counters.tolist() == whole.counters.tolist()
        used = int(whole.counters[2])
        assert used == 3
        assert torch.equal(whole.entries[:used], parts.entries[:used])
        pages = [state.pool[state.page_ids[:, :used].long()] for state in (whole, parts)]
        assert torch.equal(*pages)
        assert torch.equal(whole.sink_key, parts.sink_key) and torch.equal(whole.sink_value, parts.sink_value)
        for got, expected in zip(parts.gather(), whole.gather(), strict=True):
            assert torch.equal(got, expected)

    @pytest.mark.parametrize("count", [1, 3, 4, 5, 63, 67, 68, 131, 132, 133, 300])
    def test_counters_ring_and_sinks(self, count: int) -> None:
        state, key, value = filled("tq4", count, (50, 1), row_start=(0, 10))
        due = max(0, (count - 4 - 64) // 64)
        length, packed_end, used = state.counters.tolist()
        assert (length, packed_end, used) == (count, 4 + 64 * due, due)
        for position in range(packed_end, count):
            assert torch.equal(state.ring_key[:, :, position % 128], key[:, :, position])
            assert torch.equal(state.ring_value[:, :, position % 128], value[:, :, position])
        for row, first in enumerate((0, 10)):
            for slot in range(4):
                if first + slot < count:
                    assert torch.equal(state.sink_key[row, :, slot], key[row, :, first + slot])
                    assert torch.equal(state.sink_value[row, :, slot], value[row, :, first + slot])
                else:
                    assert state.sink_key[row, :, slot].isnan().all()

    @pytest.mark.parametrize("preset", PRESET_NAMES)
    def test_pages_hold_what_the_codec_makes_of_their_tokens(self, preset: str) -> None:
        config = PRESETS[preset]
        size, first = config.page_size, config.sink_tokens
        count = first + config.recent_window + 3 * size + 8
        state, key, value = filled(config, count, (37,), capacity=count)
        assert int(state.counters[2]) == 3
        for entry in range(3):
            tokens = slice(first + entry * size, first + (entry + 1) * size)
            valid = torch.ones(1, 2, size, dtype=torch.bool)
            words, _ = encode_page(key[:, :, tokens], value[:, :, tokens], valid, state.page, None, state.balance)
            assert torch.equal(state.pool[state.page_ids[:, entry].long()], words)

    def test_no_page_is_written_without_an_id_and_none_twice(self) -> None:
        state, _, _ = filled("tq4", 300, row_start=(0, 150))
        untouched = torch.ones(len(state.pool), dtype=torch.bool)
        untouched[state.page_ids[state.page_ids >= 0].long()] = False
        assert state.page_ids[1, 0] == -1 and state.page_ids[1, 1] == -1 and state.page_ids[1, 2] >= 0
        assert (state.pool[untouched] == -1).all()
        before = state.pool.clone()
        state.commit(*state.tokens(64, seed=5))
        written = (state.pool != before).flatten(1).any(1).nonzero().flatten().tolist()
        assert sorted(written) == sorted(state.page_ids[:, 3].tolist())

    def test_a_window_of_zero_packs_every_full_page(self) -> None:
        state, _, _ = filled("k8v4", 193, (1,))
        assert state.counters.tolist() == [193, 192, 3]

    def test_keep_leaves_tokens_out_of_the_mean_but_not_out_of_the_page(self) -> None:
        state = PackedState(sized("tq4"))
        key, value = state.tokens(200)
        key[:, :, 20:30] *= 5.0
        keep = torch.ones(1, 256, dtype=torch.uint8)
        keep[0, 20:30] = 0
        state.commit(key, value, keep)
        page = state.tensors["pool"][state.tensors["page_ids"][0, 0]]
        header = page[:, : state.page.header_words].contiguous().view(torch.float16)
        seen = [p for p in range(4, 68) if not 20 <= p < 30]
        mean = key[0, :, seen].mean(1)
        torch.testing.assert_close(header[:, : mean.shape[-1]].float(), mean, rtol=2**-10, atol=1e-4)
        got_key, got_value = state.gather()
        error = (got_key[:, :, 20:30] - key[:, :, 20:30]).norm() / key[:, :, 20:30].norm()
        assert error < 0.15
        assert (got_value[:, :, 20:30] - value[:, :, 20:30]).norm() < 0.15 * value[:, :, 20:30].norm()

    def test_non_finite_tokens_raise_the_flag_of_their_head(self) -> None:
        state = PackedState(sized("tq4"), heads=3, row_start=(0, 0))
        key, value = state.tokens(300)
        key[1, 2, 80, 0], value[0, 0, 150, 3] = math.inf, math.nan
        state.commit(key, value)
        assert state.flags.tolist() == [NON_FINITE_VALUE, 0, NON_FINITE_KEY]
        state.commit(*state.tokens(64, seed=1))
        assert state.flags.tolist() == [NON_FINITE_VALUE, 0, NON_FINITE_KEY]  # they stay
        _, got = state.gather()
        assert not got[0, 0, 150].any() and got.isfinite().all()

    def test_nothing_to_commit(self) -> None:
        state, _, _ = filled("tq4", 100)
        before = {name: tensor.clone() for name, tensor in state.tensors.items()}
        state.commit(*state.tokens(0))
        for name, tensor in state.tensors.items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)

    def test_after_a_crop_pages_start_where_it_cut(self) -> None:
        state, key, value = filled("tq4", 300)
        state.crop(100)
        again_key, again_value = state.tokens(200, seed=7)
        state.commit(again_key[:, :, :90], again_value[:, :, :90])
        state.commit(again_key[:, :, 90:], again_value[:, :, 90:])
        assert state.counters.tolist() == [300, 228, 4]
        assert state.entries[:4].tolist() == [[4, 64], [68, 32], [100, 64], [164, 64]]
        got_key, got_value = state.gather()
        expected_key = torch.cat((key[:, :, :100], again_key), 2)
        expected_value = torch.cat((value[:, :, :100], again_value), 2)
        for got, expected in ((got_key, expected_key), (got_value, expected_value)):
            assert ((got - expected).square().mean(-1) / expected.square().mean(-1)).max() < 0.1
            assert torch.equal(got[:, :, 228:], expected[:, :, 228:])

    def test_too_small_a_bound_is_refused_before_anything_is_written(self) -> None:
        state = PackedState(sized("tq4"))
        key, value = state.tokens(300)
        with pytest.raises(ValueError, match="max_due=2 is too small: 3"):
            state.commit_alone(key, value, keep=None, recent_window=64, max_due=2)
        assert state.counters.tolist() == [0, 4, 0] and state.ring_key.isnan().all()


class TestGather:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_raw_returns_every_bit(self, dtype: torch.dtype) -> None:
        state, key, value = filled("raw", 300, (41,), dim=80, value_dim=48, row_start=(0, 13, 150), dtype=dtype)
        got_key, got_value = state.gather()
        assert got_key.dtype == got_value.dtype == dtype
        for row, first in enumerate((0, 13, 150)):
            for got, expected in ((got_key, key), (got_value, value)):
                assert torch.equal(got[row, :, first:], expected[row, :, first:])
                assert not got[row, :, :first].any()

    @pytest.mark.parametrize("length", [0, 1, 4, 70, 132, 200, 299, 300, 320])
    def test_lengths(self, length: int) -> None:
        state, _, _ = filled("tq3", 300, row_start=(0, 6))
        whole = state.gather()
        for got, expected in zip(state.gather(length), whole, strict=True):
            assert got.shape[2] == length
            assert torch.equal(got[:, :, :300], expected[:, :, :length])
            assert not got[:, :, 300:].any()

    def test_sinks_and_window_are_exact_and_the_rest_is_near(self) -> None:
        state, key, value = filled("tq4", 300)
        for got, expected in zip(state.gather(), (key, value), strict=True):
            assert torch.equal(got[:, :, :4], expected[:, :, :4])
            assert torch.equal(got[:, :, 196:], expected[:, :, 196:])
            error = (got - expected)[:, :, 4:196].square().sum() / expected[:, :, 4:196].square().sum()
            assert 0.007 < error < 0.011

    def test_fp16_never_overflows(self) -> None:
        state = PackedState(sized("4bit_nc"), dtype=torch.float16)
        key, value = state.tokens(64)
        key[:, :, 0], value[:, :, 0] = 0, 0
        key[:, :, 0, 5], value[:, :, 0, 5] = 65504, 65504
        state.commit(key, value)
        assert all(part.isfinite().all() for part in state.gather())


def run_all() -> list[Tensor]:
    state, _, _ = filled("tq3", 200, (90, 1), row_start=(0, 5))
    query = state.tokens(2, seed=3)[0].repeat_interleave(2, 1)
    mask = torch.ones(2, 1, 1, 202, dtype=torch.bool, device="cpu")
    out = state.attend(query, *state.tokens(2, seed=4), mask=mask)
    return [out, state.pool, state.counters, *state.gather()]


class TestSurroundings:
    """The reference depends on nothing but its arguments, and leaves nothing behind."""

    def check(self, changed: Callable[[], list[Tensor]]) -> None:
        for got, expected in zip(changed(), run_all(), strict=True):
            assert got.dtype == expected.dtype and got.device == expected.device
            torch.testing.assert_close(got, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_default_dtype(self, dtype: torch.dtype) -> None:
        state, _, _ = filled("tq3", 130, row_start=(0, 5))
        key, value = state.tokens(70, seed=3)
        query = key[:, :, :2]
        expected = state.attend(query, key, value), *state.gather()
        torch.set_default_dtype(dtype)
        try:
            got = state.attend(query, key, value), *state.gather()
            state.commit(key, value)
        finally:
            torch.set_default_dtype(torch.float32)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
        assert state.counters.tolist() == [200, 132, 2]

    def test_default_device(self) -> None:
        state, _, _ = filled("k3v4_nc", 130, row_start=(0, 5))
        key, value = state.tokens(70, seed=3)
        query = key[:, :, :2]
        expected = state.attend(query, key, value), *state.gather()
        torch.set_default_device("meta")
        try:
            got = state.attend(query, key, value), *state.gather()
            state.commit_alone(key, value, keep=None, recent_window=64, max_due=1)
        finally:
            torch.set_default_device(None)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)

    def test_inference_mode(self) -> None:
        def changed() -> list[Tensor]:
            with torch.inference_mode():
                return run_all()

        self.check(changed)

    def test_autocast(self) -> None:
        def changed() -> list[Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return run_all()

        self.check(changed)

    def test_inputs_that_need_gradients(self) -> None:
        state = PackedState(sized("tq4"))
        key, value = (part.requires_grad_() for part in state.tokens(200))
        state.commit(key, value)
        out = state.attend(key[:, :, :1], key[:, :, :1], value[:, :, :1])
        assert not out.requires_grad and not state.ring_key.requires_grad

    def test_random_state_is_untouched(self) -> None:
        before = torch.get_rng_state()
        run_all()
        assert torch.equal(torch.get_rng_state(), before)
