"""The kernels of a decode step, compiled as `attend` would launch them on GPUs that this machine need not have."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiling import Launch, compile_launch, compiler_steps, lanes_hold_elements, resources
from tq_hf.config import TurboQuantConfig

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

# Of an H200 and, with fewer and smaller multiprocessors, most others: what decides how work is split.
PROCESSORS = {80: 108, 90: 132}
SHARED_MEMORY = {80: 100 << 10, 90: 228 << 10}


def launches(
    monkeypatch: pytest.MonkeyPatch,
    architecture: int,
    preset: str,
    dim: int,
    columns: int,
    batch: int,
    entries: int,
    queries: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    appends: bool = False,
    **options: Any,
) -> dict[str, Launch]:
    """Kernel, options, arguments and constants of each launch of one `attend`, by the kernel's name.

    appends: whether it appends its token as well, where no page falls due.
    """
    schedule_module = importlib.import_module("tq_hf.kernels.schedule")
    found = {}

    def record(call: Any, kind: Any, tensors: tuple[Any, ...]) -> None:
        assert tensors[0] is not None and len(call.grid) == 3 and all(size >= 1 for size in call.grid)
        launcher = call.launcher
        found[launcher.kernel.fn.__name__] = launcher.kernel, launcher.options, (*tensors, *call.numbers), launcher.constants

    properties = SimpleNamespace(
        major=architecture // 10,
        multi_processor_count=PROCESSORS[architecture],
        shared_memory_per_multiprocessor=SHARED_MEMORY[architecture],
    )
    monkeypatch.setattr(schedule_module.Call, "look_up", record)
    monkeypatch.setattr(schedule_module, "_properties", lambda device: properties)
    schedule_module.schedule.cache_clear()
    from tq_hf.kernels.attend import attend, calls

    calls.cache_clear()

    config = TurboQuantConfig.from_preset(preset, **options)
    layout = config.layout(dim, dim, dtype)

    def vectors(*shape: int) -> Tensor:
        return torch.empty(*shape, dim, dtype=dtype)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32)

    heads, slots, sinks = 2, config.recent_window + config.page_size, config.sink_tokens
    new = vectors(batch, heads, queries)
    rings = [vectors(batch, heads, slots) for _ in range(2)] + [vectors(batch, heads, sinks) for _ in range(2)]
    table = [numbers(batch, entries), numbers(entries, 2), numbers(batch), numbers(3)]
    balance = torch.empty(batch, heads, dim) if config.balance_keys else None
    attend(
        vectors(batch, heads * columns, queries), new, new, numbers(4, heads, layout.page_words), *rings, *table, balance,
        None, None, layout.name, dim**-0.5, 0.0, True, entries, config.recent_window if appends else None,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("batch", "dtype", "warps"),
    [(1, torch.bfloat16, 1), (2, torch.float32, 1), (32, torch.bfloat16, 4), (64, torch.bfloat16, 0)],
    ids=str,
)
def test_a_step_ends_with_its_token(
    monkeypatch: pytest.MonkeyPatch, batch: int, dtype: torch.dtype, warps: int, architecture: int, tmp_path: Path
) -> None:
    """Beside the combination, unless it is too much for one program (0 warps)."""
    found = launches(monkeypatch, architecture, "tq4", 128, 4, batch, 8, dtype=dtype, appends=True)
    if warps == 0:
        assert list(found)[-3:] == ["combine", "append_tokens", "advance_counters"]
        return
    assert list(found)[-2:] == ["decode", "combine_and_append"]
    launch = found["combine_and_append"]
    assert launch[1]["num_warps"] == warps
    compiled = compile_launch(launch, architecture)
    assert resources(compiled, tmp_path)[1] == 0
    assert compiled.asm["ptx"].count("griddepcontrol.wait") == (2 if architecture >= 90 else 0)  # both parts


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("preset", ["tq4", "4bit_nc"])
def test_a_step_compiles(monkeypatch: pytest.MonkeyPatch, preset: str, architecture: int, tmp_path: Path) -> None:
    found = launches(monkeypatch, architecture, preset, 128, 4, 2, 100)
    assert list(found) == ["prepare", "decode", "combine"]
    # Each kernel may start early, where GPUs can do that, and only there.
    early = [name for name, (_, options, _, _) in found.items() if options.get("launch_pdl")]
    assert early == (["prepare", "decode", "combine"] if architecture >= 90 else [])
    assert found["decode"][3]["TAIL"]
    for name, least in (("prepare", 16), ("decode", 80), ("combine", 0)):
        compiled = compile_launch(found[name], architecture)
        assert name == "decode" or resources(compiled, tmp_path)[1] == 0, name
        assert lanes_hold_elements(compiled.asm["ttgir"]) >= least, name


def test_the_benchmark_can_leave_kernels_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench_decode import without

    from tq_hf.kernels.attend import calls

    launches(monkeypatch, 90, "tq4", 128, 4, 1, 8)
    assert calls.cache_info().currsize == 1  # what another call that looks alike would launch
    with without("prepare", "combine"):
        assert calls.cache_info().currsize == 0
        assert list(launches(monkeypatch, 90, "tq4", 128, 4, 1, 8)) == ["decode"]
    assert calls.cache_info().currsize == 0


def test_exact_tokens_of_32_bits_have_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = launches(monkeypatch, 90, "tq4", 128, 4, 2, 100, dtype=torch.float32)
    assert list(found) == ["prepare", "attend_exact", "decode", "combine"]
    assert [name for name, (_, options, _, _) in found.items() if options.get("launch_pdl")] == list(found)
    assert not found["decode"][3]["TAIL"]
    for launch in found.values():
        assert resources(compile_launch(launch, 90), tmp_path)[1] == 0


@pytest.mark.parametrize("preset", ["tq4", "tq2"])
@pytest.mark.parametrize(("rows", "thousands"), [(1, 8), (1, 32), (1, 128), (8, 32), (32, 32)])
def test_slots_leave_room_for_exact_tokens(monkeypatch: pytest.MonkeyPatch, preset: str, rows: int, thousands: int) -> None:
    """All slots run at once, and programs of exact tokens, one after another in the places left, are done as early."""
    module = importlib.import_module("tq_hf.kernels.schedule")
    monkeypatch.setattr(module, "_properties", lambda device: SimpleNamespace(major=9, multi_processor_count=132))
    module.schedule.cache_clear()
    config = TurboQuantConfig.from_preset(preset)
    layout = config.layout(128, 128, torch.bfloat16)
    ring, entries = config.recent_window + config.page_size, 1024 * thousands // config.page_size
    plan = module.schedule(
        layout.name, rows, 8, 4, 1, 1, ring, 4, torch.bfloat16, None, torch.bfloat16, torch.device("cpu"), entries, True,
        False, False, False,
    )  # fmt: skip
    places = 12 * 132  # 168 registers
    assert plan.tail_programs == rows * (1 + ring // 16 + 1)
    assert plan.decode.grid == (8, plan.slots + plan.tail_programs, 1)
    free = places - 8 * plan.slots
    turns = -(-8 * plan.tail_programs // free)
    groups = -(-rows * entries * layout.groups // plan.slots)
    assert turns == 1 or turns * module.TAIL_GROUPS <= groups
    assert 8 * plan.slots >= 0.95 * places or groups <= 2


def test_many_exact_tokens_have_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches(monkeypatch, 90, "tq4", 64, 4, 2, 100, recent_window=1024)
    assert "attend_exact" in found and not found["decode"][3]["TAIL"]


@pytest.mark.parametrize(
    ("architecture", "preset", "dim", "columns", "entries", "tile"),
    [
        (80, "tq4", 128, 4, 100, 1),
        (80, "k8v4", 128, 4, 100, 1),
        (90, "tq4", 128, 4, 100, 1),
        (90, "tq4", 128, 4, 50_000, 2),
        (90, "tq2", 128, 4, 100, 2),
        (90, "4bit_nc", 128, 4, 100, 1),
        (90, "k8v4", 128, 4, 100, 1),
        (90, "tq3", 96, 1, 100, 2),
        (90, "tq4", 128, 8, 100, 1),
        (90, "tq4", 64, 8, 100, 2),
        (90, "tq4", 256, 4, 100, 1),
    ],
)
def test_decode_spills_nothing(
    monkeypatch: pytest.MonkeyPatch, architecture: int, preset: str, dim: int, columns: int, entries: int, tile: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    decode = launches(monkeypatch, architecture, preset, dim, columns, 2, entries)["decode"]
    assert decode[3]["TILE"] == tile
    compiled = compile_launch(decode, architecture)
    registers, stack = resources(compiled, tmp_path)
    assert registers <= 168 and stack == 0
    assert lanes_hold_elements(compiled.asm["ttgir"]) >= 50


@pytest.mark.parametrize(
    ("preset", "dim", "columns", "most"),
    [("tq4", 256, 8, 0), ("tq4", 128, 16, 64), ("tq2", 128, 16, 32), ("4bit_nc", 128, 16, 64), ("k8v4", 128, 16, 32)],
)
def test_the_widest_decode_spills_little(
    monkeypatch: pytest.MonkeyPatch, preset: str, dim: int, columns: int, most: int, tmp_path: Path
) -> None:
    """And copies tiles ahead, into no more shared memory than is counted on."""
    schedule_module = importlib.import_module("tq_hf.kernels.schedule")
    decode = launches(monkeypatch, 90, preset, dim, columns, 1, 100)["decode"]
    compiled = compile_launch(decode, 90)
    registers, stack = resources(compiled, tmp_path)
    assert registers <= 168 and stack <= most
    assert lanes_hold_elements(compiled.asm["ttgir"]) >= 100
    group = 4 * decode[3]["L"].group_words
    assert 2 * group <= compiled.metadata.shared <= 2 * (group + schedule_module.DECODE_REST)


@pytest.mark.parametrize(
    ("preset", "dim", "columns", "kernel"),
    [
        ("tq4", 128, 17, "extend"),
        ("raw", 128, 17, "attend_packed"),
        ("tq4", 256, 9, "attend_packed"),
        ("tq4", 256, 17, "extend"),
        ("raw", 64, 1, "attend_packed"),
        ("tq4", 128, 16, "decode"),
    ],
)
def test_which_kernel_takes_what(monkeypatch: pytest.MonkeyPatch, preset: str, dim: int, columns: int, kernel: str) -> None:
    found = launches(monkeypatch, 90, preset, dim, columns, 1, 10)
    assert [name for name in ("decode", "extend", "attend_packed") if name in found] == [kernel]


@pytest.mark.parametrize(
    ("architecture", "preset", "dim", "queries", "tile"),
    [
        (80, "tq4", 128, 512, (64, 2)),
        (80, "tq2", 256, 512, (64, 1)),  # 100 KiB of shared memory
        (90, "tq4", 128, 16, (64, 2)),
        (90, "tq4", 128, 512, (128, 4)),
        (90, "k8v4", 64, 512, (128, 4)),
        (90, "tq3", 256, 512, (64, 2)),
    ],
)
def test_extend_fits_the_gpu(
    monkeypatch: pytest.MonkeyPatch, architecture: int, preset: str, dim: int, queries: int, tile: tuple[int, int],
    tmp_path: Path,
) -> None:  # fmt: skip
    found = launches(monkeypatch, architecture, preset, dim, 4, 1, 2000, queries)
    assert (found["extend"][3]["COLUMNS"], found["extend"][3]["TILE"]) == tile
    assert list(found)[-1] == "combine"
    early = [name for name, (_, options, _, _) in found.items() if options.get("launch_pdl")]
    assert early == (list(found) if architecture >= 90 else [])
    for name in {"rotate_means", "extend"} & found.keys():
        compiled = compile_launch(found[name], architecture)
        assert compiled.metadata.shared <= SHARED_MEMORY[architecture] - 1024, name
        most = 256 if name == "extend" and dim > 128 else 24  # 24 in the first of Hopper's cases by Triton 3.9
        assert resources(compiled, tmp_path)[1] <= most, name
        if name == "extend":
            assert ("wgmma" in compiled.asm["ptx"]) == (architecture >= 90)
    ptx = compile_launch(found["combine"], architecture).asm["ptx"]
    assert "fma.rn.f32" not in ptx and "mul.rn.f32" in ptx  # its lanes' copies of a sum are alike to the last bit


@pytest.mark.parametrize(
    ("kernel", "preset", "dim", "columns", "queries", "most"),
    [
        ("prepare", "tq4", 128, 4, 1, 17e6),
        ("prepare", "tq4", 256, 4, 1, 36e6),
        ("decode", "tq4", 128, 4, 1, 430e6),
        ("decode", "tq4", 256, 4, 1, 260e6),
        ("decode", "tq4", 256, 8, 1, 340e6),
        ("combine", "tq4", 256, 4, 64, 1.9e6),
        ("rotate_means", "tq4", 256, 4, 64, 0.8e6),
        ("attend_exact", "tq4", 256, 4, 64, 0.6e6),
        ("extend", "tq4", 128, 4, 64, 5.3e6),
        ("extend", "tq4", 256, 4, 64, 9e6),
    ],
)
def test_kernels_compile_in_seconds(
    monkeypatch: pytest.MonkeyPatch, kernel: str, preset: str, dim: int, columns: int, queries: int, most: float
) -> None:
    """1.5 times what they take now: code that doubles takes eight times as long."""
    found = launches(monkeypatch, 90, preset, dim, columns, 2, 100, queries)
    steps = compiler_steps(compile_launch(found[kernel], 90).asm["ttir"])
    assert steps <= most
