"""Codes to words and back, as `tq_hf.layout` lays them out: whole tensors at a time, nothing per token.

Codes travel through two forms. A *run* is 8 codes of one lane, chunk and octet; below 8 bits each run becomes a *nibble
word*, an int32 with code i in nibble i, and what a width does beyond that is bit arithmetic on nibble words alone.
Bytes are viewed as words and back, so the host must be little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import GROUP_TOKENS, LANES, RUN_CODES, RunOrder

RUNS = 4  # a chunk and lane
CHUNK_DIMS = 32

_ONES = 0x11111111  # bit 0 of every nibble
_LOW3 = 0x77777777
_LOW2 = 0x33333333

_CODE_TYPES = {2: torch.uint8, 3: torch.uint8, 4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}
# Codes of a chunk and lane that stay neighbours when they are unpacked: 8 of a key, 4 of a value.
_NEIGHBOURS = {RunOrder.KEYS: torch.int64, RunOrder.VALUES: torch.int32}


def pack_codes(codes: Tensor, bits: int, order: RunOrder) -> Tensor:
    """The words of one group's key or value codes.

    Args:
        codes: `[..., 32, D]`, D a multiple of 32; uint8 up to 8 bits, int16 at 16, int32 at 32.
        bits: the width of a code: 2, 3, 4, 8, 16 or 32.
        order: how runs map to tokens and dimensions.

    Returns:
        int32 `[..., bits * D]`.
    """
    lead, dim = codes.shape[:-2], codes.shape[-1]
    runs = _to_runs(codes.reshape(-1, GROUP_TOKENS, dim), order)
    if bits <= 4:
        nibbles = (runs[..., 0::2] | (runs[..., 1::2] << 4)).view(torch.int32).squeeze(-1)
        lane_words = _join_runs(nibbles, bits).flatten(2)
    else:
        lane_words = runs.flatten(2).view(torch.int32)
        if bits == 8:
            lane_words = _swap_middle_bytes(lane_words)
    return _place(lane_words).reshape(*lead, bits * dim)


def unpack_codes(words: Tensor, bits: int, order: RunOrder) -> Tensor:
    """The inverse of `pack_codes`: int32 `[..., bits * D]` to codes `[..., 32, D]` of the type `pack_codes` takes."""
    lead, dim = words.shape[:-1], words.shape[-1] // bits
    chunks = dim // CHUNK_DIMS
    lane_words = _collect(words.reshape(-1, bits * dim))
    if bits <= 4:
        nibbles = _split_runs(lane_words.unflatten(2, (chunks, bits)), bits)
        if order is RunOrder.KEYS:
            pairs = nibbles.unsqueeze(-1).view(torch.uint8)  # [n, lane, chunk, run, 4]
            codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
        else:
            codes = _token_words(nibbles).unsqueeze(-1).view(torch.uint8)  # [n, lane, chunk, 8 tokens, 4 dimensions]
    else:
        if bits == 8:
            lane_words = _swap_middle_bytes(lane_words)
        codes = lane_words.view(_CODE_TYPES[bits]).unflatten(2, (chunks, RUNS, RUN_CODES))
        if order is RunOrder.VALUES:  # [..., (p, h), (e, a)] to [..., (h, a), (p, e)]
            codes = codes.unflatten(4, (2, 4)).unflatten(3, (2, 2)).permute(0, 1, 2, 4, 6, 3, 5).flatten(5).flatten(3, 4)
    return _from_lanes(codes, order).reshape(*lead, GROUP_TOKENS, dim)


def pack_metadata(fields: Sequence[Tensor]) -> Tensor:
    """The metadata words of one group.

    Args:
        fields: fp16 tensors `[..., 32]`, in the layout's order; at least one.

    Returns:
        int32 `[..., 16 * len(fields)]`.
    """
    by_lane = [field.unflatten(-1, (RUNS, 8)).mT for field in fields]  # each [..., g, r]
    blocks = [torch.stack(by_lane[i : i + 2], -2).flatten(-3) for i in range(0, len(by_lane), 2)]
    return torch.cat(blocks, -1).view(torch.int32)


def unpack_metadata(words: Tensor, count: int) -> tuple[Tensor, ...]:
    """The inverse of `pack_metadata`: int32 `[..., 16 * count]` to `count` fp16 tensors `[..., 32]`."""
    halves = words.contiguous().view(torch.float16)
    by_lane: list[Tensor] = []
    for i in range(0, count, 2):
        block = halves[..., GROUP_TOKENS * i : GROUP_TOKENS * min(i + 2, count)]
        by_lane += block.unflatten(-1, (8, -1, RUNS)).unbind(-2)
    return tuple(field.mT.flatten(-2) for field in by_lane)


def _to_runs(codes: Tensor, order: RunOrder) -> Tensor:
    """Codes `[n, 32, D]` to runs `[n, lane, chunk, run, 8]`."""
    if order is RunOrder.KEYS:  # token (r, g), dimension (t, c, i)
        runs = codes.unflatten(2, (4, -1, 8)).unflatten(1, (RUNS, 8)).permute(0, 2, 3, 4, 1, 5)
    else:  # token (h, a // 2, t, a % 2), dimension (g, c, p, e)
        runs = codes.unflatten(2, (8, -1, 2, 2)).unflatten(1, (2, 2, 4, 2)).permute(0, 5, 3, 6, 7, 1, 8, 2, 4)
        runs = runs.flatten(6).flatten(4, 5)
    return runs.flatten(1, 2)


def _from_lanes(codes: Tensor, order: RunOrder) -> Tensor:
    """Codes by lanes to `[n, 32, D]`: keys `[n, lane, chunk, run, 8]`, values `[n, lane, chunk, 8 tokens, 4]`."""
    code_type = codes.dtype
    if code_type is torch.uint8:
        codes = codes.contiguous().view(_NEIGHBOURS[order])  # neighbours stay neighbours: move them as one element
    codes = codes.unflatten(1, (8, 4))
    if order is RunOrder.KEYS:  # [n, g, t, c, r, i]
        codes = codes.permute(0, 4, 1, 2, 3, 5).contiguous().view(code_type).flatten(1, 2)
    else:  # [n, g, t, c, h, a // 2, a % 2, (p, e)]
        codes = codes.unflatten(4, (2, 2, 2)).permute(0, 4, 5, 2, 6, 1, 3, 7).contiguous().view(code_type).flatten(1, 4)
    return codes.flatten(2)


def _token_words(nibbles: Tensor) -> Tensor:
    """Nibble words of values `[..., (p, h)]` to words whose bytes are a token's codes of the dimensions (p, e):
    `[..., (h, a)]`."""
    first, second = nibbles.unflatten(-1, (2, 2)).unbind(-2)
    # A byte holds the codes of two neighbouring tokens, the byte above it those of the tokens 8 further on.
    pairs = [_even_bytes(first >> s) | (_even_bytes(second >> s) << 16) for s in (0, 8)]
    return torch.stack([(word >> s) & 0x0F0F0F0F for word in pairs for s in (0, 4)], -1).flatten(-2)


def _even_bytes(words: Tensor) -> Tensor:
    """Bytes 0 and 2 side by side."""
    return (words & 0xFF) | ((words >> 8) & 0xFF00)


def _place(lane_words: Tensor) -> Tensor:
    """Lane words `[n, 32, p]` in the order of `layout.lane_word_offset`: `[n, 32 * p]`."""
    quads = lane_words.shape[2] // 4
    whole = lane_words[..., : 4 * quads].unflatten(2, (quads, 4)).transpose(1, 2).flatten(1)
    return torch.cat((whole, lane_words[..., 4 * quads :].flatten(1)), 1)


def _collect(words: Tensor) -> Tensor:
    """The inverse of `_place`: `[n, 32 * p]` to `[n, 32, p]`."""
    per_lane = words.shape[1] // LANES
    quads = per_lane // 4
    whole = words[:, : 4 * quads * LANES].unflatten(1, (quads, LANES, 4)).transpose(1, 2).flatten(2)
    if per_lane % 4 == 0:
        return whole
    return torch.cat((whole, words[:, 4 * quads * LANES :].unflatten(1, (LANES, per_lane % 4))), 2)


def _join_runs(nibbles: Tensor, bits: int) -> Tensor:
    """Nibble words `[..., 4]`, one a run, to the `bits` words that a chunk takes, `[..., bits]`."""
    if bits == 2:
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << 2)
    if bits == 3:
        spare = [((nibbles[..., 3] >> w) & _ONES) << 3 for w in range(3)]
        return nibbles[..., :3] | torch.stack(spare, -1)
    negative = ((nibbles >> 3) & _ONES) ^ _ONES
    magnitude = (nibbles & _LOW3) ^ (negative * 7)
    return magnitude | (_spread(negative & 0xFFFF) << 7) | (_spread((negative >> 16) & 0xFFFF) << 3)


def _split_runs(words: Tensor, bits: int) -> Tensor:
    """The inverse of `_join_runs`: `[..., bits]` to nibble words `[..., 4]`."""
    if bits == 2:
        return torch.stack((words & _LOW2, (words >> 2) & _LOW2), -1).flatten(-2)
    if bits == 3:
        spare = (words >> 3) & _ONES
        last = spare[..., 0] | (spare[..., 1] << 1) | (spare[..., 2] << 2)
        return torch.cat((words & _LOW3, last.unsqueeze(-1)), -1)
    negative = _compress((words >> 7) & 0x01010101) | (_compress((words >> 3) & 0x01010101) << 16)
    return ((words & _LOW3) ^ (negative * 7)) | ((negative ^ _ONES) << 3)


def _spread(bits: Tensor) -> Tensor:
    """Bits 0, 4, 8, 12 to bits 0, 8, 16, 24."""
    bits = (bits | (bits << 8)) & 0x00110011
    return (bits | (bits << 4)) & 0x01010101


def _compress(bits: Tensor) -> Tensor:
    """Bits 0, 8, 16, 24 to bits 0, 4, 8, 12."""
    bits = (bits | (bits >> 4)) & 0x00110011
    return (bits | (bits >> 8)) & 0x00001111


def _swap_middle_bytes(words: Tensor) -> Tensor:
    """Bytes 0 1 2 3 of a word to 0 2 1 3; its own inverse."""
    return (words & ~0x00FFFF00) | ((words & 0x0000FF00) << 8) | ((words >> 8) & 0x0000FF00)
