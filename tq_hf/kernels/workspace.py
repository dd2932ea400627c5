"""One allocation for all that the kernels of an attention call hand on to each other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

UNIT = 16  # bytes: every section starts at a multiple, for vector loads


@triton.jit
def section(p_work, at, DTYPE: tl.constexpr):
    """The section of a workspace (fp32) that starts 16 * `at` bytes in."""
    return (p_work + at.to(tl.int64) * 4).to(tl.pointer_type(DTYPE))


class Sections:
    """Places in a workspace, handed out one behind the other."""

    def __init__(self) -> None:
        self.units = 0

    def take(self, count: int, dtype: torch.dtype) -> int:
        """Room for `count` numbers; where it starts, in units."""
        at = self.units
        self.units += -(-count * dtype.itemsize // UNIT)
        return at

    @property
    def floats(self) -> int:
        """The workspace's size in fp32."""
        return self.units * UNIT // 4


def view(workspace: Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A section as a tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return workspace.view(torch.uint8)[UNIT * at : UNIT * at + size].view(dtype).view(shape)
