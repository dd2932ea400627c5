"""Kernels compiled for GPUs that this machine need not have, and what their code tells."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
# Of a linear layout.
LANES_ARE_ROWS = re.compile(r"lane = \[" + ", ".join(rf"\[{1 << bit}(, 0)*\]" for bit in range(5)) + r"\]")
Launch = tuple[Any, dict[str, Any], tuple[Any, ...], dict[str, Any]]  # kernel, options, arguments, constants


def compile_launch(launch: Launch, architecture: int) -> Any:
    """The compiled kernel; numbers are specialized as Triton would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, options, arguments, constants = launch
    names = kernel.arg_names
    assert names[len(arguments) :] == list(constants)
    signature, fixed, aligned = {}, {}, {}
    for i, (name, value) in enumerate((dict(zip(names, arguments)) | constants).items()):
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif name in constants or value is None:
            signature[name] = "constexpr"
            fixed[(i,)] = value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not kernel.params[i].do_not_specialize:
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(kernel: Any, folder: Path) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, on which ptxas keeps what does not fit."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def lanes_hold_elements(ttgir: str) -> int:
    """Checks that lane i holds element i (row i of a block [32, N]) of what goes between lanes, and counts instructions that
    do this.

    Triton may lay out what comes of a reduction differently: instructions between lanes would then mix up elements.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M))
    count = 0
    for line in ttgir.splitlines():
        if re.search(r'inline_asm "(mma|shfl|movmatrix)', line):
            count += 1
            for layout in re.findall(r"tensor<32x(?:\d+x)?\w+, (?:#ttg\.slice<\{dim = [12], parent = )*(#\w+)", line):
                form = layouts.get(layout, layout)
                one_each = re.search(r"sizePerThread = \[1(, \d+)*\], threadsPerWarp = \[32(, 1)*\]", form)
                assert one_each or LANES_ARE_ROWS.search(form), (line, form)
    return count


def compiler_steps(ttir: str) -> int:
    """What Triton's pass that coalesces accesses has to do: for each load and store of a block it looks at every operation,
    and from there again at every operation. It takes most of the time of large kernels, about 10 ns a step."""
    operations = re.findall(r"^ .* loc\(#loc\d*\)$", ttir, re.M)
    accesses = [line for line in operations if re.search(r"tt\.(load|store|atomic_rmw) .*x!tt\.ptr", line)]
    return int(len(accesses) * len(operations) ** 2)
