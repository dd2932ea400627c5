"""What a cache holds, bit by bit, and whether its bookkeeping is sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.robustness.invariants import check_device_tables, check_pool
from tq_hf import TurboQuantCache
from tq_hf.layers.full import TurboQuantLayer
from tq_hf.layers.sliding import SlidingLayer
from tq_hf.layers.stock import contents


def state_of(cache: TurboQuantCache) -> list[Any]:
    """All that later results depend on: numbers, and copies of tensors. Where a page or a slot is does not count."""
    state: list[Any] = []
    for layer in cache.layers:
        if not isinstance(layer, TurboQuantLayer):
            state += [contents(layer)]
            continue
        if hasattr(layer, "state"):
            state += [contents(layer.state)]
        assert layer.pending is None and not layer.is_torn
        state += [layer.is_initialized and bool(layer.counters[0])]
        if state[-1]:
            state += _sliding(layer) if isinstance(layer, SlidingLayer) else _packed(layer)
    return [_copy(part) for part in state]


def _copy(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.clone()
    if isinstance(part, tuple):
        return tuple(_copy(p) for p in part)
    return {name: _copy(p) for name, p in part.items()} if isinstance(part, dict) else part


def _sliding(layer: SlidingLayer) -> list[Any]:
    """What a next query sees: a pass that fails may have forgotten what none will see."""
    starts = (layer.on_device.row_start + layer.table.origin).clamp_min(layer.get_seq_length() - layer.table.window + 1)
    state = [layer.get_seq_length(), layer.table.recording, starts, layer.flags]
    return state + list(layer.unpacked()) + ([] if layer.balance is None else [layer.balance, layer.query_energy])


def _packed(layer: TurboQuantLayer) -> list[Any]:
    length, packed_end, used = layer.counters.tolist()
    on_device = layer.on_device
    ids = on_device.page_ids[:, :used].long()
    pages = layer.pool[ids.clamp_min(0)] * (ids >= 0)[..., None, None]
    slots = torch.arange(packed_end, length) % layer.ring_key.shape[2]
    state = [length, packed_end, used, pages, on_device.entries[:used], on_device.row_start, layer.flags]
    if not layer.table.is_static:
        state += [layer.length, layer.packed_end, layer.is_empty]
    state += [layer.ring_key[:, :, slots], layer.ring_value[:, :, slots]]
    for sinks in (layer.sink_key, layer.sink_value):
        held = on_device.row_start[:, None] + torch.arange(sinks.shape[2]) < length
        state.append(sinks * held[:, None, :, None])
    return state + ([] if layer.balance is None else [layer.balance, layer.query_energy])


def equal(a: Any, b: Any) -> bool:
    """Bit by bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def require_sound(*caches: TurboQuantCache) -> None:
    """Pages counted as they are used, free ones free, block tables on the device as on the host.

    Args:
        caches: all caches that share pages with each other.
    """
    tables = [table for cache in caches for table in cache.tables]
    for pool in {table.pages for table in tables}:
        check_pool(pool, [table for table in tables if table.pages is pool])
    for table in tables:
        check_device_tables(table)
