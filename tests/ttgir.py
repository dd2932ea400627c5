"""What a kernel's intermediate code says of where values are."""

from __future__ import annotations

import re


def lanes_hold_elements(ttgir: str) -> int:
    """Checks that lane i holds element i of what goes between lanes, and counts these instructions.

    Triton may lay out what comes of a reduction differently: instructions between lanes would then mix up elements.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M))
    count = 0
    for line in ttgir.splitlines():
        if re.search(r'inline_asm "(mma|shfl|movmatrix)', line):
            count += 1
            for layout in re.findall(r"tensor<32x\w+, (?:#ttg\.slice<\{dim = 1, parent = )?(#\w+)", line):
                form = layouts.get(layout, layout)
                one_each = re.search(r"sizePerThread = \[1(, \d+)?\], threadsPerWarp = \[32(, 1)?\]", form)
                assert one_each, (line, form)
    return count
