"""The whole path on a GPU: a real model generating through the kernels, against the torch reference on the CPU."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.generation.streamers import BaseStreamer

from tests.test_generate import generate
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache, decode_ahead

pytestmark = [pytest.mark.gpu]
NEW = 64
PROMPT_TOKENS = 210
PROMPT = Path(__file__).parents[1] / "tq_hf" / "handbook.txt"


@functools.lru_cache(maxsize=1)
def on_cpu(folder: Path, preset: str) -> tuple[Tensor, list[Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return run(model, folder, preset)


def run(model: Any, folder: Path, preset: str, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Greedy tokens [NEW] and the logits that chose them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT.read_text(), return_tensors="pt").input_ids[:, :300].to(model.device)
    cache = TurboQuantCache(model.config, preset, **options)
    out = generate(model, ids, cache, new=NEW, output_logits=True, return_dict_in_generate=True)
    assert cache.report().packed_tokens > 200 * 26
    return out.sequences[0, 300:].cpu(), [step[0].float().cpu() for step in out.logits]


Result = tuple[Tensor, list[Tensor]]


def assert_same_until_a_close_call(ours: Result, reference: Result, gap: float) -> None:
    differ = (ours[0] != reference[0]).nonzero()
    if len(differ):
        first = int(differ[0])
        top2 = reference[1][first].topk(2).values
        assert top2[0] - top2[1] < gap, f"token {first} differs although the reference's top two are {top2.tolist()}"


@pytest.mark.network
@pytest.mark.parametrize("attention", [None, "turboquant"])
@pytest.mark.parametrize("preset", ["tq4", "4bit_nc", "paper_prod"])
def test_a_real_model_generates_what_the_cpu_reference_generates(
    embedded_folder: Path, attention: str | None, preset: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32, attn_implementation=attention)
    ours = run(model.eval().cuda(), embedded_folder, preset)
    assert_same_until_a_close_call(ours, on_cpu(embedded_folder, preset), gap=1e-2)


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
def test_the_first_attention_of_a_process_may_be_captured(attention: str) -> None:
    """What kernels keep between calls must not live in a graph's memory pool."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tq_hf.kernels."):
            for kept in vars(module).values():
                if hasattr(kept, "cache_clear"):
                    kept.cache_clear()
    model = tiny_model().to("cuda", torch.bfloat16)
    model.set_attn_implementation(attention)
    ids = prompt(1, 200).cuda()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    static = generate(model, ids, TurboQuantCache(model.config, max_cache_len=240))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    noise = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]  # would land in memory that a graph gave back
    scored = {"output_logits": True, "return_dict_in_generate": True}
    dynamic = generate(model, ids, TurboQuantCache(model.config), **scored)
    differ = (static[0, 200:] != dynamic.sequences[0, 200:]).nonzero()
    if len(differ):
        top2 = dynamic.logits[int(differ[0])][0].float().topk(2).values
        assert top2[0] - top2[1] < 0.02 * top2[0].abs()
    assert all((x == 7).all() for x in noise)


@pytest.mark.network
@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
def test_static_mode_with_cuda_graphs_equals_dynamic_mode(embedded_folder: Path, attention: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.bfloat16, attn_implementation=attention)
    model = model.eval().cuda()
    dynamic = run(model, embedded_folder, "tq4")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    static = run(model, embedded_folder, "tq4", max_cache_len=400)  # generate() compiles decoding by itself
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert_same_until_a_close_call(static, dynamic, gap=0.13)  # two steps of bfloat16 at these logits


@pytest.mark.parametrize("attention", ["sdpa", "turboquant", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padded_chunked_batches_agree_with_each_row_alone(attention: str, dtype: torch.dtype) -> None:
    model = tiny_model(num_hidden_layers=3).to("cuda", dtype)
    model.set_attn_implementation(attention)
    ids, mask = prompt(2, 300).cuda(), torch.ones(2, 300, dtype=torch.long, device="cuda")
    ids[0, :128], mask[0, :128] = 0, 0  # whole pages, so that both runs pack the same tokens together
    settings = {"sink_tokens": 0, "recent_window": 32}
    scored = {"output_logits": True, "return_dict_in_generate": True, "new": 40}
    both = generate(model, ids, TurboQuantCache(model.config, **settings), mask, prefill_chunk_size=100, **scored)
    alone = generate(model, ids[:1, 128:], TurboQuantCache(model.config, **settings), **scored)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for step in range(20):
        a, b = both.logits[step][0].float(), alone.logits[step][0].float()
        if both.sequences[0, 300 + step] != alone.sequences[0, 172 + step]:
            top2 = b.topk(2).values
            assert top2[0] - top2[1] < tolerance * top2.abs().max()
            break
        assert (a - b).norm() < 10 * tolerance * b.norm()


def test_the_caller_does_not_wait_for_the_gpu_while_decoding() -> None:
    model = tiny_model().cuda()
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model.config, recent_window=8)
    ids = prompt(1, 210).cuda()  # no page falls due in the steps below
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                model(ids[:, :1], past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_first_prompt_of_a_cache_waits_in_its_first_layer_at_most() -> None:
    model = tiny_model(num_hidden_layers=4).cuda()
    model.set_attn_implementation("turboquant")
    ids, caches = prompt(1, PROMPT_TOKENS).cuda(), [TurboQuantCache(model.config) for _ in range(2)]
    with torch.no_grad():
        model(ids, past_key_values=caches[0])  # kernels are compiled
        torch.cuda.synchronize()
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))
        try:
            model(ids, past_key_values=caches[1])
        finally:
            hook.remove()
            torch.cuda.set_sync_debug_mode("default")
    assert caches[1].report().packed_tokens > 0


class NoWaits(BaseStreamer):
    """From its eighth token on, whatever makes the host wait for the GPU raises an error."""

    def __init__(self) -> None:
        self.tokens = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.numel()
        if value.numel() == 1 and self.tokens == PROMPT_TOKENS + 8:
            torch.cuda.set_sync_debug_mode("error")

    def end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_decode_ahead_does_not_wait_for_the_gpu_and_generate_alone_does(attention: str, is_ahead: bool) -> None:
    model = tiny_model().cuda()
    model.set_attn_implementation(attention)
    ids, outputs = prompt(1, PROMPT_TOKENS).cuda(), []
    for streamer, options in ((None, {}), (NoWaits(), {"custom_generate": decode_ahead} if is_ahead else {})):
        cache = TurboQuantCache(model.config, max_cache_len=300)
        try:
            with nullcontext() if is_ahead or streamer is None else pytest.raises(RuntimeError, match="synchroniz"):
                outputs.append(generate(model, ids, cache, new=NEW, streamer=streamer, **options))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if is_ahead:
        assert torch.equal(*outputs) and cache.get_seq_length() == PROMPT_TOKENS + NEW - 1
    else:
        assert len(outputs) == 1


def test_memory_of_a_long_prompt_is_what_the_report_says() -> None:
    model = tiny_model(num_hidden_layers=8, max_position_embeddings=32768).to("cuda", torch.bfloat16)
    ids = prompt(2, 16384).cuda()
    with torch.no_grad():  # matrix libraries take their workspace at the first call
        model.model(ids[:, :200], past_key_values=TurboQuantCache(model.config))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = TurboQuantCache(model.config)
    with torch.no_grad():
        model.model(ids, past_key_values=cache)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    assert cache.nbytes <= grown <= cache.nbytes * 1.05 + 2**21


@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
def test_neither_a_prompt_nor_decoding_holds_the_history_unpacked(attention: str) -> None:
    model = tiny_model(num_hidden_layers=8, max_position_embeddings=32768).to("cuda", torch.bfloat16)
    model.set_attn_implementation(attention)
    ids = prompt(2, 16384).cuda()

    def peak_beside(cache: Any, tokens: Tensor) -> int:
        """Bytes that were needed for a moment, beyond what is there afterwards."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            model.model(tokens, past_key_values=cache)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()

    for _ in range(2):  # matrix libraries and kernels take their workspace at the first call
        exact, packed = DynamicCache(), TurboQuantCache(model.config)
        of_exact, of_packed = peak_beside(exact, ids), peak_beside(packed, ids)
    layer = exact.layers[0].keys.nbytes + exact.layers[0].values.nbytes
    assert of_packed <= of_exact + 1.5 * layer  # of the layer at work: its keys and values, and half as much while it packs

    steps = max(peak_beside(packed, ids[:, :1]) for _ in range(70))  # a page falls due among them, and pools grow
    assert packed.report().packed_tokens > 8 * 16000
    assert steps < layer  # a layer's pages are there twice while their pool grows; unpacked, they would take more than that
