"""The kernels of a decode step, compiled as `attend` would launch them on GPUs that this machine need not have."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tq_hf.config import TurboQuantConfig

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

TYPES = {
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
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
) -> dict[str, tuple[Any, dict[str, Any], tuple[Any, ...], dict[str, Any]]]:
    """Kernel, options, arguments and constants of each launch of one `attend`, by the kernel's name."""
    attend_module = importlib.import_module("tq_hf.kernels.attend")
    found = {}

    def record(kernel: Any, grid: tuple[int, ...], options: Any, arguments: Any, **constants: Any) -> None:
        assert all(size >= 1 for size in grid)
        found[kernel.fn.__name__] = kernel, options, arguments, constants

    properties = SimpleNamespace(
        major=architecture // 10,
        multi_processor_count=PROCESSORS[architecture],
        shared_memory_per_multiprocessor=SHARED_MEMORY[architecture],
    )
    monkeypatch.setattr(attend_module, "launch", record)
    monkeypatch.setattr(attend_module, "_properties", lambda device: properties)
    config = TurboQuantConfig.from_preset(preset)
    layout = config.layout(dim, dim, torch.bfloat16)

    def vectors(*shape: int) -> Tensor:
        return torch.empty(*shape, dim, dtype=torch.bfloat16)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32)

    heads, slots, sinks = 2, config.recent_window + config.page_size, config.sink_tokens
    new = vectors(batch, heads, queries)
    rings = [vectors(batch, heads, slots) for _ in range(2)] + [vectors(batch, heads, sinks) for _ in range(2)]
    table = [numbers(batch, entries), numbers(entries, 2), numbers(batch), numbers(3)]
    balance = torch.empty(batch, heads, dim) if config.balance_keys else None
    attend_module.attend(
        vectors(batch, heads * columns, queries), new, new, numbers(4, heads, layout.page_words), *rings, *table, balance,
        None, None, layout.name, dim**-0.5, 0.0, True, entries,
    )  # fmt: skip
    return found


def compile_launch(launch: tuple[Any, dict[str, Any], tuple[Any, ...], dict[str, Any]], architecture: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, options, arguments, constants = launch
    names = kernel.arg_names
    assert names[len(arguments) :] == list(constants)
    values = dict(zip(names, arguments)) | constants
    signature, fixed, aligned = {}, {}, {}
    for i, (name, value) in enumerate(values.items()):
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif name in constants or value is None:
            signature[name] = "constexpr"
            fixed[(i,)] = value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if name.startswith("stride_") and value % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(
    launch: tuple[Any, dict[str, Any], tuple[Any, ...], dict[str, Any]], architecture: int, folder: Path
) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, on which ptxas keeps what does not fit."""
    compiled = compile_launch(launch, architecture)
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("preset", ["tq4", "4bit_nc"])
def test_a_step_compiles(
    monkeypatch: pytest.MonkeyPatch, preset: str, architecture: int, tmp_path: Path
) -> None:
    found = launches(monkeypatch, architecture, preset, 128, 4, 2, 100)
    assert list(found) == ["plan", "attend_exact", "decode", "combine"]
    # Each kernel but the first may start early, where GPUs can do that, and only there.
    early = [name for name, (_, options, _, _) in found.items() if options.get("launch_pdl")]
    assert early == (["attend_exact", "decode", "combine"] if architecture >= 90 else [])
    for name in ("plan", "attend_exact", "combine"):
        assert resources(found[name], architecture, tmp_path)[1] == 0, name


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
    registers, stack = resources(decode, architecture, tmp_path)
    assert registers <= 168 and stack == 0


@pytest.mark.parametrize(("dim", "columns", "most"), [(256, 8, 80), (128, 16, 160)])
def test_the_widest_decode_spills_little(
    monkeypatch: pytest.MonkeyPatch, dim: int, columns: int, most: int, tmp_path: Path
) -> None:
    decode = launches(monkeypatch, 90, "tq4", dim, columns, 1, 100)["decode"]
    assert resources(decode, 90, tmp_path)[1] <= most


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
def test_which_kernel_takes_what(
    monkeypatch: pytest.MonkeyPatch, preset: str, dim: int, columns: int, kernel: str
) -> None:
    found = launches(monkeypatch, 90, preset, dim, columns, 1, 10)
    assert [name for name in ("decode", "extend", "attend_packed") if name in found] == [kernel]


@pytest.mark.parametrize(
    ("architecture", "preset", "dim", "queries", "tile"),
    [
        (80, "tq4", 128, 512, (64, 2)),
        (80, "tq2", 256, 512, (64, 1)),  # 100 KiB of shared memory
        (90, "tq4", 128, 16, (64, 2)),
        (90, "tq4", 128, 512, (128, 2)),
        (90, "k8v4", 64, 512, (128, 2)),
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
    for name in {"rotate_means", "extend"} & found.keys():
        compiled = compile_launch(found[name], architecture)
        assert compiled.metadata.shared <= SHARED_MEMORY[architecture] - 1024, name
        most = 320 if name == "extend" and dim > 128 else 96
        assert resources(found[name], architecture, tmp_path)[1] <= most, name
        if name == "extend":
            assert ("wgmma" in compiled.asm["ptx"]) == (architecture >= 90)
