"""Triton's interpreter taught the inline assembly of `tq_hf.kernels.warp`, a lane at a time.

The interpreter evaluates blocks with numpy and refuses inline assembly. Kernels of one warp with a value a lane can be run
in it nevertheless: what each instruction does is written out here from the PTX manual, fragments and all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter
from numpy.typing import NDArray

from tests import interpreting

Register = NDArray[Any]

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def install() -> None:
    """Make the interpreter's builder know the instructions."""
    interpreting.install()
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
    # Triton 3.7 and before have np.maximum, which returns NaN where either number is, as no GPU does.
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    # The interpreter rounds a product before it adds to it.
    interpreter.InterpreterBuilder.create_fma = lambda self, x, y, z: self.ternary_op(x, y, z, fused_multiply_add)


def create_inline_asm(
    self: Any, asm: str, constraints: str, values: list[Any], types: list[Any], is_pure: bool, pack: int
) -> Any:
    arguments = [np.asarray(value.data) for value in values]
    name = next(name for name in INSTRUCTIONS if name in asm)
    shape = np.broadcast_shapes((1,), *(x.shape for x in arguments))
    if name in WITHIN_A_LANE:
        results = [x.reshape(shape) for x in INSTRUCTIONS[name](*(np.broadcast_to(x, shape).reshape(-1) for x in arguments))]
    else:  # of a block [32, N], a lane has N registers
        shape = np.broadcast_shapes((32,), shape) if len(shape) == 1 else shape
        assert shape[0] == 32, shape
        registers = [np.broadcast_to(x, shape).reshape(32, -1).T for x in arguments]
        each = [INSTRUCTIONS[name](*(x[n] for x in registers)) for n in range(registers[0].shape[0])]
        results = [np.stack(x, -1).reshape(shape) for x in zip(*each, strict=True)]
    scalars = [getattr(kind, "scalar", kind) for kind in types]
    return _Results([interpreter.TensorHandle(x, kind) for x, kind in zip(results, scalars, strict=True)])


def fused_multiply_add(a: Register, b: Register, c: Register) -> Register:
    """a * b + c in fp32, rounded once: in fp64 the product is exact, and a sum that is not is rounded to odd, from where it
    rounds to fp32 as the exact sum does."""
    with np.errstate(invalid="ignore", over="ignore"):
        product, c = a.astype(np.float64) * b, c.astype(np.float64)
        total = product + c
        added = total - product
        missed = (product - (total - added)) + (c - added)
        bits = total.view(np.int64)
        inexact = np.isfinite(missed) & (missed != 0) & (bits % 2 == 0)
        bits = bits + np.where(inexact, np.where((missed > 0) == (total > 0), 1, -1), 0)
        return bits.view(np.float64).astype(np.float32)


class _Results:
    def __init__(self, results: list[Any]) -> None:
        self.results = results

    def get_result(self, index: int) -> Any:
        return self.results[index]


def _unsigned(x: Register) -> Register:
    return np.ascontiguousarray(x).view(np.uint32)


def _word(x: Register) -> Register:
    return np.ascontiguousarray(x.astype(np.uint32)).view(np.int32)


def _bytes(x: Register, kind: Any) -> Register:
    """[32, 4], the lowest byte first."""
    return np.ascontiguousarray(x).view(kind).reshape(32, 4)


def _halves(x: Register) -> Register:
    """[N, 2] fp16."""
    return np.ascontiguousarray(x).view(np.float16).reshape(-1, 2)


def _join_halves(x: Register) -> Register:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(x.astype(np.float16)).view(np.int32).reshape(-1)


def permute_bytes(a: Register, b: Register, selector: Register) -> list[Register]:
    pool = np.concatenate([_bytes(a, np.uint8), _bytes(b, np.uint8)], 1)
    result = np.zeros(32, np.uint32)
    for i in range(4):
        choice = (_unsigned(selector) >> np.uint32(4 * i)) & 15
        byte = pool[LANE, choice & 7]
        byte = np.where(choice & 8, np.where(byte & 128, 255, 0), byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return [_word(result)]


def lane_xor(x: Register, distance: Register) -> list[Register]:
    return [x[LANE ^ int(distance[0])]]


def lane_of_four(x: Register, index: Register) -> list[Register]:
    return [x[4 * G + int(index[0])]]


def lane_of(x: Register, index: Register) -> list[Register]:
    return [x[index]]


def largest_of_warp(x: Register) -> list[Register]:
    return [_word(np.full(32, _unsigned(x).max()))]


def transpose(x: Register) -> list[Register]:
    matrix = np.ascontiguousarray(x).view(np.uint16).reshape(8, 8)
    return [np.ascontiguousarray(matrix.T).view(np.int32).reshape(32)]


def power_of_two(x: Register) -> list[Register]:
    result = np.exp2(x.astype(np.float64)).astype(np.float32)
    return [np.where(result < np.finfo(np.float32).tiny, np.float32(0), result)]


def larger_halves(a: Register, b: Register) -> list[Register]:
    return [np.ascontiguousarray(np.fmax(_halves(a), _halves(b))).view(np.int32).reshape(32)]


def high_half(word: Register, one: Register) -> list[Register]:
    high = _halves(word)[:, 1] * _halves(one)[:, 1]
    return [_join_halves(np.stack([high, high], 1))]


def split_halves(x: Register) -> list[Register]:
    return [*np.ascontiguousarray(_halves(x).astype(np.float32).T)]


def join_halves(low: Register, high: Register) -> list[Register]:
    return [np.ascontiguousarray(np.stack([low, high], 1)).view(np.int32).reshape(32)]


def pack_halves(low: Register, high: Register) -> list[Register]:
    return [_join_halves(np.stack([low, high], -1))]


def multiply_add_halves(a: Register, b: Register, c: Register) -> list[Register]:
    return [_join_halves(_halves(a).astype(np.float64) * _halves(b) + _halves(c))]


def saturated_multiply_add_halves(a: Register, b: Register, c: Register) -> list[Register]:
    result = _halves(a).astype(np.float64) * _halves(b) + _halves(c)
    return [_join_halves(np.nan_to_num(np.clip(result, 0, 1)))]


def add_toward_zero(a: Register, b: Register) -> list[Register]:
    exact = a.astype(np.float64) + b  # of numbers as the kernels add
    result = exact.astype(np.float32)
    return [np.where(np.abs(result) > np.abs(exact), np.nextafter(result, np.float32(0)), result)]


def extreme(function: Callable[..., Register]) -> Callable[..., list[Register]]:
    def of_two(a: Register, b: Register) -> list[Register]:
        if a.dtype != np.uint16:  # the interpreter's bf16
            return [function(a, b)]
        wide = [(x.astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
        return [(function(*wide).view(np.uint32) >> 16).astype(np.uint16)]

    return of_two


def multiply(
    registers: tuple[Register, ...], left: Callable[..., Register], right: Callable[..., Register], kind: Any
) -> list[Register]:
    """`mma.m16n8k(8n)`, n numbers a register: a0..a3, b0, b1, c0..c3 to d0..d3."""
    n = left(registers[0]).shape[1]
    a, b, c = np.zeros((16, 8 * n), kind), np.zeros((8 * n, 8), kind), np.zeros((16, 8), kind)
    for r in range(4):
        for j in range(n):
            a[G + 8 * (r % 2), 4 * n * (r // 2) + n * T + j] = left(registers[r])[:, j]
        c[G + 8 * (r // 2), 2 * T + r % 2] = registers[6 + r]
    for r in range(2):
        for j in range(n):
            b[4 * n * r + n * T + j, G] = right(registers[4 + r])[:, j]
    d = a @ b + c
    return [d[G + 8 * (r // 2), 2 * T + r % 2].astype(registers[6].dtype) for r in range(4)]


INSTRUCTIONS: dict[str, Callable[..., list[Register]]] = {
    "prmt.b32": permute_bytes,
    "shfl.sync.bfly": lane_xor,
    "0x1c1f": lane_of_four,
    "shfl.sync.idx": lane_of,
    "redux.sync.max.u32": largest_of_warp,
    "movmatrix": transpose,
    "ex2.approx": power_of_two,
    "max.f16x2": larger_halves,
    "cvt.f32.f16": split_halves,
    "mov.b32 $0, {$1, $2}": join_halves,
    "mul.rn.f16x2": high_half,
    "cvt.rn.f16x2.f32": pack_halves,
    "fma.rn.f16x2": multiply_add_halves,
    "fma.rn.sat.f16x2": saturated_multiply_add_halves,
    "add.rz.f32": add_toward_zero,
    "min.NaN": extreme(np.minimum),
    "max.NaN": extreme(np.maximum),
    "s32.s8.s8": lambda *x: multiply(x, lambda y: _bytes(y, np.int8), lambda y: _bytes(y, np.int8), np.int64),
    "s32.s8.u8": lambda *x: multiply(x, lambda y: _bytes(y, np.int8), lambda y: _bytes(y, np.uint8), np.int64),
    "f32.f16.f16": lambda *x: multiply(x, _halves, _halves, np.float64),
}
WITHIN_A_LANE = {"cvt.rn.f16x2.f32", "fma.rn.f16x2", "fma.rn.sat.f16x2", "add.rz.f32", "min.NaN", "max.NaN"}
