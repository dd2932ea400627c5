"""Encodes rotated vectors: a warp a group, in registers from the load to the stored words.

A Hadamard matrix of order D is the Kronecker product of one of order D/4 (the *top*) and the 4 x 4 one: dimension 4k + i has
number k among the tops. Tensor cores multiply by the top, for each i apart; the small one takes additions in a lane.

Lane 4g + t has tokens 8r + g (r in 0..3), as rows of `mma` fragments go. It loads dimensions 32m + 8t to 32m + 8t + 7 of
each, a *piece* for every m. The two tops of a piece make a word of the left operand for each i. The columns of the product
are named (`rotation_fragments`) so that a lane gets what it packs: for each chunk c, the dimensions t * D/4 + 8c + 4b + i of
a key. Those of a value are n * D/8 + 4c + i in columns n = 2t + b; their codes change lanes once they are four bits long.

A word is a register of two fp16. A rotated coordinate's sign goes apart; its magnitude's cell is found by counting the
boundaries that it reaches. Those of eight coordinates become the nibbles of a register, and with these as selectors byte
permutes look up the levels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ..quantizer.codebooks import boundaries, levels
from ..quantizer.rotation import hadamard_signs
from .dequant import split_last4
from .lanes import lane_word_offset, metadata_offset
from .pieces import split_pieces
from .tiles import lane_words, load_lane_words
from .token_pieces import over_pieces
from .warp import (
    multiply_add_halves,
    multiply_fp16,
    pack_halves,
    permute_bytes,
    saturated_multiply_add_halves,
    transpose,
)

FP16_MAX = tl.constexpr(65504.0)
LARGEST = tl.constexpr(3.4028234663852886e38)
# Vectors are scaled to coordinates of this standard deviation: the lowest boundary is above a quarter of it, where fp16 are
# half apart, and no coordinate exceeds 16 times as much. A power of two and a bit: it puts the boundaries of an int8 grid,
# which would be fp16 themselves, about half way between two, where hardly a coordinate changes sides as it is rounded.
UNIT = tl.constexpr(2048 * (1 + 2**-11.5))
TWICE = tl.constexpr(0x40004000)  # 2.0, both halves
ONES = tl.constexpr(0x3C003C00)
SIXTEENS = tl.constexpr(0x4C004C00)
COUNTER = tl.constexpr(0x64006400)  # 1024.0: the bits of an integer added to it are the lowest


@lru_cache(maxsize=None)
def rotation_fragments(dim_padded: int, keys: bool, device: torch.device) -> Tensor:
    """The right operands of the rotation's products: for each chunk, words of a lane, two for every 16 tops of the input.

    Returns:
        int32 [dim_padded / 32, 32 * words], where `layout.lane_word_offset` says; two fp16 each, +-1 (0 for tops beyond the
        dimension).
    """
    chunks = dim_padded // 32
    steps = -(-chunks // 2)
    top = torch.zeros(16 * steps, 8 * chunks, dtype=torch.float16, device="cpu")
    top[: 8 * chunks] = hadamard_signs(dim_padded)[::4, ::4].mT.to(torch.float16)
    c, lane = torch.arange(chunks, device="cpu")[:, None], torch.arange(32, device="cpu")
    column = lane // 4
    out = column // 2 * (2 * chunks) + 2 * c + column % 2 if keys else column * chunks + c  # [C, 32]
    words = torch.empty(chunks, 64 * steps, dtype=torch.int32, device="cpu")
    for word in range(2 * steps):
        first = 8 * word + 2 * (lane % 4)
        at = [layout.lane_word_offset(i, word, 2 * steps) for i in range(32)]
        words[:, at] = torch.stack([top[first, out], top[first + 1, out]], -1).view(torch.int32).squeeze(-1)
    return words.to(device)


@lru_cache(maxsize=None)
def magnitude_cells(bits: int, dim: int, codebook: str, device: torch.device) -> Tensor:
    """The non-negative half of a codebook as the constants of `magnitude_indices` and the table of its levels (`look_up`).

    A boundary (but zero) is the fp16 below it, times -2: a multiply-add that saturates to 0..1 then tells whether twice a
    value reaches it.

    Returns:
        int32: a word for each boundary, which has it twice; of 16 levels' seven boundaries only for every other one, then a
        table of the rest. Last the table of the levels.
    """
    half = 2 ** (bits - 1)
    edges = boundaries(bits, dim, codebook)[half:].double() * UNIT.value
    # What is compared has been rounded to fp16, up to half a step: the fp16 from half a step below which is the boundary.
    edges = (edges + edges.log2().floor().exp2() / 2048).half()
    below = (edges.view(torch.int16) - 1).view(torch.float16) * -2
    words = (below.view(torch.int16).int() & 0xFFFF) * 0x10001
    parts = [words[1::2], _table(below[::2])] if bits == 4 else [words]
    return torch.cat([*parts, _table(levels(bits, dim, codebook)[half:].half())]).to(device)


def _table(numbers: Tensor) -> Tensor:
    """Up to eight fp16 as `look_up` takes them: int32 words of all low bytes, then of all high bytes."""
    entries = torch.zeros(2, -(-len(numbers) // 4) * 4, dtype=torch.uint8, device="cpu")
    entries[:, : len(numbers)] = numbers.contiguous().view(torch.uint8).view(-1, 2).mT
    return entries.view(torch.int32).flatten()


@triton.jit
def split_last8(x):
    """[32, 8] to a list of eight [32]."""
    even, odd = tl.split(x.reshape(x.shape[0], 4, 2))
    x0, x2, x4, x6 = split_last4(even)
    x1, x3, x5, x7 = split_last4(odd)
    return [x0, x1, x2, x3, x4, x5, x6, x7]


@triton.jit
def join4(x0, x1, x2, x3):
    """Four [32] to [32, 4]."""
    return tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(32, 4)


@triton.jit
def sum_of_four(x):
    """The sum [32] over the four lanes that share g, in each of them."""
    return tl.sum(x.reshape(8, 4), 1)[:, None].broadcast_to(8, 4).reshape(32)


@triton.jit
def token_bits(tokens):
    """A block [32] of conditions as the bits of a number."""
    return tl.sum(tokens.to(tl.int32) << tl.arange(0, 32), 0)


@triton.jit
def lane_tokens(bits):
    """A lane's four tokens of `token_bits`: four [32]."""
    tokens = []
    for r in tl.static_range(4):
        tokens = tokens + [(bits >> (8 * r + tl.arange(0, 32) // 4)) & 1 != 0]
    return tokens


@triton.jit
def piece_words(x, factor):
    """A block of pieces times a lane's factor as words of the left operand: for each piece four [32], or one [32, 4], i the
    columns."""
    if len(x.shape) == 3:
        low, high = tl.split((x * factor[:, None, None]).reshape(32, x.shape[1], 2, 4).permute(0, 1, 3, 2))
        return split_pieces(pack_halves(low, high))
    else:
        low, high = tl.split((x * factor[:, None]).reshape(32, 2, 4).permute(0, 2, 1))
        return split_last4(pack_halves(low, high))


@triton.jit
def operand_words(vectors, real, mean, factors):
    """Vectors less the mean, times the factors (blocks of pieces, or None), as left operands, and their norms.

    Vectors that are not real get the norm zero, with which they decode to zeros whatever their codes are.

    Args:
        vectors: four times the blocks of a token's pieces.
        real: four [32], the tokens that were loaded.

    Returns:
        words: for each token r, piece and i (`piece_words`); of vectors scaled so that coordinates are `UNIT` on average.
        norms: four [32].
        Whether any of the norms is not finite.
    """
    BLOCKS: tl.constexpr = len(vectors) // 4
    words = []
    norms = []
    overflow = tl.zeros([32], tl.int32)
    for r in tl.static_range(4):
        squares = tl.zeros([32, 8], tl.float32)
        blocks = []
        for b in tl.static_range(BLOCKS):
            x = vectors[r * BLOCKS + b].to(tl.float32)
            if mean is not None:
                x -= mean[b]
            if factors is not None:
                x *= factors[b]
            squares += over_pieces(x * x)
            blocks = blocks + [x]
        norm = tl.sqrt(sum_of_four(tl.sum(squares, 1)))
        inverse = UNIT / tl.maximum(norm, 1e-30)
        for b in tl.static_range(BLOCKS):
            words = words + piece_words(blocks[b], inverse)
        overflow |= (~(norm <= LARGEST)).to(tl.int32)
        norms = norms + [tl.where(real[r], norm, 0.0)]
    return words, norms, tl.max(overflow, 0) != 0


@triton.jit
def rotate_tops(first, second, fragments, i: tl.constexpr, STEP: tl.constexpr):
    """A chunk of the product with the top for dimensions i of two tokens: b = 0, 1 of the first, then of the second.

    Args:
        STEP: how many words a piece has, of which number i is taken.
    """
    PIECES: tl.constexpr = len(first) // STEP
    zero = tl.zeros(first[0].shape, tl.int32)
    nothing = tl.zeros(first[0].shape, tl.float32)
    total = [nothing, nothing, nothing, nothing]
    for s in tl.static_range(len(fragments) // 2):
        a = [first[2 * s * STEP + i], second[2 * s * STEP + i], zero, zero]
        if 2 * s + 1 < PIECES:
            a = a[:2] + [first[(2 * s + 1) * STEP + i], second[(2 * s + 1) * STEP + i]]
        total = multiply_fp16(a, fragments[2 * s : 2 * s + 2], total)
    return total


@triton.jit
def chunk_words(y, KEYS: tl.constexpr):
    """A token's rotated coordinates of a chunk, i = 0..3 for b = 0 and for b = 1, as words (`signed_codes`)."""
    if KEYS:
        return [pack_halves(y[0], y[2]), pack_halves(y[1], y[3]), pack_halves(y[4], y[6]), pack_halves(y[5], y[7])]
    else:
        return [pack_halves(y[0], y[4]), pack_halves(y[1], y[5]), pack_halves(y[2], y[6]), pack_halves(y[3], y[7])]


@triton.jit
def rotate_chunk(first, second, fragments, KEYS: tl.constexpr):
    """A chunk of two rotated tokens from their words: four words each (`chunk_words`)."""
    y = []
    if len(first[0].shape) == 2:  # words of all i
        z = rotate_tops(first, second, fragments, 0, 1)
        for j in tl.static_range(4):
            even, odd = tl.split(z[j].reshape(32, 2, 2))  # i = 0, 2 and i = 1, 3
            sum01, sum23 = tl.split(even + odd)
            difference01, difference23 = tl.split(even - odd)
            y = y + [sum01 + sum23, difference01 + difference23, sum01 - sum23, difference01 - difference23]
    else:
        z0 = rotate_tops(first, second, fragments, 0, 4)
        z1 = rotate_tops(first, second, fragments, 1, 4)
        z2 = rotate_tops(first, second, fragments, 2, 4)
        z3 = rotate_tops(first, second, fragments, 3, 4)
        for j in tl.static_range(4):
            sum01 = z0[j] + z1[j]
            sum23 = z2[j] + z3[j]
            difference01 = z0[j] - z1[j]
            difference23 = z2[j] - z3[j]
            y = y + [sum01 + sum23, difference01 + difference23, sum01 - sum23, difference01 - difference23]
    return chunk_words(y[:8], KEYS), chunk_words(y[8:], KEYS)


@triton.jit
def count_boundaries(magnitude, boundaries):
    """How many boundaries the halves of a word of magnitudes reach, as fp16."""
    count = saturated_multiply_add_halves(magnitude, TWICE, boundaries[0])  # 0 or 1
    for m in tl.static_range(1, len(boundaries)):
        count = multiply_add_halves(saturated_multiply_add_halves(magnitude, TWICE, boundaries[m]), ONES, count)
    return count


@triton.jit
def nibbles(counts):
    """Four words of two fp16 integers below 8 as nibbles: those of the low halves of words 0 and 1, of their high halves,
    then the same of words 2 and 3."""
    pairs = []
    for i in tl.static_range(2):
        pair = multiply_add_halves(counts[2 * i + 1], SIXTEENS, COUNTER)
        pairs = pairs + [multiply_add_halves(counts[2 * i], ONES, pair)]
    return permute_bytes(pairs[0], pairs[1], 0x6420)


@triton.jit
def look_up(indices, table):
    """The fp16 that `nibbles` name, as four words in their order; `table` has words of low bytes, then as many of high."""
    WORDS: tl.constexpr = len(table) // 2
    words = []
    for i in tl.static_range(2):
        selector = indices >> (16 * i)
        low = permute_bytes(table[0], table[WORDS - 1], selector)
        high = permute_bytes(table[WORDS], table[2 * WORDS - 1], selector)
        words = words + [permute_bytes(low, high, 0x6240), permute_bytes(low, high, 0x7351)]
    return words


@triton.jit
def magnitude_indices(magnitudes, cells, BITS: tl.constexpr):
    """The Lloyd-Max cells of four words of magnitudes, as `nibbles`. Magnitudes on a boundary go to the larger cell.

    Of eight cells, three boundaries tell which pair it is, and the one inside the pair which of the two.
    """
    COUNTED: tl.constexpr = 3 if BITS > 2 else 1
    counts = []
    for i in tl.static_range(4):
        counts = counts + [count_boundaries(magnitudes[i], cells[:COUNTED])]
    if BITS < 4:
        return nibbles(counts)
    else:
        inside = look_up(nibbles(counts), cells[3:5])
        finer = []
        for i in tl.static_range(4):
            reached = saturated_multiply_add_halves(magnitudes[i], TWICE, inside[i])
            finer = finer + [multiply_add_halves(counts[i], TWICE, reached)]
        return nibbles(finer)


@triton.jit
def signed_codes(indices, words, BITS: tl.constexpr, KEYS: tl.constexpr):
    """The codes of four words, from the nibbles of their magnitudes' cells and the words' signs.

    Those of a key (`chunk_words`) are one of its runs, of 4 bits as it is stored. Those of a value are nibbles as well, of 4
    bits a magnitude and a sign; byte 2p + b has those of dimensions i = 2p + e, e = 0, 1.
    """
    if BITS == 4 and KEYS:
        first = permute_bytes(words[0], words[1], 0xFBD9)  # each half's sign in all bits of a byte
        second = permute_bytes(words[2], words[3], 0xFBD9)
        return indices | (first & ~0x7F7F7F7F) | (second & 0x08080808)
    else:
        even = permute_bytes(words[0], words[2], 0xFDB9)
        odd = permute_bytes(words[1], words[3], 0xFDB9)
        if BITS == 4:
            return indices | (even & 0x08080808) | (odd & ~0x7F7F7F7F)
        else:
            ALL: tl.constexpr = (2**BITS - 1) * 0x01010101
            return indices ^ ((even & ALL) | (odd & (ALL << 4))) ^ ((1 << (BITS - 1)) * 0x11111111)


@triton.jit
def value_runs(codes):
    """The runs of a chunk from the codes of four tokens r (`signed_codes`): runs as a value's lane packs them.

    Transposed, the lane of a column has bytes of tokens 8r + 2t in a word's low half and of 8r + 2t + 1 in the high one.
    """
    runs = []
    for p in tl.static_range(2):
        for h in tl.static_range(2):
            x = transpose(permute_bytes(codes[2 * h], codes[2 * h + 1], 0x7362 if p else 0x5140))
            first = x & 0x0F0F0F0F
            second = (x >> 4) & 0x0F0F0F0F
            runs = runs + [permute_bytes(first | (first >> 12), second | (second >> 12), 0x5410)]
    return runs


@triton.jit
def run_words(runs, BITS: tl.constexpr, KEYS: tl.constexpr):
    """The words (`layout.py`) of a chunk's four runs, each a word with a code in every nibble (`signed_codes`)."""
    if BITS == 4 and KEYS:
        return runs
    elif BITS == 4:
        words = []
        for r in tl.static_range(4):
            low = permute_bytes(runs[r], runs[r], 0x1100)  # each byte has the sign that belongs to it, in bit 3 or 7
            high = permute_bytes(runs[r], runs[r], 0x3322)
            signs = ((low << 4) & 0x00800080) | (low & ~0x7FFF7FFF) | (high & 0x00080008) | ((high >> 4) & 0x08000800)
            words = words + [(runs[r] & 0x77777777) | signs]
        return words
    elif BITS == 3:
        last = runs[3]
        return [runs[0] | ((last & 0x11111111) << 3), runs[1] | ((last & 0x22222222) << 2),
                runs[2] | ((last & 0x44444444) << 1)]  # fmt: skip
    else:
        return [runs[0] | (runs[1] << 2), runs[2] | (runs[3] << 2)]


@triton.jit
def store_chunk_words(p_codes, c, words, CHUNKS: tl.constexpr):
    """Stores each lane's words of chunk c (`layout.lane_word_offset`): as many as codes have bits."""
    lane = tl.arange(0, 32)
    if len(words) == 4:
        p = p_codes + (128 * c + 4 * lane)
        tl.store(p[:, None] + tl.arange(0, 4)[None, :], join4(words[0], words[1], words[2], words[3]))
    elif len(words) == 3:
        for i in tl.static_range(3):
            tl.store(p_codes + lane_word_offset(lane, 3 * c + i, 3 * CHUNKS), words[i])
    else:
        in_quad = c < CHUNKS // 2 * 2
        p = p_codes + (128 * (c // 2) + tl.where(in_quad, 4 * lane + 2 * (c % 2), 2 * lane))
        tl.store(p[:, None] + tl.arange(0, 2)[None, :], tl.join(words[0], words[1]))


@triton.jit
def quantize_chunk(words, cells, sums, BITS: tl.constexpr, KEYS: tl.constexpr):
    """Codes of a token's four words of a chunk (`signed_codes`), and `sums` with what they add.

    Row g of the products is a token's coordinates by the levels of all eight tokens, row 8 + g its levels by theirs.
    """
    x = [words[0] & 0x7FFF7FFF, words[1] & 0x7FFF7FFF, words[2] & 0x7FFF7FFF, words[3] & 0x7FFF7FFF]
    indices = magnitude_indices(x, cells, BITS)
    y = look_up(indices, cells[5 if BITS == 4 else 2 ** (BITS - 1) - 1 :])
    sums = multiply_fp16([x[0], y[0], x[1], y[1]], [y[0], y[1]], sums)
    sums = multiply_fp16([x[2], y[2], x[3], y[3]], [y[2], y[3]], sums)
    return signed_codes(indices, words, BITS, KEYS), sums


@triton.jit
def store_scale(sums, norm, p_scale, PADDED: tl.constexpr, KEYS: tl.constexpr, FITTED: tl.constexpr):
    """Stores the scales (`layout.PageLayout.scale`) of tokens g; returns which saturate.

    Lane 4g + t has the products of token g with tokens 2t and 2t + 1: one lane has that with itself.
    """
    lane = tl.arange(0, 32)
    g = lane // 4
    own = lane % 4 == g // 2
    is_odd = g % 2 == 1
    projection = tl.where(is_odd, sums[1], sums[0])
    squares = tl.where(is_odd, sums[3], sums[2])
    scale = norm / tl.sqrt(squares)
    if FITTED:
        unbiased = norm * (UNIT * PADDED**0.5) / tl.maximum(projection, 1e-30)
        scale = tl.sqrt(scale * unbiased) if KEYS else unbiased
    saturated = own & ~(scale <= FP16_MAX)  # NaN as well: of a norm that overflows
    tl.store(p_scale, tl.where(saturated, FP16_MAX, scale).to(tl.float16), mask=own)
    return saturated.to(tl.int32)


@triton.jit
def encode(words, norms, p_codes, p_metadata, p_fragments, p_cells, PADDED: tl.constexpr, BITS: tl.constexpr,
           FIELD: tl.constexpr, FIELDS: tl.constexpr, KEYS: tl.constexpr, FITTED: tl.constexpr,
           LARGE: tl.constexpr):  # fmt: skip
    """Rotates, quantizes and stores a group of vectors, as `operand_words` gives them.

    Returns:
        Whether any token's scale saturated fp16.
    """
    CHUNKS: tl.constexpr = PADDED // 32
    WORDS: tl.constexpr = (CHUNKS + 1) // 2 * 2
    OWN: tl.constexpr = CHUNKS if LARGE else 4 * CHUNKS
    CELLS: tl.constexpr = 9 if BITS == 4 else 2 ** (BITS - 1) + 1  # `magnitude_cells`
    cells = []
    for i in tl.static_range(CELLS):
        cells = cells + [tl.load(p_cells + i)]
    nothing = tl.zeros([32], tl.float32)
    sums = [nothing] * 16
    for c in range(CHUNKS):
        fragments = lane_words(load_lane_words(p_fragments + 32 * WORDS * c, WORDS, False), WORDS, False)
        if LARGE:
            fragments = [x[:, None].broadcast_to(32, 4) for x in fragments]
        x0, x1 = rotate_chunk(words[:OWN], words[OWN : 2 * OWN], fragments, KEYS)
        x2, x3 = rotate_chunk(words[2 * OWN : 3 * OWN], words[3 * OWN :], fragments, KEYS)
        codes0, sums0 = quantize_chunk(x0, cells, sums[:4], BITS, KEYS)
        codes1, sums1 = quantize_chunk(x1, cells, sums[4:8], BITS, KEYS)
        codes2, sums2 = quantize_chunk(x2, cells, sums[8:12], BITS, KEYS)
        codes3, sums3 = quantize_chunk(x3, cells, sums[12:], BITS, KEYS)
        sums = sums0 + sums1 + sums2 + sums3
        runs = [codes0, codes1, codes2, codes3]
        if not KEYS:
            runs = value_runs(runs)
        store_chunk_words(p_codes, c, run_words(runs, BITS, KEYS), CHUNKS)
    saturated = tl.zeros([32], tl.int32)
    for r in tl.static_range(4):
        p_scale = p_metadata + metadata_offset(8 * r + tl.arange(0, 32) // 4, FIELD, FIELDS)
        saturated |= store_scale(sums[4 * r : 4 * r + 4], norms[r], p_scale, PADDED, KEYS, FITTED)
    return tl.max(saturated, 0)
