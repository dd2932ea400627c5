"""What a cache and its layers hold: tokens packed and exact, bytes, the ratio to bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import NON_FINITE_KEY, NON_FINITE_VALUE, SATURATED
from .display import html_table, mib
from .memory import storage_bytes


@dataclass(frozen=True)
class LayerReport:
    """What one layer holds: tokens over all rows (padding included), bytes of its real tensors."""

    layer: int
    kind: str
    packed_tokens: int
    exact_tokens: int
    nbytes: int
    bytes_bf16: int

    @property
    def ratio(self) -> float:
        """How many times smaller than the same tokens in bfloat16."""
        return self.bytes_bf16 / self.nbytes if self.nbytes else 0.0


@dataclass(frozen=True, repr=False)
class CacheReport:
    """What a cache holds, layer by layer, counted from its real tensors. `str()` gives a Markdown table.

    A static cache counts all that it has preallocated, however few tokens it holds yet.

    Attributes:
        preset: name of the preset.
        layers: one `LayerReport` a layer.
        table_bytes: bytes of the block table that the layers share.
    """

    preset: str
    layers: tuple[LayerReport, ...]
    table_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers) + self.table_bytes

    @property
    def packed_tokens(self) -> int:
        """Tokens in packed pages, summed over layers and rows."""
        return sum(layer.packed_tokens for layer in self.layers)

    @property
    def exact_tokens(self) -> int:
        return sum(layer.exact_tokens for layer in self.layers)

    @property
    def bytes_bf16(self) -> int:
        """What the same tokens take in bfloat16."""
        return sum(layer.bytes_bf16 for layer in self.layers)

    @property
    def ratio(self) -> float:
        """`bytes_bf16` over `nbytes`."""
        return self.bytes_bf16 / self.nbytes if self.nbytes else 0.0

    def __repr__(self) -> str:
        smaller = f", {self.ratio:.2f} times smaller than bf16" if self.ratio else ""
        return (
            f"{type(self).__name__}({self.preset!r}, {len(self.layers)} layers, {self.packed_tokens:,} tokens packed and"
            f" {self.exact_tokens:,} exact, {mib(self.nbytes)}{smaller})"
        )

    def _repr_html_(self) -> str:
        columns = ["kind", "layer", "packed tokens", "exact tokens", "bytes", "ratio to bf16"]
        total = ["all", "", *_html_cells(self)]
        return html_table(repr(self), columns, [*([r.kind, str(r.layer), *_html_cells(r)] for r in self.layers), total])

    def __str__(self) -> str:
        rows = ["| layer | kind | packed tokens | exact tokens | bytes | ratio to bf16 |", "| --- " * 6 + "|"]
        total = LayerReport(-1, "", self.packed_tokens, self.exact_tokens, self.nbytes, self.bytes_bf16)
        for r in (*self.layers, total):
            name = "all" if r.layer < 0 else str(r.layer)
            rows.append(f"| {name} | {r.kind} | {r.packed_tokens} | {r.exact_tokens} | {r.nbytes} | {r.ratio:.2f} |")
        return "\n".join(rows)


def _html_cells(r: LayerReport | CacheReport) -> list[str]:
    return [f"{r.packed_tokens:,}", f"{r.exact_tokens:,}", f"{r.nbytes:,}", f"{r.ratio:.2f}"]


def kind_of(layer: Any) -> str:
    """What a `TurboQuantLayer` is, in words."""
    kind = f"packed ({layer.preset})" if layer.config.key_format != "raw" else "exact pages"
    if layer.sliding_window is not None:
        kind += f", window {layer.sliding_window}"
    return f"{kind} + state" if hasattr(layer, "state") else kind


def not_stored(layer: Any) -> list[str]:
    """What an initialized `TurboQuantLayer` was given that a page cannot hold, by kind and KV heads. Reads the device.

    Packed tokens have left their flags; exact ones, which are kept as they came, are looked at.
    """
    length, packed_end, _ = layer.counters.tolist()
    starts, sinks = layer.on_device.row_start.long().unsqueeze(1), layer.sink_key.shape[2]
    first = starts + torch.arange(sinks, device=layer.device)  # [B, S], positions
    newest = torch.arange(min(packed_end, length), length, device=layer.device)
    held = ((first < length, "sink", slice(None)), (newest >= starts + sinks, "ring", newest % layer.ring_key.shape[2]))

    def heads_with_non_finite(side: str) -> Tensor:
        bad = torch.zeros_like(layer.flags, dtype=torch.bool)
        for is_token, where, slots in held:
            finite = getattr(layer, f"{where}_{side}")[:, :, slots].isfinite().all(-1)  # [B, H, T]
            bad |= (is_token.unsqueeze(1) & ~finite).any(2).any(0)
        return bad

    kinds = (
        ((layer.flags & NON_FINITE_KEY != 0) | heads_with_non_finite("key"), "a non-finite key"),
        ((layer.flags & NON_FINITE_VALUE != 0) | heads_with_non_finite("value"), "a non-finite value"),
        (layer.flags & SATURATED != 0, "a number beyond its stored format"),
    )
    return [f"KV heads {heads.nonzero().flatten().tolist()}: {what}" for heads, what in kinds if heads.any()]


def packed_report(index: int, layer: Any) -> LayerReport:
    """A `TurboQuantLayer`, its new tokens stored. Reads the device's counters."""
    kind = kind_of(layer)
    if not layer.is_initialized:
        return LayerReport(index, kind, 0, 0, 0, 0)
    layer.flush()
    length, _, used = layer.counters.tolist()
    packed = layer.table.packed_tokens(used)
    rows = layer.table.batch_size or 0
    per_token = layer.kv_heads * (layer.key_dim + layer.value_dim) * 2
    return LayerReport(index, kind, packed, rows * length - packed, layer.nbytes, rows * length * per_token)


def stock_report(index: int, layer: Any) -> LayerReport:
    """One of transformers' own layers: everything it holds is exact."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    held = [t for t in (keys, values) if isinstance(t, Tensor) and t.ndim == 4]
    tokens = held[0].shape[0] * held[0].shape[2] if held else 0
    return LayerReport(index, type(layer).__name__, 0, tokens, storage_bytes(vars(layer)), sum(2 * t.numel() for t in held))
