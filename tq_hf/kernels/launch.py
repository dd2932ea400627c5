"""Launching kernels again: Triton looks up which variant of a kernel fits its arguments at every call, which takes it longer
than most of the kernels here run. Here the variant of a first launch is kept for calls that look the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

Grid = tuple[int, int, int]
Number = int | float | None
Part = Callable[[tuple[Number, ...]], Any]  # some of a call's numbers
Kind = tuple[int, int, Any]  # a device, which tensors are missing, offsets from 16 bytes or 0
Run = Callable[[Grid, int, tuple[Any, ...]], None]  # a grid, a stream, a kernel's arguments and constants
KNOWN = 1024  # calls that a launcher remembers, at most
LARGE = 1 << 31  # integers from here on make a 64-bit parameter
# Releases of Triton whose driver's launch functions are known here.
OLDEST, NEWEST = (3, 5), (3, 9)


class Launcher:
    """A kernel with its constants and the compiler's options, for tensors that have the same dtypes at every call.

    Args:
        kernel: a `triton.jit` function, whose parameters are pointers, then numbers, then constants.
        options: of the compiler, as num_warps.
        constants: for the parameters that are `tl.constexpr`, in the signature's order.

    Numbers that the kernel has in `do_not_specialize` are integers, and change from call to call without a first launch.
    """

    __slots__ = ("_parts", "compiled", "constants", "kernel", "options", "values")

    def __init__(self, kernel: Any, options: dict[str, Any], constants: dict[str, Any]) -> None:
        self.kernel, self.options, self.constants = kernel, options, constants
        self.values = tuple(constants.values())
        # By what Triton specializes on, or more: the device, which tensors are missing, offsets from 16 bytes, numbers.
        self.compiled: dict[tuple[Any, ...], tuple[Any, Run]] = {}
        self._parts: tuple[Part, Part] | None = None

    def special(self, first: int, numbers: tuple[Number, ...]) -> tuple[Any, ...]:
        """What picks a variant of the kernel among a call's numbers, which come behind `first` tensors."""
        decisive, others = self._parts or self._divide(first, len(numbers))
        plain = others(numbers)
        return decisive(numbers), max(plain) >= LARGE and plain

    def _divide(self, first: int, count: int) -> tuple[Part, Part]:
        """What picks the numbers that Triton specializes on, and those that it does not, at least one."""
        parameters = getattr(self.kernel, "params", ())[first : first + count]
        plain = [i for i, parameter in enumerate(parameters) if parameter.do_not_specialize]
        decisive = [i for i in range(count) if i not in plain]
        others = _items(plain) if plain else lambda numbers: (0,)
        self._parts = _items(decisive), others
        return self._parts


class Call:
    """A launcher's calls with the same grid and numbers.

    Triton launches the first call of a kind. After that a call costs the tensors' addresses, a look into a dict, and the
    driver's launch.

    Args:
        numbers: each of the same type at every call, or None.
    """

    __slots__ = ("_runs", "behind", "grid", "launcher", "numbers")

    def __init__(self, launcher: Launcher, grid: Grid, numbers: tuple[Number, ...]) -> None:
        self.launcher, self.grid, self.numbers = launcher, grid, numbers
        self.behind = (*numbers, *launcher.values)
        self._runs: dict[Kind, Run] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """What `kernel[grid](*tensors, *numbers, **constants, **options)` does.

        Args:
            tensors: on the current device; the first is not None.
        """
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        kind = _kind(tensors[0].get_device(), addresses)  # type: ignore[union-attr]
        run = self._runs.get(kind)
        if run is None or _has_listeners():
            run = self.look_up(kind, tensors)
            if run is None:
                return
            self._runs[kind] = run
        run(self.grid, torch._C._cuda_getCurrentRawStream(kind[0]), (*addresses, *self.behind))

    def look_up(self, kind: Kind, tensors: tuple[Tensor | None, ...]) -> Run | None:
        """The driver's launch for such tensors, or None where Triton has launched this call."""
        launcher, numbers = self.launcher, self.numbers
        key = (*kind, *launcher.special(len(tensors), numbers))
        found = launcher.compiled.get(key)
        if found is None:
            compiled = launcher.kernel[self.grid](*tensors, *numbers, **launcher.constants, **launcher.options)
            if compiled is not None:  # by Triton's interpreter it is
                if len(launcher.compiled) >= KNOWN:
                    launcher.compiled.clear()
                launcher.compiled[key] = compiled, driver_launch(compiled)
            return None
        if _has_listeners():
            found[0][self.grid](*tensors, *numbers, *launcher.values)
            return None
        return found[1]


class Chain:
    """Calls one behind the other over the same tensors, whose addresses are looked up once.

    Args:
        calls: each with the places of its tensors among the chain's; None for one that is missing.
    """

    __slots__ = ("_calls", "_runs")

    def __init__(self, calls: Sequence[tuple[Call, Sequence[int | None]]]) -> None:
        # Behind the chain's tensors stands one that is missing.
        self._calls = [(call, _items([-1 if i is None else i for i in places])) for call, places in calls]
        self._runs: dict[tuple[int, Any], list[tuple[Run, Grid, Any, tuple[Any, ...]]]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch all of them, with tensors on the current device."""
        addresses: list[Any] = [tensor.data_ptr() for tensor in tensors]
        device = tensors[0].get_device()
        kind = device, _offsets(reduce(or_, addresses), addresses)
        addresses.append(None)
        runs = self._runs.get(kind)
        if runs is None or _has_listeners():
            self._look_up(kind, addresses, (*tensors, None))
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        for run, grid, pick, behind in runs:
            run(grid, stream, (*pick(addresses), *behind))

    def _look_up(self, kind: tuple[int, Any], addresses: list[int | None], tensors: tuple[Tensor | None, ...]) -> None:
        """Launch all, and keep how, unless Triton had to launch one of them."""
        runs, device = [], kind[0]
        for call, pick in self._calls:
            taken = pick(addresses)
            run = call.look_up(_kind(device, taken), pick(tensors))
            if run is not None:
                run(call.grid, torch._C._cuda_getCurrentRawStream(device), (*taken, *call.behind))
                runs.append((run, call.grid, pick, call.behind))
        if len(runs) == len(self._calls):
            self._runs[kind] = runs


def _items(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the items at these places; `itemgetter` gives no tuple of a single one."""
    return itemgetter(*places) if len(places) > 1 else lambda items: tuple(items[i] for i in places)


def _kind(device: int, addresses: Sequence[int | None]) -> Kind:
    """What Triton specializes on among tensors: which are missing, and how far each is from a multiple of 16 bytes."""
    bits = missing = 0
    for i, address in enumerate(addresses):
        if address is None:
            missing |= 1 << i
        else:
            bits |= address
    return device, missing, _offsets(bits, addresses)


def _offsets(bits: int, addresses: Sequence[int | None]) -> Any:
    return bits & 15 and tuple([address is not None and address & 15 for address in addresses])


def driver_launch(compiled: Any) -> Run:
    """A compiled kernel's launch, by grid, stream and arguments: the C function of Triton's driver, where this is a driver
    whose function is known and the kernel needs none of what the Python around it does (scratch memory, the sanitizer)."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    nothing = (None, None, None)  # for the hooks and what they are told
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    is_known = type(run).__name__ == "CudaLauncher" and OLDEST <= release <= NEWEST
    if not is_known or run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return lambda grid, stream, arguments: run(*grid, stream, function, metadata, *nothing, *arguments)
    launch, how, memory = run.launch, (run.launch_cooperative_grid, run.launch_pdl), (None, None)
    if release < (3, 7):
        before = (function, *how, *memory, metadata, *nothing)
        return lambda grid, stream, arguments: launch(*grid, stream, *before, *arguments)
    about = (function, *how, metadata, *nothing, *memory, run.arg_annotations, run.kernel_signature)
    return lambda grid, stream, arguments: launch(*grid, stream, *about, arguments)


def _has_listeners() -> bool:
    """Whether a profiler has hooked itself into Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


_launchers: dict[tuple[Any, ...], Launcher] = {}
_pointers: dict[Any, int] = {}


def prepared(
    kernel: Any,
    grid: tuple[int, ...],
    options: dict[str, Any],
    dtypes: Iterable[torch.dtype | None],
    numbers: tuple[Number, ...],
    **constants: Any,
) -> Call:
    """A kernel's calls with tensors of these dtypes; None for one that is missing."""
    key = (kernel.fn, *constants.values(), *options.items(), *dtypes)
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = Launcher(kernel, options, constants)
    x, y, z = (*grid, 1, 1)[:3]
    return Call(launcher, (x, y, z), numbers)


def launch(
    kernel: Any, grid: tuple[int, ...], options: dict[str, Any], arguments: tuple[Any, ...], **constants: Any
) -> None:
    """A launch by a `Call`, for callers that do not keep one themselves (which costs less).

    Args:
        arguments: tensors or None, then numbers, the first of which is not None.
    """
    pointers = _pointers.get(kernel.fn)
    if pointers is None:
        pointers = next(i for i, argument in enumerate(arguments) if isinstance(argument, (int, float)))
        _pointers[kernel.fn] = pointers
    tensors = arguments[:pointers]
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    prepared(kernel, grid, options, dtypes, arguments[pointers:], **constants)(*tensors)


# Triton has these as functions that kernels can call as well, which takes them microseconds.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
