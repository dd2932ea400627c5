"""Dequantization in registers: lane words to tensor-core tiles, without moving anything between lanes.

A word list has one int32 block [32] (a value a lane) for each word of a lane. A run of 8 codes becomes four *pairs*, words
of two 16-bit values that an mma fragment holds side by side; four runs of pairs become a tile of 32 x 32, whose rows and
columns are named so that lane 4g + t holds what it loaded: the reshapes and permutes below cost no instruction.

Lists stand for register arrays: Triton unrolls `static_range` loops over them.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import LANES, PageLayout
from ..quantizer.codebooks import levels

# Dimensions up to which vectors are lists of small blocks: tuned as they are, and compiled in a few seconds.
SMALL_DIMS = 128
# Inline assembly does not run in Triton's interpreter.
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on"))


class PageSpec(NamedTuple):
    """A page layout as a `tl.constexpr` argument: plain numbers, all of which Triton's cache keys then contain."""

    key_dim: int
    key_padded: int
    key_format: str
    key_bits: int
    key_words: int
    """Words of a lane, as `value_words`."""
    value_dim: int
    value_padded: int
    value_format: str
    value_bits: int
    value_words: int
    centered: bool
    groups: int
    group_bits: int
    """The power of two that `groups` is; `page_bits`: that a page's tokens are."""
    page_bits: int
    page_words: int
    header_words: int
    group_words: int
    fields: int
    """Metadata fields of a token."""
    same_table: bool
    """Whether keys and values share their table of levels."""
    large: bool
    """Whether kernels shall take vectors in few large blocks, not in lists of small ones (`pieces.py`)."""


@lru_cache(maxsize=None)
def page_spec(layout: PageLayout) -> PageSpec:
    """What the attention kernels need to know of a layout."""
    keys, values = table_words(layout, "key"), table_words(layout, "value")
    return PageSpec(
        layout.key_dim,
        layout.key_dim_padded,
        layout.key_format,
        layout.key_bits,
        layout.key_words_per_lane,
        layout.value_dim,
        layout.value_dim_padded,
        layout.value_format,
        layout.value_bits,
        layout.value_words_per_lane,
        layout.center_keys,
        layout.groups,
        layout.groups.bit_length() - 1,
        layout.page_size.bit_length() - 1,
        layout.page_words,
        layout.header_words,
        layout.group_words,
        len(layout.metadata),
        keys == values,
        max(layout.key_dim_padded, layout.value_dim_padded) > SMALL_DIMS,
    )


@lru_cache(maxsize=None)
def level_tables(layout: PageLayout, device: torch.device) -> Tensor:
    """Byte tables of the levels of keys and values.

    Returns:
        int32 [8, 32]: for keys, then values, the low bytes of the fp16 levels 0 to 3 and 4 to 7, then their high bytes.
        4-bit codes have a sign of their own, so their table holds the magnitudes. min_max codes of up to 4 bits are levels
        as well, at distance 1 and around 0. Every lane has its copy: a table in uniform registers would be moved to vector
        registers for each use.
    """
    words = table_words(layout, "key") + table_words(layout, "value")
    return torch.tensor(words, dtype=torch.int64, device="cpu").to(torch.int32)[:, None].repeat(1, LANES).to(device)


def table_words(layout: PageLayout, side: str) -> tuple[int, ...]:
    """Four words of `level_tables`, of the keys or values."""
    fmt, bits = getattr(layout, f"{side}_format"), getattr(layout, f"{side}_bits")
    if fmt == "lloyd_max":
        table = levels(bits, getattr(layout, f"{side}_dim_padded"), layout.codebook)
    elif fmt == "min_max" and bits <= 4:
        table = torch.arange(2**bits, device="cpu") - (2**bits - 1) / 2
    else:
        return (0, 0, 0, 0)
    table = table[8:] if bits == 4 else table.repeat(8 // len(table))
    halves = table.to(torch.float16).view(torch.int16).tolist()
    low, high = [h & 255 for h in halves], [(h >> 8) & 255 for h in halves]
    return tuple(sum(byte << (8 * j) for j, byte in enumerate(four)) for four in (low[:4], low[4:], high[:4], high[4:]))


@triton.jit
def load_now(p):
    """32-bit numbers as words, loaded here: Triton's pipeliner would copy them to shared memory tiles ahead."""
    if INTERPRET:
        return tl.load(p).to(tl.int32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def byte_permute(a, b, selector):
    """The four bytes of (a, b), numbered 0 to 7 from the lowest, that the low four nibbles of `selector` (0..7) name."""
    if INTERPRET:
        result = selector & 0
        for i in tl.static_range(4):
            n = (selector >> (4 * i)) & 7
            result |= ((tl.where(n < 4, a, b) >> (8 * (n & 3))) & 255) << (8 * i)
        return result
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def interleave(low, high, FIRST: tl.constexpr):
    """Bytes FIRST and FIRST + 1 of `low` and `high` as two 16-bit values in a word."""
    SELECTOR: tl.constexpr = 0x5140 + 0x2222 * (FIRST // 2)
    if INTERPRET:
        return byte_permute(low, high, (low & 0) + SELECTOR)
    elif FIRST == 0:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def subtract_halves(pair, HALVES: tl.constexpr):
    """fp16 subtraction of the constant HALVES (two fp16 in a word) from both halves of `pair`; exact for magic numbers."""
    if INTERPRET:
        low = half(pair, tl.float16) - half((pair & 0) + HALVES, tl.float16)
        high = half(pair >> 16, tl.float16) - half((pair & 0) + HALVES, tl.float16)
        low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [pair, HALVES], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def half(word, DTYPE: tl.constexpr):
    """The low 16 bits of a word as a value of DTYPE."""
    return word.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def pin(tile):
    """The tile, unchanged. Without this, Triton takes the loads behind a 16-bit dot operand as its real width, gives each
    lane runs of neighbouring columns and has to shuffle them through shared memory."""
    if INTERPRET or tile.dtype.primitive_bitwidth != 16:
        return tile
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)


@triton.jit
def split_last4(x):
    """[32, 4] to a list of four [32]."""
    even, odd = tl.split(x.reshape(x.shape[0], 2, 2))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return [x0, x1, x2, x3]


@triton.jit
def load_words(p_codes, live, COUNT: tl.constexpr):
    """The COUNT words of each lane (`layout.lane_word_offset`), zeros unless `live`."""
    lane = tl.arange(0, 32)
    REST: tl.constexpr = COUNT % 4
    words = []
    for quad in tl.static_range(COUNT // 4):
        x = tl.load(p_codes + 128 * quad + (4 * lane[:, None] + tl.arange(0, 4)[None, :]), mask=live, other=0)
        words = words + split_last4(x)
    if REST == 2:
        x = tl.load(p_codes + 32 * (COUNT - 2) + (2 * lane[:, None] + tl.arange(0, 2)[None, :]), mask=live, other=0)
        x0, x1 = tl.split(x)
        words = words + [x0, x1]
    else:
        for i in tl.static_range(REST):
            words = words + [tl.load(p_codes + 32 * (COUNT - REST) + i + REST * lane, mask=live, other=0)]
    return words


@triton.jit
def word_halves(x):
    """fp16 values of a block of words, twice as many along the last dimension."""
    values = tl.join(half(x, tl.float16), half(x >> 16, tl.float16))
    return values.reshape(x.shape[0], 2 * x.shape[1])


@triton.jit
def load_metadata(p_metadata, live, FIELDS: tl.constexpr):
    """The metadata fields of a group's tokens, zeros unless `live`.

    Returns:
        A list of fp32 [4 (r), 8 (g), 4 (t)] in the order of `PageLayout.metadata`, the same for every t: each lane loads
        what its rows of an mma tile need.
    """
    g = tl.arange(0, 32)[:, None] // 4
    fields = []
    if FIELDS > 1:
        x = tl.load(p_metadata + (4 * g + tl.arange(0, 4)[None, :]), mask=live, other=0)
        x = word_halves(x).to(tl.float32).reshape(8, 4, 2, 4)
        key, value = tl.split(x.permute(0, 1, 3, 2))
        fields = [key.permute(2, 0, 1), value.permute(2, 0, 1)]
    if FIELDS % 2 == 1:
        x = tl.load(p_metadata + (16 * FIELDS - 16 + 2 * g + tl.arange(0, 2)[None, :]), mask=live, other=0)
        fields = fields + [word_halves(x).to(tl.float32).reshape(8, 4, 4).permute(2, 0, 1)]
    return fields


@triton.jit
def chunk_runs(words, c: tl.constexpr, BITS: tl.constexpr):
    """The words of chunk c's four runs: one each, with a code in every nibble, or for 8 bits and more BITS / 4 each.

    Nibbles may hold other bits beside their code; those of 2 and 3 bits are the ones above it.
    """
    if BITS == 4:
        runs = words[4 * c : 4 * c + 4]
    elif BITS == 3:
        w = words[3 * c : 3 * c + 3]
        runs = w + [((w[0] >> 3) & 0x11111111) | ((w[1] >> 2) & 0x22222222) | ((w[2] >> 1) & 0x44444444)]
    elif BITS == 2:
        w = words[2 * c : 2 * c + 2]
        runs = [w[0], w[0] >> 2, w[1], w[1] >> 2]
    else:
        runs = words[BITS * c : BITS * c + BITS]
    return runs


@triton.jit
def level_pairs(run, table, BITS: tl.constexpr):
    """Eight codes of up to 4 bits to levels, by bytes: four words of two fp16."""
    if BITS == 2:
        low_codes = run & 0x33333333
    else:
        low_codes = run & 0x77777777
    high_codes = low_codes >> 16
    low = byte_permute(table[0], table[1], low_codes)
    high = byte_permute(table[2], table[3], low_codes)
    low2 = byte_permute(table[0], table[1], high_codes)
    high2 = byte_permute(table[2], table[3], high_codes)
    if BITS == 4:  # the sign bits stand at the tops of the bytes, those of the second half four bits lower
        high |= run & -0x7F7F7F80
        high2 |= (run << 4) & -0x7F7F7F80
    return [interleave(low, high, 0), interleave(low, high, 2), interleave(low2, high2, 0), interleave(low2, high2, 2)]


@triton.jit
def byte_pairs(word, POWERS: tl.constexpr = 0x64006400):
    """Four unsigned 8-bit codes to fp16, times 2**-10 of the power of two that both halves of POWERS are."""
    return [
        subtract_halves((word & 0x00FF00FF) | POWERS, POWERS),
        subtract_halves(((word >> 8) & 0x00FF00FF) | POWERS, POWERS),
    ]


@triton.jit
def fp8_pairs(word):
    """Four e4m3 values to fp16, times 2**-8: the exponents' difference. Subnormals come out right as well."""
    first = word << 8
    return [
        ((first >> 1) & 0x3F803F80) | (first & -0x7FFF8000),
        ((word >> 1) & 0x3F803F80) | (word & -0x7FFF8000),
    ]


@triton.jit
def chunk_pairs(words, c: tl.constexpr, table, FORMAT: tl.constexpr, BITS: tl.constexpr):
    """Chunk c as sixteen words of two values, in the order (run, pair)."""
    runs = chunk_runs(words, c, BITS)
    if FORMAT == "raw":
        return runs
    else:
        pairs = []
        for i in tl.static_range(len(runs)):
            if BITS <= 4:
                pairs = pairs + level_pairs(runs[i], table, BITS)
            elif FORMAT == "fp8":
                pairs = pairs + fp8_pairs(runs[i])
            else:
                pairs = pairs + byte_pairs(runs[i])
        return pairs


@triton.jit
def join_all(x):
    """A list of 2**k blocks [32] to one [32, 2, ..., 2], the index's highest bit first."""
    for _ in tl.static_range(5):
        if len(x) > 1:
            y = []
            for i in tl.static_range(len(x) // 2):
                y = y + [tl.join(x[i], x[i + len(x) // 2])]
            x = y
    return x[0]


@triton.jit
def chunk_values(words, c: tl.constexpr, table, FORMAT: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Chunk c as values of DTYPE, [32 lanes, 4 runs, 4 pairs, 2]."""
    pairs = join_all(chunk_pairs(words, c, table, FORMAT, BITS))
    if BITS == 32:
        values = pairs.to(tl.float32, bitcast=True)
    else:
        values = tl.join(half(pairs, DTYPE), half(pairs >> 16, DTYPE))
    return values.reshape(32, 4, 4, 2)


@triton.jit
def key_tile(words, c: tl.constexpr, table, L: tl.constexpr, DTYPE: tl.constexpr):
    """Keys of chunk c: [32 tokens, 32]; column 16ib + 8b + 2t + a is dimension t * D/4 + 8c + 4ib + 2b + a."""
    FORMAT: tl.constexpr = L.key_format
    x = chunk_values(words, c, table, FORMAT, L.key_bits, DTYPE)
    x = x.reshape(8, 4, 4, 2, 2, 2).permute(2, 0, 3, 4, 1, 5)  # [g, t, r, ib, b, a] -> [r, g, ib, b, t, a]
    return pin(x.reshape(32, 32))


@triton.jit
def value_tile(words, c: tl.constexpr, table, L: tl.constexpr, DTYPE: tl.constexpr):
    """Values of chunk c: [32, 32 tokens]; row 8 * (2p + e) + g is dimension g * D/8 + 4c + 2p + e."""
    FORMAT: tl.constexpr = L.value_format
    x = chunk_values(words, c, table, FORMAT, L.value_bits, DTYPE)
    # [g, t, p, h, e, a // 2, a % 2] -> [p, e, g, h, a // 2, t, a % 2]
    x = x.reshape(8, 4, 2, 2, 2, 2, 2).permute(2, 4, 0, 3, 5, 1, 6)
    return pin(x.reshape(32, 32))


@triton.jit
def fragment_order(x):
    """[N, 4 (t), 8 (i)] of what multiplies a key chunk, dimension t * D/4 + 8c + i, to [N, 32] in the key tile's order."""
    return x.reshape(x.shape[0], 4, 2, 2, 2).permute(0, 2, 3, 1, 4).reshape(x.shape[0], 32)


@triton.jit
def mean_tile(p_mean, c: tl.constexpr, live, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Chunk c of a page's mean key as 16 equal rows in the key tile's order: fp16 [16, 32], zeros unless `live`."""
    word = tl.arange(0, 32)[:, None] % 4 * (PADDED // 8) + (4 * c + tl.arange(0, 4)[None, :])
    mask = live
    if PADDED != DIM:
        mask = live & (word < DIM // 2)
    x = word_halves(tl.load(p_mean + word, mask=mask, other=0))  # [32, 8]
    x = fragment_order(x.reshape(8, 4, 8))
    return pin(tl.join(x, x).permute(2, 0, 1).reshape(16, 32))
