"""The cells of the table: modes × families, and the reasons of those that are not simply green."""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from packaging.version import Version

from tests.conformance.modes import MODES
from tests.tiny_models import FAMILIES


@dataclass(frozen=True)
class Refusal:
    """Something that `DynamicCache` (in static modes `StaticCache`) cannot do either.

    Attributes:
        reason: for the table.
        match: a regular expression for the error that both raise.
        ours, theirs: whether we and transformers' cache raise it; if only one does, there is nothing to compare.
    """

    reason: str
    match: str
    ours: bool = True
    theirs: bool = True


# Families with nothing that a cache of keys and values could hold.
NO_ATTENTION = ("mamba",)
# Families none of whose layers are packed, and why: their cells must agree with `DynamicCache`, and pack nothing.
UNPACKED: dict[str, str] = {
    "deepseek_v3_mla": "Latents stay exact, in transformers' own layers; it works, but packs nothing.",
    "gemma4_d512": "Layers of head_dim 512 stay exact, in transformers' own class; it works, but packs nothing.",
}
STATIC = ("static", "static_chunked")
CHUNKED = ("chunked_prefill", "chunked_padded_prefill", "static_chunked")
# The same of modes with a static cache.
UNPACKED_STATIC = {
    "mistral_sliding": "In a static cache, layers with a window keep transformers' own class; it works, but packs nothing.",
}
STATE = ("qwen3_next", "jamba", "falcon_h1", "zamba2")  # a recurrent state beside attention
_DRAFTS = Refusal("transformers refuses drafts for models with a recurrent state.", "stateful models")
_EMBEDS = Refusal("This model's `generate` takes no `inputs_embeds`.", "forwarding implemented")
_MASK = Refusal("This model's own code takes 2D masks only.", "must match the size|too many values to unpack")
_ROWS = Refusal("The model itself remembers the rows of its first forward pass.", "must match the size")
REFUSED: dict[tuple[str, str], Refusal] = {
    **{(mode, family): _DRAFTS for mode in ("assisted", "prompt_lookup") for family in STATE},
    **{("embeddings", family): _EMBEDS for family in ("falcon_h1", "zamba2", "gemma3_vision")},
    **{("whole_mask", family): _MASK for family in ("bloom_alibi", "falcon_alibi")},
    **{(mode, "falcon_alibi"): _MASK for mode in STATIC},
    ("chosen_rows", "qwen2_vl"): _ROWS,
}
# Faults of transformers' own that its newest release no longer has.
_UNFILLED = "'NoneType' object is not subscriptable"  # a crop of a cross-attention's cache that holds nothing
REFUSED_BEFORE_5_24: dict[tuple[str, str], Refusal] = {
    **{(mode, "qwen2_vl"): Refusal("", "must match the size") for mode in CHUNKED},
    **{(mode, "llama4_chunked"): Refusal("", "unexpected keyword argument 'block_sequence_ids'") for mode in STATIC},
    # Its model code knows static caches by the class `StaticCache` alone.
    **{(mode, "bloom_alibi"): Refusal("", "too many values to unpack", theirs=False) for mode in STATIC},
    ("assisted", "t5_position_bias"): Refusal("", _UNFILLED),
    **{(mode, "t5_position_bias"): Refusal("", _UNFILLED, ours=False) for mode in ("prompt_lookup", "cropped")},
}
IS_OLD = Version(transformers.__version__) < Version("5.24")
QUANTIZED = "quantized"  # the row of `test_quantized`, which compares a cache with itself


@dataclass(frozen=True)
class Cell:
    """A mode on a family.

    Attributes:
        turn: which of the attention functions it uses, modulo their number.
    """

    mode: str
    family: str
    turn: int

    @property
    def refusal(self) -> Refusal | None:
        key = (self.mode, self.family)
        return REFUSED.get(key) or (REFUSED_BEFORE_5_24.get(key) if IS_OLD else None)

    @property
    def unpacked(self) -> str | None:
        return UNPACKED.get(self.family) or (UNPACKED_STATIC.get(self.family) if self.mode in STATIC else None)

    @property
    def reason(self) -> str:
        """Why it isn't simply green with the newest transformers, or nothing."""
        refusal = REFUSED.get((self.mode, self.family))
        return refusal.reason if refusal else self.unpacked or ""

    def __str__(self) -> str:
        return f"{self.mode}-{self.family}"


TESTED = [family for family in FAMILIES if family not in NO_ATTENTION]
CELLS = [Cell(mode, family, i + j) for i, mode in enumerate(MODES) for j, family in enumerate(TESTED)]
QUANTIZED_CELLS = [Cell(QUANTIZED, family, 0) for family in TESTED]
