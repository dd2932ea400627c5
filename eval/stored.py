"""Results on disk: a JSON file whose entries were measured under the same facts, written after every entry."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tq_hf.commands import RequestError

Stored = TypeVar("Stored", bound="StoredResults")


@dataclass
class StoredResults:
    """What was measured under the same facts.

    Attributes:
        path: the JSON file.
        run: what all entries have in common: model, device, versions, a fingerprint of the code.
        entries: a result by name, in the order of measurement. Each says in `"config"` what it was measured of.
    """

    path: Path
    run: dict[str, Any]
    entries: dict[str, dict[str, Any]]

    key: ClassVar[str] = "cells"  # what the file calls its entries
    command: ClassVar[str] = "python -m eval.study"  # what writes such files

    @classmethod
    def opened(cls: type[Stored], path: Path, run: dict[str, Any]) -> Stored:
        """The results that `path` has of this run, or none yet.

        Raises:
            RequestError: the file holds another run's results, or cannot be read.
        """
        if not path.exists():
            return cls(path, run, {})
        found = cls.read(path)
        if differing := [name for name in run if found.run.get(name) != run[name]]:
            name = differing[0]
            raise RequestError(
                f"{path} was measured with {name}={found.run.get(name)!r}, and this is {run[name]!r}: give another --out, or"
                " delete the file."
            )
        return found

    @classmethod
    def read(cls: type[Stored], path: Path) -> Stored:
        """The results of a file.

        Raises:
            RequestError: it cannot be read.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, found["run"], found[cls.key])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{path} holds no results of {cls.command}: delete it, or give another --out.") from error

    def holds(self, name: str, config: Any) -> bool:
        """Whether there is a result of that name, measured of `config`; one that failed is none."""
        found = self.entries.get(name)
        return found is not None and "error" not in found and found["config"] == config

    def put(self, name: str, entry: dict[str, Any]) -> None:
        """Keep a result, and write the file: an interrupted run loses nothing, nor do several that share the file."""
        with locked(self.path.parent):
            if self.path.exists():
                self.entries = self.read(self.path).entries
            self.entries[name] = entry
            replace_text(self.path, json.dumps({"run": self.run, self.key: self.entries}, indent=1) + "\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes that write results out of a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that others see the old or the new one, and never a part."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
