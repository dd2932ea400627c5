"""What a decode step leaves to the host: once a shape or once a page, not at every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from tq_hf import TurboQuantCache, ops
from tq_hf.attention import turboquant_attention
from tq_hf.layers import full as layer
from tq_hf.layers.full import TurboQuantLayer
from tq_hf.quantizer import conditioning, rotary

CONFIG = LlamaConfig(hidden_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
PAGE, WINDOW, SINKS = 32, 32, 4
SIZES = {"page_size": PAGE, "recent_window": WINDOW, "sink_tokens": SINKS}


def states(tokens: int, heads: int = 2, batch: int = 1, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(batch, tokens, heads, 32, generator=generator).transpose(1, 2).to(device)


def step(cache: TurboQuantCache, tokens: int, mask: Tensor | None = None, batch: int = 1, device: str = "cpu") -> Tensor:
    handles = cache.update(states(tokens, 2, batch, device), states(tokens, 2, batch, device), 0)
    return turboquant_attention(torch.nn.Module(), states(tokens, 4, batch, device), *handles, mask)[0]


def padded(length: int) -> Tensor:
    """Compact mask of 2 rows, the second of which starts at position 20."""
    mask = torch.ones(2, 1, 1, length, dtype=torch.uint8)
    mask[1, :, :, :20] = 0
    return mask


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """A list that grows with each call of `owner.name`."""
    calls: list[None] = []
    run: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return run(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_states_are_validated_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TurboQuantCache(CONFIG, **SIZES)
    calls = counted(monkeypatch, TurboQuantLayer, "_validate")
    for tokens, expected in ((50, 1), (1, 2), (1, 2), (1, 2), (2, 3), (1, 4)):
        step(cache, tokens)
        assert len(calls) == expected
    cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="batch size 1 does not match the 2 rows"):
        step(cache, 1)
    step(cache, 1, batch=2)
    cache.reset()
    step(cache, 1)
    with pytest.raises(ValueError, match="batch size 2 does not match the 1 rows"):
        step(cache, 1, batch=2)


def test_a_mask_is_reduced_when_rows_start_or_a_page_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TurboQuantCache(CONFIG, **SIZES)
    table = cache.table
    calls = counted(monkeypatch, layer, "kept_positions")
    prompt = SINKS + 2 * PAGE + WINDOW
    step(cache, prompt, padded(prompt), batch=2)
    assert len(calls) == 1 and table.row_starts == [0, 20] and len(table.spans) == 2
    for i in range(1, 2 * PAGE + 1):
        step(cache, 1, padded(prompt + i), batch=2)
        assert len(calls) == 1 + i // PAGE == len(table.spans) - 1


def test_balance_is_observed_until_every_row_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TurboQuantCache(CONFIG, **SIZES)
    calls = counted(monkeypatch, ops, "observe")
    late = torch.ones(2, 1, 1, 400, dtype=torch.uint8)
    late[1, :, :, : SINKS + PAGE] = 0  # all of the second row's first page
    packed = cache.packed_layers[0]
    step(cache, 50, late[..., :50], batch=2)
    while packed.packed_end < SINKS + 2 * PAGE:
        assert packed.length < 200
        before = len(calls)
        step(cache, 1, late[..., : packed.length + 1], batch=2)
        assert len(calls) == before + 1
    assert packed.balance is not None and (packed.balance > 0).all()
    for _ in range(3):
        step(cache, 1, late[..., : packed.length + 1], batch=2)
        assert len(calls) == before + 1


@pytest.mark.parametrize("batch", [1, 2], ids=["", "padded"])
def test_most_decode_steps_are_one_call(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Attention and what is left of `commit`, without a look at the mask: all but those in which a page falls due."""
    cache = TurboQuantCache(CONFIG, **SIZES)
    prompt = SINKS + 2 * PAGE + WINDOW
    step(cache, prompt, padded(prompt) if batch == 2 else None, batch=batch)
    at_once = counted(monkeypatch, ops, "attend_and_commit")
    attends, commits = counted(monkeypatch, ops, "attend"), counted(monkeypatch, ops, "commit")
    for i in range(1, 4 * PAGE + 1):
        step(cache, 1, padded(prompt + i) if batch == 2 else None, batch=batch)
    assert len(attends) == len(commits) == 4 * PAGE and len(at_once) == 4 * PAGE - 4
    assert cache.packed_layers[0].counters.tolist() == [prompt + 4 * PAGE, SINKS + 6 * PAGE, 6]


def test_a_step_without_tokens_adds_none() -> None:
    cache = TurboQuantCache(CONFIG, **SIZES)
    step(cache, SINKS + 2 * PAGE + WINDOW)
    step(cache, 1)
    before = cache.packed_layers[0].counters.tolist()
    step(cache, 0)
    assert cache.packed_layers[0].counters.tolist() == before and cache.get_seq_length() == before[0]


def test_a_new_cache_does_not_work_out_again_what_its_layers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, rope_theta=777.0
    )
    conditioning._partners.cache_clear()
    frequencies = counted(monkeypatch, rotary, "_frequencies")
    pairs = counted(monkeypatch, rotary.Rotary, "pairs")
    made = []
    for _ in range(2):
        cache = TurboQuantCache(config, **SIZES)
        for i in range(3):
            cache.update(states(50), states(50), i)
        made += [getattr(layer, name) for layer in cache.packed_layers for name in ("partner", "partner_share")]
    assert (len(frequencies), len(pairs)) == (2, 1)
    assert len({tensor.data_ptr() for tensor in made}) == len(made)  # each layer has its own, on its device


@pytest.mark.parametrize("which", ["query", "mask", "aux_sinks"])
def test_a_tensor_on_another_device_is_refused(which: str) -> None:
    cache = TurboQuantCache(CONFIG, **SIZES)
    step(cache, 200)
    key, _ = cache.update(states(1), states(1), 0)
    given: dict[str, Any] = {"query": states(1, 4), "mask": None, "aux_sinks": None}
    given[which] = torch.ones(1, 4, 1, 32, device="meta")
    with pytest.raises(ValueError, match="a tensor on meta, and its keys are on cpu"):
        cache.packed_layers[0].attend(key.step, **given, scaling=1.0, softcap=0.0, causal=True)
    assert cache.get_seq_length() == 200
    with pytest.raises(ValueError, match="a tensor on meta, and its keys are on cpu"):
        query, mask, sinks = given.values()
        ops.attend_exact(query, states(9), states(9), mask, sinks, 1.0, 0.0, True)


class Seen(TorchDispatchMode):
    """Collects the names of this project's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tq_hf":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_fake_tensors_reach_the_registered_ops() -> None:
    with FakeTensorMode():
        query, key, value = (torch.empty(1, heads, 7, 32, device="cuda") for heads in (4, 2, 2))
        out = ops.attend_exact(query, key, value, None, None, 1.0, 0.0, True)
    assert out.shape == (1, 7, 4, 32) and out.device.type == "cuda"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_modes_see_the_ops(device: str) -> None:
    caches = [TurboQuantCache(CONFIG, **SIZES) for _ in range(2)]
    for cache in caches:
        step(cache, 200, device=device)
    with Seen() as seen:
        watched = step(caches[0], 1, device=device)
    assert seen.names == ["attend", "commit"]
    assert torch.equal(watched, step(caches[1], 1, device=device))


@pytest.mark.gpu
def test_nothing_dispatches_an_eager_step_on_a_gpu() -> None:
    cache = TurboQuantCache(CONFIG, **SIZES)
    step(cache, 200, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(cache, 1, device="cuda")
    names = {event.key for event in profile.key_averages()}
    assert names and not [name for name in names if name.startswith("tq_hf::")]
