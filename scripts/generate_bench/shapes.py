"""What is measured: models of random weights, and points, which are batches of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

POSITIONS = 1 << 18
COMMON = {"max_position_embeddings": POSITIONS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA_3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
QWEN_2_5_1_5B = {
    "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
# For dry runs on the CPU.
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, tuple[type, dict[str, Any]]] = {
    "8b": (LlamaConfig, LLAMA_3_8B),
    "1.5b": (Qwen2Config, QWEN_2_5_1_5B),
    "tiny": (LlamaConfig, TINY),
}
POINTS = ("1x2k", "1x32k", "1x128k", "8x8k", "8x32k", "32x8k", "64x4k")
ROOM = 128  # tokens that a static cache holds beside the prompt: those of three timed runs, 99, and some spare
WARM_UP_PROMPT = 1 << 14  # tokens of all rows: longer prompts have the same kernels
SEED = 0


@dataclass(frozen=True)
class Point:
    """`name`: rows x tokens of the prompt, as `8x32k` or `2x300`."""

    name: str

    @property
    def rows(self) -> int:
        return int(self.name.split("x")[0])

    @property
    def tokens(self) -> int:
        text = self.name.split("x")[1]
        return 1024 * int(text.removesuffix("k")) if text.endswith("k") else int(text)

    @property
    def capacity(self) -> int:
        """Tokens a row for which a static cache is made."""
        return self.tokens + ROOM


def model_config(shape: str) -> Any:
    kind, fields = SHAPES[shape]
    return kind(**COMMON, **fields)


def build_model(shape: str, attention: str, device: torch.device) -> Any:
    """A model of that shape with random bfloat16 weights, made on the device; the caller's RNG is left alone.

    Weights are as transformers initialises them (normal, standard deviation 0.02), with which hidden states stay finite.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(
            model_config(shape), dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
    assert all(parameter.device.type == device.type for parameter in model.parameters())
    return model


def prompt(model: Any, rows: int, tokens: int) -> Tensor:
    """Random token ids [rows, tokens] on the model's device, none of them special."""
    generator = torch.Generator(model.device).manual_seed(SEED)
    return torch.randint(3, model.config.vocab_size, (rows, tokens), device=model.device, generator=generator)


def weight_bytes(model: Any) -> int:
    """Bytes of all weights, tied ones once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def weight_bytes_read(model: Any) -> int:
    """Bytes of the weights that a decode step reads: of an embedding that is not the output layer too, a row a token."""
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return weight_bytes(model) - (0 if inputs is outputs else inputs.nbytes)


@dataclass(frozen=True)
class Needs:
    """Bytes that a process with a static cache takes: all the time, and of activations besides.

    For deciding what fits on a GPU together; measured memory is in the results.
    """

    held: int
    warming_up: int
    reading: int


def estimated_needs(shape: str, point: Point, packed: bool) -> Needs:
    config = model_config(shape)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    kv = 2 * config.num_key_value_heads * (hidden // config.num_attention_heads)
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    weights = 2 * (embeddings + layers * hidden * (2 * hidden + kv + 3 * inner))
    cache = int(2 * point.rows * point.capacity * layers * kv * (0.3 if packed else 1.0))
    tokens, each = point.rows * point.tokens, 2 * (3 * inner + 6 * hidden)
    return Needs(weights + cache + (3 << 30), each * min(tokens, WARM_UP_PROMPT), each * tokens)
