"""A model folder whose tokenizer knows the words of this project's own test data: one token a word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import tiny_models

DATA = Path(__file__).parent / "data" / "lm_eval"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"  # noqa: E501


def words() -> list[str]:
    """What the tasks' texts are made of."""
    text = " ".join(path.read_text(encoding="utf-8") for path in sorted(DATA.glob("*.jsonl")))
    return sorted({word for word in re.findall(r"\w+|[^\w\s]+", text) if word.isascii()})


def save_word_model(path: Path, **changes: Any) -> None:
    """Write a tiny Llama in float32 with far-apart logits, and its tokenizer."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "Question", "Answer", ":", *words()])}
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    settings = {"num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 2048, "initializer_range": 0.2}
    model = tiny_models.tiny_model(vocab_size=len(vocabulary), bos_token_id=1, eos_token_id=2, **settings | changes)
    model.save_pretrained(path)
