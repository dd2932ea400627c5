"""The kernels with fresh memory full of NaN, and with numbers that are not finite: in Triton's interpreter, or on a GPU.

Run this file in a process of its own with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.kernel_states import EITHER, FP16, State, commit_chunks, fresh_state, preset, random_tokens
from tests.robustness.counts import count
from tests.robustness.rows import same_bits
from tests.test_kernels_attend import STATE, Case, make, make_mask
from tq_hf import reference
from tq_hf.kernels import attend, commit, gather

POISON = float("nan")
ATTEND = [
    Case(length=100),
    Case(preset="4bit_nc", dim=32, length=140, rows=2, row_start=(0, 70), mask="row"),
    Case(preset="tq2", dim=32, length=170, queries=3, mask="query"),
    Case(preset="k8v4", length=70, queries=20, causal=True),
    Case(preset="raw", dim=80, length=140, group=4, aux_sinks=True),
    Case(preset="tq3", dim=32, length=170, queries=18),
    Case(length=3, queries=1),
]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """All fresh memory that Python asks for holds NaN (integers: their largest); a list that grows with every call.

    Patched, not `use_deterministic_algorithms`, which on a GPU would choose other algorithms.
    """
    calls: list[int] = []

    def filled(make: object) -> object:
        def fresh(*args: object, **options: object) -> Tensor:
            made: Tensor = make(*args, **options)  # type: ignore[operator]
            calls.append(made.numel())
            return made.fill_(POISON if made.is_floating_point() else torch.iinfo(made.dtype).max)

        return fresh

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
    yield calls


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("case", ATTEND, ids=str)
def test_attention_writes_every_element(case: Case, device: str, poison: list[int]) -> None:
    config, given, state = make(case, device)
    layout = config.layout(case.dim, case.value_dim or case.dim, case.dtype)
    mask = make_mask(case, int(state["counters"][0]) + given[1].shape[2], device)
    sinks = torch.linspace(-1, 2, given[0].shape[1], device=device) if case.aux_sinks else None
    arguments = (*given, *(state[name] for name in STATE), mask, sinks, layout.name, case.dim**-0.5, 0.0, case.causal)
    before = len(poison)
    output = attend(*arguments, state["page_ids"].shape[1])
    assert len(poison) > before, "nothing was poisoned"
    assert output.isfinite().all()
    count("kernel outputs written into poisoned memory")


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("name", ["tq4", "k8v4", "raw"])
def test_commit_and_gather_write_every_element(name: str, device: str, poison: list[int]) -> None:
    """`fresh_state` holds garbage where nothing is written: what is read of it later is what was written since."""
    case = preset(name, 32, FP16, page_size=32, recent_window=5, sink_tokens=2)
    generator = torch.Generator().manual_seed(0)
    results = []
    for garbage in (0, 1):
        generator.manual_seed(0)
        state = fresh_state(case, 70, [0, 36], generator).to(device)
        if garbage:
            state.pool.random_(-(2**31), 2**31 - 1)
        key, value = (t.to(device) for t in random_tokens(case, 70, generator.manual_seed(7)))
        commit_chunks(commit, state, case, key, value, (50, 1, 19), None)
        used = state.page_ids[:, : int(state.counters[2])]
        dense = gather(*state.read, case.layout.name, 73)
        assert all(side.isfinite().all() for side in dense)
        results.append((state.pool[used[used >= 0].long()].cpu(), *(side.cpu() for side in dense)))
    for clean, dirty in zip(*results, strict=True):
        assert same_bits(clean, dirty)
    count("kernel outputs written into poisoned memory", 3)


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("name", ["tq4", "k8v4", "raw"])
def test_a_bad_token_changes_no_other_row_in_the_kernels(name: str, device: str) -> None:
    """Row 1 gets a bad key in a page and a bad value in the ring: the other row's bytes and outputs stay, bit for bit."""
    case = preset(name, 32, FP16, page_size=32, recent_window=5, sink_tokens=2)
    runs = []
    for is_bad in (False, True):
        generator = torch.Generator().manual_seed(0)
        state: State = fresh_state(case, 60, [0, 0], generator).to(device)
        key, value = (t.to(device) for t in random_tokens(case, 60, generator))
        query = torch.randn(2, 4, 1, 32, generator=generator).to(device, FP16)
        if is_bad:
            key[1, 0, 20, 3], value[1, 1, 57, 0] = torch.nan, torch.inf
        commit_chunks(commit, state, case, key[:, :, :59], value[:, :, :59], (45, 1, 13), None)
        rest = (None, None, case.layout.name, 0.177, 0.0, True, state.page_ids.shape[1])
        output = attend(query, key[:, :, 59:], value[:, :, 59:], *state.read, *rest)
        runs.append((state, output))
    (clean, expected), (dirty, output) = runs
    assert clean.flags.tolist() == [0, 0] and dirty.flags.tolist() == [1, 0]
    used = int(clean.counters[2])
    assert used >= 1 and torch.equal(clean.counters, dirty.counters)
    for row, heads in ((0, (0, 1)), (1, (1,))):
        pages = clean.page_ids[row, :used].long()
        for head in heads:
            assert same_bits(dirty.pool[pages, head], clean.pool[pages, head])
    assert output[0].isfinite().all() and same_bits(output[0], expected[0])
    assert output[1, :, :2].isfinite().all(), "a packed bad key is a zero vector"
    if name in ("4bit_nc", "k8v4", "raw"):  # pages without a mean: the neighbours' bytes stay as well
        difference = (dirty.pool[clean.page_ids[1, :used].long(), 0] != clean.pool[clean.page_ids[1, :used].long(), 0]).sum()
        assert 0 < difference <= 64 + 2
    count("bad tokens")


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize(
    ("name", "bits", "queries"),
    [("tq4", 4, 1), ("tq2", 2, 3), ("tq4", 4, 20), ("4bit_nc", 4, 1), ("4bit_nc", 4, 20), ("k8v4", 8, 20)],
)
def test_values_at_the_limit_of_fp16_stay_finite(name: str, bits: int, queries: int, device: str) -> None:
    """What a page holds of them lies beyond it."""
    limit = torch.finfo(FP16).max
    case = preset(name, 32, FP16, page_size=32, recent_window=5, sink_tokens=2, value_bits=bits)
    generator = torch.Generator().manual_seed(0)
    state = fresh_state(case, 70 + queries, [0, 0], generator).to(device)
    key, value = random_tokens(case, 70 + queries, generator)
    query = torch.randn(2, 4, queries, 32, generator=generator).to(device, FP16)
    value.copy_(limit * value[0, 0, 0].sign())
    key, value = key.to(device), value.to(device)
    commit_chunks(commit, state, case, key[:, :, :70], value[:, :, :70], (45, 1, 24), None)
    new, rest = (key[:, :, 70:], value[:, :, 70:]), (None, None, case.layout.name, 0.177, 0.0, True, state.page_ids.shape[1])
    wide = reference.attend(query.float(), *(t.float() for t in new), *state.read, *rest)
    assert wide.isfinite().all() and (wide.abs() > limit).any()
    output = attend(query, *new, *state.read, *rest)
    assert output.isfinite().all()
    torch.testing.assert_close(output.float(), wide.clamp(-limit, limit), rtol=0, atol=4e-3 * limit)
    count("outputs at the limit of fp16", output.numel())


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize(("name", "queries"), [("tq4", 1), ("4bit_nc", 20)])
def test_values_that_are_not_finite_come_out_as_they_are(name: str, queries: int, device: str) -> None:
    bad = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=FP16)
    case = preset(name, 32, FP16, page_size=32, recent_window=5, sink_tokens=2)
    generator = torch.Generator().manual_seed(0)
    state = fresh_state(case, 70 + queries, [0, 0], generator).to(device)
    key, value = random_tokens(case, 70 + queries, generator)
    query = torch.randn(2, 4, queries, 32, generator=generator).to(device, FP16)
    value[:, :, 69, :3] = bad  # in the ring, where all queries see it
    key, value = key.to(device), value.to(device)
    commit_chunks(commit, state, case, key[:, :, :70], value[:, :, :70], (45, 1, 24), None)
    rest = (None, None, case.layout.name, 0.177, 0.0, True, state.page_ids.shape[1])
    arguments = (query, key[:, :, 70:], value[:, :, 70:], *state.read, *rest)
    output = attend(*arguments)
    assert output[..., 3:].isfinite().all()
    torch.testing.assert_close(output[..., :3].cpu(), bad.expand(2, queries, 4, 3), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(output.isnan(), reference.attend(*arguments).isnan())
    count("outputs that are not finite", 3 * output.numel() // 32)


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("name", ["tq4", "k8v4"])
def test_a_row_of_the_kernels_does_not_depend_on_its_batch_mates(name: str, device: str) -> None:
    """Packed bytes are the same beside other rows; attention's splits, and with them its rounding, may differ."""
    case = preset(name, 32, FP16, page_size=32, recent_window=5, sink_tokens=2, balance_keys=False)
    packed = []
    for mate in (1, 2):
        state = fresh_state(case, 60, [0, 0], torch.Generator().manual_seed(0)).to(device)
        key, value = (t.to(device) for t in random_tokens(case, 60, torch.Generator().manual_seed(0)))
        key[1] *= mate
        value[1] = value[1].roll(mate, 0)
        commit_chunks(commit, state, case, key, value, (45, 1, 14) if mate == 1 else (60,), None)
        packed.append(state.pool[state.page_ids[0, : int(state.counters[2])].long()].cpu())
    assert same_bits(*packed)
    count("rows compared with their like alone")
