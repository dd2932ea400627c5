"""Every kernel of the package once or more, on small shapes: the program that compute-sanitizer watches.

    python -m tests.robustness.kernel_calls cuda     # prints the kernels that were launched, and ends with "done"
    python -m tests.robustness.kernel_calls fault    # one kernel that writes outside of its tensor: is it noticed?
    python -m tests.robustness.kernel_calls race     # one whose threads do not wait for each other

With TRITON_INTERPRET=1 the first takes `cpu`, and checks that no kernel is missing.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.runtime.jit import KernelInterface

from tests import kernel_states as storing
from tests import test_kernels_attend as attention
from tests import test_kernels_observe as statistics
from tq_hf import kernels

KERNELS = Path(kernels.__file__).parent
LAUNCHERS = {"Launch", "Launcher", "launch", "prepared"}  # take a kernel first
# Each of the ways that `schedule.py` takes: decode, several columns (packed), chunks (extend), exact tokens by themselves.
CASES = [
    attention.Case(length=100),
    attention.Case(preset="4bit_nc", length=140, rows=2, row_start=(0, 70), mask="row"),
    attention.Case(preset="tq2", length=200, queries=3, group=2, mask="query"),
    attention.Case(preset="k8v4", length=140, queries=6),
    attention.Case(preset="raw", dim=80, length=140, group=4, aux_sinks=True),
    attention.Case(preset="tq3", length=250, queries=18, group=2, softcap=30.0),
    attention.Case(preset="tq4", dim=256, length=150),
    attention.Case(length=3),
]

RACE = """
extern "C" __global__ void race(float* out) {
    __shared__ float shared[256];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[255 - threadIdx.x];
}
"""


@triton.jit
def write_beyond(p_out, n, BLOCK: tl.constexpr):
    """Stores up to BLOCK numbers where there is room for n."""
    tl.store(p_out + n + tl.arange(0, BLOCK), 1.0)


def entry_kernels() -> set[str]:
    """The kernels that are launched: `triton.jit` functions that a launcher is made for, or that get a grid. They may call
    each other as well."""
    defined, launched = set(), set()
    for path in KERNELS.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(".jit" in ast.unparse(d) for d in node.decorator_list):
                defined.add(node.name)
                continue
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in LAUNCHERS and call.args:
                    launched.add(ast.unparse(call.args[0]))
                elif isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                    launched.add(ast.unparse(call.func.value))
    return defined & launched


def call_all(device: str) -> set[str]:
    """Launch everything; returns the names of the kernels that ran."""
    launched: set[str] = set()
    get = KernelInterface.__getitem__

    def recording(self: KernelInterface, grid: object) -> object:
        launched.add(self.fn.__name__)
        return get(self, grid)

    KernelInterface.__getitem__ = recording
    try:
        for case in CASES:
            attention.check(case, device)
        for name in ("tq4", "k8v4", "raw"):
            case = storing.preset(name, 64, torch.float16, page_size=32, recent_window=5, sink_tokens=2)
            storing.check(case, device, (50, 1, 19), [0, 36])
        statistics.test_matches_reference(statistics.Case(), device)
    finally:
        KernelInterface.__getitem__ = get
    return launched


def main(what: str) -> None:
    if what == "fault":
        out = torch.empty(1024, device="cuda")
        write_beyond[(1,)](out, 1 << 20, BLOCK=128)
        torch.cuda.synchronize()
    elif what == "race":
        out = torch.empty(256, device="cuda")
        torch.cuda._compile_kernel(RACE, "race")((1, 1, 1), (256, 1, 1), (out,))
        torch.cuda.synchronize()
    else:
        launched = call_all(what)
        if what == "cuda":
            torch.cuda.synchronize()
        print(*sorted(launched))
        missing = entry_kernels() - launched
        assert not missing, f"these kernels were not launched: {sorted(missing)}"
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
