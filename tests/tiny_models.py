"""Small randomly initialised models, one a family: a new family is tested by adding one line."""

from __future__ import annotations

import copy

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
    "mistral_sliding": {"config": "MistralConfig", **COMMON, **HEADS, "head_dim": 32, "sliding_window": 64},
    "mistral_full": {"config": "MistralConfig", **COMMON, **HEADS, "sliding_window": None},
    "gemma3_d256": {
        "config": "Gemma3TextConfig", **COMMON, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3_d96": {"config": "Phi3Config", **COMMON, "hidden_size": 192, "num_attention_heads": 2, "pad_token_id": 0},
    "falcon_mqa": {"config": "FalconConfig", **COMMON, "num_attention_heads": 4, "multi_query": True},
    "falcon_alibi": {"config": "FalconConfig", **COMMON, "num_attention_heads": 4, "alibi": True},
    "bloom_alibi": {"config": "BloomConfig", "vocab_size": 99, "hidden_size": 64, "n_layer": 2, "n_head": 2},
    "olmo": {"config": "OlmoConfig", **COMMON, **HEADS, "clip_qkv": 1.0, "eos_token_id": 98},
    "olmo2": {"config": "Olmo2Config", **COMMON, **HEADS, "eos_token_id": 98},
    "granite": {"config": "GraniteConfig", **COMMON, **HEADS, "attention_multiplier": 0.1, "residual_multiplier": 0.5},
    "smollm3_no_rope": {"config": "SmolLM3Config", **COMMON, **HEADS, "no_rope_layers": [1, 0], "pad_token_id": 0},
    "llama4_chunked": {
        "config": "Llama4TextConfig", **COMMON, **HEADS, "head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 2,
        "attention_chunk_size": 24, "no_rope_layers": [1, 0],
    },
    "deepseek_v3_mla": {
        "config": "DeepseekV3Config", **COMMON, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32,
        "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2,
    },
    "gemma3n_shared": {
        "config": "Gemma3nTextConfig", **COMMON, **HEADS, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 24,
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 8,
        "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 16, "activation_sparsity_pattern": None,
    },
    "gemma4_shared": {
        "config": "Gemma4TextConfig", **COMMON, **HEADS, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32,
        "sliding_window": 24, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 16,
    },
    "gemma4_d512": {
        "config": "Gemma4TextConfig", **COMMON, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "global_head_dim": 512, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 16,
    },
    "qwen3_next": {
        "config": "Qwen3NextConfig", **COMMON, **HEADS, "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "jamba": {
        "config": "JambaConfig", **COMMON, **HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
        "num_experts_per_tok": 1, "mamba_dt_rank": 4,
    },
    "falcon_h1": {
        "config": "FalconH1Config", **COMMON, **HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_chunk_size": 32,
    },
    "zamba2": {
        "config": "Zamba2Config", **COMMON, "num_hidden_layers": 3, "num_attention_heads": 4, "n_mamba_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "hybrid"], "mamba_d_state": 16, "chunk_size": 32,
    },
    "mamba": {"config": "MambaConfig", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "bart": {
        "config": "BartConfig", "model": "BartForConditionalGeneration", "vocab_size": 99, "d_model": 64,
        "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 256, "pad_token_id": 0,
        "decoder_start_token_id": 1, "forced_eos_token_id": None,
    },
    "t5_position_bias": {
        "config": "T5Config", "model": "T5ForConditionalGeneration", "vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 64,
        "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    },
    "gemma3_vision": {
        "config": "Gemma3Config", "model": "Gemma3ForConditionalGeneration", "mm_tokens_per_image": 4,
        "image_token_index": 95, "boi_token_index": 96, "eoi_token_index": 97,
        "text_config": {
            **COMMON, **HEADS, "head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
            "patch_size": 4,
        },
    },
    "qwen2_vl": {
        "config": "Qwen2VLConfig", "model": "Qwen2VLForConditionalGeneration", "image_token_id": 95, "video_token_id": 96,
        "vision_start_token_id": 97, "vision_end_token_id": 98,
        "text_config": {
            **COMMON, **HEADS, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]},
        },
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
    },
}  # fmt: skip

# Families of which no layer has pages, and what the cache says of it.
UNPACKED = {
    "mamba": "LinearAttentionLayer",
    "deepseek_v3_mla": "latents stay exact",
    "gemma4_d512": "this one is 512",
}
EAGER_ONLY = ("falcon_alibi", "bloom_alibi", "mamba")  # attention code of their own, or none
NO_SDPA = ("gemma2_softcap", "gpt_oss_sinks")


def attentions(family: str) -> list[str]:
    """The attention functions that the family has, ours first."""
    if family in EAGER_ONLY:
        return ["eager"]
    if family == "falcon_mqa":  # its own code calls torch's SDPA
        return ["sdpa", "eager"]
    return ["turboquant", "eager"] if family in NO_SDPA else ["turboquant", "sdpa", "eager"]


def tiny_model(family: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A seeded float32 model in eval mode; the caller's RNG is left alone."""
    settings = copy.deepcopy({**FAMILIES[family], **changes})  # configs write into what they are given
    make = getattr(tf, settings.pop("model", "AutoModelForCausalLM"))
    config = getattr(tf, settings.pop("config"))(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make._from_config(config) if "model" in FAMILIES[family] else make.from_config(config)
        model = model.eval()
        for name, parameter in model.named_parameters():
            if "sinks" in name or name.endswith("bias"):  # initialised to nothing, which would test nothing
                parameter.data.normal_()
    return model


def use_attention(model: PreTrainedModel, attention: str) -> None:
    """Let the model use one of `attentions`, also where `set_attn_implementation` leaves it alone."""
    if model.config.model_type == "falcon":
        model.config._attn_implementation = attention
    elif model.config.model_type not in ("bloom", "mamba"):  # which have one only
        model.set_attn_implementation(attention)


def cache_for(model: PreTrainedModel, cache: tf.Cache) -> tf.Cache:
    """What `generate()` takes: the cache, with a cross-attention's beside it for an encoder-decoder model."""
    if not model.config.is_encoder_decoder:
        return cache
    return tf.EncoderDecoderCache(cache, tf.DynamicCache(config=model.config))


def prompt(batch: int, length: int, seed: int = 1, vocab: int = 99) -> torch.Tensor:
    """Token ids [batch, length], never 0 (padding)."""
    return torch.randint(1, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
