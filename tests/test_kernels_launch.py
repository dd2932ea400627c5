"""Launches that look alike share a compiled kernel; others do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")


class FakeKernel:
    """Stands for a `triton.JITFunction`: a launch compiles, and returns what can be launched again."""

    def __init__(self) -> None:
        self.compilations = 0
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def fn(self) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int, **constants: Any) -> Any:
            self.compilations += 1
            self.launches.append((grid, (*arguments, *constants.values())))
            return FakeCompiled(self)

        return run


class FakeCompiled:
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 3
        return lambda *arguments: self.kernel.launches.append((grid, arguments))


def test_a_launch_that_looks_like_an_earlier_one_is_not_looked_up() -> None:
    from tq_hf.kernels.launch import launch

    kernel, x = FakeKernel(), torch.zeros(32)
    for number in (6, 7, 22):
        launch(kernel, (number, 2), {"num_warps": 4}, (x, number, 0.5 * number, None), WIDTH=8)
    assert kernel.compilations == 1
    assert [grid for grid, _ in kernel.launches] == [(6, 2), (7, 2, 1), (22, 2, 1)]
    assert [arguments[1:] for _, arguments in kernel.launches] == [
        (6, 3.0, None, 8),
        (7, 3.5, None, 8),
        (22, 11.0, None, 8),
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"arguments": (torch.zeros(32)[1:], 6, 0.5, None)}, "alignment"),
        ({"arguments": (torch.zeros(32, dtype=torch.int32), 6, 0.5, None)}, "dtype"),
        ({"arguments": (torch.zeros(32), 16, 0.5, None)}, "divisible by 16"),
        ({"arguments": (torch.zeros(32), 1, 0.5, None)}, "one"),
        ({"arguments": (torch.zeros(32), 1 << 33, 0.5, None)}, "64 bits"),
        ({"arguments": (torch.zeros(32), 6, None, None)}, "None"),
        ({"options": {"num_warps": 8}}, "option"),
        ({"WIDTH": 16}, "constant"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_triton_specializes_on_compiles_again(change: dict[str, Any], what: str) -> None:
    from tq_hf.kernels.launch import launch

    kernel = FakeKernel()
    usual: dict[str, Any] = {"options": {"num_warps": 4}, "arguments": (torch.zeros(32), 6, 0.5, None), "WIDTH": 8}
    launch(kernel, (1,), **usual)
    launch(kernel, (1,), **(usual | change))
    assert kernel.compilations == 2, what
    launch(kernel, (1,), **usual)
    assert kernel.compilations == 2
