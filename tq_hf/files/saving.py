"""Writing a cache to a file.

One safetensors file. Its metadata has two strings: `format` is `tq_hf.cache`, and `header` is JSON:

    version        of this format; a reader refuses newer ones
    model          the model's kind and shape (`model_facts`)
    preset, quantization, max_cache_len, offloading, is_decoder_only     what the cache was made with
    configs        the `TurboQuantConfig`s of its layers, fields by name
    rotaries       their `Rotary`s, likewise, or null
    tables         one a block table: page_size, sink_tokens, recent_window, rows (null: no token yet), pages, sliding
                   (null, or {window, shares_keys, origin, kept_from, recording}: `SlidingTable`). The first has no window
    layers         one a layer of the model, either
                   {"kind": "packed", config, rotary, table, state, hybrid}: indices into the lists above; state is null
                   (no token yet) or {device, dtype, kv_heads, key_dim, value_dim, counters}; hybrid is null or the next
                   without kind
                   or {"kind": "transformers", layer, numbers, device}: `stock.description` and `.contents`

Tensors, B rows and E entries in use:

    tables.T.page_ids    int32 [B, E]     numbers of pages in this file, -1 where there is none
    tables.T.entries     int32 [E, 2]     start and count
    tables.T.row_start   int32 [B]
    layers.L.pages       int32 [pages, H, page_words], those that some row uses
    layers.L.NAME        the rest of a packed layer's state (`ops.py`), or what a layer of transformers' holds
    layers.L.hybrid.NAME the recurrent states beside a packed layer
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..layers import stock
from ..layers.full import TurboQuantLayer
from ..layers.hybrid import HybridLayer
from ..layers.sliding import SlidingTable
from ..pages.pool import NO_PAGE
from ..pages.table import BlockTable

if TYPE_CHECKING:
    from ..cache import TurboQuantCache

FORMAT, VERSION = "tq_hf.cache", 1
_FACTS = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def model_facts(config: Any) -> dict[str, str | int]:
    """What a model's text config says of its kind and shape, as far as it says it in plain numbers."""
    varying = getattr(config, "per_layer_attributes", None) or ()  # which transformers refuses to read from the whole config

    def fact(name: str) -> Any:
        if name in varying:
            return " ".join(str(getattr(layer, name, None)) for layer in config.per_layer_config)
        return getattr(config, name, None)

    return {name: value for name in _FACTS if isinstance(value := fact(name), (str, int))}


def save(cache: TurboQuantCache, path: str | os.PathLike[str]) -> None:
    """Write a cache that has nothing left to commit (`TurboQuantCache.save`)."""
    tensors: dict[str, Tensor] = {}
    layers = cache.packed_layers
    configs = list({layer.config: None for layer in layers})
    rotaries = list({layer.rotary: None for layer in layers})
    kept = [_save_table(tensors, f"tables.{t}.", table, layers) for t, table in enumerate(cache.tables)]
    described: list[dict[str, Any]] = []
    header = {
        "version": VERSION,
        "model": cache.model_facts,
        "preset": cache.preset,
        "quantization": asdict(cache.quantization),
        "max_cache_len": cache.table.max_cache_len,
        "offloading": [cache.offloading, cache.only_non_sliding],
        "is_decoder_only": cache.is_decoder_only,
        "configs": [asdict(config) for config in configs],
        "rotaries": [None if rotary is None else asdict(rotary) for rotary in rotaries],
        "tables": [_describe_table(table, len(pages)) for table, pages in zip(cache.tables, kept, strict=True)],
        "layers": described,
    }
    for i, layer in enumerate(cache.layers):
        prefix = f"layers.{i}."
        if isinstance(layer, TurboQuantLayer):
            table = [t is layer.table for t in cache.tables].index(True)
            entry: dict[str, Any] = {"kind": "packed", "config": configs.index(layer.config), "table": table}
            entry |= {"rotary": rotaries.index(layer.rotary), "state": None, "hybrid": None}
            if layer.is_initialized:
                entry["state"] = _save_packed(tensors, prefix, layer, kept[table])
            if isinstance(layer, HybridLayer):
                entry["hybrid"] = _save_stock(tensors, i, prefix + "hybrid.", layer.state, cache.table.max_cache_len)
        else:
            stock = _save_stock(tensors, i, prefix, layer, cache.table.max_cache_len)
            entry = {"kind": "transformers", **stock}
        described.append(entry)
    _write(tensors, {"format": FORMAT, "header": json.dumps(header)}, os.fspath(path))


def _save_stock(tensors: dict[str, Tensor], i: int, prefix: str, layer: Any, max_cache_len: int | None) -> dict[str, Any]:
    try:
        described = stock.description(layer, max_cache_len)
    except ValueError as error:
        raise ValueError(f"this cache cannot be saved, because of its layer {i}: {error}") from None
    numbers, held = stock.contents(layer)
    tensors |= {prefix + name: _copied(tensor) for name, tensor in held.items()}
    device = str(next(iter(held.values())).device) if held else "cpu"
    return {"layer": described, "numbers": numbers, "device": device}


def _describe_table(table: BlockTable, pages: int) -> dict[str, Any]:
    sizes = {name: getattr(table, name) for name in ("page_size", "sink_tokens", "recent_window")}
    sliding = None
    if isinstance(table, SlidingTable):
        sliding = {name: getattr(table, name) for name in ("window", "shares_keys", "origin", "kept_from", "recording")}
    return {**sizes, "rows": table.batch_size, "pages": pages, "sliding": sliding}


def _save_table(tensors: dict[str, Tensor], prefix: str, table: BlockTable, layers: Sequence[TurboQuantLayer]) -> list[int]:
    """The pages in use, ascending: a page's place in this list is its number in the file."""
    if table.rows is None:
        return []
    starts, used = torch.tensor(table.row_starts, dtype=torch.int32), len(table.spans)
    if table.is_static:  # entries in use and row starts are known on the device only
        layer = next(layer for layer in layers if layer.table is table and layer.is_initialized)
        used, starts = int(layer.counters[2]), layer.on_device.row_start
    rows = [row[:used] for row in table.rows]
    kept = sorted({page for row in rows for page in row} - {NO_PAGE})
    number = {NO_PAGE: NO_PAGE, **dict(zip(kept, range(len(kept)), strict=True))}
    ids = [[number[page] for page in row] for row in rows]
    tensors[prefix + "page_ids"] = torch.tensor(ids, dtype=torch.int32).reshape(len(rows), used)
    tensors[prefix + "entries"] = torch.tensor(table.spans[:used], dtype=torch.int32).reshape(used, 2)
    tensors[prefix + "row_start"] = _copied(starts)
    return kept


def _save_packed(tensors: dict[str, Tensor], prefix: str, layer: TurboQuantLayer, kept: list[int]) -> dict[str, Any]:
    was_offloaded = layer.table.pages.is_offloaded(layer.slot)
    pool = layer.pool
    tensors[prefix + "pages"] = _copied(pool.index_select(0, torch.tensor(kept, dtype=torch.int64).to(pool.device)))
    if was_offloaded:
        layer.offload()
    for name in (*layer.row_state_names(), "flags"):
        tensors[prefix + name] = _copied(getattr(layer, name))
    return {
        "device": str(layer.device),
        "dtype": str(layer.dtype).removeprefix("torch."),
        "kv_heads": layer.kv_heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
        "counters": layer.counters.tolist(),
    }


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _write(tensors: dict[str, Tensor], metadata: dict[str, str], path: str) -> None:
    """All or nothing: a file that was there stays until the new one is complete.

    A link at `path` is replaced, not followed, and the unfinished file has a name that nobody can have guessed and made into
    a link.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OSError(f"{path} cannot be written: it is a folder or a device, not a file.")
    part = f"{path}.{secrets.token_hex(8)}.part"
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        safetensors.torch.save_file(tensors, part, metadata)
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):  # it has become the file
            os.remove(part)
