"""Vectors by one warp, in pieces of eight numbers of a lane: a piece for every 32 numbers of a vector.

Blocks hold the same pieces of all lanes, [32 lanes, pieces, 8]. Triton compiles few large blocks much faster than lists of
many small ones: for every load and store it looks through whatever comes before and after it, one operation at a time. So
all that can be done to whole blocks is done to whole blocks, which become lists of registers no earlier than they must.
Dimensions of blocks are powers of two: a vector has a block of 8 pieces, one of 4, of 2 and of 1, or some of these (words
of codes may be 16 times four).

Memory is accessed by blocks in which each lane gets rows of its own. Of the last dimension, Triton gives a lane what it can
load at once; then it deals out to lanes the first dimension, up to Triton 3.6, or the last but one, since. There the lanes
are, [32 lanes, pieces, 8] or [pieces, 32 lanes, 8]: else numbers would change lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .warp import round_to_pair

RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
LANES_SECOND = tl.constexpr(RELEASE >= (3, 7))
# Since 3.8, Triton takes pointers that a `tl.where` chose, of which n follow each other, to be aligned to n bytes at most:
# of eight bf16, it would have two lanes load half each.
CHOICES_ARE_ALIGNED = tl.constexpr(RELEASE < (3, 8))


@triton.constexpr_function
def block_count(pieces):
    """How many blocks so many pieces make."""
    return bin(pieces).count("1")


@triton.constexpr_function
def block_size(b, pieces):
    """The pieces of block b."""
    return [size for size in (16, 8, 4, 2, 1) if pieces & size][b]


@triton.constexpr_function
def block_start(b, pieces):
    """The first piece of block b."""
    return sum([size for size in (16, 8, 4, 2, 1) if pieces & size][:b])


@triton.jit
def block_offsets(offset, STEP: tl.constexpr, b: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
                  SIZE: tl.constexpr = 8):  # fmt: skip
    """Where the numbers of block b are, SIZE a piece: piece m of a lane at STEP * m from its offset, [32].

    Returns:
        int32 [32, pieces * SIZE / WIDTH, WIDTH] as `lanes_first` takes it; WIDTH numbers are what a lane loads at once.
    """
    PARTS: tl.constexpr = SIZE // WIDTH
    n = tl.arange(0, block_size(b, PIECES) * PARTS)
    at = STEP * (block_start(b, PIECES) + n // PARTS) + n % PARTS * WIDTH
    return (of_lane(offset) + of_piece(at)) + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def of_lane(x):
    """[32], to go with `block_offsets`."""
    return x[None, :, None] if LANES_SECOND else x[:, None, None]


@triton.jit
def of_piece(x):
    """The other dimension of `block_offsets`."""
    return x[:, None, None] if LANES_SECOND else x[None, :, None]


@triton.jit
def lanes_first(x):
    """A block as it is accessed, to [32, N, WIDTH], and back."""
    return x.permute(1, 0, 2) if LANES_SECOND else x


@triton.constexpr_function
def load_width(dtype):
    """Numbers of 16 bytes, at most a piece: what a lane loads at once. Of longer rows of a block, Triton would give parts to
    other lanes."""
    return min(8, 128 // dtype.primitive_bitwidth)


@triton.jit
def as_pieces(x):
    """What stands at `block_offsets`, [32, pieces, 8]; a single piece as it is."""
    return lanes_first(x).reshape(32, x.numel // 256, 8) if len(x.shape) == 3 else x


@triton.jit
def split_pieces(x):
    """[32, N, WIDTH] to a list of N [32, WIDTH]; N is a power of two of at most 32."""
    parts = [x]
    for bit in tl.static_range(5):
        if 1 << bit < x.shape[1]:
            new = []
            for k in tl.static_range(1 << bit):
                halves = parts[k].reshape(32, 2, x.shape[1] >> (bit + 1), x.shape[2])
                a, b = tl.split(halves.permute(0, 2, 3, 1))
                new = new + [a, b]
            parts = new
    pieces = []
    for k in tl.static_range(x.shape[1]):
        pieces = pieces + [parts[k].reshape(32, x.shape[2])]
    return pieces


@triton.jit
def pair_words(blocks, DTYPE: tl.constexpr):
    """Blocks of fp32 as a list of [32, 1]: words of two neighbours in fp16 or bf16, four a piece."""
    words = []
    for b in tl.static_range(len(blocks)):
        low, high = tl.split(blocks[b].reshape(32, 4 * blocks[b].shape[1], 2))
        word = round_to_pair(low, high, DTYPE)
        words = words + split_pieces(word.reshape(32, word.shape[1], 1))
    return words
