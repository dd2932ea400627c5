"""A call that fails in the middle leaves the cache as it was, or says at the next call that it did not and what helps.

Every call is made again and again, and fails at another place each time: at the first allocation, the second, ..., until it
comes through. After each failure the cache must hold the same bits as before and go on like one that nothing has happened
to. Where some layers hold the tokens of a forward pass and others do not, the next pass must be refused, and `crop` must
take them back.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.robustness.counts import count
from tests.robustness.faults import FailingOp, Interrupt, OutOfMemory, expected
from tests.robustness.states import equal, require_sound, state_of
from tests.test_cache import states
from tests.test_cache_sliding import ALL_SLIDING, MIXED, SMALL
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache
from tq_hf.attention import turboquant_attention
from tq_hf.files import loading
from tq_hf.layers.full import TurboQuantLayer

FULL = tf.LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=64)
# The window is too short to be packed, so that its layers are transformers' own.
STOCK = tf.Gemma3TextConfig(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=64, sliding_window=24,
    layer_types=["sliding_attention", "full_attention", "full_attention"],
)  # fmt: skip
CONFIGS = {"full": FULL, "mixed": MIXED, "all_sliding": ALL_SLIDING, "stock": STOCK}
ROWS = 2
FAR = 10**9  # beyond any place of a fault
Call = Callable[[TurboQuantCache], Any]


def forward(cache: TurboQuantCache, tokens: int, seed: int = 50, padded: int = 0) -> list[Tensor]:
    """New tokens for every layer, and the attention of each; the first `padded` positions of row 0 are padding."""
    outputs = []
    rows = cache._rows or ROWS
    for i in range(len(cache.layers)):
        query, key, value = (states(tokens, rows, seed=seed + 3 * i + side) for side in range(3))
        key, value = cache.update(key, value, i)
        mask = None
        if padded:
            mask = torch.ones(rows, 1, 1, key.shape[2], dtype=torch.uint8)
            mask[0, ..., :padded] = 0
        outputs.append(turboquant_attention(nn.Module(), query, key, value, mask)[0])
    return outputs


def cache_of(kind: str, *sizes: int, **options: Any) -> TurboQuantCache:
    """A cache that has had these chunks of tokens; the first has some padding."""
    cache = TurboQuantCache(CONFIGS[kind], "tq4", **SMALL, **options)
    for seed, size in enumerate(sizes):
        forward(cache, size, seed=1000 * seed, padded=0 if seed or kind != "full" else 7)
    return cache


# A forward pass of so many tokens (the first packs nothing, the second a page, the third overwrites exact tokens).
FORWARD: dict[str, tuple[str, tuple[int, ...], int]] = {
    "prompt": ("full", (), 90),
    "decode": ("full", (90, 1), 1),
    "decode that packs": ("full", (90, 25), 1),
    "chunk": ("full", (90, 1), 70),
    "first tokens, one by one": ("full", (5,), 1),
    "sliding prompt": ("mixed", (), 130),
    "sliding decode": ("mixed", (130, 20), 1),
    "sliding chunk": ("all_sliding", (130, 1), 80),
    "stock": ("stock", (60,), 1),
}


def test_the_cases_are_what_they_say() -> None:
    kind, sizes, tokens = FORWARD["decode that packs"]
    cache = cache_of(kind, *sizes)
    used = int(cache.layers[0].counters[2])
    forward(cache, tokens)
    assert int(cache.layers[0].counters[2]) == used + 1
    kind, sizes, tokens = FORWARD["sliding decode"]
    cache = cache_of(kind, *sizes)
    (table,) = cache.sliding_tables.values()
    assert table.origin == 0
    forward(cache, tokens)
    assert table.origin > 0
    assert [isinstance(layer, TurboQuantLayer) for layer in cache_of("stock").layers] == [False, True, True]


def taken_back(cache: TurboQuantCache, call: Call) -> bool:
    """Whether the cache can be used after a forward pass that failed; `crop` as the refusal of the next one says."""
    try:
        list(cache)
        return True
    except RuntimeError as error:
        message = str(error)
    assert "ended early" in message
    with pytest.raises(RuntimeError, match="ended early"):
        call(cache)  # a forward pass is refused as any use is
    if (found := re.search(r"cache\.crop\((-?\d+)\)", message)) is None:
        assert "Call cache.reset()" in message
        count("faults that leave only reset()")
        return False
    extra = int(found[1])
    for tokens in {0, extra - 1, -FAR} - {extra}:  # fewer, older ones too, more than there are: nothing changes
        with pytest.raises(ValueError, match=rf"crop\({tokens}\).*Call cache\.crop\({extra}\)"):
            cache.crop(tokens)
    cache.crop(extra)
    count("faults taken back by crop()")
    return True


def places(run: Callable[[Any], Any], make: Callable[[int], Any], most: int | None) -> range:
    """Where faults can be placed in a call: all places, or at most so many, evenly spread."""
    fault = make(FAR)
    with fault:
        run(fault)
    assert not fault.raised
    total = FAR - fault.left
    return range(0, total, 1 if most is None else -(-total // most))


def fail_everywhere(cache: TurboQuantCache, call: Call, fault_name: str, soak: bool) -> None:
    """Let a forward pass fail everywhere, or at as many places as a short run tries."""
    make, most = FAULTS[fault_name]
    undisturbed = copy.deepcopy(cache)
    before = state_of(undisturbed)
    wanted = [call(undisturbed)]
    after = state_of(undisturbed)
    wanted += [forward(undisturbed, n, seed=9000 + n) for n in (1, 33)]
    measured = copy.deepcopy(cache)
    for place in places(lambda _: call(measured), make, None if soak else most):
        fault, tried, outcome = make(place), copy.deepcopy(cache), None
        with expected(fault):
            outcome = call(tried)
        assert fault.raised
        count(f"faults injected: {fault_name}")
        if outcome is None:
            if not taken_back(tried, call):
                tried.reset()
                assert tried.get_seq_length() == 0
                forward(tried, 5)
                continue
            if tried.get_seq_length() > cache.get_seq_length():  # an interrupt behind the last layer's update
                assert fault_name == "interrupt"
                count("faults after which the cache holds the tokens")
                require_sound(tried)
                continue
            assert equal(state_of(tried), before), vars(fault)
            require_sound(tried)
            outcome = call(tried)
        assert equal(state_of(tried), after), vars(fault)
        assert equal([outcome] + [forward(tried, n, seed=9000 + n) for n in (1, 33)], wanted)
        require_sound(tried)


FAULTS: dict[str, tuple[Callable[[int], Any], int]] = {  # and how many of them a short run tries
    "out of memory": (OutOfMemory, 12),
    "interrupt": (Interrupt, 12),
    "an op that fails at once": (lambda n: FailingOp(n, does_its_work=False), 99),
    "an op that fails late": (lambda n: FailingOp(n, does_its_work=True), 99),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", FORWARD)
def test_a_forward_pass_that_fails(case: str, fault: str, soak: bool) -> None:
    kind, sizes, tokens = FORWARD[case]
    fail_everywhere(cache_of(kind, *sizes), lambda c: forward(c, tokens), fault, soak)


# -- edits -------------------------------------------------------------------------------------------------------------
EDITS: dict[str, Call] = {
    "crop of the tail": lambda c: c.crop(-3),
    "crop into pages": lambda c: c.crop(-60),
    "reorder": lambda c: c.reorder_cache(torch.tensor([1, 1])),
    "select": lambda c: c.batch_select_indices(torch.tensor([1])),
    "repeat": lambda c: c.batch_repeat_interleave(2),
    "fork": lambda c: c.fork(2),
    "copy": copy.deepcopy,
    "move": lambda c: c.to("cpu"),
}
EDITED = {
    "full": ("full", (300, 1), {}),
    "mixed": ("mixed", (130, 20), {}),
    "stock": ("stock", (20,), {}),
    "static": ("full", (150, 1), {"max_cache_len": 200}),
}


def is_possible(edit: str, edited: str) -> bool:
    """Whether a cache of this kind can be edited so."""
    is_static = edited == "static"
    if (edited == "mixed" and edit.startswith("crop")) or (edited == "stock" and edit == "crop into pages"):
        return False  # a window has forgotten what came before, or there are not so many tokens
    return not (is_static and edit in ("select", "repeat", "fork"))


@pytest.mark.parametrize("fault", ["out of memory", "interrupt"])
@pytest.mark.parametrize(("edit", "edited"), [(e, kind) for e in EDITS for kind in EDITED if is_possible(e, kind)])
def test_an_edit_that_fails(edit: str, edited: str, fault: str, soak: bool) -> None:
    """As it was, or as it is after the edit, or refused from then on; never anything between."""
    (kind, sizes, options), (make, _), call = EDITED[edited], FAULTS[fault], EDITS[edit]
    cache = cache_of(kind, *sizes, **options)
    undisturbed = copy.deepcopy(cache)
    before = state_of(undisturbed)
    call(undisturbed)
    after = state_of(undisturbed)
    measured = copy.deepcopy(cache)
    for place in places(lambda _: call(measured), make, None if soak else 6):
        tried = copy.deepcopy(cache)
        sibling = None if options else tried.fork(1)[0]
        mine = [tried] if sibling is None else [tried, sibling]
        error = make(place)
        with expected(error):
            call(tried)
        count(f"faults injected: {fault}")
        try:
            list(tried)
        except RuntimeError as refusal:
            assert "cache.reset()" in str(refusal)
            with pytest.raises(RuntimeError, match=r"cache\.reset\(\)"):
                tried.crop(-1)
            count("faults that leave only reset()")
            tried.reset()
            forward(tried, 9)
        else:
            state = state_of(tried)
            assert equal(state, before) or equal(state, after), vars(error)
            forward(tried, 33, seed=5)
        require_sound(*mine)
        if sibling is not None:
            assert equal(state_of(sibling), before)


class Opened:
    """safetensors' `safe_open`, which cannot make tensors while something watches torch: they are made beforehand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = safe_open(*args, **kwargs)
        with _disable_current_modes():
            self._tensors = {name: self._file.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("edited", EDITED)
def test_no_memory_for_a_file(edited: str, tmp_path: Path, soak: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving leaves the cache and an older file alone; loading leaves nothing."""
    kind, sizes, options = EDITED[edited]
    cache = cache_of(kind, *sizes, **options)
    before = state_of(cache)
    path = tmp_path / "cache"
    TurboQuantCache(CONFIGS[kind], "tq4").save(path)
    older = path.read_bytes()
    most = None if soak else 10
    for place in places(lambda _: cache.save(tmp_path / "measured"), OutOfMemory, most):
        with expected(OutOfMemory(place)):
            cache.save(path)
        count("faults injected: out of memory")
        assert path.read_bytes() == older and len(list(tmp_path.iterdir())) == 2
        assert equal(state_of(cache), before)
    cache.save(path)
    monkeypatch.setattr(loading, "safe_open", Opened)
    for place in places(lambda _: TurboQuantCache.load(path), OutOfMemory, most):
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(place):
            TurboQuantCache.load(path)
        count("faults injected: out of memory")
    assert equal(state_of(TurboQuantCache.load(path)), before)


# -- whole models ------------------------------------------------------------------------------------------------------
class Stop(Exception):
    """Raised by the tests from within `generate()`."""


def generate(model: Any, ids: Tensor, cache: TurboQuantCache, new: int = 12, **options: Any) -> Tensor:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False, max_new_tokens=new, **options
    )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("passes", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid", "qwen3_next"])
def test_an_error_in_a_models_layer(family: str, passes: int, error: type[BaseException]) -> None:
    """Outside of attention, where the cache hears nothing of it: in the prompt, or in a later forward pass."""
    model, ids = tiny_model(family), prompt(1, 70)
    wanted = generate(model, ids, TurboQuantCache(model.config, **SMALL))
    for k, layer in enumerate(model.model.layers):
        cache = TurboQuantCache(model.config, **SMALL)
        left = [passes]

        def fail(*_: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise error

        handle = layer.mlp.register_forward_hook(fail)
        with pytest.raises(error):
            generate(model, ids, cache)
        handle.remove()
        count("faults injected: in a model's layer")
        if k < len(model.model.layers) - 1:  # else all layers have the tokens
            with pytest.raises(RuntimeError, match="ended early"):
                list(cache)
            with pytest.raises(RuntimeError, match="ended early") as refusal, torch.no_grad():
                model(ids[:, -1:], past_key_values=cache)
            found = re.search(r"cache\.crop\((-\d+)\)", str(refusal.value))
            if found is None:
                assert family != "llama"
                cache.reset()
            else:
                cache.crop(int(found[1]))
        require_sound(cache)
        held = cache.get_seq_length()
        assert held in (0, 70, 70 + passes, 70 + passes - 1)
        if held:  # `generate` wants at least one token that is not there yet
            ids_now = wanted[:, : held + 1]
            assert torch.equal(generate(model, ids_now, cache, new=wanted.shape[1] - held - 1), wanted)
        else:
            assert torch.equal(generate(model, ids, cache), wanted)


class Streamer:
    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def put(self, _: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stop

    def end(self) -> None:
        """Nothing."""


def stopping(tokens: int) -> Any:
    streamer = Streamer(tokens)
    return lambda ids, scores, **_: streamer.put(ids) or torch.zeros(len(ids), dtype=torch.bool)


def processing(tokens: int) -> Any:
    streamer = Streamer(tokens)
    return lambda ids, scores: streamer.put(ids) or scores


@pytest.mark.parametrize("options", [
    lambda: {"streamer": Streamer(5)},
    lambda: {"stopping_criteria": tf.StoppingCriteriaList([stopping(5)])},
    lambda: {"logits_processor": tf.LogitsProcessorList([processing(5)])},
])  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid", "qwen3_next"])
def test_a_generation_that_is_stopped_from_within(family: str, options: Callable[[], dict[str, Any]]) -> None:
    """Between two forward passes: nothing has to be taken back."""
    model, ids = tiny_model(family), prompt(1, 70)
    wanted = generate(model, ids, TurboQuantCache(model.config, **SMALL))
    cache = TurboQuantCache(model.config, **SMALL)
    with pytest.raises(Stop):
        generate(model, ids, cache, **options())
    count("faults injected: in generate()")
    held = cache.get_seq_length()
    assert 70 < held < wanted.shape[1]
    assert torch.equal(generate(model, wanted[:, : held + 1], cache, new=wanted.shape[1] - held - 1), wanted)


def test_a_static_cache_says_that_a_pass_ended_early() -> None:
    model, ids = tiny_model("llama"), prompt(1, 70)
    cache = TurboQuantCache(model.config, max_cache_len=100, **SMALL)
    wanted = generate(model, ids, cache)
    for passes in (0, 3):
        cache.reset()
        left = [passes]

        def fail(*_: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Stop

        handle = model.model.layers[0].mlp.register_forward_hook(fail)
        with pytest.raises(Stop):
            generate(model, ids, cache)
        handle.remove()
        for use in (lambda: cache.crop(-1), lambda: cache.reorder_cache(torch.tensor([0]))):
            with pytest.raises(RuntimeError, match=r"ended early.*cache\.reset\(\)"):
                use()
        with pytest.raises(RuntimeError, match=r"ended early.*only layer 0 of 2 hold.*cache\.reset\(\)"), torch.no_grad():
            model(ids[:, -1:], past_key_values=cache)
        cache.reset()
        assert torch.equal(generate(model, ids, cache), wanted)


def test_no_memory_for_a_smaller_pool() -> None:
    """A crop after which most pages are unused copies the others, of all layers or of none."""
    cache = cache_of("full", 700, 1)

    def second_row() -> TurboQuantCache:
        one = copy.deepcopy(cache)
        one.batch_select_indices(torch.tensor([1]))
        return one

    undisturbed, measured = second_row(), second_row()
    before, capacity = state_of(undisturbed), undisturbed.table.pages.capacity
    assert undisturbed.table.rows[0] != list(range(len(undisturbed.table.rows[0])))  # they will have other numbers
    undisturbed.crop(-620)
    assert undisturbed.table.pages.capacity < capacity
    after = state_of(undisturbed)
    wanted = forward(undisturbed, 33, seed=5)
    for place in places(lambda _: measured.crop(-620), OutOfMemory, None):
        tried = second_row()
        with expected(OutOfMemory(place)):
            tried.crop(-620)
        count("faults injected: out of memory")
        if tried.get_seq_length() == 701:
            assert equal(state_of(tried), before)
            tried.crop(-620)
        assert equal(state_of(tried), after)
        assert equal(forward(tried, 33, seed=5), wanted)
        require_sound(tried)


# -- what no sampled place is sure to reach ----------------------------------------------------------------------------
def test_pages_reserved_by_a_step_that_failed_are_given_back() -> None:
    kind, sizes, tokens = FORWARD["decode that packs"]
    cache = cache_of(kind, *sizes)
    table, used = cache.table, cache.table.pages.used
    with expected(FailingOp(1, does_its_work=False)):  # attend, then commit of the first layer
        forward(cache, tokens)
    assert table.pages.used == used + ROWS  # the first layer has reserved them
    list(cache)  # any use that finds the pass over
    assert cache.get_seq_length() == sum(sizes) and table.pages.used == used
    require_sound(cache)


def test_a_commit_that_failed_is_undone_at_once() -> None:
    """Not only by the `crop` that a later use would ask for: the layer itself is as it was."""
    kind, sizes, tokens = FORWARD["chunk"]
    cache = cache_of(kind, *sizes)
    layer, before = cache.layers[0], state_of(cache)
    with expected(FailingOp(1, does_its_work=True)):
        forward(cache, tokens)
    assert not layer.is_torn and layer.pending is None and layer.get_seq_length() == sum(sizes)
    assert equal(state_of(cache), before)


def test_an_interrupt_at_the_end_of_an_update_is_not_a_refusal() -> None:
    """The layer has its tokens then, and the others have none."""
    cache = cache_of("full", 90, 1)
    key, value = states(1, ROWS, seed=3), states(1, ROWS, seed=4)
    update, layer = cache.layers[0].update, cache.layers[0]

    def interrupted(*args: Any) -> Any:
        update(*args)
        raise KeyboardInterrupt

    layer.update = interrupted
    with pytest.raises(KeyboardInterrupt):
        cache.update(key, value, 0)
    del layer.update
    with pytest.raises(RuntimeError, match=r"only layer 0 of 2 hold its tokens\. Call cache\.crop\(-1\)"):
        cache.update(key, value, 0)
    cache.crop(-1)
    forward(cache, 1)
    assert cache.get_seq_length() == 92
