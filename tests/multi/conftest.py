"""Two ranks for all tests of this folder, and the model that they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.multi.ranks import Ranks

# Far-apart logits, and a vocabulary that two ranks can share (transformers 5.17 refuses others).
MODEL: dict[str, Any] = {
    "vocab_size": 96, "num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 1024, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float32 with two KV heads of four query heads."""
    path = tmp_path_factory.mktemp("model")
    tiny_models.tiny_model(**MODEL).save_pretrained(path)
    return path
