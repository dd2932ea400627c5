"""GSM8K and WikiText-2 from a folder, for machines that cannot reach the Hub: $TQ_HF_DATA names it.

gsm8k/train.jsonl, gsm8k/test.jsonl             fields question and answer, as published
wikitext2_raw/wikitext2_test_pages.jsonl        one article a line in the field page, as lm-eval's wikitext task reads it
wikitext2_raw/wiki.test.raw                     the published file, for `eval.study`, which else joins the articles
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

__all__ = ["gsm8k", "process_results", "wikitext", "wikitext_detokenizer"]


def rows(*parts: str) -> Dataset:
    """The lines of a JSON-lines file of the folder.

    Raises:
        FileNotFoundError: TQ_HF_DATA is not set, or the file is not there.
    """
    folder = os.environ.get("TQ_HF_DATA")
    path = Path(folder or ".").joinpath(*parts)
    if not folder or not path.is_file():
        raise FileNotFoundError(f"TQ_HF_DATA={folder!r} names no folder with {'/'.join(parts)}: set it to one that has it.")
    return Dataset.from_list([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def gsm8k(**kwargs: Any) -> DatasetDict:
    return DatasetDict({split: rows("gsm8k", f"{split}.jsonl") for split in ("train", "test")})


def wikitext(**kwargs: Any) -> DatasetDict:
    return DatasetDict({"test": rows("wikitext2_raw", "wikitext2_test_pages.jsonl")})
