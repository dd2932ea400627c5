"""Shared fixtures, and the two markers: `gpu` (skipped without a CUDA device) and `network`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests import tiny_models
from tests.command_line import CommandLine
from tests.word_model import save_word_model
from tq_hf import embedded_model as embedded

pytest.register_assert_rewrite("tests.kernel_states")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def interrupts() -> Iterator[None]:
    """A job in a shell's background ignores interrupts, and what it starts does too: some tests send them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def tiny_model() -> PreTrainedModel:
    """A small Llama whose logits are far enough apart for greedy decoding to be stable."""
    return tiny_models.tiny_model(
        num_hidden_layers=3, head_dim=32, intermediate_size=96, max_position_embeddings=1024, initializer_range=0.2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model's folder. Tests that use it carry the marker `network`."""
    try:
        return embedded.embedded_model()
    except embedded.EmbeddedModelError as error:
        pytest.skip(f"the embedded model is not available: {error}")


@pytest.fixture(scope="session")
def embedded_model(embedded_folder: Path) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in bfloat16 and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.bfloat16).eval()
    return model, AutoTokenizer.from_pretrained(embedded_folder)


@pytest.fixture
def tq_hf(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(scope="session")
def word_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float32 with a chat template, whose words are its tokens."""
    path = tmp_path_factory.mktemp("words") / "model"
    save_word_model(path)
    return path


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template, for contexts of 300 tokens."""
    path = tmp_path_factory.mktemp("words") / "base"
    save_word_model(path, max_position_embeddings=300)
    (path / "chat_template.jinja").unlink()
    return path
