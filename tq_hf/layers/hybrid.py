"""`HybridLayer`: full attention in packed pages beside a state space in transformers' own layer (Falcon-H1, Zamba2)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ..config import TurboQuantConfig
from ..pages.table import BlockTable
from ..quantizer.rotary import Rotary
from ..reporting.memory import storage_bytes
from ..reporting.reports import LayerReport
from .full import TurboQuantLayer


class HybridLayer(TurboQuantLayer, LinearAttentionCacheLayerMixin):
    """A `TurboQuantLayer` that also answers for the layer's convolution and recurrent states.

    These live in `state`, a layer of transformers' own, which the cache edits (reset, crop, reorder, ...) as such.

    Args:
        config, table, preset, guards_capacity: as in `TurboQuantLayer`.
        number_of_states: convolution and recurrent states in this layer.
    """

    supports_early_init = False

    def __init__(
        self,
        config: TurboQuantConfig,
        table: BlockTable,
        preset: str,
        rotary: Rotary | None = None,
        guards_capacity: bool = False,
        number_of_states: int = 1,
    ) -> None:
        super().__init__(config, table, preset, rotary, guards_capacity)
        self.state = LinearAttentionLayer(number_of_states)

    def fork(self, table: BlockTable) -> HybridLayer:
        twin: HybridLayer = super().fork(table)
        twin.state = copy.deepcopy(self.state)
        return twin

    @property
    def is_compileable(self) -> bool:
        return self.table.is_static and self.state.is_compileable

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # a plain attribute of layers without states
        return self.state.is_croppable

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self.state.update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self.state.update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def activate_past_recording(self) -> None:
        self.state.activate_past_recording()

    @property
    def nbytes(self) -> int:
        return super().nbytes + storage_bytes(vars(self.state))

    def report(self, layer: int) -> LayerReport:
        return replace(super().report(layer), nbytes=self.nbytes)

    # What transformers' `Cache` and models read of a layer with states.
    has_previous_state = property(lambda self: self.state.has_previous_state)
    conv_states = property(lambda self: self.state.conv_states)
    recurrent_states = property(lambda self: self.state.recurrent_states)
    conv_kernel_size = property(lambda self: self.state.conv_kernel_size)
    number_of_states = property(lambda self: self.state.number_of_states)
    record_past = property(lambda self: self.state.record_past)
