"""A cache that takes in many tokens at once and reads what taking them in one by one would read.

`TurboQuantCache` packs what is due after a forward pass, so that all of its queries read the same pages. Long passes are
what makes scoring a text cheap, though: here attention walks through the new tokens in pieces, each of which ends where a
page falls due, and packs it before the next piece. The rest of the model sees one long pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import ATTENTION_NAME
from ..cache import TurboQuantCache
from ..config import TurboQuantConfig
from ..layers.full import TurboQuantLayer
from ..layers.hybrid import HybridLayer
from ..layers.packed_kv import Step
from ..layers.plan import decoder_config
from ..layers.sliding import SlidingLayer


def pages_at_once(model: Any, tokens: int, config: TurboQuantConfig) -> int:
    """How many pages a pass of `model` over about so many tokens of each text may pack in a `PageByPageCache`.

    One, as in every cache, where attention does not walk: other attention functions than `"turboquant"`, and models with
    layers that read the keys of another one, which are all there by then.
    """
    shares_keys = bool(getattr(decoder_config(model.config), "num_kv_shared_layers", None))
    if model.config._attn_implementation != ATTENTION_NAME or shares_keys:
        return 1
    return max(1, tokens // config.page_size)


class PageByPageLayer(TurboQuantLayer):
    """A packed layer that packs pages in the middle of a pass."""

    def attend(
        self, step: Step, query: Tensor, mask: Tensor | None, aux_sinks: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        ends = self._ends(step)
        if len(ends) == 1:
            return super().attend(step, query, mask, aux_sinks, *args, **kwargs)
        if query.shape[2] != step.new:
            self.drop(step)
            raise ValueError(
                f"{query.shape[2]} queries for {step.new} new tokens, in which {len(ends) - 1} pages fall due: expected a"
                " query for each, or passes that end where a page falls due."
            )
        outputs = []
        for start, end in zip([0, *ends], ends):
            key, value = step.key[:, :, start:end], step.value[:, :, start:end]
            piece = Step(key, value, False, step.start + start, self.table.origin)
            seen = None if mask is None else self._mask_of(piece, step, mask, start, end)
            some = query[:, :, start:end]
            outputs.append(super().attend(piece, some, seen, aux_sinks, *args, **kwargs))
            super().commit(piece, seen, some)
        step.committed = True
        return torch.cat(outputs, dim=1)

    def _ends(self, step: Step) -> list[int]:
        """Where a step is cut: how many of its tokens have come when a page falls due, and all of them."""
        if step.is_first or step.committed or self.table.is_static:
            return [step.new]
        due = self.packed_end + self.config.recent_window + self.config.page_size - step.start
        return [*range(due, step.new, self.config.page_size), step.new]

    def _mask_of(self, piece: Step, step: Step, mask: Tensor, start: int, end: int) -> Tensor:
        """The rows and columns of a step's mask, compact or complete, that are a piece's."""
        rows = slice(start, end) if mask.shape[2] > 1 else slice(None)
        first = self.hidden(piece) - self.hidden(step)
        return mask[:, :, rows, first : first + self.visible_length(piece)]

    def dense(self, step: Step) -> tuple[Tensor, Tensor]:
        if len(self._ends(step)) > 1:
            self.drop(step)
            raise RuntimeError(
                f"{step.new} tokens at once, in the middle of which pages fall due, can only be read by"
                f" attn_implementation={ATTENTION_NAME!r}: use it, or passes that end where a page falls due."
            )
        return super().dense(step)


class PageByPageHybridLayer(PageByPageLayer, HybridLayer):
    """The same beside a state space."""


class PageByPageSlidingLayer(PageByPageLayer, SlidingLayer):
    """The same with a sliding window."""


class PageByPageCache(TurboQuantCache):
    """`TurboQuantCache` of `PageByPageLayer`, for passes of up to `pages_at_once` pages after a first one."""

    layer_class = PageByPageLayer
    hybrid_layer_class = PageByPageHybridLayer
    sliding_layer_class = PageByPageSlidingLayer
