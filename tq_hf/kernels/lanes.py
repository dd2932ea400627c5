"""What the kernels that write and read pages share: `layout.py`'s index arithmetic on blocks, and constants on the device.

Tiles are 32 tokens (one group) by 32 dimensions (one chunk of every lane's part). The columns of a chunk are not
neighbours in the head: column n of key chunk c is dimension `(n // 8) * D/4 + 8c + n % 8`, of value chunk c
`(n // 4) * D/8 + 4c + n % 4` (D padded). So a chunk's codes fill whole words, whatever the dimension.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import GROUP_TOKENS, PageLayout
from ..quantizer.codebooks import levels
from ..quantizer.rotation import hadamard_signs
from .launch import power_of_two

CHUNK = 32


@triton.jit
def row_pointers(first, p_first, p_second, columns):
    """Pointers [rows, columns] to rows of the first tensor where `first`, else of the second; all but columns [rows].

    The choice is made between whole blocks: of pointers to chosen rows, Triton 3.9 would not know that they are aligned.
    """
    return tl.where(first[:, None], p_first[:, None] + columns[None, :], p_second[:, None] + columns[None, :])


@triton.jit
def chunk_dims(c, PADDED: tl.constexpr, KEYS: tl.constexpr):
    """The dimensions of the columns of chunk c, int32 [32]."""
    n = tl.arange(0, 32)
    if KEYS:
        dims = (n // 8) * (PADDED // 4) + 8 * c + n % 8
    else:
        dims = (n // 4) * (PADDED // 8) + 4 * c + n % 4
    return dims


@triton.jit
def load_factors(p_factors, d, DIM: tl.constexpr):
    """A head's channel factors, 1 where there are none yet and beyond DIM."""
    factors = tl.load(p_factors + d, mask=d < DIM, other=1.0)
    return tl.where(factors == 0, 1.0, factors)


@triton.jit
def lane_word_offset(lane, word, WORDS: tl.constexpr):
    """`layout.lane_word_offset` for blocks; WORDS is the words a lane has."""
    QUADS: tl.constexpr = WORDS // 4
    REST: tl.constexpr = WORDS % 4
    offset = 128 * (word // 4) + 4 * lane + word % 4
    if REST != 0:
        offset = tl.where(word < 4 * QUADS, offset, 128 * QUADS + REST * lane + word - 4 * QUADS)
    return offset


@triton.jit
def metadata_offset(token, FIELD: tl.constexpr, FIELDS: tl.constexpr):
    """`PageLayout.metadata_offset` for a block of tokens 0..31: halves from the start of the group's metadata."""
    if FIELDS == 1 or FIELD == 2:
        offset = 64 * (FIELD // 2) + 4 * (token % 8) + token // 8
    else:
        offset = 8 * (token % 8) + 4 * FIELD + token // 8
    return offset


@triton.jit
def code_shift(i, BITS: tl.constexpr):
    """The bit at which code i (0..7) of a run starts in its word."""
    if BITS <= 4:
        shift = 4 * i
    elif BITS == 8:  # bytes 0, 2 hold codes 4h, 4h + 1 and bytes 1, 3 codes 4h + 2, 4h + 3
        shift = 16 * (i % 2) + 8 * (i // 2 % 2)
    elif BITS == 16:
        shift = 16 * (i % 2)
    else:
        shift = 0 * i
    return shift


@triton.jit
def sign_shift(i):
    """The bit of code i's sign in a word of 3-bit magnitudes."""
    return tl.where(i < 4, 8 * i + 7, 8 * i - 29)


@lru_cache(maxsize=None)
def signs(dim_padded: int, keys: bool, device: torch.device) -> Tensor:
    """The rotation by chunks: entry [c, k, n] is the sign with which input k enters rotated column n of chunk c.

    Returns:
        fp16 [dim_padded / 32, block_dim(dim_padded), 32] of +-1, zero for inputs beyond `dim_padded`.
    """
    chunks = dim_padded // CHUNK
    c, n = torch.arange(chunks, device="cpu")[:, None], torch.arange(CHUNK, device="cpu")[None, :]
    part = 8 if keys else 4
    dims = n // part * (dim_padded * part // CHUNK) + part * c + n % part  # [C, 32]
    table = torch.zeros(chunks, block_dim(dim_padded), CHUNK, dtype=torch.float16, device="cpu")
    table[:, :dim_padded] = hadamard_signs(dim_padded)[dims].mT.to(torch.float16)
    return table.to(device)


@lru_cache(maxsize=None)
def code_levels(bits: int, dim: int, codebook: str, device: torch.device) -> Tensor:
    """The level of each code, fp16 [2**bits] (exact)."""
    return levels(bits, dim, codebook).to(torch.float16).to(device)


def block_dim(dim: int) -> int:
    """The block size that holds a padded dimension: a power of two."""
    return power_of_two(dim)


@lru_cache(maxsize=None)
def constants(layout: PageLayout) -> dict[str, Any]:
    """The `tl.constexpr` arguments that describe a layout to `gather.unpack_pages`."""
    sides: dict[str, Any] = {}
    for side in ("key", "value"):
        field = f"{side}_scale"
        padded = getattr(layout, f"{side}_dim_padded")
        sides |= {
            f"{side.upper()}_DIM": getattr(layout, f"{side}_dim"),
            f"{side.upper()}_PADDED": padded,
            f"{side.upper()}_BLOCK": block_dim(padded),
            f"{side.upper()}_FORMAT": getattr(layout, f"{side}_format"),
            f"{side.upper()}_BITS": getattr(layout, f"{side}_bits"),
            f"{side.upper()}_SCALE": layout.metadata.index(field) if field in layout.metadata else 0,
        }
    return sides | {
        "FIELDS": len(layout.metadata),
        "CENTER_KEYS": layout.center_keys,
        "PAGE": layout.page_size,
        "GROUPS": layout.page_size // GROUP_TOKENS,
        "PAGE_WORDS": layout.page_words,
        "HEADER_WORDS": layout.header_words,
        "GROUP_WORDS": layout.group_words,
        "KEY_WORDS": layout.key_words,
        "VALUE_WORDS": layout.value_words,
    }


def warps(layout: PageLayout) -> int:
    """Warps for a program that holds 32 whole vectors: at most 32 values of a thread."""
    return 4 if max(block_dim(layout.key_dim_padded), block_dim(layout.value_dim_padded)) <= 128 else 8


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device: switch to the tensors' where that is another."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def keep_bytes(keep: Tensor | None) -> Tensor | None:
    """A bool or uint8 mask [B, kv] as bytes in contiguous rows."""
    if keep is None:
        return None
    keep = keep.view(torch.uint8)
    return keep if keep.stride(-1) == 1 else keep.contiguous()
