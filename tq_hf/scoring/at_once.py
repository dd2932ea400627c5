"""A cache that packs tokens before anything reads them: what published schemes, which keep no token exact, make of a model.

`TurboQuantCache` packs a page after attention has seen its last token, so that even without a window up to a page of the
newest tokens is exact, and so is a whole first prompt. Here new tokens are stored first, and their queries read them back
under the causal mask. What does not fill a page stays exact until it does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from ..cache import TurboQuantCache
from ..config import DEFAULT_PRESET, TurboQuantConfig
from ..layers.full import TurboQuantLayer
from ..layers.hybrid import HybridLayer
from ..layers.packed_kv import PackedKV, Step
from ..layers.sliding import SlidingLayer


class AtOnceLayer(TurboQuantLayer):
    """A packed layer that commits before it attends."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[PackedKV, PackedKV]:
        key, value = super().update(key_states, value_states, *args, **kwargs)
        key.step.is_first = False  # nor does a prompt read its exact states
        return key, value

    def _only_appends(self, step: Step, query: Tensor) -> bool:
        return False  # tokens are stored before they are read

    def attend(self, step: Step, query: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        self.commit(step, mask, query)
        return super().attend(step, query, mask, *args, **kwargs)

    def dense(self, step: Step) -> tuple[Tensor, Tensor]:
        """Keys and values as tensors [B, H, length, D / Dv], the step's own tokens as they are stored."""
        if step.dense is None:
            self._require_newest(step)
            self.table.note_dense_read()
            self.commit(step, mask=None)
            key, value = TurboQuantLayer.unpacked(self)  # all that is there, in a layer with a window too
            assert key is not None and value is not None  # the step's tokens are there
            step.dense = key, value
        return step.dense


class AtOnceHybridLayer(AtOnceLayer, HybridLayer):
    """The same beside a state space."""


class AtOnceSlidingLayer(AtOnceLayer, SlidingLayer):
    """The same with a sliding window."""

    def dense(self, step: Step) -> tuple[Tensor, Tensor]:
        if step.dense is None:
            hidden = max(self.hidden(step), 0)
            key, value = super().dense(step)
            step.dense = key[:, :, hidden:], value[:, :, hidden:]
        return step.dense


class AtOnceCache(TurboQuantCache):
    """`TurboQuantCache` of `AtOnceLayer`. A page's mean key (`center_keys`) knows all tokens of the page, later ones too.

    Args:
        config, preset, overrides: as for `TurboQuantCache`; exact tokens must be switched off.

    Raises:
        ValueError: the config keeps tokens exact.
    """

    layer_class = AtOnceLayer
    hybrid_layer_class = AtOnceHybridLayer
    sliding_layer_class = AtOnceSlidingLayer

    def __init__(self, config: PretrainedConfig, preset: str | TurboQuantConfig = DEFAULT_PRESET, **overrides: Any) -> None:
        super().__init__(config, preset, **overrides)
        for table in self.sliding_tables.values():
            table.shares_keys = True  # what the first new query sees is read after the last new token is stored
        kept = self.quantization
        if kept.recent_window or kept.sink_tokens:
            raise ValueError(
                f"recent_window={kept.recent_window}, sink_tokens={kept.sink_tokens} keep tokens exact: expected 0."
            )
