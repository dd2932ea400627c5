"""Launches that look alike share a compiled kernel; others do not."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton import knobs

from tq_hf.kernels import launch as launching
from tq_hf.kernels.launch import Call, Chain, Launcher, driver_launch, launch

on_gpu = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
CONSTANTS = {"WIDTH": 8}
OPTIONS = {"num_warps": 4}
X = torch.zeros(32)


class FakeKernel:
    """Stands for a `triton.JITFunction`: a launch compiles, and returns what can be launched again."""

    def __init__(self) -> None:
        self.compilations = 0
        self.params: list[Any] = []
        self.launches: list[tuple[Any, ...]] = []
        """How, grid, arguments."""

    def fn(self) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int, **constants: Any) -> Any:
            self.compilations += 1
            self.launches.append(("compiled", grid, (*arguments, *constants.values())))
            return FakeCompiled(self)

        return run


class FakeCompiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def run(self, *arguments: Any) -> None:
        *grid, stream, function, metadata, launch_metadata, enter, leave = arguments[:9]
        assert (stream, function, metadata) == ("stream", "function", "metadata")
        assert launch_metadata is enter is leave is None
        self.kernel.launches.append(("driver", tuple(grid), arguments[9:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.launches.append(("triton", grid, arguments))


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)


def test_a_launch_that_looks_like_an_earlier_one_goes_to_the_driver() -> None:
    kernel = FakeKernel()
    call = Call(Launcher(kernel, OPTIONS, CONSTANTS), (6, 2, 1), (6, 0.5, None))
    for _ in range(3):
        call(X, None)
    assert kernel.launches == [
        ("compiled", (6, 2, 1), (X, None, 6, 0.5, None, 8)),
        *[("driver", (6, 2, 1), (X.data_ptr(), None, 6, 0.5, None, 8))] * 2,
    ]


def test_the_function_finds_the_launcher() -> None:
    kernel = FakeKernel()
    for size in (6, 7):
        launch(kernel, (size, 2), OPTIONS, (X, None, 6, 0.5), WIDTH=8)
    assert [(how, grid) for how, grid, _ in kernel.launches] == [("compiled", (6, 2, 1)), ("driver", (7, 2, 1))]
    assert kernel.launches[1][2] == (X.data_ptr(), None, 6, 0.5, 8)


USUAL: dict[str, Any] = {"options": OPTIONS, "arguments": (X, X, None, 6, 0.5, None), "WIDTH": 8}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"arguments": (X[1:], X, None, 6, 0.5, None)}, "alignment"),
        ({"arguments": (X, X[1:], None, 6, 0.5, None)}, "alignment of another"),
        ({"arguments": (X, None, X, 6, 0.5, None)}, "another is missing"),
        ({"arguments": (X, X, X, 6, 0.5, None)}, "none is missing"),
        ({"arguments": (X.int(), X, None, 6, 0.5, None)}, "dtype"),
        ({"arguments": (X, X.bool(), None, 6, 0.5, None)}, "dtype of another"),
        ({"arguments": (X, X, None, 16, 0.5, None)}, "divisible by 16"),
        ({"arguments": (X, X, None, 1, 0.5, None)}, "one"),
        ({"arguments": (X, X, None, 1 << 33, 0.5, None)}, "64 bits"),
        ({"arguments": (X, X, None, 6, None, None)}, "None"),
        ({"options": {"num_warps": 8}}, "option"),
        ({"WIDTH": 16}, "constant"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_triton_specializes_on_compiles_again(change: dict[str, Any], what: str) -> None:
    kernel = FakeKernel()
    first, second = USUAL, USUAL | change
    for arguments in (first, second, first, second):
        launch(kernel, (1,), **arguments)
    assert kernel.compilations == 2, what
    assert [how for how, *_ in kernel.launches[2:]] == ["driver"] * 2


def test_numbers_that_triton_does_not_specialize_on_may_change() -> None:
    kernel = FakeKernel()
    kernel.params = [SimpleNamespace(do_not_specialize=name in ("b", "c")) for name in ("p_x", "a", "b", "c", "d", "WIDTH")]
    launcher = Launcher(kernel, OPTIONS, CONSTANTS)
    for i, numbers in enumerate([(6, 1, 16, 0.5), (6, 2, 17, 0.5), (6, -3, 16, 0.5)]):
        Call(launcher, (1, 1, 1), numbers)(X)
        assert kernel.compilations == 1 and kernel.launches[i][2] == (*((X.data_ptr(),) if i else (X,)), *numbers, 8)
    for numbers in ((7, 1, 16, 0.5), (6, 1, 1 << 31, 0.5), (6, 1, 16, None)):
        Call(launcher, (1, 1, 1), numbers)(X)
    assert kernel.compilations == 4


def test_each_misaligned_tensor_counts() -> None:
    kernel = FakeKernel()
    call = Call(Launcher(kernel, OPTIONS, CONSTANTS), (1, 1, 1), (5,))
    for tensors in ((X[1:], X), (X, X[1:]), (X[1:], X[1:]), (X, None)) * 3:
        call(*tensors)
    assert kernel.compilations == 4
    assert [arguments[:2] for _, _, arguments in kernel.launches[4:8]] == [
        (X[1:].data_ptr(), X.data_ptr()), (X.data_ptr(), X[1:].data_ptr()), (X[1:].data_ptr(),) * 2, (X.data_ptr(), None)
    ]  # fmt: skip


def test_a_chain_launches_each_call_with_its_tensors() -> None:
    kernels = [FakeKernel() for _ in range(3)]
    calls = [Call(Launcher(kernel, OPTIONS, CONSTANTS), (i, 1, 1), (i, 0.5)) for i, kernel in enumerate(kernels)]
    chain = Chain([(calls[0], (2, 0)), (calls[1], (1,)), (calls[2], (0, None, 1, None))])
    a, b, c = (torch.zeros(32) for _ in range(3))
    for _ in range(3):
        chain(a, b, c)
    takes: tuple[tuple[Any, ...], ...] = ((c, a), (b,), (a, None, b, None))
    for i, (kernel, taken) in enumerate(zip(kernels, takes, strict=True)):
        addresses = tuple(None if tensor is None else tensor.data_ptr() for tensor in taken)
        assert kernel.launches == [
            ("compiled", (i, 1, 1), (*taken, i, 0.5, 8)),
            *[("driver", (i, 1, 1), (*addresses, i, 0.5, 8))] * 2,
        ]


def test_a_chain_knows_tensors_that_are_not_aligned() -> None:
    kernels = [FakeKernel(), FakeKernel()]
    chain = Chain([(Call(Launcher(kernel, OPTIONS, CONSTANTS), (1, 1, 1), (5,)), (i,)) for i, kernel in enumerate(kernels)])
    for tensors in ((X, X), (X, X[1:]), (X[1:], X)) * 2:
        chain(*tensors)
    for kernel, order in zip(kernels, ((X, X, X[1:]), (X, X[1:], X)), strict=True):
        assert kernel.compilations == 2
        assert [arguments[0] for _, _, arguments in kernel.launches[-3:]] == [tensor.data_ptr() for tensor in order]


def test_a_chain_goes_on_where_one_call_is_new() -> None:
    """Calls are launched in their order, those that Triton has to compile among them."""
    known, new = FakeKernel(), FakeKernel()
    known.launches = new.launches  # in one list
    launcher = Launcher(known, OPTIONS, CONSTANTS)
    for _ in range(2):
        Call(launcher, (1, 1, 1), (5,))(X)
    new.launches.clear()
    Chain([(Call(launcher, (1, 1, 1), (5,)), (0,)), (Call(Launcher(new, OPTIONS, CONSTANTS), (2, 1, 1), (5,)), (0,))])(X)
    assert [(how, grid) for how, grid, _ in new.launches] == [("driver", (1, 1, 1)), ("compiled", (2, 1, 1))]


def test_each_device_has_its_own() -> None:
    kernel = FakeKernel()
    call = Call(Launcher(kernel, OPTIONS, CONSTANTS), (1, 1, 1), (5,))
    for device in (0, 1, 0, 1, 0, 1):
        tensor: Any = SimpleNamespace(data_ptr=lambda: 512, get_device=lambda device=device: device)
        call(tensor)
    assert kernel.compilations == 2


def test_a_launcher_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "KNOWN", 4)
    launcher = Launcher(FakeKernel(), OPTIONS, CONSTANTS)
    for n in range(2, 20):
        Call(launcher, (1, 1, 1), (n,))(X)
        assert len(launcher.compiled) <= 4


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_profilers_are_told(name: str, chained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    call = Call(Launcher(kernel, OPTIONS, CONSTANTS), (1, 1, 1), (5,))
    call(X)
    call(X)
    with monkeypatch.context() as patch:
        if chained:
            patch.setattr(getattr(knobs.runtime, name), "calls", [print])
        else:
            patch.setattr(knobs.runtime, name, print)
        call(X)
    monkeypatch.setattr(knobs.runtime, name, None)
    call(X)
    assert [how for how, *_ in kernel.launches] == ["compiled", "driver", "triton", "driver"]
    assert kernel.launches[2][1:] == ((1, 1, 1), (X, 5, 8))


def test_an_interpreted_kernel_is_interpreted_every_time() -> None:
    class Interpreted:
        calls = 0

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: Any, **more: Any) -> None:
                assert (arguments, more) == ((X, 5), OPTIONS | CONSTANTS)
                self.calls += 1

            return run

    kernel = Interpreted()
    call = Call(Launcher(kernel, OPTIONS, CONSTANTS), (1, 1, 1), (5,))
    for _ in range(3):
        call(X)
    assert kernel.calls == 3


class CudaLauncher:
    """As Triton's, with the C function's arguments noted."""

    launch_cooperative_grid, launch_pdl = False, True
    arg_annotations, kernel_signature = "annotations", "signature"
    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.seen: tuple[Any, ...] = ()

    def launch(self, *arguments: Any) -> None:
        self.seen = arguments

    def __call__(self, *arguments: Any) -> None:
        self.seen = ("python", *arguments)


GRID, ARGUMENTS = (7, 8, 9), (512, 3, "constant")
OLD = (*GRID, "stream", "function", False, True, *[None] * 2, "metadata", *[None] * 3, *ARGUMENTS)
NEW = (*GRID, "stream", "function", False, True, "metadata", *[None] * 5, "annotations", "signature", ARGUMENTS)
PYTHON = ("python", *GRID, "stream", "function", "metadata", None, None, None, *ARGUMENTS)


@pytest.mark.parametrize(
    ("version", "needs", "expected"),
    [
        ("3.5.1", {}, OLD),
        ("3.6.0", {}, OLD),
        ("3.7.1", {}, NEW),
        ("3.9.0+git1234", {}, NEW),
        ("3.10.0", {}, PYTHON),
        ("3.6.0", {"global_scratch_size": 128}, PYTHON),
        ("3.6.0", {"profile_scratch_size": 128}, PYTHON),
        ("3.9.0", {"gsan_enabled": True}, PYTHON),
    ],
)
def test_the_drivers_function_gets_what_its_release_expects(
    version: str, needs: dict[str, Any], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    run = CudaLauncher()
    vars(run).update(needs)
    compiled = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    driver_launch(compiled)(GRID, "stream", ARGUMENTS)  # type: ignore[arg-type]
    assert run.seen == expected


@triton.jit
def scale_rows(p_out, p_in, p_shift, n, stride, factor, BLOCK: tl.constexpr):
    """Row i of [grid, BLOCK]: p_out = p_in * factor (+ p_shift), of n columns."""
    i = tl.arange(0, BLOCK)
    x = tl.load(p_in + tl.program_id(0) * stride + i, mask=i < n, other=0) * factor
    if p_shift is not None:
        x += tl.load(p_shift + i, mask=i < n, other=0)
    tl.store(p_out + tl.program_id(0) * BLOCK + i, x)


@pytest.mark.gpu
@on_gpu
def test_launches_again_do_what_first_launches_do() -> None:
    launcher = Launcher(scale_rows, OPTIONS, {"BLOCK": 64})
    numbers = torch.randn(20 * 64 + 1, device="cuda")
    shift = torch.randn(64, device="cuda")
    heard: list[Any] = []
    calls: dict[tuple[Any, ...], Call] = {}
    for repeat in range(4):
        if repeat == 3:
            knobs.runtime.launch_enter_hook.add(heard.append)
        try:
            for first, added, n, stride, factor in [
                (0, None, 64, 64, 2.0), (1, None, 64, 64, 2.0), (0, shift, 64, 64, 2.0), (0, None, 63, 64, 2.0),
                (0, None, 1, 64, 2.0), (0, None, 64, 16, 2.0), (0, None, 64, 1, 2.0), (0, None, 64, 64, 3.0),
            ]:  # fmt: skip
                x = numbers[first:]
                out = torch.full((19, 64), -1.0, device="cuda")
                call = calls.setdefault((n, stride, factor), Call(launcher, (19, 1, 1), (n, stride, factor)))
                call(out, x, added)
                expected = x.as_strided((19, 64), (stride, 1)).clone() * factor
                expected[:, n:] = 0
                if added is not None:
                    expected[:, :n] += added[:n]
                torch.testing.assert_close(out, expected)
        finally:
            knobs.runtime.launch_enter_hook.remove(heard.append)
    assert len(heard) == 8
    assert len(launcher.compiled) == 8
