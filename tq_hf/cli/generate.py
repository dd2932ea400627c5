"""`tq_hf generate`: continue a prompt, streamed, and say what the cache took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .output import print_json, say, size

if TYPE_CHECKING:
    from ..generation.streaming import CacheSize, Stream


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing: standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    model: options.Model = None,
    cache: options.Cache = "tq4",
    max_new_tokens: options.NewTokens = 200,
    set_: options.Set = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    plain: Annotated[bool, typer.Option("--plain", help="Continue the text itself, without the chat template.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = "bfloat16",
    as_json: options.Json = False,
) -> int:
    """Continue a prompt. Text goes to standard output, one line with speed and memory to standard error.

    tq_hf generate "Why is the sky blue?"

    tq_hf generate --model Qwen/Qwen3-0.6B --cache tq3 --prompt-file book.txt

    cat notes.txt | tq_hf generate --cache bf16 --json
    """
    text = options.read_prompt(prompt, prompt_file)
    changes = options.changes(set_)
    options.require_cache(cache, changes)
    loaded = options.load_model(model, device, dtype)
    held = options.new_cache(loaded.model.config, cache, **changes)

    from ..generation.conversation import encode_prompt, room_for
    from ..generation.streaming import Stream, cache_size

    if plain:
        ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"]
    else:
        ids = encode_prompt(loaded.tokenizer, text)
    room = room_for(loaded.model.config, ids.shape[1], max_new_tokens)
    if room < max_new_tokens:
        say(f"The model's context leaves room for {room} new tokens.")
    how = options.sampling(temperature, top_p, seed)
    stream = Stream(loaded.model, loaded.tokenizer, ids.to(loaded.model.device), held, max_new_tokens=room, **how)
    stopped = False
    with stream, options.as_requests():
        try:
            for event in stream:
                if not as_json:
                    print(event.piece, end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
            stream.close()
    if not as_json:
        print(flush=True)
    taken = cache_size(held)
    result: dict[str, Any] = {
        "model": loaded.name,
        "device": str(loaded.model.device),
        "cache": cache,
        "text": stream.text,
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(stream.tokens),
        "first_token_seconds": stream.first_token_seconds,
        "tokens_per_s": stream.tokens_per_s,
        "cache_bytes": taken.nbytes,
        "cache_bytes_bf16": taken.bytes_bf16,
        "ratio": taken.ratio,
        "packed_tokens": taken.packed_tokens,
        "stopped": stopped,
    }
    if as_json:
        print_json(result)
    else:
        say(summary(cache, ids.shape[1], stream, taken))
    return 130 if stopped else 0


def summary(cache: str, prompt_tokens: int, stream: Stream, taken: CacheSize) -> str:
    """One line on speed and memory."""
    return (
        f"{prompt_tokens:,} + {len(stream.tokens):,} tokens, {stream.tokens_per_s:.1f} tokens/s"
        f" after {stream.first_token_seconds:.2f} s; cache {against_bf16(cache, taken)}"
    )


def against_bf16(cache: str, taken: CacheSize) -> str:
    """A cache's bytes, and what packing has saved."""
    line = size(taken.nbytes)
    if cache == options.BF16:
        return line
    line += f" where bfloat16 takes {size(taken.bytes_bf16)}"
    if taken.ratio > 1:
        line += f" ({taken.ratio:.2f} times smaller)"
    return line if taken.packed_tokens else f"{line}; no page is packed yet"
