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

OCTETS = 4  # runs a chunk and lane: one for each 8 tokens of a group
CHUNK_DIMS = 32

_ONES = 0x11111111  # bit 0 of every nibble
_LOW3 = 0x77777777
_LOW2 = 0x33333333

_CODE_TYPES = {2: torch.uint8, 3: torch.uint8, 4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}
_BYTES = {4: torch.int32, 8: torch.int64}


def pack_codes(codes: Tensor, bits: int, order: RunOrder, signed: bool = False) -> Tensor:
    """The words of one group's key or value codes.

    Args:
        codes: `[..., 32, D]`, D a multiple of 32; uint8 up to 8 bits, int16 at 16, int32 at 32.
        bits: the width of a code: 2, 3, 4, 8, 16 or 32.
        order: how runs map to tokens and dimensions.
        signed: 4 bits only: store sign and magnitude apart (Lloyd-Max codes).

    Returns:
        int32 `[..., bits * D]`.
    """
    lead, dim = codes.shape[:-2], codes.shape[-1]
    runs = _to_runs(codes.reshape(-1, GROUP_TOKENS, dim), order)
    if bits <= 4:
        nibbles = (runs[..., 0::2] | (runs[..., 1::2] << 4)).view(torch.int32).squeeze(-1)
        lane_words = _join_runs(nibbles, bits, signed).flatten(2)
    else:
        lane_words = runs.flatten(2).view(torch.int32)
        if bits == 8:
            lane_words = _swap_middle_bytes(lane_words)
    return _place(lane_words).reshape(*lead, bits * dim)


def unpack_codes(words: Tensor, bits: int, order: RunOrder, signed: bool = False) -> Tensor:
    """The inverse of `pack_codes`: int32 `[..., bits * D]` to codes `[..., 32, D]` of the type `pack_codes` takes."""
    lead, dim = words.shape[:-1], words.shape[-1] // bits
    chunks = dim // CHUNK_DIMS
    lane_words = _collect(words.reshape(-1, bits * dim))
    if bits <= 4:
        nibbles = _split_runs(lane_words.unflatten(2, (chunks, bits)), bits, signed)
        pairs = nibbles.unsqueeze(-1).view(torch.uint8)  # [n, lane, chunk, octet, 4]
        # A byte holds codes 2e and 2e + 1; in PAIRS order these are two tokens' and belong apart.
        runs = torch.stack((pairs & 15, pairs >> 4), -2 if order is RunOrder.PAIRS else -1).flatten(-2)
    else:
        if bits == 8:
            lane_words = _swap_middle_bytes(lane_words)
        runs = lane_words.view(_CODE_TYPES[bits]).unflatten(2, (chunks, OCTETS, RUN_CODES))
        if order is RunOrder.PAIRS:
            runs = runs.unflatten(-1, (4, 2)).mT.flatten(-2)
    return _from_runs(runs, order).reshape(*lead, GROUP_TOKENS, dim)


def pack_metadata(fields: Sequence[Tensor]) -> Tensor:
    """The metadata words of one group.

    Args:
        fields: fp16 tensors `[..., 32]`, in the layout's order; at least one.

    Returns:
        int32 `[..., 16 * len(fields)]`.
    """
    by_lane = [field.unflatten(-1, (OCTETS, 8)).mT for field in fields]  # each [..., g, r]
    blocks = [torch.stack(by_lane[i : i + 2], -2).flatten(-3) for i in range(0, len(by_lane), 2)]
    return torch.cat(blocks, -1).view(torch.int32)


def unpack_metadata(words: Tensor, count: int) -> tuple[Tensor, ...]:
    """The inverse of `pack_metadata`: int32 `[..., 16 * count]` to `count` fp16 tensors `[..., 32]`."""
    halves = words.contiguous().view(torch.float16)
    by_lane: list[Tensor] = []
    for i in range(0, count, 2):
        block = halves[..., GROUP_TOKENS * i : GROUP_TOKENS * min(i + 2, count)]
        by_lane += block.unflatten(-1, (8, -1, OCTETS)).unbind(-2)
    return tuple(field.mT.flatten(-2) for field in by_lane)


def _to_runs(codes: Tensor, order: RunOrder) -> Tensor:
    """Codes `[n, 32, D]` to runs `[n, lane, chunk, octet, 8]`."""
    if order is RunOrder.KEYS:  # token (r, g), dimension (t, c, i)
        split, axes = (OCTETS, 1, 8, 4, -1, 8), (0, 3, 4, 5, 1, 2, 6)
    else:  # token (r, t, a), dimension (g, c, e)
        split, axes = (OCTETS, 4, 2, 8, -1, 4), (0, 4, 2, 5, 1, 3, 6)
    runs = codes.unflatten(2, split[3:]).unflatten(1, split[:3]).permute(axes)  # [n, g, t, c, r, (a, e) or (1, i)]
    if order is RunOrder.PAIRS:
        runs = runs.mT
    return runs.flatten(5).flatten(1, 2)


def _from_runs(runs: Tensor, order: RunOrder) -> Tensor:
    """Runs `[n, lane, chunk, octet, 8]` to codes `[n, 32, D]`; runs in PAIRS order come in as in HALVES order."""
    runs = runs.unflatten(-1, (1, 8) if order is RunOrder.KEYS else (2, 4))
    code_type = runs.dtype
    if code_type is torch.uint8:
        runs = runs.view(_BYTES[runs.shape[-1]])  # neighbours stay neighbours: move them as one element
    axes = (0, 4, 5, 1, 2, 3, 6) if order is RunOrder.KEYS else (0, 4, 2, 5, 1, 3, 6)
    return runs.unflatten(1, (8, 4)).permute(axes).contiguous().view(code_type).flatten(1, 3).flatten(2)


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


def _join_runs(nibbles: Tensor, bits: int, signed: bool) -> Tensor:
    """Nibble words `[..., 4]`, one an octet, to the `bits` words that a chunk takes, `[..., bits]`."""
    if bits == 2:
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << 2)
    if bits == 3:
        spare = [((nibbles[..., 3] >> w) & _ONES) << 3 for w in range(3)]
        return nibbles[..., :3] | torch.stack(spare, -1)
    if not signed:
        return nibbles
    negative = ((nibbles >> 3) & _ONES) ^ _ONES
    magnitude = (nibbles & _LOW3) ^ (negative * 7)
    return magnitude | (_spread(negative & 0xFFFF) << 7) | (_spread((negative >> 16) & 0xFFFF) << 3)


def _split_runs(words: Tensor, bits: int, signed: bool) -> Tensor:
    """The inverse of `_join_runs`: `[..., bits]` to nibble words `[..., 4]`."""
    if bits == 2:
        return torch.stack((words & _LOW2, (words >> 2) & _LOW2), -1).flatten(-2)
    if bits == 3:
        spare = (words >> 3) & _ONES
        last = spare[..., 0] | (spare[..., 1] << 1) | (spare[..., 2] << 2)
        return torch.cat((words & _LOW3, last.unsqueeze(-1)), -1)
    if not signed:
        return words
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
