"""Which channels of a layer's keys rotary embeddings turn into each other, and how fast.

A pair of channels turns by its frequency, in radians, from one position to the next. The model's config tells the
frequencies, and its own `rotate_half` which channels make a pair. Both are read as far as they can be understood: balance is
a matter of quality, and a model whose code or config is unlike transformers' own must not fail for it.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FASTEST = 1e6  # radians a position; 1 is usual, but scaled embeddings (longrope, linear) go beyond
# Models that turn keys in their layers with a window only, as their attention code says and no field of their config does.
ONLY_SLIDING = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini")
BY_LAYER = ("layer_types", "no_rope_layers", "layer_rope_theta", "mlp_layer_types")  # lists below tell layers apart by
UNLESS_ALL_ARE_FULL = ("exaone4", "exaone_moe", "kolibri1")  # of these, those that turn all if the model has no window


@dataclass(frozen=True)
class Rotary:
    """Rotary embeddings of the first `2 * len(frequencies)` channels of a head.

    Attributes:
        frequencies: of each pair, in radians a position; 0 for a pair that never turns.
        interleaved: pair i is channels 2i and 2i + 1 (Cohere, GLM, Llama 4), not i and i + len(frequencies).
    """

    frequencies: tuple[float, ...]
    interleaved: bool

    def pairs(self, dim: int) -> tuple[Tensor, Tensor]:
        """The partner of each channel, and their frequency.

        Args:
            dim: head_dim. Channels beyond the pairs are their own partners, at frequency 0, and so are all of a head that is
                too small for the pairs (keys that are not what the config says).

        Returns:
            int64 [dim], fp32 [dim].
        """
        partner, frequency = torch.arange(dim, device="cpu"), torch.zeros(dim, device="cpu")
        count = len(self.frequencies)
        if 2 * count <= dim:
            pair = torch.arange(2 * count, device="cpu")
            partner[: 2 * count] = pair ^ 1 if self.interleaved else (pair + count) % (2 * count)
            own = torch.tensor(self.frequencies, device="cpu")
            frequency[: 2 * count] = own.repeat_interleave(2) if self.interleaved else own.repeat(2)
        return partner, frequency


def rotary_of(config: Any, layer: int) -> Rotary | None:
    """The rotary embeddings of a layer of a model with this text config; None where there are none, or none known of."""
    try:
        frequencies = _frequencies(config, layer)
    except Exception:  # code of a model may keep anything under these names
        return None
    if frequencies is None or not all(0 <= f <= FASTEST and math.isfinite(f) for f in frequencies):
        return None
    return Rotary(frequencies, _is_interleaved(type(config).__module__))


def rotaries_of(config: Any, layers: Iterable[int]) -> dict[int, Rotary | None]:
    """`rotary_of` each of these layers, found once for all layers that the config says the same of."""
    lists = [named for name in BY_LAYER if (named := getattr(config, name, None))]
    has_own = bool(getattr(config, "is_heterogeneous", False))
    known: dict[Hashable, Rotary | None] = {}
    found = {}
    for layer in layers:
        try:
            kind: Hashable = layer if has_own else tuple(named[layer] for named in lists)
            hash(kind)
        except Exception:  # as in `rotary_of`
            kind = layer
        if kind not in known:
            known[kind] = rotary_of(config, layer)
        found[layer] = known[kind]
    return found


def _turns(config: Any, layer: int) -> bool:
    """Whether this layer applies the rotary embeddings that the config describes."""
    if getattr(config, "alibi", False) or not getattr(config, "use_mem_rope", True):  # Falcon; Zamba2
        return False
    if getattr(config, "position_embedding_type", "rope") != "rope":  # Granite 4
        return False
    for field in ("no_rope_layers", "layer_rope_theta"):  # 0 for a layer that does not: SmolLM3, Llama 4; Granite SWA, Muse
        layers = getattr(config, field, None)
        if layers and not layers[layer]:
            return False
    kind = getattr(config, "model_type", None)
    if kind not in ONLY_SLIDING or config.layer_types[layer] == "sliding_attention":
        return True
    if kind == "cohere2_moe":  # its first, dense layers may do without a window
        return bool(config.mlp_layer_types[layer] == "dense" and config.prefix_dense_sliding_window_pattern == 1)
    return kind in UNLESS_ALL_ARE_FULL and config.sliding_window is None


def _frequencies(config: Any, layer: int) -> tuple[float, ...] | None:
    if not _turns(config, layer):
        return None
    parameters, kind = getattr(config, "rope_parameters", None) or {}, None
    kinds = getattr(config, "layer_types", None)
    if kinds and isinstance(parameters.get(kinds[layer]), dict):  # parameters of their own for each kind of layer
        kind = kinds[layer]
        parameters = parameters[kind]
    if thetas := getattr(config, "layer_rope_theta", None):
        parameters = {**parameters, "rope_theta": thetas[layer]}
        config = copy.copy(config)
        config.rope_parameters = parameters
    if not parameters.get("rope_theta"):
        return None
    if (initialize := ROPE_INIT_FUNCTIONS.get(parameters.get("rope_type", "default"))) is not None:
        frequencies = initialize(config, torch.device("cpu"), layer_type=kind)[0]
    else:
        own = (getattr(config, "per_layer_config", None) or {layer: config})[layer]
        dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        dim = int(dim * parameters.get("partial_rotary_factor", 1.0))
        frequencies = parameters["rope_theta"] ** -(torch.arange(0, dim, 2, device="cpu") / dim)
    return tuple(frequencies.tolist())


def _is_interleaved(configuration: str) -> bool:
    """Whether the model turns neighbours: its module is asked, by the name of the module that defines its config.

    Modules that are not transformers' are asked only if they have been imported, since importing runs their code.
    """
    name = configuration.replace(".configuration_", ".modeling_")
    try:
        model = importlib.import_module(name) if name.startswith("transformers.") else sys.modules.get(name)
        rotate_half = getattr(model, "rotate_half", None)
        if rotate_half is not None:
            return bool(rotate_half(torch.arange(4.0, device="cpu")).tolist() == [-1, 0, -3, 2])
    except Exception:  # no such module, or one that turns heads in another way
        return False
    return hasattr(model, "apply_rotary_emb")  # pairs as complex numbers
