"""The kernels of a commit, compiled as it would launch them on GPUs that this machine need not have."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiling import Launch, compile_launch, compiler_steps, lanes_hold_elements, resources
from tq_hf.config import TurboQuantConfig

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def launches(
    monkeypatch: pytest.MonkeyPatch, architecture: int, preset: str, dims: tuple[int, int], dtype: torch.dtype, max_due: int,
    tokens: int = 200,
) -> dict[str, Launch]:  # fmt: skip
    """Kernel, options, arguments and constants of each launch of one `commit`, by the kernel's name.

    dims: of keys and of values.
    """
    commit_module, store, launching = (
        importlib.import_module(f"tq_hf.kernels.{name}") for name in ("commit", "store", "launch")
    )
    config = TurboQuantConfig.from_preset(preset)
    layout = config.layout(*dims, dtype)
    found: dict[str, Launch] = {}

    def record(call: Any, *tensors: Any) -> None:
        assert all(size >= 1 for size in call.grid)
        launcher = call.launcher
        found[launcher.kernel.fn.__name__] = launcher.kernel, launcher.options, (*tensors, *call.numbers), launcher.constants

    def packing(name: str, device: torch.device) -> tuple[Any, bool]:
        assert name == layout.name
        return store.packing(layout, device), architecture >= 90

    monkeypatch.setattr(launching.Call, "__call__", record)
    monkeypatch.setattr(commit_module, "_packing", packing)
    commit_module.calls_behind_packing.cache_clear()
    batch, heads, slots = 2, 2, config.recent_window + config.page_size

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32)

    new = [torch.empty(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2) for dim in dims]
    exact = [torch.empty(batch, heads, n, dim, dtype=dtype) for n in (slots, config.sink_tokens) for dim in dims]
    balance = torch.empty(batch, heads, dims[0]) if config.balance_keys else None
    commit_module.commit(
        *new, numbers(9, heads, layout.page_words), *exact, numbers(batch, 4), numbers(4, 2), numbers(batch), numbers(3),
        balance, numbers(heads), None, layout.name, config.recent_window, max_due,
    )  # fmt: skip
    return found


# Triton 3.6 to 3.9 leave different numbers of bytes on the stack: 16 and 32 in the first case, 408 to 624 in the last, none
# and 40 in the first of min-max values.
@pytest.mark.parametrize(
    ("architecture", "preset", "dims", "dtype", "most_registers", "most_stack"),
    [
        (90, "tq4", (128, 128), torch.bfloat16, 144, 64),
        (90, "tq3", (96, 96), torch.float32, 144, 160),
        (80, "tq2", (128, 128), torch.bfloat16, 144, 320),
        (90, "4bit_nc", (128, 128), torch.bfloat16, 144, 64),
        (80, "3bit_nc", (96, 96), torch.float32, 144, 64),
        (90, "4bit_nc", (256, 256), torch.float16, 255, 64),
        (90, "tq4", (256, 256), torch.float16, 255, 416),
        (90, "tq4", (192, 128), torch.bfloat16, 255, 64),
        (90, "tq3", (64, 128), torch.bfloat16, 144, 128),
        (90, "tq2", (256, 64), torch.float16, 255, 736),
    ],
    ids=str,
)
def test_packing_stays_in_registers(
    monkeypatch: pytest.MonkeyPatch, architecture: int, preset: str, dims: tuple[int, int], dtype: torch.dtype,
    most_registers: int, most_stack: int, tmp_path: Path,
) -> None:  # fmt: skip
    kernel = compile_launch(launches(monkeypatch, architecture, preset, dims, dtype, 3)["pack_pages"], architecture)
    registers, stack = resources(kernel, tmp_path)
    assert registers <= most_registers and stack <= most_stack
    assert lanes_hold_elements(kernel.asm["ttgir"]) >= 20
    # With min-max values, metadata change lanes through it since Triton 3.7, and keys in fp32 with 3.9.
    assert kernel.metadata.shared <= (1024 if preset.endswith("_nc") else 0)


@pytest.mark.parametrize(
    ("preset", "dim", "dtype", "most"),
    [("tq4", 128, torch.bfloat16, 1280e6), ("4bit_nc", 128, torch.bfloat16, 208e6), ("tq4", 256, torch.float16, 430e6)],
    ids=str,
)
def test_packing_compiles_in_seconds(
    monkeypatch: pytest.MonkeyPatch, preset: str, dim: int, dtype: torch.dtype, most: float
) -> None:
    """1.5 times what it takes now: code that doubles takes eight times as long."""
    launch = launches(monkeypatch, 90, preset, (dim, dim), dtype, 3)["pack_pages"]
    steps = compiler_steps(compile_launch(launch, 90).asm["ttir"])
    assert steps <= most


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("max_due", [0, 1])
def test_the_steps_of_a_commit(
    monkeypatch: pytest.MonkeyPatch, architecture: int, max_due: int, tokens: int, tmp_path: Path
) -> None:
    found = launches(monkeypatch, architecture, "tq4", (128, 128), torch.bfloat16, max_due, tokens)
    steps = ["pack_pages"] * max_due + (["append_token"] if tokens == 1 else ["append_tokens", "advance_counters"])
    assert list(found) == steps
    # Each but the first may start early, where GPUs can do that, and only there; and waits for the one ahead.
    early = [name for name, (_, options, _, _) in found.items() if options.get("launch_pdl")]
    assert early == (steps[1:] if architecture >= 90 else [])
    for name in steps[max_due:]:
        kernel = compile_launch(found[name], architecture)
        assert resources(kernel, tmp_path)[1] == 0
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (name in early)
