"""A cache that packs tokens before anything reads them: what published schemes, which keep no token exact, make of a model.

`TurboQuantCache` packs whole pages, so even without a window up to a page of the newest tokens is still exact. Here a chunk
of whole pages is packed first, and its queries then read it back, their own tokens included, under the causal mask.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.layer import TurboQuantLayer
from tq_hf.packed_kv import PackedKV, Step


class AtOnceLayer(TurboQuantLayer):
    """A packed layer that commits before it attends; every chunk must fill its pages."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[PackedKV, PackedKV]:
        key, value = super().update(key_states, value_states, *args, **kwargs)
        key.step.is_first = False  # nor does a prompt read its exact states
        return key, value

    def attend(self, step: Step, query: Tensor, mask: Tensor | None, *args: Any) -> Tensor:
        self.commit(step, None, query)
        if self.packed_end != self.length:
            raise ValueError(
                f"{self.length - self.packed_end} tokens do not fill a page: feed chunks of {self.config.page_size}."
            )
        return super().attend(step, query, mask, *args)


class AtOnceCache(TurboQuantCache):
    """`TurboQuantCache` of `AtOnceLayer`, for unpadded batches fed in whole pages.

    Raises:
        ValueError: the config keeps tokens exact.
    """

    def __init__(self, model_config: PretrainedConfig, config: TurboQuantConfig) -> None:
        if config.recent_window or config.sink_tokens:
            raise ValueError(
                f"recent_window={config.recent_window}, sink_tokens={config.sink_tokens} keep tokens exact: expected 0."
            )
        super().__init__(model_config, config)
        for i, layer in enumerate(self.layers):
            if isinstance(layer, TurboQuantLayer):
                self.layers[i] = AtOnceLayer(layer.config, self.table, self.preset, layer.rotary, layer.guards_capacity)
