"""What a packed layer holds as plain tensors, dequantized: for attention code that does not know pages, and for users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..pages.pool import while_alone
from ..pages.table import BlockTable
from .packed_kv import Step


class LayerDense:
    """The part of `TurboQuantLayer` that unpacks its history as a whole."""

    table: BlockTable
    is_initialized: bool
    device: torch.device
    counters: Tensor
    layout_name: str
    flush: Callable[[], None]
    commit: Callable[..., None]
    _state: Callable[[], tuple[Tensor | None, ...]]
    _known_length: Callable[[Step], int]
    _require_newest: Callable[[Step], None]

    def dense(self, step: Step) -> tuple[Tensor, Tensor]:
        """Keys and values as tensors [B, H, length, D / Dv]: history dequantized, the step's own tokens exact."""
        if step.dense is None:
            self._require_newest(step)
            self.table.note_dense_read()
            if step.is_first and not self.table.is_static:
                step.dense = (step.key, step.value)
            else:
                key, value = self._gather(step)
                step.dense = (ops.inference_only(key, step.key), ops.inference_only(value, step.value))
            self.commit(step, mask=None)
        return step.dense

    @while_alone
    def _gather(self, step: Step) -> tuple[Tensor, Tensor]:
        dense = ops.gather(*self._state(), self.layout_name, self._known_length(step))
        if torch.compiler.is_compiling():
            step.read = dense[0]
        first: Any = step.start
        if self.table.is_static:
            first = self.counters[0] - step.new if step.committed else self.counters[0]
        positions = torch.arange(step.new, device=self.device) + first
        for tensor, raw in zip(dense, (step.key, step.value), strict=True):
            tensor.index_copy_(2, positions, raw.detach())
        return dense

    @while_alone
    def unpacked(self) -> tuple[Tensor | None, Tensor | None]:
        """All keys and values [B, H, length, D / Dv], dequantized; None before the first token."""
        if not self.is_initialized:
            return None, None
        self.flush()
        return ops.gather(*self._state(), self.layout_name, self.counters.tolist()[0])

    def _read(self, which: int) -> Tensor | None:
        self.flush()
        with torch.inference_mode():  # its tensors refuse to be written to, which would change a copy
            return self.unpacked()[which]

    # As users of transformers read them. Each read dequantizes the layer: `for keys, values, window in cache` does so once.
    keys = property(lambda self: self._read(0))
    values = property(lambda self: self._read(1))
