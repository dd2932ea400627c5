"""Configs of well-known models, as their repositories publish them: what decides how large a cache is, and the weights."""

from __future__ import annotations

import re
from typing import Any

from transformers import AutoConfig, PretrainedConfig

_LLAMA = {"model_type": "llama", "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 128256,
    },
    "Llama 3.3 70B": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "vocab_size": 128256,
    },
    "Qwen3 4B": {
        **_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen3 8B": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "vocab_size": 151936,
    },
    "Qwen3 32B": {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "vocab_size": 151936,
    },
    "Qwen3 30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "Qwen2.5 7B": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    },
    "Mistral 7B v0.3": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None, "vocab_size": 32768,
        "max_position_embeddings": 32768,
    },
    "Mistral Nemo 12B": {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None, "vocab_size": 131072,
        "max_position_embeddings": 131072,
    },
    "Mixtral 8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    "Gemma 3 12B": {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024, "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "Gemma 3 27B": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024, "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "gpt-oss 20B": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "sliding_window": 128,
        "vocab_size": 201088, "max_position_embeddings": 131072,
    },
    "Phi-4 14B": {
        "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352, "max_position_embeddings": 16384,
        "pad_token_id": 100349,
    },
    "SmolLM3 3B": {
        "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256, "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


# Building a model, or the config alone (labels), takes an object for each of these, on the meta device too.
_LAYERS = re.compile(r"layer|depth|block|stage", re.IGNORECASE)
_COUNT = re.compile(rf"{_LAYERS.pattern}|label|expert|head|codebook", re.IGNORECASE)
_SIZE = re.compile(r"size|dim|width|token|period|offset|_ids?$", re.IGNORECASE)  # costs nothing there
MAX_LAYERS, MAX_COUNT, MAX_NESTING = 256, 1 << 14, 8


def require_countable(settings: Any, nesting: int = 0) -> None:
    """Refuse a stranger's `config.json` that would take minutes or all of the memory to build.

    Raises:
        ValueError: which number is too large, or nesting that no config has.
    """
    if nesting > MAX_NESTING:
        raise ValueError(f"it is nested more than {MAX_NESTING} deep: expected a model's config.json.")
    entries = settings.items() if isinstance(settings, dict) else ((None, value) for value in settings)
    for name, value in entries:
        if isinstance(value, (dict, list)):
            require_countable(value, nesting + 1)
        elif isinstance(value, int) and name is not None and _COUNT.search(name) and not _SIZE.search(name):
            most = MAX_LAYERS if _LAYERS.search(name) else MAX_COUNT
            if value > most:
                raise ValueError(f"{name} is {value:.6g}: expected at most {most}.")


def config_of(settings: dict[str, Any]) -> PretrainedConfig:
    """The config object for what a `config.json` holds.

    Raises:
        ValueError: no `model_type`, one that transformers does not know, or numbers beyond what can be counted.
    """
    require_countable(settings)
    settings = {name: value for name, value in settings.items() if name != "auto_map"}  # code from elsewhere
    model_type = settings.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError("there is no model_type in it: expected a model's whole config.json.")
    return AutoConfig.for_model(model_type, **settings)
