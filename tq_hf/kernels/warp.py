"""The instructions of a warp that Triton has no name for, on tensors of one value a lane.

A block of shape [32] in a program of one warp is a register: element i is lane i's. Lane 4g + t holds what PTX's figures of
the `mma` fragments give it. https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def permute_bytes(a, b, selector):
    """Four bytes of (a, b), numbered 0 to 7 from the lowest, that the low four nibbles of `selector` name; 8 added to a
    number replicates that byte's sign."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def lane_xor(x, distance: tl.constexpr):
    """The value of lane `lane ^ distance`."""
    return tl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,n", [x, distance], dtype=x.dtype, is_pure=True, pack=1
    )


@triton.jit
def lane_of_four(x, index: tl.constexpr):
    """The value of lane `4g + index`, for lane 4g + t."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1c1f, 0xffffffff;", "=r,r,n", [x, index], dtype=x.dtype, is_pure=True, pack=1
    )


@triton.jit
def lane_of(x, index):
    """The value of lane `index`."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, index], dtype=x.dtype, is_pure=True, pack=1
    )


@triton.jit
def largest_of_warp(x):
    """The largest unsigned number of all lanes."""
    return tl.inline_asm_elementwise(
        "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def transpose(x):
    """An 8 x 8 matrix of 16-bit numbers, transposed: lane 4g + t holds row g, columns 2t and 2t + 1."""
    return tl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def power_of_two(x):
    """2**x, zero for results below fp32's normal range."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def larger_halves(a, b):
    """The larger of two fp16, for both halves of a word."""
    return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pack_halves(low, high):
    """Two fp32 as the two fp16 of a word."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def extreme(a, b, KIND: tl.constexpr):
    """The smaller ("min") or larger ("max") of two numbers, NaN if one is; fp16 and bf16 by pairs."""
    if a.dtype == tl.float32:
        x = tl.inline_asm_elementwise(
            KIND + ".NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=a.dtype, is_pure=True, pack=1
        )
    elif a.dtype == tl.float16:
        x = tl.inline_asm_elementwise(
            KIND + ".NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2
        )
    else:
        x = tl.inline_asm_elementwise(
            KIND + ".NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2
        )
    return x


@triton.jit
def multiply_add_halves(a, b, c):
    """a * b + c for both fp16 of words, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def saturated_multiply_add_halves(a, b, c):
    """`multiply_add_halves` clamped to 0..1; 0 for NaN."""
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def add_toward_zero(a, b):
    """a + b in fp32, cut where a sum would be rounded."""
    return tl.inline_asm_elementwise("add.rz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def high_half(word, one):
    """The high half of a word, in both halves, as the floating-point unit moves it: an fp16, not a NaN, times one.

    Shifts share their unit with byte permutes.
    """
    return tl.inline_asm_elementwise(
        "{.reg .b16 a, b; .reg .b32 c; mov.b32 {a, b}, $1; mov.b32 c, {b, b}; mul.rn.f16x2 $0, c, $2;}", "=r,r,r",
        [word, one], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def split_halves(word):
    """The two fp16 of a word in fp32, the low half first."""
    low, high = tl.inline_asm_elementwise(
        "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}", "=f,=f,r", [word],
        dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return [low, high]


@triton.jit
def multiply_int8(a, b, c):
    """A [16, 32] times B [32, 8] plus C, int8: lists of four, two and four registers. Returns four int32."""
    d0, d1, d2, d3 = tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return [d0, d1, d2, d3]


@triton.jit
def multiply_int8_by_bytes(a, b, c):
    """`multiply_int8` with unsigned B."""
    d0, d1, d2, d3 = tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return [d0, d1, d2, d3]


@triton.jit
def multiply_fp16(a, b, c):
    """A [16, 16] times B [16, 8] plus C, fp16: lists of four, two and four registers. Returns four fp32."""
    d0, d1, d2, d3 = tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return [d0, d1, d2, d3]


@triton.jit
def multiply_bf16(a, b, c):
    """`multiply_fp16` for bf16."""
    d0, d1, d2, d3 = tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return [d0, d1, d2, d3]


@triton.jit
def round_to_pair(low, high, DTYPE: tl.constexpr):
    """Two fp32 as fp16 or bf16 in a word."""
    if DTYPE == tl.bfloat16:
        word = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = pack_halves(low, high)
    return word


@triton.jit
def join_halves(low, high):
    """Two 16-bit numbers as a word."""
    low = low.to(tl.int16, bitcast=True)
    high = high.to(tl.int16, bitcast=True)
    return tl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def largest_exponent(scale):
    """The least e, fp32 of at least -14, so that all value scales of the tile (words of two) are below 2**e."""
    x = scale[0]
    for i in tl.static_range(1, len(scale)):
        x = larger_halves(x, scale[i])
    x = largest_of_warp(tl.maximum(x & -65536, x << 16))  # fp16 of at least 0: their bits are ordered as they are
    return (x >> 26).to(tl.float32) - 14.0


@triton.jit
def rotate_lanes(values, g):
    """Rotates a vector of a power of two of coordinates: lane 4g + t holds number g * len(values) + i as value i."""
    DIMS: tl.constexpr = len(values)
    for bit in tl.static_range(5):  # Sylvester's matrix is a product of matrices for each bit of the coordinate's number
        if 1 << bit < DIMS:
            new = []
            for i in tl.static_range(DIMS):
                if i & (1 << bit) == 0:
                    new = new + [values[i] + values[i + (1 << bit)]]
                else:
                    new = new + [values[i - (1 << bit)] - values[i]]
            values = new
    for bit in tl.static_range(3):
        sign = tl.where(g & (1 << bit) == 0, 1.0, -1.0)
        values = [tl.fma(v, sign, lane_xor(v, 4 << bit)) for v in values]
    return [v * (8 * DIMS) ** -0.5 for v in values]


@triton.jit
def rotate_block(x, g):
    """`rotate_lanes` for a block [32, N]."""
    DIMS: tl.constexpr = x.shape[1]
    for bit in tl.static_range(5):
        if 1 << bit < DIMS:
            first, second = tl.split(x.reshape(32, DIMS >> (bit + 1), 2, 1 << bit).permute(0, 1, 3, 2))
            x = tl.join(first + second, first - second).permute(0, 1, 3, 2).reshape(32, DIMS)
    for bit in tl.static_range(3):
        sign = tl.where(g & (1 << bit) == 0, 1.0, -1.0)[:, None].broadcast_to(x.shape)
        x = tl.fma(x, sign, lane_xor(x, 4 << bit))
    return x * (8 * DIMS) ** -0.5
