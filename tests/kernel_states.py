"""Packed layers as flat tensors, for tests of the kernels that write and read them: made, filled and compared with the
reference's. `test_kernels_store.py` says how they run without a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tq_hf import reference
from tq_hf.config import TurboQuantConfig
from tq_hf.kernels.commit import commit, gather
from tq_hf.layout import PageLayout, RunOrder
from tq_hf.reference.packing import unpack_codes, unpack_metadata

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
BATCH, HEADS = 2, 2

if INTERPRETED:
    from tests import ptx

    ptx.install()

GPU_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU and compiled kernels"),
]
EITHER = [pytest.param("cpu", marks=interpreter), pytest.param("cuda", marks=GPU_MARKS)]


def gpu(test):
    for mark in GPU_MARKS:
        test = mark(test)
    return test


@dataclass
class State:
    pool: Tensor
    ring_key: Tensor
    ring_value: Tensor
    sink_key: Tensor
    sink_value: Tensor
    page_ids: Tensor
    entries: Tensor
    row_start: Tensor
    counters: Tensor
    balance: Tensor | None
    flags: Tensor

    def to(self, device: str) -> State:
        moved = {name: t if t is None else t.to(device, copy=True) for name, t in vars(self).items()}
        return State(**moved)

    @property
    def read(self) -> tuple[Tensor | None, ...]:
        return tuple(vars(self).values())[:-1]


@dataclass(frozen=True)
class Case:
    config: TurboQuantConfig
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def layout(self) -> PageLayout:
        return self.config.layout(self.key_dim, self.value_dim, self.dtype)

    def __str__(self) -> str:
        name = self.layout.name.replace(",", "-")
        return f"{name}-w{self.config.recent_window}s{self.config.sink_tokens}-{str(self.dtype)[6:]}"


def preset(name: str, key_dim: int, dtype: torch.dtype, value_dim: int | None = None, **overrides: object) -> Case:
    return Case(TurboQuantConfig.from_preset(name, **overrides), key_dim, value_dim or key_dim, dtype)


def own(key: str, key_bits: int, value: str, value_bits: int, dims: tuple[int, int], dtype: torch.dtype, **rest) -> Case:
    return Case(TurboQuantConfig(key, key_bits, value, value_bits, **rest), *dims, dtype)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def fresh_state(case: Case, tokens: int, row_start: list[int], generator: torch.Generator) -> State:
    """An empty layer on the CPU with room for `tokens`: garbage wherever nothing is written, and shuffled pages."""
    layout, config = case.layout, case.config
    capacity = tokens // layout.page_size + 1
    starts = config.sink_tokens + layout.page_size * torch.arange(capacity, dtype=torch.int32)
    page_ids = torch.randperm(BATCH * capacity, generator=generator).int().view(BATCH, capacity) + 1
    first = torch.tensor(row_start, dtype=torch.int32)
    page_ids[starts + layout.page_size <= first[:, None] + config.sink_tokens] = -1
    garbage = torch.randint(-(2**31), 2**31 - 1, (BATCH * capacity + 2, HEADS, layout.page_words), generator=generator)

    def unwritten(slots: int, dim: int) -> Tensor:
        return torch.full((BATCH, HEADS, slots, dim), float("nan"), dtype=case.dtype)

    slots = config.recent_window + layout.page_size
    return State(
        pool=garbage.int(),
        ring_key=unwritten(slots, case.key_dim),
        ring_value=unwritten(slots, case.value_dim),
        sink_key=unwritten(config.sink_tokens, case.key_dim),
        sink_value=unwritten(config.sink_tokens, case.value_dim),
        page_ids=page_ids,
        entries=torch.stack([starts, torch.full_like(starts, layout.page_size)], 1),
        row_start=first,
        counters=torch.tensor([0, config.sink_tokens, 0], dtype=torch.int32),
        balance=torch.randn(BATCH, HEADS, case.key_dim, generator=generator).exp() if config.balance_keys else None,
        flags=torch.zeros(HEADS, dtype=torch.int32),
    )


def random_tokens(case: Case, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys with an offset per channel and values of many sizes, [B, H, tokens, dim], strided as a model's are."""
    key = torch.randn(BATCH, tokens, HEADS, case.key_dim, generator=generator)
    key += 2 * torch.randn(HEADS, case.key_dim, generator=generator)
    value = torch.randn(BATCH, tokens, HEADS, case.value_dim, generator=generator)
    value *= torch.exp(torch.randn(BATCH, tokens, HEADS, 1, generator=generator))
    return key.to(case.dtype).transpose(1, 2), value.to(case.dtype).transpose(1, 2)


def commit_chunks(
    op, state: State, case: Case, key: Tensor, value: Tensor, chunks: tuple[int, ...], keep: Tensor | None
) -> None:
    start = 0
    for n in chunks:
        op(
            key[:, :, start : start + n],
            value[:, :, start : start + n],
            *vars(state).values(),
            keep,
            case.layout.name,
            case.config.recent_window,
            n // case.layout.page_size + 1,
        )
        start += n


def stored(words: Tensor, layout: PageLayout) -> dict[str, Tensor]:
    """What pages `[..., page_words]` hold: header, codes `[..., groups, 32, dim]` and fields `[..., groups, 32]`."""
    groups = words[..., layout.header_words :].unflatten(-1, (layout.groups, layout.group_words))
    key, value, metadata = groups.split((layout.key_words, layout.value_words, layout.metadata_words), -1)
    parts = {
        "key": unpack_codes(key, layout.key_bits, RunOrder.KEYS),
        "value": unpack_codes(value, layout.value_bits, RunOrder.VALUES),
        "mean": words[..., : layout.header_words].contiguous().view(torch.float16).float(),
    }
    if layout.metadata:
        fields = unpack_metadata(metadata, len(layout.metadata))
        parts |= {name: field.float() for name, field in zip(layout.metadata, fields, strict=True)}
    return parts


def tolerance(dtype: torch.dtype) -> float:
    """For `relative_rms` of decoded vectors. Triton's interpreter cuts fp32 to bf16 instead of rounding it."""
    return 6e-3 if INTERPRETED and dtype is BF16 else 2e-3


def relative_rms(got: Tensor, expected: Tensor) -> float:
    assert not got.isnan().any()
    error, scale = (got.double() - expected.double()).square().mean().sqrt(), expected.double().square().mean().sqrt()
    return (error / scale.clamp_min(1e-30)).item()


def assert_same_state(got: State, expected: State, layout: PageLayout) -> None:
    """Everything exact, except codes next to a boundary and the last bit of fp16 scales and means."""
    for name in set(vars(got)) - {"pool"}:
        if getattr(expected, name) is None:
            continue
        torch.testing.assert_close(
            getattr(got, name),
            getattr(expected, name),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    used = expected.page_ids[:, : int(expected.counters[2])]
    used = used[used >= 0].long()
    others = torch.ones(len(expected.pool), dtype=torch.bool)
    others[used] = False
    assert torch.equal(got.pool[others], expected.pool[others]), "a page that is not due was written"
    if not len(used):
        return
    got_parts, expected_parts = stored(got.pool[used], layout), stored(expected.pool[used], layout)
    torch.testing.assert_close(got_parts["mean"], expected_parts["mean"], rtol=1e-3, atol=1e-6)
    for side, fmt in (("key", layout.key_format), ("value", layout.value_format)):
        difference = (got_parts[side].int() - expected_parts[side].int()).abs()
        if fmt in ("raw", "fp8", "min_max"):
            assert difference.max() == 0, f"{side} codes differ by up to {difference.max()}"
            continue
        scale, expected_scale = got_parts[f"{side}_scale"], expected_parts[f"{side}_scale"]
        difference[expected_scale == 0] = 0  # codes of a zero vector mean nothing
        share = (difference != 0).float().mean().item()
        count = difference.numel()
        # Vectors are rounded to fp16 before the rotation, which moves coordinates by 2e-4 of their deviation, and after it,
        # which moves 16 levels' boundaries by as much: between 1e-4 (four int8_grid levels) and 9e-4 (16 of others).
        allowed = 1e-3 + 4 * (1e-3 / count) ** 0.5 + 2 / count  # with the noise of a small sample
        assert difference.max() <= 1 and share <= allowed, f"{side} codes differ: {share:.2e}, allowed {allowed:.2e}"
        same = (difference == 0).all(-1)
        torch.testing.assert_close(scale[same], expected_scale[same], rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(scale, expected_scale, rtol=0.1, atol=1e-7)  # another code, another norm
    if layout.value_format == "min_max":
        for name in ("value_scale", "value_min"):
            assert torch.equal(got_parts[name], expected_parts[name]), name


def check(case: Case, device: str, chunks: tuple[int, ...], row_start: list[int], masked: bool = False) -> None:
    """Commits chunks with the kernels and with the reference; compares all state, then what gathering gives."""
    generator = torch.Generator().manual_seed(sum(chunks))
    tokens = sum(chunks)
    expected = fresh_state(case, tokens, row_start, generator)
    got = expected.to(device)
    key, value = random_tokens(case, tokens, generator)
    keep = torch.rand(BATCH, tokens + 5, generator=generator) < 0.8 if masked else None
    commit_chunks(reference.commit, expected, case, key, value, chunks, keep)
    on_device = [t if t is None else t.to(device) for t in (key, value, keep)]
    commit_chunks(commit, got, case, on_device[0], on_device[1], chunks, on_device[2])
    assert_same_state(got.to("cpu"), expected, case.layout)
    length = tokens + 3
    dense = gather(*got.read, case.layout.name, length)
    for side, expected_side in zip(dense, reference.gather(*got.to("cpu").read, case.layout.name, length), strict=True):
        assert side.dtype == case.dtype and side.is_contiguous()
        assert relative_rms(side.cpu(), expected_side) <= tolerance(case.dtype)
