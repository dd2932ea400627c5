"""How a cache shows itself: in a line, and as a table in a notebook.

It is looked at from the host only. Nothing is flushed or copied from a device but a static cache's length, which is nowhere
else, in one read: looking at a cache must neither change it nor wait for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..layers.full import TurboQuantLayer
from .display import html_table, mib
from .reports import kind_of, stock_report

if TYPE_CHECKING:
    from ..cache import TurboQuantCache


@dataclass
class _Kind:
    """Layers of one kind, taken together."""

    layers: int = 0
    nbytes: int = 0
    bytes_bf16: int = 0

    def cells(self) -> list[str]:
        ratio = f"{self.bytes_bf16 / self.nbytes:.2f}" if self.nbytes and self.bytes_bf16 else ""
        return [str(self.layers), f"{self.nbytes:,}", f"{self.bytes_bf16:,}", ratio]


@dataclass
class _Summary:
    """What is seen of a cache: tokens a row, rows, layers by kind, and the sum with the block tables."""

    tokens: int = 0
    rows: int = 0
    kinds: dict[str, _Kind] = field(default_factory=dict)
    total: _Kind = field(default_factory=_Kind)

    def add(self, kind: str, nbytes: int, bytes_bf16: int) -> None:
        for line in (self.kinds.setdefault(kind, _Kind()), self.total):
            line.layers += 1
            line.nbytes += nbytes
            line.bytes_bf16 += bytes_bf16


def describe(cache: TurboQuantCache) -> str:
    """A cache in one line."""
    return _line(cache, _look_at(cache)) if _is_built(cache) else f"{type(cache).__name__}(not built)"


def as_html(cache: TurboQuantCache) -> str:
    """A cache as an HTML table: a row a kind of layers, and their sum."""
    columns = ["kind", "layers", "bytes", "in bf16", "ratio"]
    if not _is_built(cache):
        return html_table(describe(cache), columns, [])
    seen = _look_at(cache)
    rows = [[kind, *line.cells()] for kind, line in seen.kinds.items()]
    return html_table(_line(cache, seen), columns, [*rows, ["all, with block tables", *seen.total.cells()]])


def _is_built(cache: Any) -> bool:
    """Whether `__init__` has come to its end: debuggers show objects before."""
    return {"layers", "table", "sliding_tables", "preset"} <= vars(cache).keys()


def _line(cache: TurboQuantCache, seen: _Summary) -> str:
    parts = [f"preset={cache.preset!r}"]
    if cache.table.max_cache_len is not None:
        parts.append(f"max_cache_len={cache.table.max_cache_len}")
    parts.append(f"{len(cache.packed_layers)} of {len(cache.layers)} layers packed")
    if not seen.rows:
        parts.append("empty")
    else:
        parts.append(f"{seen.tokens:,} tokens" + (f" in each of {seen.rows} rows" if seen.rows > 1 else ""))
        parts.append(f"{mib(seen.total.nbytes)} where bf16 takes {mib(seen.total.bytes_bf16)}")
    return f"{type(cache).__name__}({', '.join(parts)})"


def _look_at(cache: TurboQuantCache) -> _Summary:
    seen = _Summary()
    ready = [layer for layer in cache.packed_layers if layer.is_initialized]
    if ready:
        seen.tokens, seen.rows = int(ready[0].get_seq_length()), ready[0].table.batch_size or 0
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, TurboQuantLayer):
            bytes_bf16 = 0
            if layer.is_initialized:
                window = layer.sliding_window
                shown = seen.tokens if window is None else min(seen.tokens, window - 1)
                bytes_bf16 = seen.rows * shown * layer.kv_heads * (layer.key_dim + layer.value_dim) * 2
            seen.add(kind_of(layer), layer.nbytes, bytes_bf16)
            continue
        report = stock_report(i, layer)
        seen.add(report.kind, report.nbytes, report.bytes_bf16)
        if not ready and report.exact_tokens:  # nothing is packed
            seen.rows = layer.keys.shape[0]
            seen.tokens = max(seen.tokens, report.exact_tokens // seen.rows)
    seen.total.nbytes += sum(tensor.nbytes for table in cache.tables for tensor in table.tensors())
    return seen
