"""What a cache has to know of tensor parallelism: its rank packs the KV heads of the tensors that it is given.

`from_pretrained(..., distributed_config=DistributedConfig(tp_plan="auto"))` under `torchrun` shards the projections and
leaves the config's head counts as they are. So shapes come from the tensors, and only two things from the config: whether
the plan leaves each rank whole KV heads, and which part of the model a saved cache belongs to.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from .compat import tensor_parallel_plan

_QUERIES = ("q_proj",)
_KEYS = ("k_proj", "kv_b_proj", "qkv_proj", "query_key_value")
_SHARDED = "colwise"  # other styles gather a projection's output, so that every rank has all heads


def ranks(config: PretrainedConfig) -> int:
    """Over how many ranks a model's projections are sharded; 1 without tensor parallelism."""
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1


def require_whole_heads(config: PretrainedConfig) -> None:
    """Refuse a model whose plan cuts KV heads in two, or takes their query heads from them.

    transformers loads such a model. Its forward then fails at a shape that names neither heads nor ranks, or, with keys on
    all ranks and queries sharded, reads other keys than it should.

    Args:
        config: the model's, as in `model.config`.

    Raises:
        ValueError: naming heads, ranks and what to do.
    """
    count = ranks(config)
    if count == 1:
        return
    plan = tensor_parallel_plan(config)
    heads = _kv_heads(config)
    queries, keys = (_is_sharded(plan, names) for names in (_QUERIES, _KEYS))
    if keys and any(number % count for number in heads):
        uneven = next(number for number in heads if number % count)
        divisors = ", ".join(str(n) for n in range(1, uneven + 1) if uneven % n == 0)
        raise ValueError(
            f"num_key_value_heads={uneven} cannot be split over tp_size={count} ranks: each rank packs whole KV heads."
            f" Start a number of ranks that divides it ({divisors}), or load the model with device_map='auto' in a single"
            " process."
        )
    if queries and not keys and any(number > 1 for number in heads):
        raise ValueError(
            f"the tp_plan shards q_proj over tp_size={count} ranks and leaves all num_key_value_heads={max(heads)} on each:"
            " a rank's query heads would read keys of others. Give k_proj and v_proj the style of q_proj, 'colwise'."
        )


def shard_facts(count: object) -> dict[str, str | int]:
    """Which part of a model over `count` ranks this process has, beside `model_facts`; nothing where that cannot be told."""
    if not isinstance(count, int) or count < 2 or not torch.distributed.is_initialized():
        return {}
    return {"tp_size": count, "tp_rank": torch.distributed.get_rank() % count}  # "tp" is a mesh's last dimension


def _is_sharded(plan: dict[str, str], names: tuple[str, ...]) -> bool:
    return any(style == _SHARDED and name.rpartition(".")[2] in names for name, style in plan.items())


def _kv_heads(config: PretrainedConfig) -> list[int]:
    """KV heads, layer by layer where layers differ."""
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "per_layer_config", None) or [text]
    names = ("num_key_value_heads", "num_attention_heads")
    found = [next((n for name in names if (n := getattr(layer, name, None))), None) for layer in layers]
    return [number for number in found if number is not None]  # a layer without attention has neither
