"""How much of what a model read came from packed pages: kept beside results, so that a run past the cache is visible."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CacheUsage:
    """Sums over texts.

    Attributes:
        texts: how many.
        tokens: what the last query of each text read, its own token included.
        packed_tokens: those of them that it read from packed pages, in the layers that have them.
        nbytes, bytes_bf16: what the caches held at the end, padding included, all layers; and the same in bfloat16.
    """

    texts: int = 0
    tokens: int = 0
    packed_tokens: int = 0
    nbytes: float = 0.0
    bytes_bf16: float = 0.0

    def __add__(self, other: CacheUsage) -> CacheUsage:
        return CacheUsage(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    @property
    def packed_share(self) -> float:
        """`packed_tokens` over `tokens`."""
        return self.packed_tokens / self.tokens if self.tokens else 0.0

    @property
    def cache_ratio(self) -> float:
        """How many times smaller than bfloat16 the caches were."""
        return self.bytes_bf16 / self.nbytes if self.nbytes else 0.0

    def as_dict(self) -> dict[str, float]:
        """Flat, for a results file."""
        return {
            "texts": self.texts,
            "packed_share": self.packed_share,
            "cache_bytes": round(self.nbytes),
            "cache_bytes_bf16": round(self.bytes_bf16),
            "cache_ratio": self.cache_ratio,
        }
