"""What a study is to the runner: cells to measure, and what their results look like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tq_hf.commands import Loaded, RequestError
from tq_hf.generation.comparison import Progress

from ..settings import Setting, select
from ..stored import StoredResults

EXACT = "bf16"  # the cell of transformers' DynamicCache
Result = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        name: unique in its study; the result is kept under it.
        config: what is measured, as JSON keeps it. A stored result counts only if it was measured of the same.
        subject: what the study measures it with.
    """

    name: str
    config: dict[str, Any]
    subject: Any = None


class Study(ABC):
    """A study of one model.

    Args:
        loaded: the model, on its device, and its tokenizer.
        options: an `options_type`.
        data_dir: a folder with the public data sets (`eval/tasks/local_data.py` says how); None: through `datasets`.

    Raises:
        RequestError: the options do not fit the model, or the data cannot be read.
    """

    kind: ClassVar[str]
    options_type: ClassVar[type]
    unit: ClassVar[str] = "token"  # of progress

    def __init__(self, loaded: Loaded, options: Any, data_dir: Path | None) -> None:
        self.loaded, self.options, self.data_dir = loaded, options, data_dir
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Read the data and check the options."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What all results have in common, besides the model and versions; as JSON keeps it."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """All there is to measure."""

    def batches(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Cells that are measured together."""
        return [[cell] for cell in cells]

    @abstractmethod
    def work(self, cell: Cell) -> int:
        """How many units of progress a cell is."""

    @abstractmethod
    def measure(self, batch: Sequence[Cell], progress: Progress) -> list[Result]:
        """A result a cell, as JSON keeps it."""

    @classmethod
    @abstractmethod
    def tables(cls, results: Sequence[StoredResults]) -> dict[str, str]:
        """Markdown tables by heading, from the results of one or several models."""

    @staticmethod
    @abstractmethod
    def line(result: Result) -> str:
        """A result that did not fail, in short."""

    # -- what studies share ------------------------------------------------------------------------------------------
    @property
    def context(self) -> int | None:
        """Tokens that the model takes; None: it does not say."""
        return getattr(self.loaded.model.config.get_text_config(), "max_position_embeddings", None)

    def require_context(self, tokens: int, what: str) -> None:
        """Refuse texts that are longer than the model takes.

        Raises:
            RequestError: they are.
        """
        if self.context is not None and tokens > self.context:
            raise RequestError(f"{what} of {tokens} is more than the context of {self.loaded.name}, {self.context}.")

    def settings(self) -> list[Setting]:
        """The options' settings but for `EXACT`, in their order.

        Raises:
            RequestError: one is unknown.
        """
        names = [name for name in self.options.settings if name != EXACT]
        try:
            return select([], names) if names else []
        except ValueError as error:
            raise RequestError(str(error)) from error


def measured(results: StoredResults) -> dict[str, Result]:
    """The entries that did not fail, in the order of the config."""
    found = sorted(results.entries.items(), key=lambda item: item[1]["order"])
    return {name: entry for name, entry in found if "error" not in entry and "missing" not in entry}


def failures(results: Sequence[StoredResults]) -> str:
    """A line for each cell that failed or could not be measured here; empty if there are none."""
    lines = []
    for found in results:
        for name, entry in found.entries.items():
            if why := entry.get("error") or entry.get("missing"):
                lines.append(f"- {title(found)}, {name}: {'failed' if 'error' in entry else 'not measured'}: {why}\n")
    return "".join(lines)


def title(results: StoredResults) -> str:
    """The model's name without its owner or folder."""
    return Path(results.run["model"]).name.removesuffix("-Instruct")
