"""`TQ_HF_DEBUG=1`: before every op, the host checks what it is going to read and write; after it, what could not be stored.

Kernels take the block table and the counters on trust: a wrong page number would read, or overwrite, whatever is there. Both
are this package's own and never the user's, so that a check only finds faults of the package, or of what else writes to its
tensors. It waits for the device at every layer, and is no part of what is compiled or captured.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import TYPE_CHECKING

import torch

from .pages.pool import NO_PAGE
from .reporting.reports import not_stored

if TYPE_CHECKING:
    from .layers.full import TurboQuantLayer

logger = logging.getLogger(__name__)

ENABLED = os.environ.get("TQ_HF_DEBUG", "0") not in ("", "0")


def check_state(layer: TurboQuantLayer, new: int = 0) -> None:
    """Raise unless every page, entry and length that an op on this layer uses is one that the layer has.

    Args:
        new: tokens that the op is going to commit.

    Raises:
        RuntimeError: naming the layer, and the row and entry where it is one of these.
    """
    if _is_unseen(layer):
        return
    name = f"layer {layer.index}" if layer.index is not None else "a layer"
    table, slots, pages = layer.on_device, layer.ring_key.shape[2], len(layer.pool)

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise RuntimeError(
                f"TQ_HF_DEBUG: {name}: {what}. Its state has been overwritten, or this is a mistake in tq_hf: call"
                " cache.reset(), and report it."
            )

    length, packed_end, used = layer.counters.tolist()
    size, limit = layer.config.page_size, layer.table.max_cache_len
    due = max(0, (length + new - packed_end - layer.config.recent_window) // size) if new else 0
    rows, room = table.page_ids.shape
    held = (layer.ring_key.shape[0], table.row_start.shape[0])
    require(held == (rows, rows), f"the block table has {rows} rows, its tokens and row starts {held}")
    require(0 <= length and (limit is None or length + new <= limit), f"a length of {length} and {new} more, of {limit}")
    within = min(room, len(table.entries))
    require(0 <= used and used + due <= within, f"{used} entries in use and {due} due, of {within} in the block table")
    require(length - packed_end <= slots, f"tokens {packed_end} to {length} are exact, and there are {slots} slots")

    entries = table.entries[: used + due].tolist()
    end = entries[0][0] if used else packed_end
    require(not used or -size < end <= layer.config.sink_tokens, f"entry 0 starts at {end}")
    for e, (start, count) in enumerate(entries):
        follows = start == end and 0 < count <= size
        require(follows, f"entry {e} starts at {start} with {count} tokens, the one before ends at {end}")
        end += count
        require(e != used - 1 or end == packed_end, f"entry {e} ends at {end}, and pages at {packed_end}")

    device_rows = table.page_ids[:, : used + due].tolist()
    uses = Counter(page for ids in device_rows for page in ids)
    for row, (ids, own) in enumerate(zip(device_rows, layer.table.rows or [], strict=True)):
        for e, (page, right) in enumerate(zip(ids, own[: used + due], strict=True)):
            is_page = page == NO_PAGE or 0 <= page < pages
            require(is_page, f"row {row}, entry {e}: page {page} is none of the {pages} pages (or {NO_PAGE}, for none)")
            require(page == right, f"row {row}, entry {e}: page {page} on {layer.device}, and {right} on the host")
            is_free = e < used or page == NO_PAGE or uses[page] == 1
            require(is_free, f"row {row}, entry {e}: page {page} is to be written, and {uses[page]} entries use it")
    for row, start in enumerate(table.row_start.tolist()):
        right = start if limit is not None else layer.table.row_starts[row]  # the static mode finds it on the device
        fits = start == right and 0 <= start <= (right if limit is None else limit)
        require(fits, f"row {row} starts at {start} on {layer.device}, and at {right} on the host")


def report_states(layer: TurboQuantLayer) -> None:
    """Log what the layer was given and cannot store, once for each kind and head."""
    if _is_unseen(layer):
        return
    found = not_stored(layer)
    if found and found != layer.reported:
        logger.warning("TQ_HF_DEBUG: layer %s: %s", layer.index, "; ".join(found))
    layer.reported = found


def _is_unseen(layer: TurboQuantLayer) -> bool:
    """Whether the host cannot look at the layer's tensors now: traced, captured, or without data."""
    if torch.compiler.is_compiling() or layer.device.type == "meta":
        return True
    return layer.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
