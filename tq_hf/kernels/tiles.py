"""What the decode kernel loads of a tile of packed tokens, and codes as int8.

Lists of blocks [32], a register each, as in `dequant.py`; there codes become 16-bit numbers, here bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import chunk_runs, split_last4
from .pieces import block_count, block_offsets, lanes_first, split_pieces
from .warp import lane_of_four, permute_bytes, split_halves


@triton.jit
def load_lane_words(p_codes, COUNT: tl.constexpr, LARGE: tl.constexpr):
    """The COUNT words of each lane as blocks of four and what is left (`layout.lane_word_offset`). If LARGE, several fours
    are a block [32, QUADS, 4] (`pieces.py`)."""
    lane = tl.arange(0, 32)
    REST: tl.constexpr = COUNT % 4
    blocks = []
    if LARGE:
        for b in tl.static_range(block_count(COUNT // 4)):
            at = block_offsets(4 * lane, 128, b, COUNT // 4, 4, 4)
            blocks = blocks + [lanes_first(tl.load(p_codes + at))]
    else:
        p = p_codes + (4 * lane[:, None] + tl.arange(0, 4)[None, :])
        for quad in tl.static_range(COUNT // 4):
            blocks = blocks + [tl.load(p + 128 * quad)]
    if REST == 2:
        p = p_codes + (2 * lane[:, None] + tl.arange(0, 2)[None, :])
        blocks = blocks + [tl.load(p + 32 * (COUNT - 2))]
    else:
        for i in tl.static_range(REST):
            blocks = blocks + [tl.load(p_codes + REST * lane + (32 * (COUNT - REST) + i))]
    return blocks


@triton.jit
def lane_words(blocks, COUNT: tl.constexpr, LARGE: tl.constexpr):
    """The blocks of `load_lane_words` as a list of words."""
    BLOCKS: tl.constexpr = block_count(COUNT // 4) if LARGE else COUNT // 4
    words = []
    for i in tl.static_range(BLOCKS):
        quads = split_pieces(blocks[i]) if LARGE else [blocks[i]]
        for quad in tl.static_range(len(quads)):
            words = words + split_last4(quads[quad])
    if COUNT % 4 == 2:
        x0, x1 = tl.split(blocks[BLOCKS])
        words = words + [x0, x1]
    else:
        words = words + blocks[BLOCKS:]
    return words


@triton.jit
def load_pages(p_pages, tile, entries, wanted, GROUP_BITS: tl.constexpr, TILE: tl.constexpr):
    """The ids of a tile's one or two pages; -1 where there is none or it is not `wanted`."""
    entry = (tile * TILE) >> GROUP_BITS
    pages = [tl.load(p_pages + entry, mask=wanted, other=-1)]
    if (1 << GROUP_BITS) < TILE:
        pages = pages + [tl.load(p_pages + (entry + 1), mask=wanted & (entry + 1 < entries), other=-1)]
    return pages


@triton.jit
def tile_groups(pages, others, p_head, heads, tile, L: tl.constexpr, TILE: tl.constexpr):
    """Pointers to a tile's groups; `others` for groups without a page.

    Codes are read wherever there is no page as well: what of, does not matter, and loads without a condition are cheaper.
    """
    in_page = ((tile * TILE) & (L.groups - 1)) * L.group_words
    groups = []
    for u in tl.static_range(TILE):
        page = pages[u % len(pages)]
        p = p_head + (page.to(tl.int64) * heads * L.page_words + (in_page + (u // len(pages)) * L.group_words))
        groups = groups + [tl.where(page >= 0, p, others[u])]
    return groups


@triton.jit
def load_codes(p_groups, OFFSET: tl.constexpr, COUNT: tl.constexpr, LARGE: tl.constexpr):
    """`load_lane_words` for each group of a tile."""
    blocks = []
    for u in tl.static_range(len(p_groups)):
        blocks = blocks + load_lane_words(p_groups[u] + OFFSET, COUNT, LARGE)
    return blocks


@triton.jit
def part(values, u: tl.constexpr, TILE: tl.constexpr):
    """What belongs to group u in a list of a tile's."""
    SIZE: tl.constexpr = len(values) // TILE
    return values[u * SIZE : (u + 1) * SIZE]


@triton.jit
def load_fields(p_groups, pages, OFFSET: tl.constexpr, FIELDS: tl.constexpr, COLUMNS: tl.constexpr):
    """The metadata of each group; zeros where there is no page.

    For 4 columns a register or two, with every word in one lane of those that need it. Else blocks [8, 4] and [8, 2].
    """
    lane = tl.arange(0, 32)
    words = []
    for u in tl.static_range(len(p_groups)):
        p = p_groups[u] + OFFSET
        live = pages[u % len(pages)] >= 0
        if COLUMNS == 4:
            if FIELDS > 1:  # [g][field][r]: lane 4g + t loads word t of its g
                words = words + [tl.load(p + lane, mask=live, other=0)]
            if FIELDS % 2 == 1:
                words = words + [tl.load(p + (16 * FIELDS - 16) + (lane // 4 * 2 + lane % 2), mask=live, other=0)]
        else:
            g = tl.arange(0, 8)[:, None]
            if FIELDS > 1:
                words = words + [tl.load(p + (4 * g + tl.arange(0, 4)[None, :]), mask=live, other=0)]
            if FIELDS % 2 == 1:
                p += 16 * FIELDS - 16
                words = words + [tl.load(p + (2 * g + tl.arange(0, 2)[None, :]), mask=live, other=0)]
    return words


@triton.jit
def load_kept(p_kept, tile, pages, TILE: tl.constexpr):
    """A word for each group with a bit for each token that counts."""
    words = []
    for u in tl.static_range(TILE):
        words = words + [tl.load(p_kept + (tile * TILE + u), mask=pages[u % len(pages)] >= 0, other=0)]
    return words


@triton.jit
def load_means(p_means, tile, pages, columns, own_column, GROUP_BITS: tl.constexpr, TILE: tl.constexpr):
    """The scores of each page's mean key for the column of a lane."""
    entry = (tile * TILE) >> GROUP_BITS
    scores = []
    for u in tl.static_range(len(pages)):
        p = p_means + ((entry + u) * columns + own_column)
        scores = scores + [tl.load(p, mask=pages[u] >= 0, other=0.0)]
    return scores


@triton.jit
def field_words(words, FIELD: tl.constexpr, FIELDS: tl.constexpr, COLUMNS: tl.constexpr):
    """A field of a lane's tokens as words of two fp16: for 4 columns those of tokens 8r + g, r = 0, 1 and 2, 3; else those
    of tokens 8r + 2t + a, in the order (halves of r, a)."""
    REST: tl.constexpr = FIELDS == 1 or FIELD == 2  # in a block of its own
    block = words[len(words) - 1] if REST else words[0]
    FIRST: tl.constexpr = 0 if REST else 2 * FIELD
    if COLUMNS == 4:
        return [lane_of_four(block, FIRST), lane_of_four(block, FIRST + 1)]
    else:
        if REST:
            x = block
        else:
            pairs = tl.split(block.reshape(8, 2, 2).permute(0, 2, 1))
            x = pairs[FIELD]
        # [2t + a, half] to a lane's [half, a]
        x = x.reshape(4, 2, 2).permute(0, 2, 1)[None, :, :, :].broadcast_to(8, 4, 2, 2).reshape(32, 2, 2)
        even, odd = tl.split(x)
        e0, e1 = tl.split(even)
        o0, o1 = tl.split(odd)
        return [e0, o0, e1, o1]


@triton.jit
def token_halves(words):
    """Words of `field_words` as fp32, a number for each token of the lane."""
    if len(words) == 2:
        return split_halves(words[0]) + split_halves(words[1])
    else:
        values = []
        for i in tl.static_range(0, 4, 2):
            x = split_halves(words[i])
            y = split_halves(words[i + 1])
            values = values + [x[0], y[0], x[1], y[1]]
        return values


@triton.jit
def to_int8(run, table, BITS: tl.constexpr):
    """Eight codes to eight int8 in two words."""
    if BITS == 4:
        codes = run & 0x77777777
        # The sign bits stand at the tops of the bytes, those of the second half four bits lower; -1 - m is ~m.
        lower = run << 4
        return [
            permute_bytes(table[0], table[1], codes) ^ permute_bytes(run, run, 0xBA98),
            permute_bytes(table[0], table[1], codes >> 16) ^ permute_bytes(lower, lower, 0xBA98),
        ]
    else:
        codes = run & (0x77777777 if BITS == 3 else 0x33333333)
        return [permute_bytes(table[0], table[1], codes), permute_bytes(table[0], table[1], codes >> 16)]


@triton.jit
def chunk_int8(words, c: tl.constexpr, table, BITS: tl.constexpr):
    """Chunk c as eight words: first and second half of each of its four runs."""
    runs = chunk_runs(words, c, BITS)
    halves = []
    for r in tl.static_range(4):
        halves = halves + to_int8(runs[r], table, BITS)
    return halves
