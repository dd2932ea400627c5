"""The public data sets of the studies: through `datasets`, or from a folder."""

from __future__ import annotations

import json
from pathlib import Path

from tq_hf.commands import RequestError, first_line

from .text import read_text

RAW = Path("wikitext2_raw", "wiki.test.raw")
PAGES = Path("wikitext2_raw", "wikitext2_test_pages.jsonl")
GSM8K = (Path("gsm8k", "train.jsonl"), Path("gsm8k", "test.jsonl"))


def wikitext(data_dir: Path | None) -> str:
    """WikiText-2's raw test set: the published file `wikitext2_raw/wiki.test.raw` of the folder, or its articles joined
    (`wikitext2_test_pages.jsonl`, as `eval/tasks/local_data.py` reads them); without a folder, from the Hub.

    Raises:
        RequestError: the folder has neither, or what it has cannot be read.
    """
    if data_dir is None:
        return read_text(None, instead="--data-dir DIR")
    if (data_dir / RAW).is_file():
        return read_text(data_dir / RAW)
    require_files(data_dir, PAGES)
    try:
        lines = (data_dir / PAGES).read_text(encoding="utf-8").splitlines()
        return "".join(json.loads(line)["page"] for line in lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{data_dir / PAGES} cannot be read: {first_line(error)}") from error


def require_files(data_dir: Path, *names: Path) -> None:
    """
    Raises:
        RequestError: the folder lacks one of the files.
    """
    for name in names:
        if not (data_dir / name).is_file():
            raise RequestError(f"--data-dir {data_dir} has no {name}: eval/tasks/local_data.py says what belongs there.")
