"""Launching kernels again: Triton looks up which variant of a kernel fits its arguments at every call, which takes it longer
than most of the kernels here run. Here the variant of a first launch is kept for calls that look the same."""

from __future__ import annotations

from typing import Any

_compiled: dict[Any, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], options: dict[str, Any], arguments: tuple[Any, ...], **constants: Any
) -> None:
    """What `kernel[grid](*arguments, **constants, **options)` does.

    Args:
        options: of the compiler, as num_warps.
        arguments: for the parameters that are no `tl.constexpr`.
        constants: for those that are, which come last in the kernel's signature, in that order.
    """
    key = (kernel.fn, tuple(constants.values()), tuple(options.items()), tuple(map(_traits, arguments)))
    compiled = _compiled.get(key)
    if compiled is None:
        # Triton's interpreter compiles nothing.
        _compiled[key] = kernel[grid](*arguments, **constants, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants.values())


def _traits(argument: Any) -> Any:
    """All that Triton specializes a kernel on, or more: the device, type and alignment of tensors, the divisibility and
    width of integers."""
    kind = type(argument)
    if kind is int:
        return argument == 1, argument & 15 == 0, argument >> 31
    if kind is float or argument is None:
        return kind
    return argument.dtype, argument.device.index, argument.data_ptr() & 15


# Triton has these as functions that kernels can call as well, which takes them microseconds.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
