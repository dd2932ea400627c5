"""Which layers stay exact by their place in the model: the rule of the published presets.

vLLM's rule (`TurboQuantConfig.get_boundary_skip_layers` in vllm/model_executor/layers/quantization/turboquant/config.py):
the first and last layers of a dense model keep the model's dtype, without which GSM8K drops by about 30 points on a model of
4B parameters. On a hybrid, a model that mixes attention with layers that carry a recurrent state, none do: it has few
attention layers, and the rule would take a large share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# In `layer_types` or `layers_block_type`, by the names of all releases. Whatever else is listed attends or holds no state.
RECURRENT_KINDS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"})
LINEAR_ATTENTION = 0  # in `attn_type_list`, where 1 is softmax attention


def is_hybrid(config: Any) -> bool:
    """Whether some layer of a model with this text config carries a recurrent state."""
    for name in ("layer_types", "layers_block_type"):
        if RECURRENT_KINDS.intersection(getattr(config, name, None) or ()):
            return True
    return LINEAR_ATTENTION in (getattr(config, "attn_type_list", None) or ())


def boundary_layers(config: Any, packable: Sequence[int], count: int) -> set[int]:
    """The layers to keep exact at the ends of a dense model.

    A model whose layers alternate between full and sliding attention (Gemma 3) is dense in vLLM's eyes, which counts all
    layers and quantizes both kinds. So places are counted among all layers here too, although not every sliding layer is
    packed: what stays exact is the same in both, and a full layer in the middle doesn't become a boundary because its
    neighbours are of another kind.

    Args:
        config: the model's text config.
        packable: the layers that could be packed, by their place in the model.
        count: layers at each end. At most a quarter of all layers is taken at each, so that a small model is packed too
            (vLLM allows a half, and so would quantize nothing of a model of four layers).

    Returns:
        Those of `packable` that stay exact.
    """
    if is_hybrid(config):
        return set()
    layers = config.num_hidden_layers
    count = min(count, layers // 4)
    return {i for i in packable if i < count or i >= layers - count}
