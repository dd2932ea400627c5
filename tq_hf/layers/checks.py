"""What a packed layer refuses: states, masks and devices that do not fit what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..config import MODEL_DTYPES, TurboQuantConfig
from ..layout import PageLayout
from ..pages.table import BlockTable
from .packed_kv import PackedKV, Step

if TYPE_CHECKING:
    from .full import TurboQuantLayer

UNEVEN = (
    "the last forward pass ended early, by an error or an interrupt, and not all layers hold its tokens. A static cache"
    " cannot take them back: call cache.reset()."
)


class LayerChecks:
    """The part of `TurboQuantLayer` that says no."""

    table: BlockTable
    config: TurboQuantConfig
    is_initialized: bool
    counters: Tensor
    length: int
    last_layer: TurboQuantLayer | None
    drop: Callable[[Step], None]
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    def _validate(self, key: Tensor, value: Tensor) -> None:
        if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"key states {tuple(key.shape)} and value states {tuple(value.shape)} do not fit together: expected"
                " [batch, kv_heads, tokens, head_dim] with the same batch, heads and tokens."
            )
        if key.dtype not in MODEL_DTYPES or value.dtype != key.dtype:
            raise ValueError(f"key dtype {key.dtype}, value dtype {value.dtype}: expected the same, one of {MODEL_DTYPES}.")
        if value.device != key.device:
            raise ValueError(
                f"key on {key.device}, value on {value.device}: expected the same device. Give all modules of an attention"
                " layer one device in the device_map."
            )
        rows = self.table.batch_size
        if rows is not None and key.shape[0] != rows:
            remedy = "make a new cache" if self.table.is_static else "call cache.reset() or batch_select_indices()"
            raise ValueError(f"batch size {key.shape[0]} does not match the {rows} rows this cache holds: {remedy}.")
        limit = self.table.max_cache_len
        if limit is not None and key.shape[2] > limit:
            raise RuntimeError(_over_capacity(limit))
        if not self.is_initialized:
            self._layout(key, value)  # raises where there is none
            return
        given = (key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        held = (self.kv_heads, self.key_dim, self.value_dim, self.dtype, self.device)
        if given[:-1] == held[:-1] and given != held:
            anew = "make a new cache" if self.table.is_static else "call cache.reset() and read the text again"
            raise ValueError(
                f"new keys are on {key.device}, and this layer's tokens are on {self.device}: the cache was filled under"
                f" another device map. Use the model with the device_map that it had, call cache.to({str(key.device)!r}) if"
                f" all layers are there now, or {anew}."
            )
        if given != held:
            raise ValueError(
                f"(kv_heads, key head_dim, value head_dim, dtype, device) = {given} does not match the cache's {held}:"
                " call cache.reset() before using it with another model, dtype, device or rank of a tensor-parallel model."
            )

    def _layout(self, key: Tensor, value: Tensor) -> PageLayout:
        """The layout for such states, or `ValueError` where they have none or it cannot serve a static cache."""
        layout = self.config.layout(key.shape[-1], value.shape[-1], key.dtype)
        self.require_kernels(layout, key.device)
        return layout

    def require_kernels(self, layout: PageLayout, device: torch.device) -> None:
        """Raise `ValueError` if the cache is static and the layout has no kernels for `device`."""
        if self.table.is_static and device.type != "cpu" and not ops.has_kernels(layout.name):
            raise ValueError(
                f"max_cache_len={self.table.max_cache_len} on {device} needs Triton kernels, and there are none for"
                f" key_format={layout.key_format!r}, value_format={layout.value_format!r}, rotation={layout.rotation!r},"
                f" scale={layout.scale!r}: leave max_cache_len out, choose another preset, or run on"
                " the CPU."
            )

    def _check_capacity(self, new: int) -> None:
        limit = self.table.max_cache_len
        if limit is not None:
            # The length is on the device: an asynchronous check neither waits for the GPU nor breaks a captured graph.
            torch._assert_async(self.counters[0] + new <= limit, _over_capacity(limit))
            last = self.last_layer  # compiled passes are not seen by `ForwardPass`, which would say so on the host
            if last is not None and last.is_initialized:
                pending = 0 if last.pending is None else last.pending.new
                newest = (last.counters[0] + pending).to(self.device)  # which may be another
                torch._assert_async(newest == self.counters[0], UNEVEN)

    def require_mask(self, key: PackedKV, query: Tensor, mask: Tensor) -> None:
        """Refuse a mask that does not fit [B or 1, 1, q or 1, the handle's length].

        Raises:
            ValueError: naming both shapes.
        """
        if error := ops.mask_error(mask, query, key.shape[2]):
            raise ValueError(error)

    def require_device(self, step: Step, *tensors: Tensor | None) -> None:
        """Refuse tensors on another device than the layer's, as of a layer split across devices, and forget the step."""
        if error := ops.device_error(self.device, *tensors):
            self.drop(step)
            raise ValueError(error)

    def _require_newest(self, step: Step) -> None:
        if not step.committed or self.table.is_static:
            return
        shown, held = step.start + step.new, self.length
        if (shown, step.origin) != (held, self.table.origin):
            raise RuntimeError(
                f"these keys and values show the cache at {step.origin + shown} tokens, and it holds"
                f" {self.table.origin + held} by now: use what the newest cache.update() returned."
            )


def signature(key: Tensor, value: Tensor) -> tuple[object, ...]:
    """All that `_validate` looks at."""
    return key.shape, value.shape, key.dtype, value.dtype, key.device, value.device


def _over_capacity(limit: int) -> str:
    return (
        f"more tokens than max_cache_len={limit}: make the TurboQuantCache with a larger max_cache_len, or without one to"
        " let it grow."
    )
