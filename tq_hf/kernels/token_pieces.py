"""The pieces of a group's tokens, as `encode.py` takes them: a lane's eight numbers for every 32 of a vector.

They are a block [32, 8] each, or if LARGE, several are a block [32, pieces, 8] (`pieces.py`), which Triton compiles in a
quarter of the time. Up to 128 dimensions they are apart: how many registers the store kernel may take is tuned to that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pieces import as_pieces, block_count, block_offsets, load_width, of_lane


@triton.constexpr_function
def piece_blocks(pieces, large):
    """How many blocks so many pieces make."""
    return block_count(pieces) if large else pieces


@triton.jit
def piece_dims(b: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, LARGE: tl.constexpr):
    """The dimensions of a lane's block b of pieces."""
    if LARGE:
        return block_offsets(tl.arange(0, 32) % 4 * 8, 32, b, PIECES, WIDTH)
    else:
        return (32 * b + tl.arange(0, 32) % 4 * 8)[:, None] + tl.arange(0, 8)[None, :]


@triton.jit
def to_dims(x, dims):
    """x, [32], to go with `piece_dims`."""
    return of_lane(x) if len(dims.shape) == 3 else x[:, None]


@triton.jit
def over_pieces(block):
    """The sum [32, 8] of a block's pieces."""
    return tl.sum(block, 1) if len(block.shape) == 3 else block


@triton.jit
def load_pieces(first, p_first, p_second, real, eviction: tl.constexpr, DIM: tl.constexpr, PIECES: tl.constexpr,
                LARGE: tl.constexpr):  # fmt: skip
    """The pieces of one token a lane, in the first tensor where `first`, else in the second; zeros unless `real`."""
    WIDTH: tl.constexpr = load_width(p_first.dtype.element_ty)
    blocks = []
    for b in tl.static_range(piece_blocks(PIECES, LARGE)):
        d = piece_dims(b, PIECES, WIDTH, LARGE)
        p = tl.where(to_dims(first, d), to_dims(p_first, d) + d, to_dims(p_second, d) + d)
        mask = to_dims(real, d) if DIM % 32 == 0 else to_dims(real, d) & (d < DIM)
        blocks = blocks + [as_pieces(tl.load(p, mask=mask, other=0.0, eviction_policy=eviction))]
    return blocks


@triton.jit
def add_tokens(total, vectors, share: tl.constexpr):
    """`total`, blocks of pieces, and with it the pieces of a lane's four tokens times a share."""
    BLOCKS: tl.constexpr = len(total)
    sums = []
    for b in tl.static_range(BLOCKS):
        x = total[b]
        for r in tl.static_range(4):
            x += vectors[r * BLOCKS + b].to(tl.float32) * share
        sums = sums + [x]
    return sums


@triton.jit
def not_finite(total):
    """Whether any number of blocks of pieces is not finite."""
    zeros = tl.zeros([32, 8], tl.float32)
    for b in tl.static_range(len(total)):
        zeros += over_pieces(total[b] * 0.0)  # infinities and NaN times zero are NaN
    return tl.max(tl.max((zeros != 0.0).to(tl.int32), 1), 0) != 0


@triton.jit
def over_tokens(blocks):
    """The sums of blocks of pieces over the lanes that share t, in each of them."""
    sums = []
    for b in tl.static_range(len(blocks)):
        x = tl.sum(blocks[b].reshape(8, 4, blocks[b].numel // 32), 0)[None, :, :]
        sums = sums + [x.broadcast_to(8, 4, x.shape[2]).reshape(blocks[b].shape)]
    return sums
