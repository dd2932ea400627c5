"""`tq-hf`, a model for EleutherAI's lm-eval: everything it answers was read through a `TurboQuantCache`.

Importing this module registers it. `tq_hf lm-eval run --model tq-hf --model_args pretrained=...,preset=tq4 --tasks ...` does
so and hands over to lm-eval's own command line; in Python:

    import lm_eval
    import tq_hf.lm_eval_model
    lm_eval.simple_evaluate(model="tq-hf", model_args={"pretrained": ..., "preset": "tq4"}, tasks=["gsm8k"])

lm-eval's own `hf` model scores a text in a single forward pass, whose queries attend to exact states: whatever cache it is
given, the answer doesn't depend on it. Here texts are scored in one of the modes of `scoring_mode.py`.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from accelerate.utils import gather_object
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM, eval_logger
from lm_eval.models.utils import chunks
from torch import Tensor
from tqdm import tqdm

from .attention import ATTENTION_NAME
from .cache import TurboQuantCache
from .commands import versions
from .config import DEFAULT_PRESET, TurboQuantConfig
from .generation.chunks import first_page_tokens
from .generation.comparison import cache_argument
from .scoring.cache_usage import CacheUsage
from .scoring.mode import ScoringMode, quantized_layers, tokens_in_pages
from .scoring.token_scores import goes_on_in_chunks, score_tokens

UNNAMED = "(no task)"
Request = tuple[Any, list[int], list[int]]  # (context and continuation or None, their tokens)


@register_model("tq-hf")
class TurboQuantLM(HFLM):
    """lm-eval's `hf` model with its keys and values in a `TurboQuantCache`.

    Args:
        pretrained: as for `hf`: a hub id, a folder or a model. A model that is loaded here uses `"turboquant"` attention
            unless `attn_implementation` names another; a model object keeps the one it has.
        preset: a name of `tq_hf.PRESETS`, or a `TurboQuantConfig`.
        mode: `"decode"`, `"packed"` or `"prefill=N"`, see `scoring_mode.py`.
        prefill: N; the same as mode="prefill=N".
        softmax_dtype: what log-probabilities are computed in. `hf` takes the model's dtype, and sums in it.
        kwargs: fields of `TurboQuantConfig` to change in the preset, and all that `hf` takes.

    Raises:
        ValueError: an unknown preset or mode, a field out of range, an encoder-decoder model, or a model none of whose
            layers would be quantized.
    """

    def __init__(
        self,
        pretrained: Any,
        preset: str | TurboQuantConfig = DEFAULT_PRESET,
        mode: str | None = None,
        prefill: int | None = None,
        softmax_dtype: str | torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> None:
        if prefill is not None:
            if mode not in (None, "prefill"):
                raise ValueError(f"mode={mode!r} and prefill={prefill!r} contradict each other: give one of them.")
            mode = f"prefill={prefill}"
        self.mode = ScoringMode.parse(mode or "decode")
        overrides = {field.name: kwargs.pop(field.name) for field in fields(TurboQuantConfig) if field.name in kwargs}
        self.preset = preset if isinstance(preset, str) else "custom"
        self.settings = self.mode.settings(preset, **overrides)
        self.usage: dict[str, CacheUsage] = {}
        self._running: dict[str, CacheUsage] = {}
        self._tasks: Iterator[str | None] = itertools.repeat(UNNAMED)
        self._largest_batch: int | None = None
        self._goes_on_in_chunks: bool | None = None
        self._keeps_attention = "attn_implementation" in kwargs
        super().__init__(pretrained, softmax_dtype=softmax_dtype, **kwargs)
        if hasattr(self, "accelerator") and self.world_size == 1:  # `HFLM` shares requests among processes with GPUs only
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        cache = self.new_cache()
        self.layers, self.quantized_layers = len(cache.layers), quantized_layers(cache)
        if not self.quantized_layers:
            raise ValueError(
                f"preset {self.preset!r} quantizes none of this {self.model.config.model_type!r} model's {self.layers}"
                " layers (the cache's warning says why): evaluate it with --model hf."
            )

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        super()._get_backend(*args, **kwargs)
        if self.backend != "causal":
            raise ValueError(
                f"tq-hf evaluates decoder-only models, and {self.config.model_type!r} is an encoder-decoder"
                f" (backend={self.backend!r}): use --model hf."
            )

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        super()._create_model(*args, **kwargs)
        if not self._keeps_attention:
            self._model.set_attn_implementation(ATTENTION_NAME)  # models with attention code of their own stay with it

    def new_cache(self) -> TurboQuantCache:
        """An empty cache for one batch."""
        return self.mode.new_cache(self.model.config, self.settings)

    def _require_chunks(self) -> None:
        if self._goes_on_in_chunks is None:
            self._goes_on_in_chunks = goes_on_in_chunks(self.model)
        if not self._goes_on_in_chunks:
            raise ValueError(
                f"this {self.model.config.model_type!r} model goes on from a cache with single tokens only, and forgets its"
                " recurrent states otherwise: it can generate in modes decode and packed, and not score texts."
            )

    # -- scoring -----------------------------------------------------------------------------------------------------
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation in nats, and whether it is the greedy one, as `HFLM` gives them.

        Raises:
            ValueError: see `_loglikelihood_tokens`.
        """
        self._tasks = _tasks_once(requests)
        results = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        self._account()
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text in nats, in windows of the model's maximum, as `HFLM` gives it.

        Raises:
            ValueError: a task none of whose texts read a packed page.
        """
        self._tasks = itertools.chain(self._tasks_of_windows(requests), itertools.repeat(None))
        results = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        self._account()
        return results

    def _tasks_of_windows(self, requests: Sequence[Any]) -> Iterator[str | None]:
        """The task of each window that texts are cut into; windows of equal length but for the last."""
        for request, task in zip(requests, _tasks_once(requests)):
            windows = -(-len(self.tok_encode(request.args[0])) // self.max_length)
            yield from itertools.repeat(task, windows)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score continuations, as `HFLM._loglikelihood_tokens` does, through the cache.

        Raises:
            ValueError: an empty context or continuation, one longer than the model's maximum, or a task none of whose
                texts is long enough to read a page.
        """
        self._require_chunks()
        tasks = [next(self._tasks, None) for _ in requests]
        inputs: dict[tuple[int, ...], list[int]] = {}  # what the model is fed, and the requests that it answers
        for index, (_, context, continuation) in enumerate(requests):
            inputs.setdefault(self._input(context, continuation), []).append(index)
        order = sorted(inputs, key=lambda tokens: (-len(tokens), tokens))
        if override_bs is None:
            self._require_long_texts(tasks, {index: len(tokens) for tokens in order for index in inputs[tokens]})
        size, scheduler = self._batching(override_bs)
        representatives = [requests[inputs[tokens][0]] for tokens in order]
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests") as bar:
            if scheduler is not None:
                self.batch_sizes: dict[int, int] = {}  # detected anew for these requests
            position = 0
            for batch in chunks(representatives, n=size, fn=scheduler):
                texts, position = order[position : position + len(batch)], position + len(batch)
                cache = self.new_cache()
                with self._autocast():
                    scores = score_tokens(self.model, texts, self.mode, cache, self.softmax_dtype)
                for row, text in enumerate(texts):
                    for index in inputs[text]:
                        asked, _, continuation = requests[index]
                        results[index] = scores.continuation(row, len(text), continuation)
                        if asked is not None:  # windows of a rolling request are none of their own
                            self.cache_hook.add_partial("loglikelihood", asked, results[index])
                        bar.update()
                self._count(
                    cache,
                    [[tasks[index] for index in inputs[text]] for text in texts],
                    [len(text) for text in texts],
                    scores.read_from_pages,
                )
        return results

    def _input(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """What the model is fed: all but the last token, cut on the left to the model's maximum."""
        if not context or not continuation or len(continuation) > self.max_length:
            raise ValueError(
                f"a context of {len(context)} tokens and a continuation of {len(continuation)} cannot be scored: expected at"
                f" least one token each, and a continuation of at most max_length={self.max_length}."
            )
        tokens = context + continuation
        if len(tokens) > self.max_length + 1:
            eval_logger.warning(
                f"A context of {len(context)} tokens and a continuation of {len(continuation)} exceed"
                f" max_length={self.max_length}: the context is truncated from the left."
            )
        return tuple(tokens[-(self.max_length + 1) : -1])

    def _batching(self, override_bs: int | None) -> tuple[int, Any]:
        """The batch size, or 0 and lm-eval's scheduler that finds one."""
        if self.batch_size != "auto":
            return self.batch_size, None
        return (override_bs, None) if override_bs else (0, self._batch_scheduler)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        if requests:
            return super()._detect_batch_size(requests, pos)
        if self._largest_batch is None:  # for texts of max_length it is always the same
            self._largest_batch = super()._detect_batch_size()
        return self._largest_batch

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits [rows, length, vocabulary] of one forward pass into an empty cache: the detection of batch sizes."""
        with torch.no_grad(), self._autocast():
            return self.model(inps, use_cache=True, **{cache_argument(self.model): self.new_cache()}).logits

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None)

    # -- generating --------------------------------------------------------------------------------------------------
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop sequence, as `HFLM` gives them; a task's requests together.

        Raises:
            ValueError: a task none of whose new tokens read a packed page.
        """
        by_task: dict[str, list[int]] = {}
        first: dict[int, int] = {}
        copies: dict[int, int] = {}
        for index, (request, task) in enumerate(zip(requests, _tasks_once(requests))):
            first.setdefault(id(request), index)
            if task is None:
                copies[index] = first[id(request)]
            else:
                by_task.setdefault(task, []).append(index)
        results = [""] * len(requests)
        for task, indices in by_task.items():
            self._tasks = itertools.repeat(task)
            texts = super().generate_until([requests[index] for index in indices], disable_tqdm=disable_tqdm)
            for index, text in zip(indices, texts):
                results[index] = text
        for index, origin in copies.items():
            results[index] = results[origin]
        self._account()
        return results

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], attention_mask: Tensor, **generation_kwargs: Any
    ) -> Tensor:
        """Generate as `HFLM` does, with a cache of this mode; in `prefill=N` the prompt is fed to it in chunks before."""
        cache = self.new_cache()
        if self.mode.kind == "prefill":
            self._feed_prompt(context, attention_mask, cache)
        output = super()._model_generate(
            context,
            max_length,
            stop,
            attention_mask=attention_mask,
            **{cache_argument(self.model): cache},
            **generation_kwargs,
        )
        self._count_generated(cache, context, attention_mask, output.shape[1])
        return output

    def _prompt_chunks(self, context: Tensor) -> list[tuple[int, int]]:
        return self.mode.chunks(context.shape[1], self.model, self.settings)

    @torch.no_grad()
    def _feed_prompt(self, context: Tensor, attention_mask: Tensor, cache: TurboQuantCache) -> None:
        """Feed all but a prompt's last chunk, which `generate()` goes on with."""
        self._require_chunks()
        positions = (attention_mask.cumsum(1) - 1).clamp_min(0)
        argument = cache_argument(self.model)
        with self._autocast():
            for start, end in self._prompt_chunks(context)[:-1]:
                self.model(
                    context[:, start:end],
                    attention_mask=attention_mask[:, :end],
                    position_ids=positions[:, start:end],
                    use_cache=True,
                    logits_to_keep=1,
                    **{argument: cache},
                )

    def _count_generated(self, cache: TurboQuantCache, context: Tensor, attention_mask: Tensor, length: int) -> None:
        """Count what the last forward pass of a generation read; the newest token was not fed to the model any more."""
        fed = length - 1
        prompt = attention_mask.shape[1]
        paged = tokens_in_pages(cache)
        if self.mode.kind != "packed":  # a first pass reads its own exact states
            first_only = fed == prompt and (self.mode.kind == "decode" or len(self._prompt_chunks(context)) == 1)
            paged = 0 if first_only else tokens_in_pages(cache, fed)
        padding = (prompt - attention_mask.sum(1)).tolist()
        read = [max(0, paged - left) for left in padding]  # a row's first exact tokens stand behind its padding
        self._count(cache, [[next(self._tasks)]] * len(padding), [fed - left for left in padding], read)

    # -- accounting --------------------------------------------------------------------------------------------------
    def _count(
        self,
        cache: TurboQuantCache,
        tasks: Sequence[Sequence[str | None]],
        tokens: Sequence[int],
        read_from_pages: Sequence[int],
    ) -> None:
        """Add a batch to the usage of its tasks.

        Args:
            tasks: of each text, the tasks of the requests that it answered; None for a copy that fills a rank up.
            tokens, read_from_pages: of each text, what its last query read, and how much of it from pages.
        """
        report = cache.report()
        rows = len(tokens)
        for names, length, paged in zip(tasks, tokens, read_from_pages):
            for name in dict.fromkeys(names):
                if name is not None:
                    used = CacheUsage(1, length, paged, report.nbytes / rows, report.bytes_bf16 / rows)
                    self._running[name] = self._running.get(name, CacheUsage()) + used

    def _account(self) -> None:
        """Publish and print the usage of the tasks that have just run, over all processes.

        Raises:
            ValueError: a task none of whose texts read a packed page.
        """
        self._tasks = itertools.repeat(UNNAMED)
        everyone = self._of_all_processes(self._running)
        self._running = {}
        merged: dict[str, CacheUsage] = {}
        for usage in everyone:
            for name, used in usage.items():
                merged[name] = merged.get(name, CacheUsage()) + used
        self.usage |= merged
        for name, used in merged.items():
            if not used.packed_share:
                raise ValueError(self._advice(name))
            # To lm-eval, every rank of a sharded model is the first.
            if self.rank == 0 and os.environ.get("LOCAL_RANK", "0") == "0":
                print(
                    f"tq-hf, {name}: preset {self.preset}, mode {self.mode}: {used.packed_share:.1%} of tokens read from"
                    f" packed pages, {self.quantized_layers} of {self.layers} layers quantized; cache"
                    f" {used.nbytes / 2**20:.1f} MiB over {used.texts} texts, bfloat16 would take"
                    f" {used.cache_ratio:.2f} times as much"
                )

    def _require_long_texts(self, tasks: Sequence[str | None], lengths: dict[int, int]) -> None:
        """Refuse a task that could not read a page in any process before anything is computed."""
        longest: dict[str, int] = {}
        for i, length in lengths.items():
            if (name := tasks[i]) is not None:
                longest[name] = max(length, longest.get(name, 0))
        for share in self._of_all_processes(longest):
            longest |= {name: max(length, longest.get(name, 0)) for name, length in share.items()}
        for name in sorted(longest):
            if not self.mode.read_from_pages(longest[name], self.settings):
                raise ValueError(self._advice(name, f" Its longest text has {longest[name]} tokens."))

    def _of_all_processes(self, own: Any) -> list[Any]:
        """What each process has under this name. All of them have to ask."""
        return list(gather_object([own])) if self.world_size > 1 else [own]

    def _advice(self, name: str, detail: str = "") -> str:
        kept = self.settings
        first = max(first_page_tokens(kept), self.mode.prefill)
        return (
            f"task {name}: no token was read from a packed page, so its results would be those of --model hf.{detail} With"
            f" preset {self.preset!r} and mode {self.mode}, pages are read behind the first {first} tokens"
            f" (sink_tokens={kept.sink_tokens} + recent_window={kept.recent_window} + page_size={kept.page_size}"
            f"{f', or prefill={self.mode.prefill}' if self.mode.prefill else ''}). Use mode=packed, longer prompts"
            " (--num_fewshot), or a smaller recent_window and page_size."
        )

    def get_model_info(self) -> dict[str, Any]:
        """`HFLM`'s facts, and under `"tq_hf"` the preset, the mode, the settings and what each task read from the cache."""
        total = sum(self.usage.values(), CacheUsage())
        ours = {
            "preset": self.preset,
            "mode": str(self.mode),
            "settings": asdict(self.settings),
            "attention": self.model.config._attn_implementation,
            "layers": self.layers,
            "quantized_layers": self.quantized_layers,
            **total.as_dict(),
            "tasks": {name: used.as_dict() for name, used in self.usage.items()},
            "versions": versions(),
        }
        return super().get_model_info() | {"tq_hf": ours}


def _task(request: Any) -> str:
    """An lm-eval request's task."""
    return request.task_name or UNNAMED


def _tasks_once(requests: Iterable[Any]) -> Iterator[str | None]:
    """The task of each request; None for the copies with which lm-eval gives each process as many as any other has."""
    seen: Counter[int] = Counter()
    for request in requests:
        seen[id(request)] += 1
        yield _task(request) if seen[id(request)] <= (request.repeats or 1) else None
