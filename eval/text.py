"""The text that quality is measured on, cut into windows of token ids."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tq_hf.commands import RequestError, first_line

DATASET, CONFIGURATION = "Salesforce/wikitext", "wikitext-2-raw-v1"


def read_text(path: Path | None, instead: str = "--text FILE") -> str:
    """A text file, or WikiText-2's raw test set from the hub; `instead` is what a command takes where there is no hub.

    Raises:
        RequestError: the file or the data set cannot be read.
    """
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the text file {path} cannot be read: {first_line(error)}") from error
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RequestError(f"WikiText-2 comes through `datasets`: pip install -e '.[eval]', or give {instead}.") from error
    try:
        rows = load_dataset(DATASET, CONFIGURATION, split="test")["text"]
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"{DATASET} could not be loaded: {first_line(error)}. Give {instead}.") from error
    return "".join(row or " \n" for row in rows)  # the data set empties blank lines; this is the published file again


def windows(tokenizer: Any, text: str, window: int, tokens: int, starts: bool) -> Tensor:
    """The first tokens of a text as windows that share nothing.

    Args:
        window: tokens a window, a leading BOS included.
        tokens: how many to take in all, rounded down to whole windows.
        starts: whether each window starts with BOS (`bos.starts_with_bos`).

    Returns:
        int64 [windows, window].

    Raises:
        RequestError: fewer tokens than a window, a text that is too short, or no BOS to start with.
    """
    rows = tokens // window
    if rows < 1:
        raise RequestError(f"tokens: {tokens} is less than a window of {window}.")
    start = tokenizer.bos_token_id
    if starts and start is None:
        raise RequestError("bos: always is not possible: this model's tokenizer has no BOS token.")
    each = window - starts
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(ids) < rows * each:
        raise RequestError(f"the text has {len(ids)} tokens, too few for {rows} windows of {window}: lower tokens.")
    cut = ids[: rows * each].view(rows, each)
    return torch.cat([cut.new_full((rows, 1), start), cut], dim=1) if starts else cut


def fingerprint(ids: Tensor) -> str:
    """What tells one set of windows from another."""
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:16]
