"""Which program of the decode kernel takes what: rows get splits in proportion to the pages that they have.

Every head has the same number of *slots*, one program each. All rows of a batch have the same entries, but a padded row
skips those before its first token; so the tiles of all rows are counted, divided by the slots, and a row takes as many slots
as it has such shares. Nothing of this is known on the host: the kernels that need it work it out alike.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_splits(p_row_start, p_counters, batch, slots, PAGE_BITS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
               LEAST: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """How the tiles of a batch are split.

    Args:
        slots: at least as many as rows.
        GROUPS: groups of a page; TILE: groups of a tile, which may have two pages; LEAST: tiles that a split should have.
        BATCH: a power of two of at least `batch`, 1 or at least 32: of a sum over a warp, the compiler knows that all lanes
            have the same.

    Returns:
        For each row, int32 [BATCH]: the first tile that holds a token, and how many splits the row has. And the tiles of
        every row, those before its first one included.
    """
    row = tl.arange(0, BATCH)
    start = tl.load(p_row_start + row, mask=row < batch, other=0)
    tiles = tl.cdiv(tl.load(p_counters + 2) * GROUPS, TILE)
    first = (start >> PAGE_BITS) * GROUPS // TILE
    # Shorter pages than most, and a first one that begins before position 0, can only have made this too low.
    own = tl.where(row < batch, tl.maximum(tiles - first, 0), 0)
    total = tl.sum(own, 0)
    least = tl.maximum(tl.cdiv(total, slots), LEAST)
    if BATCH == 1:
        return first, tl.cdiv(own, least), tiles
    else:  # the last split of a row may be a small one, so that somewhat larger splits are needed to fit the slots
        spare = slots - batch
        most = tl.where(spare > 0, tl.maximum(tl.cdiv(total, tl.maximum(spare, 1)), least), tl.maximum(tiles, 1))
        size = most
        for i in tl.static_range(3):  # sizes without a guarantee, which may fit nevertheless
            smaller = least + (most - least) * (2 - i) // 3
            size = tl.where(tl.sum(tl.cdiv(own, smaller), 0) <= slots, smaller, size)
        return first, tl.cdiv(own, size), tiles


@triton.jit
def slot_of(first, splits, slot, BATCH: tl.constexpr):
    """What slot number `slot` of a head has: its row, the row's first tile, the split of the row and the row's splits; a row
    of BATCH or more, and no splits, for a slot that has nothing to do."""
    row = tl.arange(0, BATCH)
    end = tl.cumsum(splits, 0)
    i_b = tl.sum((end <= slot).to(tl.int32), 0)
    its = row == i_b
    begin = tl.sum(tl.where(its, end - splits, 0), 0)
    return i_b, tl.sum(tl.where(its, first, 0), 0), slot - begin, tl.sum(tl.where(its, splits, 0), 0)


@triton.jit
def slots_of(splits, i_b, BATCH: tl.constexpr):
    """The first slot of row `i_b`, and how many it has."""
    row = tl.arange(0, BATCH)
    return tl.sum(tl.where(row < i_b, splits, 0), 0), tl.sum(tl.where(row == i_b, splits, 0), 0)
