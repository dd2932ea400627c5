"""`commit` and `gather` for tensors on a GPU: what `tq_hf.ops` calls. Nothing here waits for the device."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..layout import PageLayout
from .append import append_calls
from .gather import launch_copy_exact, launch_unpack_pages
from .lanes import keep_bytes, on_device
from .launch import Call
from .schedule import prepare_tables
from .store import Packing, launch_pack_pages, packing


def commit(
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    page_ids: Tensor,
    entries: Tensor,
    row_start: Tensor,
    counters: Tensor,
    balance: Tensor | None,
    flags: Tensor,
    keep: Tensor | None,
    layout: str,
    recent_window: int,
    max_due: int,
) -> None:
    """Adds new tokens to a packed layer, in place; see `tq_hf.ops` for the state tensors.

    The pages that the new tokens make due are packed, the tokens that stay exact go into the ring and the sinks, and the
    counters advance: three launches, or two for a single token, of which a captured graph replays every step whatever is
    due. In steps in which nothing is, `attend` launches the last of them itself.

    Args:
        key, value: [B, H, n, D / Dv] in the model's dtype, any strides but a contiguous last dim: the next n tokens.
        keep: bool or uint8 [B, >= length + n]: positions with zero do not enter their page's mean, but are stored; None
            keeps all.
        layout: a `PageLayout.name`.
        recent_window: tokens that stay exact, at least.
        max_due: at least the number of pages that become due.
    """
    if key.shape[2] == 0:
        return
    append, advance = calls_behind_packing(
        layout, key.shape, key.stride(), value.stride(), value.shape[3], key.dtype, key.device, sink_key.shape[2],
        recent_window, max_due > 0,
    )  # fmt: skip
    with on_device(key.device):
        if max_due > 0:
            pack, overlap = _packing(layout, key.device)
            launch_pack_pages(
                key, value, pool, ring_key, ring_value, page_ids, row_start, counters, balance, flags, keep_bytes(keep),
                pack, sink_key.shape[2], recent_window, max_due, overlap,
            )  # fmt: skip
        append(key, value, ring_key, ring_value, sink_key, sink_value, row_start, counters)
        if advance is not None:
            advance(counters)


@lru_cache(maxsize=4096)
def calls_behind_packing(
    layout: str,
    key_shape: tuple[int, ...],
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    sinks: int,
    recent_window: int,
    after_packing: bool,
) -> tuple[Call, Call | None]:
    """What a commit of such tokens launches behind the packing of pages, if there is any: see `append.append_calls`."""
    page_size = PageLayout.from_name(layout).page_size
    overlap = _packing(layout, device)[1]
    return append_calls(
        key_shape, key_strides, value_strides, value_dim, dtype, sinks, page_size, recent_window, after_packing, overlap
    )


@lru_cache(maxsize=None)
def _packing(layout: str, device: torch.device) -> tuple[Packing, bool]:
    """What packing takes, and whether the GPU can start a kernel before the one ahead has finished."""
    page = PageLayout.from_name(layout)
    prepare_tables(page, device)
    overlap = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return packing(page, device), overlap


def gather(
    pool: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    page_ids: Tensor,
    entries: Tensor,
    row_start: Tensor,
    counters: Tensor,
    balance: Tensor | None,
    layout: str,
    length: int,
) -> tuple[Tensor, Tensor]:
    """The first `length` positions of a packed layer, decoded; see `tq_hf.ops` for the state tensors.

    Returns:
        key [B, H, length, D] and value [B, H, length, Dv] in the model's dtype; zeros where a position holds nothing.
    """
    page_layout = PageLayout.from_name(layout)
    batch, heads = ring_key.shape[:2]
    key = ring_key.new_zeros(batch, heads, length, page_layout.key_dim)
    value = ring_value.new_zeros(batch, heads, length, page_layout.value_dim)
    if length == 0:
        return key, value
    with on_device(key.device):
        launch_unpack_pages(
            key, value, pool, page_ids, entries, row_start, counters, balance, page_layout, sink_key.shape[2]
        )
        launch_copy_exact(key, value, ring_key, ring_value, sink_key, sink_value, row_start, counters)
    return key, value
