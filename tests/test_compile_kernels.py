"""The decode kernel compiled for GPUs that this machine need not have: it must fit their registers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tq_hf.config import TurboQuantConfig

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

POINTERS = {
    "p_query": "*i32", "p_factor": "*fp32", "p_pool": "*i32", "p_tables": "*i32", "p_page_ids": "*i32",
    "p_row_start": "*i32", "p_counters": "*i32", "p_kept": "*i32", "p_means": "*fp32", "p_output": "*fp32",
    "p_stats": "*fp32",
}  # fmt: skip


def resources(preset: str, dim: int, columns: int, tile: int, architecture: int, folder: Path) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, on which ptxas keeps what does not fit."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tq_hf.kernels.attend import decode_registers, lane_columns
    from tq_hf.kernels.decode import decode
    from tq_hf.kernels.dequant import page_spec

    layout = TurboQuantConfig.from_preset(preset).layout(dim, dim, torch.bfloat16)
    constants = {
        "softcap": None,
        "L": page_spec(layout),
        "NX": lane_columns(columns),
        "TILE": tile,
        "LEAST": 1,
        "BATCH": 32,
        "ROTATE_BACK": layout.rotates_values and dim & (dim - 1) == 0,
        "DEPENDENT": architecture >= 90,
    }
    if not layout.center_keys:
        constants["p_means"] = None
    names = decode.arg_names
    floats = dict.fromkeys(("key_step", "value_step"), "fp32")
    signature = {name: "constexpr" if name in constants else (POINTERS | floats).get(name, "i32") for name in names}
    source = ASTSource(
        decode,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in POINTERS},
    )
    options = {"num_warps": 1, "maxnreg": decode_registers(layout, columns, tile)}
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert kernel.metadata.shared == 0
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("preset", "dim", "columns", "tile"),
    [
        ("tq4", 128, 4, 1),
        ("tq4", 128, 4, 2),
        ("tq2", 128, 4, 2),
        ("4bit_nc", 128, 4, 1),
        ("k8v4", 128, 4, 1),
        ("tq3", 96, 1, 2),
        ("tq4", 128, 8, 1),
        ("tq4", 64, 8, 2),
        ("tq4", 256, 4, 1),
    ],
)
def test_decode_spills_nothing(
    preset: str, dim: int, columns: int, tile: int, architecture: int, tmp_path: Path
) -> None:
    registers, stack = resources(preset, dim, columns, tile, architecture, tmp_path)
    assert registers <= 168 and stack == 0


@pytest.mark.parametrize(("dim", "columns", "most"), [(256, 8, 80), (128, 16, 160)])
def test_the_widest_decode_spills_little(dim: int, columns: int, most: int, tmp_path: Path) -> None:
    _, stack = resources("tq4", dim, columns, 1, 90, tmp_path)
    assert stack <= most
