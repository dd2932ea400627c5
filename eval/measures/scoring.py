"""From windows of text and settings to numbers: perplexity, KL, agreement and bytes of each setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from tq_hf import ATTENTION_NAME, TurboQuantCache
from tq_hf.generation.chunks import text_chunks
from tq_hf.generation.comparison import Progress, TextScores, score_texts
from tq_hf.layout import PageLayout
from tq_hf.scoring.page_by_page import pages_at_once

from .. import simulated_cache
from ..settings import Setting
from ..simulated_cache import SimulatedCache

Result = dict[str, Any]
TOKENS_AT_ONCE = 8192  # in a pass, over all windows: logits of a vocabulary of 150,000 take 2.5 GB in bfloat16


def lockstep_batches(settings: Sequence[Setting], length: int, most: int) -> list[list[Setting]]:
    """Settings that can share an exact reference, at most `most` a batch: their chunks are the same."""
    batches: dict[tuple[Any, ...], list[list[Setting]]] = {}
    for setting in settings:
        key = (setting.split is not None, *text_chunks(length, setting.config))
        same = batches.setdefault(key, [[]])
        if len(same[-1]) == most:
            same.append([])
        same[-1].append(setting)
    return [batch for same in batches.values() for batch in same]


def measure(model: Any, ids: Tensor, settings: Sequence[Setting], progress: Progress | None = None) -> list[Result]:
    """Score settings in lockstep and sum each up, see `score` and `summary`."""
    return [summary(scored, cache, ids) for scored, cache in score(model, ids, settings, progress)]


def score(
    model: Any, ids: Tensor, settings: Sequence[Setting], progress: Progress | None = None
) -> list[tuple[TextScores, TurboQuantCache | SimulatedCache]]:
    """Score settings in lockstep with one exact cache; all windows are rows of one batch.

    Args:
        model: a causal language model of transformers.
        ids: int64 [windows, length], on the model's device.
        settings: one of `lockstep_batches`.

    Returns:
        Each setting's scores, and its cache at the end.

    Raises:
        ValueError: a setting has no layout in this model, or the windows are too short for it to pack anything.
    """
    # The simulation needs to see queries; both names are the same attention for everything else.
    model.set_attn_implementation(simulated_cache.ATTENTION_NAME if settings[0].split is not None else ATTENTION_NAME)
    for setting in settings:
        if setting.at_once and ids.shape[1] % setting.config.page_size:
            raise ValueError(
                f"windows of {ids.shape[1]} tokens do not fill pages of {setting.config.page_size}, as packing at once"
                " needs: take a multiple."
            )
    caches = [setting.new_cache(model.config) for setting in settings]
    config = settings[0].config
    chunks = text_chunks(ids.shape[1], config, pages=pages_at_once(model, TOKENS_AT_ONCE // len(ids), config))
    exact = DynamicCache(config=model.config)
    return list(zip(score_texts(model, ids, exact, caches, chunks, progress), caches))


def summary(scores: TextScores, cache: TurboQuantCache | SimulatedCache, ids: Tensor) -> Result:
    """A flat dict, see `quality` and `_memory`."""
    return quality(scores, ids.shape[1]) | _memory(cache, ids.numel())


def quality(scores: TextScores, length: int) -> Result:
    """Perplexities and distances over the positions that read packed pages.

    `kl_by_text` is the mean of each text. `kl_second_half` is that of each text's second half: the same positions in all
    settings, however many tokens they keep exact. `kl_stderr` and `ppl_delta_stderr` (percent, like the change itself, to
    first order) are standard errors over texts, whose positions are not independent; None for a single text.
    """
    kl = scores.kl.double()
    nll_exact, nll_packed = (nll[:, :-1].double().mean(1) for nll in (scores.nll_exact, scores.nll_packed))
    exact, packed = nll_exact.mean().item(), nll_packed.mean().item()
    delta_error = standard_error(nll_packed - nll_exact)
    return {
        "ppl_exact": math.exp(exact),
        "ppl_packed": math.exp(packed),
        "ppl_delta_percent": 100 * math.expm1(packed - exact),
        "ppl_delta_stderr": None if delta_error is None else 100 * math.exp(packed - exact) * delta_error,
        "kl": kl.mean().item(),
        "kl_stderr": standard_error(kl.mean(1)),
        "kl_by_text": kl.mean(1).tolist(),
        "kl_second_half": kl[:, -(length // 2) :].mean().item(),
        "kl_p99": kl.flatten().kthvalue(max(1, math.ceil(0.99 * kl.numel()))).values.item(),
        "top1": scores.same.double().mean().item(),
        "positions": kl.numel(),
    }


def standard_error(per_text: Tensor) -> float | None:
    """Of the mean over texts, [texts]."""
    return (per_text.std() / math.sqrt(len(per_text))).item() if len(per_text) > 1 else None


def _memory(cache: TurboQuantCache | SimulatedCache, tokens: int) -> Result:
    """What the cache holds of `tokens` at the end, and what a token takes in a long context.

    `packed_share` is that of the tokens in pages, in the layers that have pages. `page_bytes` is for a token and KV head of
    a quantized layer; `mean_bytes` is the mean over all layers with pages, exact layers in bfloat16 included.
    """
    report = cache.report()
    if isinstance(cache, TurboQuantCache):
        layouts = [PageLayout.from_name(layer.layout_name) for layer in cache.packed_layers]
        pages = [layout.bytes_per_token for layout in layouts]
        exact = [2.0 * (layout.key_dim + layout.value_dim) for layout in layouts]
        is_quantized = [layer.config == cache.quantization for layer in cache.packed_layers]
    else:
        pages = [layer.page_bytes for layer in cache.simulated_layers]
        exact = [2.0 * (layer.keys.shape[3] + layer.values.shape[3]) for layer in cache.simulated_layers]
        is_quantized = [True] * len(pages)
    smallest = min(range(len(pages)), key=pages.__getitem__)
    held = [page if is_packed else full for page, full, is_packed in zip(pages, exact, is_quantized)]
    return {
        "packed_share": report.packed_tokens / (tokens * len(pages)),
        "layers": len(report.layers),
        "quantized_layers": sum(is_quantized),
        "cache_bytes": report.nbytes,
        "cache_bytes_bf16": report.bytes_bf16,
        "cache_ratio": report.ratio,
        "page_bytes": pages[smallest],
        "page_ratio": exact[smallest] / pages[smallest],
        "mean_bytes": sum(held) / len(held),
    }
