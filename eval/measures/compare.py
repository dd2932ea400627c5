"""`compare`: this project's presets, `DynamicCache` and other quantized caches on the same work.

Each generates from the same prompt, which gives its bytes (those of all its tensors) and its speed, and then reads the same
text behind the prompt, which gives KL against `DynamicCache` and perplexity over the same positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from transformers import DynamicCache

from tq_hf import PRESETS, TurboQuantCache
from tq_hf.attention import ATTENTION_NAME
from tq_hf.generation.chunks import text_chunks
from tq_hf.generation.comparison import Progress, cache_nbytes, generate_timed, score_texts
from tq_hf.scoring.mode import quantized_layers, tokens_in_pages

from ..bos import starts_with_bos
from ..data import wikitext
from ..results import markdown
from ..stored import StoredResults
from ..text import fingerprint, windows
from .base import Cell, Result, Study, measured, title
from .other_caches import DYNAMIC, OTHERS, OtherCache, other_chunks, quantized_share, quantizing_layers
from .text_quality import PerplexityOptions

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class CompareOptions:
    """A prompt of `prompt` tokens, then `new_tokens` generated; of a text that goes on for `scored` tokens, those count."""

    caches: tuple[str, ...] = (*OTHERS, *PRESETS)
    prompt: int = 8192
    new_tokens: int = 64
    scored: int = 1024
    bos: str = "auto"

    def __post_init__(self) -> None:
        PerplexityOptions(bos=self.bos)
        if unknown := [name for name in self.caches if name not in (*OTHERS, *PRESETS)]:
            known = ", ".join((*OTHERS, *PRESETS))
            raise ValueError(f"caches: {unknown[0]!r} is unknown: expected one of {known}.")
        if self.new_tokens < 2 or self.scored < 2:
            raise ValueError("new_tokens and scored: expected at least 2, to have a speed and something to predict.")


class Compare(Study):
    """Bytes, tokens a second, KL and perplexity of each cache."""

    kind = "compare"
    options_type: ClassVar[type] = CompareOptions

    def prepare(self) -> None:
        options: CompareOptions = self.options
        length = options.prompt + max(options.scored, options.new_tokens)
        self.require_context(length, "a prompt with what follows")
        text, (model, tokenizer) = wikitext(self.data_dir), (self.loaded.model, self.loaded.tokenizer)
        starts = starts_with_bos(model, tokenizer, text, options.bos)
        ids = windows(tokenizer, text, options.prompt + options.scored, options.prompt + options.scored, starts)
        self.ids, self.starts = ids.to(model.device), starts

    def facts(self) -> dict[str, Any]:
        options: CompareOptions = self.options
        return {
            "prompt": options.prompt,
            "new_tokens": options.new_tokens,
            "scored": options.scored,
            "bos": self.starts,
            "token_ids": fingerprint(self.ids),
        }

    def cells(self) -> list[Cell]:
        found = []
        for name in self.options.caches:
            other = OTHERS.get(name)
            config = {"cache": name} if other is not None else {"preset": name} | asdict(PRESETS[name])
            found.append(Cell(name, config, other))
        return found

    def work(self, cell: Cell) -> int:
        return int(self.ids.shape[1] + self.options.new_tokens)

    def measure(self, batch: Sequence[Cell], progress: Progress) -> list[Result]:
        return [self._compare(cell, progress) for cell in batch]

    def _compare(self, cell: Cell, progress: Progress) -> Result:
        other: OtherCache | None = cell.subject
        if other is not None and (why := other.missing()) is not None:
            progress(self.work(cell))
            return {"missing": why}
        model, options = self.loaded.model, self.options
        model.set_attn_implementation(ATTENTION_NAME)  # torch's SDPA for all that does not come packed
        prompt = self.ids[:, : options.prompt]
        generate_timed(model, prompt, self._new_cache(cell), WARM_UP_TOKENS)  # kernels are compiled at their first call
        cache = self._new_cache(cell)
        run = generate_timed(model, prompt, cache, options.new_tokens, progress)
        size, share = cache_nbytes(cache), self._share(cell, cache)
        layers = quantized_layers(cache) if other is None else len(quantizing_layers(cache))
        tokens = options.prompt + options.new_tokens - 1  # the newest is not cached yet
        whole = len(cache.layers)
        del cache
        return {
            "bytes": size,
            "bytes_per_token": size / tokens,
            "tokens_per_s": run.tokens_per_s,
            "first_token_seconds": run.first_token_seconds,
            "quantized_share": share,
            "quantized_layers": layers,
            "layers": whole,
            **self._quality(cell, progress),
        }

    def _new_cache(self, cell: Cell) -> Any:
        config = self.loaded.model.config
        return TurboQuantCache(config, preset=cell.name) if cell.subject is None else cell.subject.make(config)

    def _share(self, cell: Cell, cache: Any) -> float:
        """The share of tokens that are quantized, in the layers that quantize.

        Raises:
            ValueError: none, in a cache that should.
        """
        if cell.subject is None:
            share = tokens_in_pages(cache) / cache.get_seq_length()
        else:
            share = quantized_share(cache)
        if not share and cell.name != DYNAMIC:
            raise ValueError(f"{cell.name} quantized none of {cache.get_seq_length()} tokens: use a longer prompt.")
        return share

    def _quality(self, cell: Cell, progress: Progress) -> Result:
        """KL and perplexity over the last `scored` positions; the last one predicts nothing."""
        model, scored, length = self.loaded.model, self.options.scored, self.ids.shape[1]
        if cell.subject is None:
            chunks = text_chunks(length, PRESETS[cell.name], positions=scored)
        else:
            chunks = other_chunks(length - scored, length)
        exact = DynamicCache(config=model.config)
        (scores,) = score_texts(model, self.ids, exact, [self._new_cache(cell)], chunks, progress)
        kl, same = scores.kl[:, -scored:].double(), scores.same[:, -scored:].double()
        nll_exact, nll = (each[:, -scored:-1].double().mean().item() for each in (scores.nll_exact, scores.nll_packed))
        return {
            "kl": max(kl.mean().item(), 0.0),
            "top1": same.mean().item(),
            "ppl_exact": math.exp(nll_exact),
            "ppl": math.exp(nll),
            "positions": kl.numel(),
        }

    @classmethod
    def tables(cls, results: Sequence[StoredResults]) -> dict[str, str]:
        shown = {}
        # No tokens/s, which are of one run each: a shared host changes its speed meanwhile (`bench_generate` takes turns).
        head = ["cache", "MiB", "times smaller", "KL, nats", "top-1, %", "PPL", "quantized, %", "layers"]
        for found in results:
            entries = measured(found)
            whole = entries.get(DYNAMIC)
            rows = []
            for name, r in entries.items():
                ratio = "" if whole is None else f"{whole['bytes'] / r['bytes']:.2f}"
                rows.append(
                    [
                        name,
                        f"{r['bytes'] / 2**20:.1f}",
                        ratio,
                        f"{r['kl']:.5f}",
                        f"{100 * r['top1']:.1f}",
                        f"{r['ppl']:.3f}",
                        f"{100 * r['quantized_share']:.0f}",
                        f"{r['quantized_layers']} of {r['layers']}",
                    ]
                )
            run = found.run
            heading = f"{title(found)}, prompt of {run['prompt']:,} tokens, {run['scored']:,} positions scored"
            shown[heading] = markdown(head, rows)
        return shown

    @staticmethod
    def line(result: Result) -> str:
        if "missing" in result:
            return f"not measured: {result['missing']}"
        return (
            f"{result['bytes'] / 2**20:.1f} MiB  {result['tokens_per_s']:.1f} tokens/s  KL {result['kl']:.5f}"
            f"  PPL {result['ppl']:.3f}"
        )
