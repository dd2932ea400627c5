"""`needle`: facts hidden in a long log, at several depths, asked for after the log was packed.

An exact prefill would hide what quantization does: here the log alone is the prompt, and the question comes behind it, so
that all of its tokens read the log from the cache. An answer is right if greedy decoding would give it, token for token.
Needles among the newest tokens that a preset keeps exact are read exactly, as in use: in 1,024 tokens, one or two of ten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from tq_hf import TurboQuantCache
from tq_hf.attention import ATTENTION_NAME
from tq_hf.commands import RequestError
from tq_hf.generation.comparison import Progress, cache_argument
from tq_hf.scoring.mode import tokens_in_pages

from ..bos import starts_with_bos
from ..results import described, markdown
from ..settings import OWN
from ..stored import StoredResults
from .base import EXACT, Cell, Result, Study, measured, title
from .haystack import KEEPERS, SEED, entries, needles, question, statement
from .scoring import standard_error
from .text_quality import AS_PUBLISHED, PerplexityOptions, with_error

QUESTION_TOKENS = 64  # of each length, kept free for the question and its answer


@dataclass(frozen=True)
class NeedleOptions:
    """Texts of each of `lengths` that the model takes, with a needle at each of `depths` evenly spaced depths; `repeats`
    texts each."""

    settings: tuple[str, ...] = (EXACT, *OWN, *AS_PUBLISHED)
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    depths: int = 10
    repeats: int = 5
    bos: str = "auto"

    def __post_init__(self) -> None:
        PerplexityOptions(bos=self.bos)
        if self.depths > len(KEEPERS):
            raise ValueError(f"depths: {self.depths} is not possible: expected at most {len(KEEPERS)}.")
        if min(self.lengths) <= QUESTION_TOKENS:
            raise ValueError(f"lengths: {min(self.lengths)} is not possible: expected more than {QUESTION_TOKENS}.")


def log_with_needles(tokenizer: Any, length: int, hidden: Sequence[tuple[str, str]], seed: int) -> list[int]:
    """Token ids of a log of exactly `length` tokens, with the needles before the sentences at depths (i + 1/2) / n.

    Raises:
        ValueError: the needles alone are longer.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    facts = [encode(statement(keeper)) + encode(f" {number}") + encode(".") for keeper, number in hidden]
    room = length - sum(map(len, facts))
    if room < 0:
        raise ValueError(f"{len(hidden)} needles do not fit into {length} tokens: lower depths.")
    sentences: list[list[int]] = []
    for text in entries(seed):
        tokens = encode(f" {text}")
        if len(tokens) > room:
            sentences.insert(0, tokens[len(tokens) - room :])  # the end of a sentence, as a page torn off would show it
            break
        sentences.append(tokens)
        room -= len(tokens)
    total = sum(map(len, sentences))
    ids: list[int] = []
    placed = seen = 0
    for tokens in sentences:
        while placed < len(facts) and seen >= (placed + 0.5) / len(facts) * total:
            ids += facts[placed]
            placed += 1
        ids += tokens
        seen += len(tokens)
    return ids + [token for fact in facts[placed:] for token in fact]


class Needle(Study):
    """The share of needles found, by length and depth."""

    kind = "needle"
    options_type: ClassVar[type] = NeedleOptions

    def prepare(self) -> None:
        options: NeedleOptions = self.options
        self.lengths = [n for n in options.lengths if self.context is None or n <= self.context]
        if not self.lengths:
            self.require_context(min(options.lengths), "a text")
        sample = "".join(text for text, _ in zip(entries(0), range(200)))
        self.starts = starts_with_bos(self.loaded.model, self.loaded.tokenizer, sample, options.bos)
        if self.starts and self.loaded.tokenizer.bos_token_id is None:
            raise RequestError("bos: always: this model's tokenizer has no BOS token.")

    def facts(self) -> dict[str, Any]:
        options: NeedleOptions = self.options
        return {"depths": options.depths, "repeats": options.repeats, "bos": self.starts, "seed": SEED}

    def cells(self) -> list[Cell]:
        found = []
        for length in self.lengths:
            if EXACT in self.options.settings:
                found.append(Cell(f"{EXACT}, {length}", {"cache": "DynamicCache", "length": length}, (None, length)))
            for each in self.settings():
                name = f"{each.name}, {length}"
                found.append(Cell(name, described(each) | {"length": length}, (each, length)))
        return found

    def work(self, cell: Cell) -> int:
        return int(cell.subject[1] * self.options.repeats)

    def measure(self, batch: Sequence[Cell], progress: Progress) -> list[Result]:
        return [self._look(cell, progress) for cell in batch]

    def _look(self, cell: Cell, progress: Progress) -> Result:
        setting, length = cell.subject
        options: NeedleOptions = self.options
        self.loaded.model.set_attn_implementation(ATTENTION_NAME)  # of all cells, so that the cache is all that differs
        right: list[list[int]] = []
        nats: list[list[float]] = []
        shares = []
        for repeat in range(options.repeats):
            config = self.loaded.model.config
            cache = DynamicCache(config=config) if setting is None else setting.new_cache(config)
            hidden = needles(options.depths, repeat)
            found, log_probs, share = self._ask(cache, length - QUESTION_TOKENS, hidden, repeat)
            right.append(found)
            nats.append(log_probs)
            shares.append(share)
            progress(length)
        flat = [each for row in right for each in row]
        result = {
            "setting": EXACT if setting is None else setting.name,
            "length": length,
            "right": right,  # by repeat, then by depth
            "nats": [[round(each, 4) for each in row] for row in nats],
            "found": sum(flat) / len(flat),
            "mean_nats": sum(each for row in nats for each in row) / len(flat),
        }
        return result if setting is None else result | {"packed_share": sum(shares) / len(shares)}

    @torch.no_grad()
    def _ask(
        self, cache: Any, length: int, hidden: Sequence[tuple[str, str]], seed: int
    ) -> tuple[list[int], list[float], float]:
        """Whether each needle is found, -log p of its number in nats, and the share of the log read from pages.

        Raises:
            ValueError: nothing of the log was packed.
        """
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        start = [tokenizer.bos_token_id] if self.starts else []
        log = start + log_with_needles(tokenizer, length - len(start), hidden, seed)
        argument = cache_argument(model)
        model(torch.tensor([log], device=model.device), use_cache=True, logits_to_keep=1, **{argument: cache})
        share = 0.0
        if isinstance(cache, TurboQuantCache):
            share = tokens_in_pages(cache) / len(log)
            if not share:
                raise ValueError(f"a log of {len(log)} tokens leaves no page packed: the result would be that of {EXACT}.")
        cache.batch_repeat_interleave(len(hidden))
        asked, answers = [], []
        for keeper, number in hidden:
            asked.append(tokenizer(question(keeper), add_special_tokens=False)["input_ids"])
            answers.append(tokenizer(f" {number}", add_special_tokens=False)["input_ids"])
        fed = [before + answer[:-1] for before, answer in zip(asked, answers)]
        width = max(map(len, fed))
        if width > QUESTION_TOKENS:
            raise ValueError(f"a question takes {width} tokens with this tokenizer: expected at most {QUESTION_TOKENS}.")
        # Padded on the right, where no earlier token looks.
        ids = torch.tensor([each + [0] * (width - len(each)) for each in fed], device=model.device)
        logits: Tensor = model(ids, use_cache=True, **{argument: cache}).logits
        right, nats = [], []
        for row, before, answer in zip(logits, asked, answers):
            scores = row[len(before) - 1 :][: len(answer)].float().log_softmax(-1)
            target = torch.tensor(answer, device=scores.device)
            right.append(int((scores.argmax(-1) == target).all()))
            nats.append(-scores.gather(-1, target[:, None]).sum().item())
        return right, nats, share

    @classmethod
    def tables(cls, results: Sequence[StoredResults]) -> dict[str, str]:
        shown = {}
        for found in results:
            entries_by_setting = by_setting(found)
            lengths = sorted({length for cells in entries_by_setting.values() for length in cells})
            rows = []
            for name, cells in entries_by_setting.items():
                row = [name]
                for length in lengths:
                    r = cells.get(length)
                    row.append("" if r is None else _cell(r))
                rows.append(row)
            count = found.run["depths"] * found.run["repeats"]
            heading = f"{title(found)}: % of {count} needles found, and in brackets -log p of a number in nats"
            shown[heading] = markdown(["setting", *(f"{length:,}" for length in lengths)], rows)
        return shown

    @staticmethod
    def line(result: Result) -> str:
        share = f"  packed {result['packed_share']:.0%}" if "packed_share" in result else ""
        return f"found {result['found']:.0%}  {result['mean_nats']:.2f} nats{share}"


def by_setting(results: StoredResults) -> dict[str, dict[int, Result]]:
    """The results of a file by setting and length."""
    found: dict[str, dict[int, Result]] = {}
    for entry in measured(results).values():
        found.setdefault(entry["setting"], {})[entry["length"]] = entry
    return found


def grid(cells: dict[int, Result], lengths: Sequence[int]) -> list[list[float]]:
    """The share of needles found: a row a depth, a column a length; NaN where a length was not measured."""
    depths = len(next(iter(cells.values()))["right"][0])
    return [
        [
            sum(row[depth] for row in cells[length]["right"]) / len(cells[length]["right"]) if length in cells else math.nan
            for length in lengths
        ]
        for depth in range(depths)
    ]


def _cell(result: Result) -> str:
    return f"{100 * result['found']:.0f}{with_error(_error(result), 0)} ({result['mean_nats']:.2f})"


def _error(result: Result) -> float | None:
    """Standard error of the percentage found, from the texts, whose needles share a prompt; None for a single text."""
    return standard_error(100 * torch.tensor(result["right"], dtype=torch.float64).mean(1))
