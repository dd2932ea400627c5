"""The decoding modes: each a function from a `Subject` to what it generated.

A new mode is one function; its docstring's first line is its name in the table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TextStreamer, pipeline

from tests.conformance.subjects import Subject
from tests.tiny_models import prompt

# Pages fall due at 36, 68 and 100 tokens: one in the prompt, one while decoding, so that few new tokens need be decoded.
PROMPT = 64

Outcome = list[Any]  # tensors and strings
Mode = Callable[[Subject], Outcome]
MODES: dict[str, Mode] = {}


def mode(function: Mode) -> Mode:
    MODES[function.__name__] = function
    return function


def title(name: str) -> str:
    documentation = MODES[name].__doc__
    assert documentation
    return documentation.splitlines()[0].rstrip(".")


def left_padded(length: int = PROMPT, pad: int = 21, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Two rows, the second with `pad` tokens of padding in front: ids and mask."""
    ids, mask = prompt(2, length, seed), torch.ones(2, length, dtype=torch.long)
    ids[1, :pad], mask[1, :pad] = 0, 0
    return ids, mask


@mode
def greedy(subject: Subject) -> Outcome:
    """Greedy."""
    scores = {"return_dict_in_generate": True, "output_logits": True}
    out = subject.generate(prompt(2, PROMPT), subject.cache(), new=12, **scores)
    return [out.sequences, *out.logits]


@mode
def sampling(subject: Subject) -> Outcome:
    """Sampling, same seed."""
    return [subject.generate(prompt(2, PROMPT), subject.cache(), do_sample=True, top_p=0.9)]


@mode
def beams(subject: Subject) -> Outcome:
    """Beam search."""
    options = {"num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    out = subject.generate(prompt(2, PROMPT), subject.cache(), num_beams=3, **options)
    scores = out.sequences_scores.view(2, 2)
    # Of two beams as good as each other, as a model that repeats itself has them, rounding decides which is the best one.
    is_clear = scores[:, 0] - scores[:, 1] > 1e-4
    return [scores, out.sequences[::2][is_clear]]


@mode
def several_beams(subject: Subject) -> Outcome:
    """Beam search, several returned."""
    options = {"return_dict_in_generate": True, "output_scores": True}
    out = subject.generate(prompt(1, PROMPT), subject.cache(), num_beams=4, num_return_sequences=2, **options)
    return [out.sequences, out.sequences_scores]


@mode
def beam_sampling(subject: Subject) -> Outcome:
    """Beam sampling, padded."""
    ids, mask = left_padded()
    return [subject.generate(subject.inputs(ids, mask), subject.cache(), num_beams=2, do_sample=True)]


@mode
def several_sequences(subject: Subject) -> Outcome:
    """Several return sequences."""
    return [subject.generate(prompt(1, PROMPT), subject.cache(), do_sample=True, num_return_sequences=3)]


@mode
def assisted(subject: Subject) -> Outcome:
    """Assisted decoding."""
    return [subject.generate(prompt(1, PROMPT), subject.cache(), new=10, assistant_model=subject.assistant())]


@mode
def prompt_lookup(subject: Subject) -> Outcome:
    """Prompt lookup."""
    options = {"new": 10, "prompt_lookup_num_tokens": 3, "no_repeat_ngram_size": 0}
    return [subject.generate(prompt(1, 30).repeat(1, 2), subject.cache(), **options)]


@mode
def chunked_prefill(subject: Subject) -> Outcome:
    """Prefill in chunks."""
    return [subject.generate(prompt(2, 70), subject.cache(), prefill_chunk_size=24)]


@mode
def chunked_padded_prefill(subject: Subject) -> Outcome:
    """Prefill in chunks, padded."""
    ids, mask = left_padded(70)
    return [subject.generate(subject.inputs(ids, mask), subject.cache(), prefill_chunk_size=19)]


@mode
def padded_batch(subject: Subject) -> Outcome:
    """Left-padded batch, and each row alone."""
    ids, mask = left_padded()
    both = subject.generate(subject.inputs(ids, mask), subject.cache())
    rows = [subject.generate(ids[i : i + 1, pad:], subject.cache()) for i, pad in enumerate((0, 21))]
    return [both, *(row[:, -6:] for row in rows)]


@mode
def turns(subject: Subject) -> Outcome:
    """Two turns on one cache."""
    cache = subject.cache()
    first = subject.generate(prompt(2, 50), cache)
    return [first, subject.generate(torch.cat([first, prompt(2, 40, seed=2)], 1), cache)]


@mode
def turns_with_holes(subject: Subject) -> Outcome:
    """Two turns, padding between them."""
    cache = subject.cache()
    ids, mask = left_padded(50)
    ids[0, 43:], mask[0, 43:] = 0, 0  # this row is padded on the right
    first = subject.generate(subject.inputs(ids, mask), cache)
    more, hole = left_padded(40, pad=8, seed=2)
    seen = torch.cat([mask, torch.ones(2, first.shape[1] - 50, dtype=torch.long), hole], 1)
    return [first, subject.generate(subject.inputs(torch.cat([first, more], 1), seen), cache)]


@mode
def copied_prefix(subject: Subject) -> Outcome:
    """Deep-copied prompt cache."""
    prefix, cache = prompt(1, 46), subject.cache()
    subject.read(prefix, cache)
    return [
        subject.generate(torch.cat([prefix, prompt(1, 20, seed)], 1), copy.deepcopy(cache), new=5) for seed in (2, 3)
    ] + [subject.generate(torch.cat([prefix, prompt(1, 20, 4)], 1), cache, new=5)]


@mode
def forked(subject: Subject) -> Outcome:
    """Forked prompt cache."""
    prefix, cache = prompt(1, 78), subject.cache()
    subject.read(prefix, cache)
    caches = [*subject.forks(cache, 2), cache]
    return [
        subject.generate(torch.cat([prefix, prompt(1, 20, seed)], 1), caches[i], new=5)
        for i, seed in ((1, 2), (2, 3), (0, 4))
    ]


@mode
def saved(subject: Subject) -> Outcome:
    """Saved, loaded, then on."""
    ids, mask = left_padded(92)
    cache = subject.cache()
    subject.read(subject.inputs(ids, mask), cache)
    ids, mask = torch.cat([ids, prompt(2, 5, seed=2)], 1), torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], 1)
    return [subject.generate(subject.inputs(ids, mask), subject.reloaded(cache))]


@mode
def chosen_rows(subject: Subject) -> Outcome:
    """Rows repeated, selected, reordered."""
    ids, cache = prompt(2, PROMPT), subject.cache()
    if subject.edits_rows:  # else the same tokens from the start
        subject.read(ids, cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 2]))
        cache.reorder_cache(torch.tensor([1, 0, 0]))
    ids = torch.cat([ids[[0, 1, 1]], prompt(3, 5, seed=2)], 1)
    return [subject.generate(ids, cache)]


@mode
def cropped(subject: Subject) -> Outcome:
    """Cropped, then on."""
    ids, cache, outcome = prompt(2, 90), subject.cache(), []
    cache.activate_past_recording()  # sliding layers keep what the next crop may remove
    subject.read(ids, cache)
    for removed, seed in ((37, 2), (3, 3), (0, 4), (9, 5), (1, 6)):
        cache.crop(-removed)
        ids = torch.cat([ids[:, : cache.get_seq_length()], prompt(2, 9, seed)], 1)
        out = subject.generate(ids, cache, new=1, return_dict_in_generate=True, output_logits=True)
        outcome += [out.sequences, *out.logits]
    return outcome


@mode
def whole_mask(subject: Subject) -> Outcome:
    """Custom 4D mask."""
    ids, cache = prompt(1, 72), subject.cache()
    keep = torch.ones(72, 72, dtype=torch.bool).tril()
    keep[40:, 10:25] = False  # an early part that later tokens do not see
    keep[60:66, 50:60] = False
    logits = []
    for start, end in ((0, 66), (66, 70), (70, 71), (71, 72)):
        mask = subject.whole_mask(keep[start:end, :end], cache)
        with torch.no_grad():
            logits.append(subject.forward(ids[:, start:end], mask, cache, start))
    return [torch.cat(logits, 1)]


@mode
def embeddings(subject: Subject) -> Outcome:
    """Prompt as `inputs_embeds`."""
    ids, mask = left_padded()
    inputs = subject.inputs(ids, mask)
    inputs["inputs_embeds"] = subject.model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    return [subject.generate(inputs, subject.cache())]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words 0 to 98, one a token."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(99)}, unk_token="1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="1", padding_side="left")


@mode
def streaming(subject: Subject) -> Outcome:
    """Streaming."""
    pieces: list[str] = []

    class Collector(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)

    tokens = subject.generate(prompt(1, PROMPT), subject.cache(), streamer=Collector(tokenizer(), skip_prompt=True))
    assert len("".join(pieces).split()) >= 6
    return [tokens, "|".join(pieces)]


@mode
def pipelines(subject: Subject) -> Outcome:
    """`pipeline`, after `enable(model)`."""
    texts = [" ".join(map(str, row[: PROMPT - 9 * i].tolist())) for i, row in enumerate(prompt(3, PROMPT))]
    with subject.plain() as model:
        # An encoder-decoder model reads the prompt elsewhere: its cache takes only what it writes.
        new = 40 if model.config.is_encoder_decoder else 5
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "no_repeat_ngram_size": 2}
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer())
        outputs = [pipe(text, **settings) for text in texts[:1]]
        outputs += pipe(texts[1:], batch_size=2, **settings)
    return [output[0]["generated_text"] for output in outputs]


@mode
def enabled(subject: Subject) -> Outcome:
    """Plain `generate`, after `enable(model)`."""
    with subject.plain():
        return [subject.generate(prompt(2, PROMPT), None, num_beams=beams) for beams in (1, 2)]


@mode
def static(subject: Subject) -> Outcome:
    """Static cache."""
    ids, mask = left_padded()
    cache = subject.cache(max_cache_len=100)
    return [subject.generate(subject.inputs(ids, mask), cache)]


@mode
def static_chunked(subject: Subject) -> Outcome:
    """Static cache, prefill in chunks."""
    return [subject.generate(prompt(2, PROMPT), subject.cache(max_cache_len=100), prefill_chunk_size=19)]
