"""Small randomly initialised models, one a family: a new family is tested by adding one line."""

from __future__ import annotations

import torch
import transformers as tf
from transformers import PreTrainedModel

COMMON = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

FAMILIES: dict[str, dict] = {
    "llama": {"config": "LlamaConfig", **COMMON, **HEADS},
    "llama_mqa_d80": {
        "config": "LlamaConfig", **COMMON, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1,
        "head_dim": 80,
    },
    "qwen2_bias": {"config": "Qwen2Config", **COMMON, **HEADS},
    "qwen3_qk_norm": {"config": "Qwen3Config", **COMMON, **HEADS, "head_dim": 32},
    "phi3": {"config": "Phi3Config", **COMMON, **HEADS, "pad_token_id": 0},
    "gemma3_hybrid": {
        "config": "Gemma3TextConfig", **COMMON, **HEADS, "head_dim": 16, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2_softcap": {
        "config": "Gemma2Config", **COMMON, **HEADS, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0, "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss_sinks": {
        "config": "GptOssConfig", **COMMON, **HEADS, "head_dim": 16, "sliding_window": 24, "num_local_experts": 2,
        "num_experts_per_tok": 1, "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neox": {"config": "GPTNeoXConfig", **COMMON, "num_attention_heads": 4},
    "gpt2": {"config": "GPT2Config", "vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512},
}  # fmt: skip


def tiny_model(family: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A seeded float32 model in eval mode; the caller's RNG is left alone."""
    settings = {**FAMILIES[family], **changes}
    config = getattr(tf, settings.pop("config"))(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tf.AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if "sinks" in name or name.endswith("bias"):  # initialised to nothing, which would test nothing
                parameter.data.normal_()
    return model


def prompt(batch: int, length: int, seed: int = 1, vocab: int = 99) -> torch.Tensor:
    """Token ids [batch, length], never 0 (padding)."""
    return torch.randint(1, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
