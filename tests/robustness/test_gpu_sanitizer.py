"""compute-sanitizer over every kernel, on small shapes: no access outside of a tensor, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.robustness.counts import count

ROOT = Path(__file__).parents[2]
FOUND = 97  # the tool's exit code for a fault


def sanitizer() -> str | None:
    """The tool: on the path, CUDA's, or that of the package `nvidia-cuda-sanitizer-api`."""
    if found := shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"):
        return found
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    return next((str(path) for path in sorted(packages.glob("*/compute-sanitizer/compute-sanitizer"))), None)


def run(what: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.robustness.kernel_calls", what]
    if options:
        tool = sanitizer()
        assert tool is not None
        command = [tool, *options, "--error-exitcode", str(FOUND), "--report-api-errors", "no", *command]
    # Each tensor has memory of its own then, so that what is beyond it is nobody's.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)


needs_tool = pytest.mark.skipif(
    sanitizer() is None, reason="compute-sanitizer is neither on the path nor in /usr/local/cuda/bin (pip package "
    "nvidia-cuda-sanitizer-api)"
)  # fmt: skip


@pytest.mark.gpu
@needs_tool
@pytest.mark.parametrize(("tool", "fault"), [("memcheck", "fault"), ("racecheck", "race")])
def test_the_tool_notices_a_fault(tool: str, fault: str) -> None:
    done = run(fault, "--tool", tool)
    said = done.stdout + done.stderr
    assert done.returncode == FOUND, said[-3000:]
    assert ("write_beyond" if fault == "fault" else "race") in said


@pytest.mark.gpu
@needs_tool
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_every_kernel_is_clean(tool: str) -> None:
    done = run("cuda", "--tool", tool)
    assert done.returncode == 0 and done.stdout.rstrip().count("done") == 1, (done.stdout + done.stderr)[-5000:]
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-3000:]
    count(f"kernels under {tool}", len(done.stdout.splitlines()[-3].split()))


def test_the_kernels_that_are_launched_are_known() -> None:
    pytest.importorskip("triton")
    from tests.robustness.kernel_calls import entry_kernels

    packed = {"decode", "extend", "attend_packed", "attend_exact", "prepare", "pack_pages", "unpack_pages"}
    assert packed | {"combine", "append_token", "combine_and_append"} <= entry_kernels()
