"""Reading a cache from a file that `saving.py` describes.

The file is not trusted. Its header and the names, types and shapes of its tensors, which safetensors has checked against the
file's size, are held against each other before anything is allocated, so that nothing is made larger than the file. Only a
static cache is larger than its file; its size is checked against the device's memory. What pages hold needs no check,
since every bit pattern is some number.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from ..config import MODEL_DTYPES, TurboQuantConfig
from ..errors import is_out_of_memory
from ..layers import stock
from ..layers.full import TurboQuantLayer
from ..layers.hybrid import HybridLayer
from ..layers.plan import decoder_config
from ..layers.sliding import SlidingLayer, SlidingTable
from ..layout import MAX_HEAD_DIM, PageLayout
from ..pages.device import int32
from ..pages.pool import NO_PAGE
from ..pages.table import BlockTable
from ..quantizer.rotary import FASTEST, Rotary
from ..tensor_parallel import ranks, shard_facts
from .reader import DTYPES, LARGEST, SavedFile
from .saving import FORMAT, VERSION, model_facts

if TYPE_CHECKING:
    from ..cache import TurboQuantCache

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in MODEL_DTYPES}
_LARGEST_EXACT = 1 << 17  # tokens of a window, or sinks, that no tensor in the file proves
# A static table on the host: an entry's start and count, and a row's number for it.
_SPAN_BYTES, _ID_BYTES = 128, 48


@dataclass
class _Table:
    """A block table as the file has it, checked."""

    table: BlockTable
    pages: int
    page_ids: list[list[int]] = field(default_factory=list)
    entries: list[tuple[int, int]] = field(default_factory=list)
    row_start: list[int] = field(default_factory=list)


@dataclass
class _Packed:
    """A packed layer's state as the header has it, checked."""

    layout: PageLayout
    dtype: torch.dtype
    kv_heads: int
    device: torch.device
    rows: int
    counters: list[int]


def load(
    cls: type[TurboQuantCache], path: str | os.PathLike[str], config: Any, device: torch.device | str | int | None
) -> TurboQuantCache:
    """`TurboQuantCache.load`."""
    if config is not None and not isinstance(config, PretrainedConfig):
        raise ValueError(f"config is a {type(config).__name__}: expected the model's config, as in model.config, or None.")
    name = os.fspath(path)
    try:
        target = None if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device!r} cannot be used here: {error}") from None
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for somebody to write to it
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(
                f"{name} cannot be loaded as a TurboQuantCache: it is a folder, a pipe or a device, not a file."
            )
        # safetensors opens a file twice, for its header and for its tensors; by name, another could be there by then.
        with safe_open(f"/proc/self/fd/{descriptor}", framework="pt", device="cpu") as opened:
            return _load(cls, SavedFile(name, opened), opened.metadata() or {}, config, target)
    except SafetensorError as error:
        what = f"it is no complete safetensors file ({error})"
        raise ValueError(f"{name} cannot be loaded as a TurboQuantCache: {what}.") from None
    finally:
        os.close(descriptor)


def _load(
    cls: type[TurboQuantCache], file: SavedFile, metadata: Mapping[str, str], config: Any, target: torch.device | None
) -> TurboQuantCache:
    header = _header(file, metadata)
    _require_model(file, header, config)
    max_cache_len = file.get(header, "max_cache_len", int, type(None))
    if max_cache_len is not None:
        file.number(header, "max_cache_len", 1)
    offloading = file.get(header, "offloading", list)
    fits = len(offloading) == 2 and all(type(v) is bool for v in offloading)
    file.require(fits and not (offloading[0] and max_cache_len is not None), f"offloading is {str(offloading)[:80]}")
    quantization, preset = _config(file, file.get(header, "quantization", dict)), file.get(header, "preset", str)
    configs = [_config(file, c) for c in file.get(header, "configs", list)]
    exact = replace(quantization, key_format="raw", value_format="raw", center_keys=False, balance_keys=False)
    file.require({*configs} <= {quantization, exact}, "its layers' configs are not those of its quantization")
    rotaries = [_rotary(file, r) for r in file.get(header, "rotaries", list)]
    is_decoder_only = file.get(header, "is_decoder_only", bool)
    tables: list[_Table] = []
    for described_table in file.get(header, "tables", list):
        tables.append(_table(file, described_table, max_cache_len, tables))
    file.require(bool(tables), "it has no block table")
    described = file.get(header, "layers", list)

    layers: list[Any] = []
    states: list[_Packed | None] = []
    for i, layer in enumerate(described):
        kind = file.get(layer, "kind", str)
        file.require(kind in ("packed", "transformers"), f"layer {i} is of the unknown kind {kind!r}")
        if kind == "packed":
            built, state = _packed(file, i, layer, configs, rotaries, tables, preset, target)
            built.guards_capacity = not any(isinstance(other, TurboQuantLayer) for other in layers)
            layers.append(built)
            states.append(state)
        else:
            layers.append(_stock(file, i, f"layers.{i}.", layer, target))
            states.append(None)
    file.require(bool(layers), "it has no layers")
    unexpected = sorted(set(file.slices) - file.expected)
    file.require(not unexpected, f"it has tensors that belong to nothing: {unexpected[:5]}")
    _require_layers(cls, file, layers, quantization, max_cache_len, config)
    _require_agreement(file, tables, layers, states, described)
    _require_memory(file, tables, layers, states)

    # Everything fits: from here on, tensors are made.
    for i, (layer, state) in enumerate(zip(layers, states, strict=True)):
        if state is not None:
            _fill_packed(file, i, layer, state)
    for held in tables:
        _fill_table(file, held, layers)
    for i, (layer, made) in enumerate(zip(layers, described, strict=True)):
        if not isinstance(layer, TurboQuantLayer):
            _fill_stock(file, f"layers.{i}.", layer, made, target)
        elif isinstance(layer, HybridLayer):
            _fill_stock(file, f"layers.{i}.hybrid.", layer.state, made["hybrid"], target)
    return cls.from_parts(
        layers,
        [held.table for held in tables],
        offloading,
        is_decoder_only=is_decoder_only,
        quantization=quantization,
        preset=preset,
        model_facts=header["model"],
    )


def _header(file: SavedFile, metadata: Mapping[str, str]) -> dict[str, Any]:
    file.require(metadata.get("format") == FORMAT, "it is a safetensors file of something else")
    try:
        header = json.loads(metadata.get("header", ""))
    except (ValueError, RecursionError):
        raise file.error("its header is no JSON") from None
    version = file.get(header, "version", int)
    newer = f"it has format version {version}, and this tq_hf reads {VERSION}: update tq_hf"
    file.require(version <= VERSION, newer)
    file.require(version == VERSION, f"format version {version} does not exist")
    return header


def _require_model(file: SavedFile, header: Mapping[str, Any], config: Any) -> None:
    saved = file.get(header, "model", dict)
    file.require(all(type(value) in (str, int) for value in saved.values()), "its model facts are no plain values")
    if config is None:  # the heads of another rank would fit, and be others
        facts = saved | shard_facts(saved.get("tp_size"))
    else:
        facts = model_facts(decoder_config(config)) | shard_facts(ranks(config))
    names = sorted(set(saved) | set(facts))
    other = [f"{n} {saved.get(n)!r}, this one {facts.get(n)!r}" for n in names if saved.get(n) != facts.get(n)]
    file.require(not other, f"it is of another model, with {'; '.join(other)}")


def _config(file: SavedFile, saved: Any) -> TurboQuantConfig:
    names = {f.name for f in fields(TurboQuantConfig)}
    file.require(isinstance(saved, dict) and set(saved) == names, f"a quantization config does not have the fields {names}")
    file.require(all(type(v) in (str, int, bool) for v in saved.values()), "a quantization config is no plain values")
    try:
        return TurboQuantConfig(**saved)
    except ValueError as error:
        raise file.error(str(error)) from None


def _rotary(file: SavedFile, saved: Any) -> Rotary | None:
    if saved is None:
        return None
    frequencies, interleaved = file.get(saved, "frequencies", list), file.get(saved, "interleaved", bool)
    fits = all(type(f) is float and 0 <= f <= FASTEST for f in frequencies) and 2 * len(frequencies) <= MAX_HEAD_DIM
    file.require(fits, "its rotary frequencies are no radians of a head's pairs")
    return Rotary(tuple(frequencies), interleaved)


def _table(file: SavedFile, described: Any, max_cache_len: int | None, before: Sequence[_Table]) -> _Table:
    page_size = file.number(described, "page_size", 1)
    sink_tokens, recent_window = (file.number(described, name, 0) for name in ("sink_tokens", "recent_window"))
    rows, pages = file.get(described, "rows", int, type(None)), file.number(described, "pages", 0)
    sliding = file.get(described, "sliding", dict, type(None))
    file.require((sliding is None) == (not before), "its block tables are not one without a window and others with")
    if sliding is None:
        held = _Table(BlockTable(page_size, sink_tokens, recent_window, max_cache_len), pages)
    else:
        file.require(max_cache_len is None, "a static cache has no table with a window")
        table = _sliding_table(file, sliding, before)
        same = (table.page_size, table.sink_tokens, table.recent_window)
        file.require((page_size, sink_tokens, recent_window) == same, f"a table with a window has not the sizes {same}")
        held = _Table(table, pages)
    if rows is None:
        size = max(sink_tokens, recent_window)
        file.require(size <= _LARGEST_EXACT, f"an empty cache that keeps {size} tokens exact is none that was saved")
        return held
    prefix = f"tables.{len(before)}."
    file.number(described, "rows", 1)
    shape = tuple(file.slices[prefix + "entries"].get_shape()) if prefix + "entries" in file.slices else ()
    entries = shape[0] if shape else 0
    file.expect(prefix + "entries", torch.int32, entries, 2)
    file.expect(prefix + "page_ids", torch.int32, rows, entries)
    file.expect(prefix + "row_start", torch.int32, rows)
    held.entries = [(start, count) for start, count in file.tensor(prefix + "entries").tolist()]
    held.page_ids = file.tensor(prefix + "page_ids").tolist()
    held.row_start = file.tensor(prefix + "row_start").tolist()
    end = sink_tokens
    if held.entries and held.table.origin:  # the first page may reach across the window's start
        end = held.entries[0][0]
        file.require(-page_size < end <= 0, f"its entries do not follow each other at position {end}")
    for start, count in held.entries:
        file.require(start == end and 0 < count <= page_size, f"its entries do not follow each other at position {start}")
        end = start + count
    ids = {page for row in held.page_ids for page in row} - {NO_PAGE}
    file.require(ids == set(range(len(ids))) and len(ids) == pages, f"its page ids are not those of its {pages} pages")
    file.require(all(start >= 0 for start in held.row_start), "a row starts before the first position")
    if max_cache_len is not None:
        whole = all(page != NO_PAGE for row in held.page_ids for page in row)
        room = held.table.static_entries - entries
        needed = -(-max(0, max_cache_len - recent_window - end) // page_size)
        file.require(whole and needed <= room, f"its entries do not fit a static cache of {max_cache_len} tokens")
    return held


def _sliding_table(file: SavedFile, described: Any, before: Sequence[_Table]) -> SlidingTable:
    full = before[0].table
    window = file.number(described, "window", full.recent_window + full.page_size)
    known = [held.table.window for held in before if isinstance(held.table, SlidingTable)]
    file.require(window not in known, f"two of its tables have a window of {window}")
    table = SlidingTable(full, window, file.get(described, "shares_keys", bool))
    table.recording = file.get(described, "recording", bool)
    table.origin = file.number(described, "origin", 0)
    table.kept_from = file.number(described, "kept_from", table.origin)
    if table.origin:
        table.sink_tokens = 0
    return table


def _packed(
    file: SavedFile,
    i: int,
    described: Any,
    configs: Sequence[TurboQuantConfig],
    rotaries: Sequence[Rotary | None],
    tables: Sequence[_Table],
    preset: str,
    target: torch.device | None,
) -> tuple[TurboQuantLayer, _Packed | None]:
    config = configs[file.number(described, "config", 0, len(configs) - 1)]
    rotary = rotaries[file.number(described, "rotary", 0, len(rotaries) - 1)]
    held = tables[file.number(described, "table", 0, len(tables) - 1)]
    table = held.table
    full = tables[0].table  # whose first tokens stay where they are
    same = (full.page_size, full.sink_tokens, full.recent_window)
    file.require(same == (config.page_size, config.sink_tokens, config.recent_window), f"layer {i} does not fit its table")
    hybrid = file.get(described, "hybrid", dict, type(None))
    layer: TurboQuantLayer
    if isinstance(table, SlidingTable):
        file.require(hybrid is None, f"layer {i} has both a window and a recurrent state")
        layer = SlidingLayer(config, table, preset, rotary)
    elif hybrid is not None:
        linear = _stock(file, i, f"layers.{i}.hybrid.", hybrid, target)
        file.require(type(linear) is LinearAttentionLayer, f"layer {i} has no recurrent state, but {linear}")
        layer = HybridLayer(config, table, preset, rotary, number_of_states=linear.number_of_states)
    else:
        layer = TurboQuantLayer(config, table, preset, rotary)
    state = file.get(described, "state", dict, type(None))
    if state is None:
        return layer, None
    name = file.get(state, "dtype", str)
    file.require(name in _BY_NAME, f"layer {i} has the dtype {name!r}")
    dims = [file.number(state, side, 1) for side in ("key_dim", "value_dim")]
    try:
        layout = config.layout(dims[0], dims[1], _BY_NAME[name])
        device = _device(file, state, target)
        layer.require_kernels(layout, device)
    except ValueError as error:
        raise file.error(str(error)) from None
    heads = file.number(state, "kv_heads", 1)
    counters = file.get(state, "counters", list)
    fits = len(counters) == 3 and all(type(c) is int and 0 <= c <= LARGEST for c in counters)
    file.require(fits, f"layer {i} has counters that are no three numbers")
    length, packed_end, used = counters
    file.require(used <= len(held.entries), f"layer {i} uses more entries than there are")
    end = sum(held.entries[used - 1]) if used else table.sink_tokens
    ring, rows = config.recent_window + config.page_size, len(held.row_start)
    fits = rows > 0 and packed_end == end and length - packed_end <= ring and (length >= packed_end or not used)
    fits = fits and (table.max_cache_len is None or length <= table.max_cache_len)
    fits = fits and all(start <= length for start in held.row_start)
    fits = fits and (not isinstance(table, SlidingTable) or table.kept_from <= table.origin + length)
    file.require(fits, f"layer {i} has counters {counters} that do not fit its entries and rows")

    prefix, dtype = f"layers.{i}.", _BY_NAME[name]
    file.expect(prefix + "pages", torch.int32, held.pages, heads, layout.page_words)
    for side, dim in (("key", dims[0]), ("value", dims[1])):
        file.expect(f"{prefix}ring_{side}", dtype, rows, heads, ring, dim)
        file.expect(f"{prefix}sink_{side}", dtype, rows, heads, table.sink_tokens, dim)
    file.expect(prefix + "flags", torch.int32, heads)
    if config.balance_keys:
        file.expect(prefix + "balance", torch.float32, rows, heads, dims[0])
        file.expect(prefix + "query_energy", torch.float32, rows, heads, dims[0])
    return layer, _Packed(layout, dtype, heads, device, rows, counters)


def _stock(file: SavedFile, i: int, prefix: str, described: Any, target: torch.device | None) -> Any:
    _device(file, described, target)
    found = {name: s for name, s in file.slices.items() if name.startswith(prefix)}
    shapes = {name.removeprefix(prefix): tuple(s.get_shape()) for name, s in found.items()}
    kinds = {name.removeprefix(prefix): DTYPES.get(s.get_dtype(), torch.bool) for name, s in found.items()}
    try:
        layer = stock.build(file.get(described, "layer", dict))
        stock.check_contents(layer, file.get(described, "numbers", dict), shapes, kinds)
    except ValueError as error:
        raise file.error(f"layer {i}: {error}") from None
    file.expected |= set(found)
    return layer


def _device(file: SavedFile, described: Any, target: torch.device | None) -> torch.device:
    """Where a layer goes: to the target, or where it was."""
    if target is not None:
        return target
    name = file.get(described, "device", str)
    file.require(name == "cpu" or name.startswith("cuda"), f"the device {name!r} is no place for a cache")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        raise file.error(f"it was saved from {name}, which this machine lacks: pass device=") from None


def _require_layers(
    cls: type[TurboQuantCache],
    file: SavedFile,
    layers: Sequence[Any],
    quantization: TurboQuantConfig,
    max_cache_len: int | None,
    config: Any,
) -> None:
    """Each layer must be what a cache made for the model has in its place."""
    if config is None:
        return
    fresh = cls(config, quantization, max_cache_len=max_cache_len).layers

    def kind(layer: Any) -> Any:
        if not isinstance(layer, TurboQuantLayer):
            return stock.description(layer, max_cache_len)
        states = layer.number_of_states if isinstance(layer, HybridLayer) else 0
        return layer.config, layer.rotary, layer.sliding_window, states

    file.require(len(fresh) == len(layers), f"it has {len(layers)} layers, and the model's cache {len(fresh)}")
    for i, (saved, wanted) in enumerate(zip(layers, fresh, strict=True)):
        file.require(kind(saved) == kind(wanted), f"layer {i} is {kind(saved)}, and in the model's cache {kind(wanted)}")


def _require_agreement(
    file: SavedFile,
    tables: Sequence[_Table],
    layers: Sequence[Any],
    states: Sequence[_Packed | None],
    described: Sequence[Mapping[str, Any]],
) -> None:
    """All layers must hold the same rows and the same tokens."""
    rows, lengths = set[int](), set[int]()
    for held in tables:
        of_it = [state for layer, state in zip(layers, states) if state and layer.table is held.table]
        file.require(bool(of_it) == bool(held.row_start), "a block table has rows of no layer, or a layer no rows")
        same = all(state.counters == of_it[0].counters for state in of_it)
        file.require(same, "layers of one block table hold different numbers of tokens")
        rows |= {state.rows for state in of_it}
        lengths |= {held.table.origin + state.counters[0] for state in of_it}
    for i, made in enumerate(described):
        shapes = {name: s.get_shape() for name, s in file.slices.items() if name.startswith(f"layers.{i}.")}
        if states[i] is not None:
            shapes = {name: shape for name, shape in shapes.items() if ".hybrid." in name}
        rows |= {shape[0] for shape in shapes.values()}
        if (keys := shapes.get(f"layers.{i}.keys")) is not None:
            numbers = made["numbers"]  # of a full static window, only the second is right
            lengths.add(numbers.get("cumulative_length_int", numbers.get("cumulative_length", keys[2])))
    file.require(len(rows) <= 1, f"its layers have {sorted(rows)} rows")
    file.require(len(lengths) <= 1, f"its layers hold {sorted(lengths)} tokens")


def _require_memory(
    file: SavedFile, tables: Sequence[_Table], layers: Sequence[Any], states: Sequence[_Packed | None]
) -> None:
    """A static cache must fit the memory of its devices, and its block table that of the host."""
    needed: dict[torch.device, int] = {}
    for held in tables:
        if held.table.is_static and held.row_start:
            size = held.table.static_entries * (_SPAN_BYTES + len(held.row_start) * _ID_BYTES)
            needed[torch.device("cpu")] = size
    for layer, state in zip(layers, states, strict=True):
        if state is not None and layer.table.is_static:
            pages = state.rows * layer.table.static_entries
            size = 4 * state.layout.page_words * state.kv_heads * pages
            needed[state.device] = needed.get(state.device, 0) + size
    for device, size in needed.items():
        if device.type == "cuda":
            there = torch.cuda.get_device_properties(device).total_memory
        else:
            there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        file.require(size <= there, f"its max_cache_len takes {size / 2**30:.0f} GiB, and {device} has {there / 2**30:.0f}")


@torch.inference_mode(False)
def _fill_packed(file: SavedFile, i: int, layer: TurboQuantLayer, state: _Packed) -> None:
    """Everything but the pages."""
    prefix = f"layers.{i}."
    key, value = (
        torch.empty(state.rows, state.kv_heads, 0, dim, dtype=state.dtype, device=state.device)
        for dim in (state.layout.key_dim, state.layout.value_dim)
    )
    layer.lazy_initialization(key, value)
    for name in (*layer.row_state_names(), "flags"):
        getattr(layer, name).copy_(file.tensor(prefix + name))
    layer.cut(state.counters[0], state.counters[1], int32(state.counters), no_page_left=False)


def _fill_stock(file: SavedFile, prefix: str, layer: Any, made: Mapping[str, Any], target: torch.device | None) -> None:
    where = _device(file, made, target)
    names = [name for name in file.expected if name.startswith(prefix)]
    stock.fill(layer, made["numbers"], {n.removeprefix(prefix): file.tensor(n, where) for n in names})


@torch.inference_mode(False)
def _fill_table(file: SavedFile, held: _Table, layers: Sequence[Any]) -> None:
    """The rows, and the pages of all layers."""
    if not held.row_start:
        return
    place = held.table.restore(held.page_ids, held.entries, held.row_start, held.pages)
    for i, layer in enumerate(layers):
        if getattr(layer, "table", None) is not held.table or not layer.is_initialized:
            continue
        pages = file.tensor(f"layers.{i}.pages", layer.device)
        if held.table.is_static:
            layer.pool[torch.tensor(place, dtype=torch.int64).to(layer.device)] = pages
        else:
            held.table.pages.put(layer.slot, pages)
