"""`perplexity` and `longctx`: what the cache costs on running text, position by position, against an exact cache.

Every position after the first page reads what decoding token by token would read. The two differ in what they look at: even
parts of windows, or the last positions before given lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from tq_hf.commands import RequestError
from tq_hf.generation.comparison import Progress, TextScores

from ..bos import BOS_CHOICES, starts_with_bos
from ..data import wikitext
from ..results import described, markdown
from ..settings import OWN, PUBLISHED
from ..stored import StoredResults
from ..text import fingerprint, windows
from .base import Cell, Result, Study, measured, title
from .scoring import lockstep_batches, score, standard_error, summary

AS_PUBLISHED = tuple(f"{name}, as published" for name in PUBLISHED)


@dataclass(frozen=True)
class PerplexityOptions:
    """`tokens` of text in windows of `window`; curves of `parts` equal parts of a window; `lockstep` settings share an
    exact pass."""

    settings: tuple[str, ...] = (*OWN, *AS_PUBLISHED, "raw")
    window: int = 2048
    tokens: int = 65536
    parts: int = 16
    bos: str = "auto"
    lockstep: int = 4

    def __post_init__(self) -> None:
        if self.bos not in BOS_CHOICES:
            raise ValueError(f"bos: {self.bos!r} is unknown: expected one of {', '.join(BOS_CHOICES)}.")


@dataclass(frozen=True)
class LongContextOptions:
    """`texts` windows as long as the last of `positions` that the model takes; before each of them, `around` positions
    count."""

    settings: tuple[str, ...] = OWN
    positions: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    around: int = 512
    texts: int = 4
    bos: str = "auto"
    lockstep: int = 4

    def __post_init__(self) -> None:
        PerplexityOptions(bos=self.bos)
        if list(self.positions) != sorted(set(self.positions)) or self.around > self.positions[0]:
            raise ValueError(
                f"positions: {list(self.positions)} with around={self.around} are not possible: expected growing numbers,"
                " the first at least `around`."
            )


def curve(scores: TextScores, length: int, spans: Sequence[tuple[int, int]]) -> list[Result]:
    """Means over spans of positions.

    Args:
        scores: of texts of `length` tokens, whose last positions they are.
        spans: [(start, end), ...] of positions 0 .. length. What lies before the first scored position is left out, and a
            span without scored positions too.

    Returns:
        A dict a span: from, to (behind the last position), kl, kl_stderr (over texts; None for one text), top1,
        ppl_exact, ppl_packed (None where only a text's last position, which predicts nothing, is in the span).
    """
    first = length - scores.kl.shape[1]
    points = []
    for start, end in spans:
        start = max(start, first)
        if start >= end:
            continue
        inside = slice(start - first, end - first)
        predicts = slice(start - first, min(end, length - 1) - first)
        kl = scores.kl[:, inside].double()
        points.append(
            {
                "from": start,
                "to": end,
                "kl": kl.mean().item(),
                "kl_stderr": standard_error(kl.mean(1)),
                "top1": scores.same[:, inside].double().mean().item(),
                "ppl_exact": _perplexity(scores.nll_exact[:, predicts]),
                "ppl_packed": _perplexity(scores.nll_packed[:, predicts]),
            }
        )
    return points


def _perplexity(nll: Tensor) -> float | None:
    return math.exp(nll.double().mean().item()) if nll.numel() else None


class TextStudy(Study):
    """What both have in common. Subclasses say which windows and which spans."""

    starts: bool
    ids: Tensor
    spans: list[tuple[int, int]]

    def cut(self, window: int, tokens: int) -> None:
        """Make `ids` of windows."""
        self.require_context(window, "a window")
        text = wikitext(self.data_dir)
        self.starts = starts_with_bos(self.loaded.model, self.loaded.tokenizer, text, self.options.bos)
        ids = windows(self.loaded.tokenizer, text, window, tokens, self.starts)
        self.ids = ids.to(self.loaded.model.device)

    def facts(self) -> dict[str, Any]:
        rows, length = self.ids.shape
        return {"window": length, "windows": rows, "bos": self.starts, "token_ids": fingerprint(self.ids)}

    def cells(self) -> list[Cell]:
        spans = [list(span) for span in self.spans]
        return [Cell(each.name, described(each) | {"spans": spans}, each) for each in self.settings()]

    def batches(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        by_name = {cell.name: cell for cell in cells}
        found = lockstep_batches([cell.subject for cell in cells], self.ids.shape[1], self.options.lockstep)
        return [[by_name[setting.name] for setting in batch] for batch in found]

    def work(self, cell: Cell) -> int:
        return self.ids.numel()

    def measure(self, batch: Sequence[Cell], progress: Progress) -> list[Result]:
        found = score(self.loaded.model, self.ids, [cell.subject for cell in batch], progress)
        length = self.ids.shape[1]
        return [summary(scores, cache, self.ids) | {"curve": curve(scores, length, self.spans)} for scores, cache in found]

    @staticmethod
    def line(result: Result) -> str:
        return (
            f"PPL {result['ppl_exact']:.3f} -> {result['ppl_packed']:.3f}  KL {result['kl']:.5f}"
            f"  top-1 {result['top1']:.2%}  packed {result['packed_share']:.0%}"
        )


class Perplexity(TextStudy):
    """Perplexity, KL and top-1 agreement, with curves over a window's positions.

    A setting counts the positions that read packed pages, from its own first page on; in the second half of the windows all
    settings count the same.
    """

    kind = "perplexity"
    options_type: ClassVar[type] = PerplexityOptions

    def prepare(self) -> None:
        options: PerplexityOptions = self.options
        if options.window % options.parts:
            raise RequestError(f"window: {options.window} has no {options.parts} equal parts: change one of them.")
        self.cut(options.window, options.tokens)
        size = options.window // options.parts
        self.spans = [(start, start + size) for start in range(0, options.window, size)]

    @classmethod
    def tables(cls, results: Sequence[StoredResults]) -> dict[str, str]:
        shown = {}
        head = [
            "setting",
            "bytes",
            "PPL, exact",
            "PPL",
            "change, %",
            "KL, nats",
            "KL, second half",
            "top-1, %",
            "packed, %",
        ]
        for found in results:
            rows = []
            for name, r in measured(found).items():
                change = f"{r['ppl_delta_percent']:+.2f}{with_error(r['ppl_delta_stderr'], 2)}"
                kl = f"{r['kl']:.4f}{with_error(r['kl_stderr'], 4)}"
                rows.append(
                    [
                        name,
                        f"{r['mean_bytes']:.0f}",
                        f"{r['ppl_exact']:.3f}",
                        f"{r['ppl_packed']:.3f}",
                        change,
                        kl,
                        f"{r['kl_second_half']:.4f}",
                        f"{100 * r['top1']:.1f}",
                        f"{100 * r['packed_share']:.0f}",
                    ]
                )
            shown[f"{title(found)}, {found.run['windows']} windows of {found.run['window']:,}"] = markdown(head, rows)
        return shown


class LongContext(TextStudy):
    """KL at given distances from the start."""

    kind = "longctx"
    options_type: ClassVar[type] = LongContextOptions

    def prepare(self) -> None:
        options: LongContextOptions = self.options
        reached = [end for end in options.positions if self.context is None or end <= self.context]
        if not reached:
            self.require_context(options.positions[0], "a text")
        self.cut(reached[-1], options.texts * reached[-1])
        self.spans = [(end - options.around, end) for end in reached]

    @classmethod
    def tables(cls, results: Sequence[StoredResults]) -> dict[str, str]:
        shown = {}
        for found in results:
            entries = measured(found)
            ends = sorted({point["to"] for entry in entries.values() for point in entry["curve"]})
            rows = []
            for name, entry in entries.items():
                at = {point["to"]: point for point in entry["curve"]}
                rows.append([name, *(_kl_and_top1(at.get(end)) for end in ends)])
            head = ["setting", *(f"{end:,}" for end in ends)]
            shown[f"{title(found)}: KL in nats, and top-1 agreement, before a position"] = markdown(head, rows)
        return shown


def with_error(error: float | None, digits: int) -> str:
    """A standard error behind its number; nothing where there is none."""
    return "" if error is None else f" ± {error:.{digits}f}"


def _kl_and_top1(point: Result | None) -> str:
    return "" if point is None else f"{point['kl']:.4f}{with_error(point['kl_stderr'], 4)} ({100 * point['top1']:.1f} %)"
