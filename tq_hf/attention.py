"""The `"turboquant"` attention and mask functions.

Three ways lead to the packed pages, and the first two end in `TurboQuantLayer.attend_and_commit`:

- `attn_implementation="turboquant"`: `turboquant_attention` gets the handles from the model's attention module.
- the model's default `"sdpa"`: `F.scaled_dot_product_attention` meets a handle (`packed_kv.scaled_dot_product_attention`).
- anything else (`"eager"`, a model's own attention code) reads a dense, dequantized copy through the handle.

Masks come in three kinds: None (nothing but causality), *compact* (uint8 [B, 1, 1, kv]: which positions are not padding;
causality comes on top) and *complete* (bool [B, 1, q, kv], causality included). Without a mask, the first of several queries
sees the first key by transformers' convention, whose static caches show positions behind a first prompt that are empty yet.
Where the last query is the newest key instead, `_ALL_KEPT` says so: a compact mask of one column.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils import logging

from . import ops
from .layers.packed_kv import PackedKV, are_pair, attend_first, densify, or_drop

logger = logging.get_logger(__name__)

ATTENTION_NAME = "turboquant"
# Models whose own code edits the mask before attention and understands only complete ones.
_MASK_EDITORS = ("doge",)
# Models that compute only the last queries of a prompt in layers that share keys, whatever the mask.
_QUERY_SLICERS = ("gemma4_text", "gemma4_unified_text")
MASK_ROOM = 64  # rows of a compact mask are as far apart for so many steps, whose kernels then get the same numbers
_ALL_KEPT = torch.ones(1, 1, 1, 1, dtype=torch.uint8)
# Arguments that change which keys a query sees and that this attention does not know: silence would be wrong.
_REFUSED = frozenset(("indices", "block_indices", "sinks", "head_mask"))


def turboquant_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for one kind of layer, in transformers' mask interface.

    Returns:
        None where only causality applies (`_ALL_KEPT` behind a history), a compact uint8 [B, 1, 1, kv_length] keep-mask
        where tokens are padding, and transformers' complete bool [B, 1, q_length, kv_length] mask for sliding or chunked
        layers, custom patterns and static caches (whose filled length is on the device).
    """
    model_type = getattr(kwargs.get("config"), "model_type", None)
    slices_queries = model_type in _QUERY_SLICERS and q_length > 1
    is_static = isinstance(q_offset, Tensor) or kv_length + kv_offset != q_offset + q_length
    plain = mask_function is causal_mask_function and local_size is None and not use_vmap
    if plain and is_static and q_length == 1 and attention_mask is not None:
        # generate() makes this mask in Python at every compiled step: the same as below, with a quarter of the operations.
        keep = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length] != 0
        position = torch.arange(kv_offset, kv_offset + kv_length, device=attention_mask.device)
        return (keep & (position <= q_offset))[:, None, None]
    if not plain or is_static or not allow_is_causal_skip or model_type in _MASK_EDITORS:
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip and not (is_static and slices_queries),
            use_vmap=use_vmap,
            **kwargs,
        )
        return _ALL_KEPT if mask is None and slices_queries else mask
    if attention_mask is None or bool(attention_mask.all()):
        return _ALL_KEPT if slices_queries or q_length not in (1, kv_length) else None
    keep = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length]
    rows = keep.new_zeros((keep.shape[0], -(-kv_length // MASK_ROOM) * MASK_ROOM), dtype=torch.uint8)
    rows[:, :kv_length] = keep
    return rows[:, None, None, :kv_length]


def turboquant_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | PackedKV,
    value: Tensor | PackedKV,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' attention interface; reads packed pages where `key` and `value` are handles.

    Args:
        query: [B, Hq, q, D].
        key, value: handles of a `TurboQuantCache`, or tensors [B, H, kv, D / Dv].
        attention_mask: None, compact or complete (module docstring), or transformers' additive float mask.
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: [Hq] learned sink logits.

    Returns:
        ([B, q, Hq, Dv], None): attention weights are not available.

    Raises:
        ValueError: an argument that would change the result and is not supported.
    """
    for name in _REFUSED.intersection(kwargs):
        if kwargs[name] is not None:
            raise ValueError(
                f"attention argument {name!r} is not supported by attn_implementation='turboquant': load the model with"
                " attn_implementation='sdpa' or 'eager'."
            )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if not scaling > 0:
        raise ValueError(f"scaling={scaling} is not supported by attn_implementation='turboquant': expected a positive one.")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if kwargs.get("output_attentions"):
        logger.warning_once("attn_implementation='turboquant' returns no attention weights: use 'eager' for them.")
    newest_last = isinstance(key, PackedKV) and not key.step.is_first
    if attention_mask is not None and attention_mask.dtype == torch.uint8 and attention_mask.numel() == 1 < key.shape[2]:
        attention_mask, newest_last = None, True  # `_ALL_KEPT`, or its copy on another device
    if attention_mask is not None and attention_mask.dtype == torch.uint8 and attention_mask.shape[-2] > 1:
        attention_mask = attention_mask != 0  # not one of `turboquant_mask`: a user's complete mask
    needs_sdpa = kwargs.get("position_bias") is not None or dropout > 0 or not _is_keep_mask(attention_mask)
    if are_pair(key, value) and not needs_sdpa:
        assert isinstance(key, PackedKV)
        arguments = (query, key, attention_mask, scaling, sliding_window, softcap, s_aux, is_causal)
        return or_drop(key, _packed, *arguments), None

    dense_key, dense_value = densify(key), densify(value)
    if attention_mask is None and is_causal and not newest_last and query.shape[2] > 1:
        dense_key, dense_value = dense_key[:, :, : query.shape[2]], dense_value[:, :, : query.shape[2]]
        if kwargs.get("position_bias") is not None:
            kwargs["position_bias"] = kwargs["position_bias"][..., : query.shape[2]]
    mask = _complete(attention_mask, query.shape[2], dense_key.shape[2], is_causal, query.device)
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, dense_key, dense_value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if needs_sdpa:
        raise ValueError(
            "softcap and s_aux cannot be combined with dropout, position_bias or an additive float mask in"
            " attn_implementation='turboquant': use attn_implementation='eager'."
        )
    causal = is_causal and mask is None
    return ops.attend_exact(query, dense_key, dense_value, mask, s_aux, scaling, softcap or 0.0, causal), None


def _packed(
    query: Tensor,
    key: PackedKV,
    mask: Tensor | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    is_causal: bool,
) -> Tensor:
    step, layer = key.step, key.layer
    complete = False
    if mask is not None:
        complete = mask.dtype == torch.bool
        layer.require_mask(key, query, mask)
    if sliding_window is not None and sliding_window < key.shape[2] and sliding_window != layer.sliding_window:
        window = layer.sliding_window
        listed = "full attention" if window is None else f"sliding attention over {window} tokens"
        raise ValueError(
            f"sliding_window={sliding_window} on a layer that the config lists as {listed}, for which its pages are kept."
            " Use attn_implementation='sdpa' with DynamicCache for this model."
        )
    causal = is_causal and not complete
    if not step.is_first or softcap is not None or s_aux is not None or not (mask is None or complete):
        return layer.attend_and_commit(step, query, mask, s_aux, scaling, softcap or 0.0, causal)
    queries, keys = query.shape[2], step.key.shape[2]
    if causal and 1 < queries < keys:  # the prompt's last queries alone (`_QUERY_SLICERS`)
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
        causal = False
    out = attend_first(query, key, mask, causal and query.shape[2] > 1, scaling).transpose(1, 2).contiguous()
    layer.commit(step, mask, query)
    return out


def _is_keep_mask(mask: Tensor | None) -> bool:
    """Whether the packed path can read the mask: keep or drop, the same for all heads."""
    return mask is None or (mask.dtype in (torch.bool, torch.uint8) and mask.ndim == 4 and mask.shape[1] == 1)


def _complete(mask: Tensor | None, queries: int, keys: int, causal: bool, device: torch.device) -> Tensor | None:
    """A mask that torch's SDPA understands: complete, or None where its own `is_causal` rule fits."""
    if mask is not None and mask.dtype != torch.uint8:
        return mask
    keep = None if mask is None else mask[..., :keys] != 0
    if not causal or queries == 1 or (keep is None and queries == keys):
        return keep
    position = torch.arange(keys, device=device)
    allowed = position <= position[keys - queries :, None]  # the last query is the newest key
    return allowed[None, None] if keep is None else allowed & keep


AttentionInterface.register(ATTENTION_NAME, turboquant_attention)
AttentionMaskInterface.register(ATTENTION_NAME, turboquant_mask)
