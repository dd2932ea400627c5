"""The data of the tasks in this folder: problems and prose written for this project, read without a cache on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

FOLDER = Path(__file__).parent


def rows(name: str) -> Dataset:
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return Dataset.from_list([json.loads(line) for line in lines])


def arithmetic(**kwargs: Any) -> DatasetDict:
    return DatasetDict({"train": rows("arithmetic_train"), "test": rows("arithmetic_test")})


def prose(**kwargs: Any) -> DatasetDict:
    return DatasetDict({"test": rows("prose")})


def choice_endings(doc: dict[str, Any]) -> list[str]:
    """The right number, and three that are near it."""
    number = int(doc["answer"].rsplit("#### ", 1)[1])
    return [f" {number + off}" for off in (0, 1, 10, 100)]
