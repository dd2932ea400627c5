"""What the positions of a text read while it is scored: the named modes.

- `decode`: what decoding token by token reads, the preset's exact tail and first tokens included; everything older is read
  from packed pages. Fed in chunks that pack each page where it falls due, which is the same within rounding.
- `packed`: every query reads quantized keys and values, its own token's included, and nothing stays exact: the pure
  quantizer, for comparison with figures published for it. It looks ahead where keys are centred or balanced: a page's mean
  knows the whole page, and the balance of channels the whole first page.
- `prefill=N`: the first N tokens attend exactly, as a prompt does, and later ones read the cache as in `decode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from ..cache import TurboQuantCache
from ..config import TurboQuantConfig
from ..generation.chunks import text_chunks
from .at_once import AtOnceCache
from .page_by_page import PageByPageCache, pages_at_once

# Tokens of a text that are fed at once: all of the usual windows of 2,048 and 4,096, as lm-eval's own models do. Longer
# texts are cut for the sake of the logits' memory. A multiple of every page size.
LONGEST_PASS = 4096
EXACT_TOKENS = ("recent_window", "sink_tokens")


@dataclass(frozen=True)
class ScoringMode:
    """One of the modes. `str()` gives its name back.

    Attributes:
        kind: `"decode"`, `"packed"` or `"prefill"`.
        prefill: the tokens that attend exactly, in `"prefill"`; else 0.
    """

    kind: str = "decode"
    prefill: int = 0

    @classmethod
    def parse(cls, name: str) -> ScoringMode:
        """The mode of that name.

        Raises:
            ValueError: an unknown name, or no positive N.
        """
        if name in ("decode", "packed"):
            return cls(name)
        kind, _, tokens = str(name).partition("=")
        if kind != "prefill" or not tokens.isdecimal() or int(tokens) < 1:
            raise ValueError(f"mode={name!r} is unknown: expected decode, packed or prefill=N with N of at least 1.")
        return cls(kind, int(tokens))

    def __str__(self) -> str:
        return f"prefill={self.prefill}" if self.kind == "prefill" else self.kind

    def settings(self, preset: str | TurboQuantConfig, **overrides: Any) -> TurboQuantConfig:
        """The preset with `overrides`; without exact tokens in `packed`.

        Raises:
            ValueError: an unknown preset or field, a value out of range, or exact tokens asked for in `packed`.
        """
        if self.kind == "packed":
            for name in EXACT_TOKENS:
                if overrides.get(name):
                    raise ValueError(
                        f"{name}={overrides[name]} contradicts mode='packed', where nothing stays exact: leave it out,"
                        " or use mode='decode'."
                    )
            overrides |= dict.fromkeys(EXACT_TOKENS, 0)
        return TurboQuantConfig.from_preset(preset, **overrides)

    def new_cache(self, model_config: PretrainedConfig, settings: TurboQuantConfig) -> TurboQuantCache:
        """An empty cache for `settings`."""
        return (AtOnceCache if self.kind == "packed" else PageByPageCache)(model_config, settings)

    def chunks(self, length: int, model: Any, settings: TurboQuantConfig) -> list[tuple[int, int]]:
        """How to feed texts of `length` tokens to a model and its `new_cache`: [(start, end), ...], covering 0 .. length."""
        if self.kind == "packed":
            ends = [*range(LONGEST_PASS, length, LONGEST_PASS), length]
            return list(zip([0, *ends], ends))
        return text_chunks(length, settings, prompt=self.prefill, pages=pages_at_once(model, LONGEST_PASS, settings))

    def padded_length(self, length: int, settings: TurboQuantConfig) -> int:
        """Tokens to feed for a text of `length`: in `packed` whole pages, so that none of its tokens stays exact."""
        return -(-length // settings.page_size) * settings.page_size if self.kind == "packed" else length

    def read_from_pages(self, length: int, settings: TurboQuantConfig) -> int:
        """Tokens that the last of `length` reads from pages."""
        if self.kind == "packed":
            return length
        if length <= self.prefill:
            return 0
        pages = (length - 1 - settings.recent_window - settings.sink_tokens) // settings.page_size
        return max(0, pages) * settings.page_size


def tokens_in_pages(cache: TurboQuantCache, length: int | None = None) -> int:
    """Positions that a cache's pages cover, whatever the number of its layers and rows: all of them, or those that the last
    of `length` tokens reads, which a page falls due before it is fed."""
    if not cache.packed_layers:
        return 0
    if length is None:
        return cache.table.packed_end - cache.table.sink_tokens
    last = length - 1 - cache.table.recent_window
    return sum(count for start, count in cache.table.spans if start + count <= last)


def quantized_layers(cache: TurboQuantCache) -> int:
    """Layers whose pages have the cache's own format: neither one of transformers' own nor a boundary layer."""
    return sum(layer.config == cache.quantization for layer in cache.packed_layers)


def right_padding(lengths: Tensor, width: int) -> Tensor:
    """int64 [rows, width], 1 where a position is one of the row's first `lengths` tokens."""
    return (lengths.new_ones(width).cumsum(0) <= lengths.unsqueeze(1)).long()
