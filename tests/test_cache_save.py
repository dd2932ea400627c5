"""A cache in a file: what is written, what another process makes of it, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3NextConfig
from transformers.cache_utils import Cache, DynamicLayer

from tests.test_cache import CONFIG, filled, held_tensors, states
from tests.test_cache_fork import SMALL, content, extend, same
from tests.test_generate import generate, left_padded
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache

ROOT = Path(__file__).parents[1]
CHILD = """
import sys, torch
from tests.test_cache_save import bits
from tests.test_generate import generate
from tests.tiny_models import tiny_model
from tq_hf import TurboQuantCache
family, path, inputs, out = sys.argv[1:]
model, (ids, mask) = tiny_model(family), torch.load(inputs)
cache = TurboQuantCache.load(path, model.config)
tokens = generate(model, ids, cache, mask, new=40)
torch.save((tokens, bits(cache)), out)
"""


def bits(cache: TurboQuantCache) -> list[Tensor]:
    """A packed layer's whole state, with pages in the order of rows and entries."""
    state = []
    for layer in cache.packed_layers:
        used = int(layer.counters[2])
        pages = layer.on_device.page_ids[:, :used].flatten().long()
        state += [layer.pool[pages[pages >= 0]], layer.on_device.entries[:used], layer.on_device.row_start]
        state += [getattr(layer, name) for name in layer.state_names()]
    return [tensor.clone() for tensor in state]


@pytest.mark.parametrize(
    ("family", "preset", "options"),
    [("llama", "tq4", {}), ("gemma3_hybrid", "raw", {}), ("gemma3_hybrid", "tq2", {"max_cache_len": 250})],
)
def test_another_process_goes_on_bit_for_bit(tmp_path: Path, family: str, preset: str, options: dict[str, int]) -> None:
    """Generated tokens and the state after them; left padding, a page cut by a crop, shared pages and free ones."""
    model = tiny_model(family)
    ids, mask = left_padded(2, 110, [40, 0])
    cache = TurboQuantCache(model.config, preset, **SMALL, **options)
    generate(model, ids, cache, mask, new=6)
    if family == "llama":
        cache.crop(-20)
        cache.reorder_cache(torch.tensor([1, 1]))
        ids, mask = ids[[1, 1]], mask[[1, 1]]
    assert cache.report().packed_tokens > 0
    if preset != "raw":
        assert all(bool(layer.query_energy.any()) for layer in cache.packed_layers)
    cache.save(tmp_path / "cache")
    longer = torch.cat([ids, prompt(2, 40, seed=7)], 1)
    inputs = (longer, torch.cat([mask, torch.ones(2, 40, dtype=mask.dtype)], 1))
    torch.save(inputs, tmp_path / "inputs")
    arguments = [family, *(str(tmp_path / name) for name in ("cache", "inputs", "out"))]
    subprocess.run([sys.executable, "-c", CHILD, *arguments], check=True, cwd=ROOT, timeout=300)
    tokens, state = torch.load(tmp_path / "out")
    assert torch.equal(generate(model, inputs[0], cache, inputs[1], new=40), tokens)
    assert same(bits(cache), state)


def test_only_pages_in_use_are_written_once(tmp_path: Path) -> None:
    cache = filled(130, batch=3, **SMALL)
    cache.reorder_cache(torch.tensor([2, 2, 2]))
    cache.save(tmp_path / "one")
    forks = cache.fork(2)
    for i, fork in enumerate(forks):
        extend(fork, 96, seed=i)
    forks[1].crop(-96)
    forks[1].save(tmp_path / "fork")
    # The crop has left each row of the fork a piece of a page of its own.
    for name, origin, pages in (("one", cache, 3), ("fork", forks[1], 3 + 3)):
        saved = safetensors.torch.load_file(tmp_path / name)
        assert saved["layers.0.pages"].shape[0] == pages
        back = TurboQuantCache.load(tmp_path / name)
        assert same(content(back), content(origin))
        assert len(back.layers[0].pool) == back.table.pages.used == pages
        extend(back, 70, seed=3)
        assert back.nbytes == sum(t.untyped_storage().nbytes() for t in held_tensors(back))


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 200}])
def test_pending_tokens_are_committed_first_and_nothing_else_changes(tmp_path: Path, options: dict[str, int]) -> None:
    cache = TurboQuantCache(CONFIG, "raw", **SMALL, **options)
    for layer in range(2):
        cache.update(states(100, seed=layer), states(100, seed=9 + layer), layer)
    cache.save(tmp_path / "cache")
    back = TurboQuantCache.load(tmp_path / "cache", CONFIG)
    assert same(content(back), [states(100, seed=seed) for seed in (0, 9, 1, 10)])
    assert same(content(back), content(cache))
    assert int(back.get_seq_length()) == 100
    assert (repr(back), back.report()) == (repr(cache), cache.report())
    assert back.quantization == cache.quantization


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 200}])
def test_an_empty_cache_can_be_saved(tmp_path: Path, options: dict[str, int]) -> None:
    TurboQuantCache(CONFIG, "tq3", **options).save(tmp_path / "cache")
    back = TurboQuantCache.load(tmp_path / "cache", CONFIG)
    assert (back.preset, back.table.max_cache_len, back.get_seq_length()) == ("tq3", options.get("max_cache_len"), 0)
    extend_first(back)
    assert same(content(back), [s for _ in range(2) for s in (states(50), states(50, seed=1))])


def extend_first(cache: TurboQuantCache) -> None:
    for layer in range(2):
        cache.update(states(50), states(50, seed=1), layer)


def test_a_static_cache_with_shared_rows_goes_on(tmp_path: Path) -> None:
    cache = filled(150, "raw", batch=3, **SMALL, max_cache_len=300)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    cache.crop(-30)
    cache.save(tmp_path / "cache")
    back = TurboQuantCache.load(tmp_path / "cache")
    for c in (cache, back):
        extend(c, 120, seed=4)
    assert same(content(back), content(cache))
    assert same(bits(back), bits(cache))


def test_linear_attention_layers_are_saved(tmp_path: Path) -> None:
    config = Qwen3NextConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    cache = TurboQuantCache(config, "tq4", **SMALL)
    ids = prompt(1, 100)
    generate(model, ids, cache, new=4)
    cache.save(tmp_path / "cache")
    back = TurboQuantCache.load(tmp_path / "cache", config)
    longer = torch.cat([ids, prompt(1, 10, seed=2)], 1)
    assert cache.report().packed_tokens > 0
    assert torch.equal(generate(model, longer, cache, new=8), generate(model, longer, back, new=8))


def test_layers_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    class Unknown(DynamicLayer):
        pass

    cache = filled(100)
    cache.layers.append(Unknown())
    with pytest.raises(ValueError, match="layer 2: a Unknown cannot be saved"):
        cache.save(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(100, **SMALL).save(tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()

    def fails(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        filled(50).save(tmp_path / "cache")
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    assert (tmp_path / "cache").read_bytes() == before


# -- another model -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 3}, "num_hidden_layers 2, this one 3"),
        ("llama", {"num_key_value_heads": 1}, "num_key_value_heads 2, this one 1"),
        ("llama", {"hidden_size": 128}, "hidden_size 64, this one 128"),
        ("qwen2_bias", {}, "model_type 'llama', this one 'qwen2'"),
    ],
)
def test_a_model_that_does_not_match_is_told_what_differs(
    tmp_path: Path, family: str, changes: dict[str, int], message: str
) -> None:
    cache = TurboQuantCache(tiny_model().config)
    extend_first_small(cache)
    cache.save(tmp_path / "cache")
    assert TurboQuantCache.load(tmp_path / "cache", tiny_model().config).get_seq_length() == 20
    with pytest.raises(ValueError, match=f"of another model.*{message}"):
        TurboQuantCache.load(tmp_path / "cache", tiny_model(family, **changes).config)


def extend_first_small(cache: TurboQuantCache) -> None:
    for layer in range(2):
        cache.update(states(20, dim=16), states(20, dim=16), layer)


def test_another_window_is_told(tmp_path: Path) -> None:
    TurboQuantCache(tiny_model("gemma3_hybrid").config).save(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"layer 0 is .*24.*25"):
        TurboQuantCache.load(tmp_path / "cache", tiny_model("gemma3_hybrid", sliding_window=25).config)


# -- files that are not what they should be ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved cache with a transformers layer, two rows and three pages each."""
    config = tiny_model("gemma3_hybrid").config
    cache = TurboQuantCache(config, "tq4", **SMALL)
    for layer in range(2):
        cache.update(states(110, 2, dim=16), states(110, 2, dim=16, seed=1), layer)
    path = tmp_path_factory.mktemp("saved") / "cache"
    cache.save(path)
    return path


def parts(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors, json.loads(metadata["header"]), metadata


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.99, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, good: Path, keep: float) -> None:
    whole = good.read_bytes()
    end = int(len(whole) * keep) if isinstance(keep, float) else keep
    (tmp_path / "cut").write_bytes(whole[:end])
    with pytest.raises(ValueError, match="no complete safetensors file"):
        TurboQuantCache.load(tmp_path / "cut")


def test_foreign_files_are_refused(tmp_path: Path, good: Path) -> None:
    (tmp_path / "text").write_text("hello " * 100)
    with pytest.raises(ValueError, match="no complete safetensors file"):
        TurboQuantCache.load(tmp_path / "text")
    torch.save({"a": torch.zeros(3)}, tmp_path / "pickle")
    with pytest.raises(ValueError, match="no complete safetensors file"):
        TurboQuantCache.load(tmp_path / "pickle")
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file({"weight": torch.zeros(3)}, tmp_path / "weights", metadata)
        with pytest.raises(ValueError, match="of something else"):
            TurboQuantCache.load(tmp_path / "weights")
    with pytest.raises(FileNotFoundError):
        TurboQuantCache.load(tmp_path / "nothing")


def at(header: Any, *path: Any) -> Any:
    for step in path:
        header = header[step]
    return header


HEADERS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("version",), 2, "format version 2, and this tq_hf reads 1: update"),
    (("version",), 0, "version 0 does not exist"),
    (("version",), "1", "version='1'"),
    (("model",), [], "model="),
    (("model", "hidden_size"), [64], "model facts"),
    (("preset",), 7, "preset='7'"),
    (("max_cache_len",), 0, "max_cache_len=0"),
    (("max_cache_len",), 10**12, "max_cache_len=1000000000000"),
    (("max_cache_len",), 60, "do not fit"),
    (("offloading",), [1, 2], "offloading"),
    (("quantization",), {}, "quantization config"),
    (("quantization", "key_bits"), 5, "key_bits=5"),
    (("quantization", "recent_window"), -1, "recent_window=-1"),
    (("quantization", "codebook"), None, "quantization config"),
    (("configs",), [], "config=0 in its header is not between"),
    (("tables",), [], "no block table"),
    (("tables", 0, "rows"), 3, "page_ids"),
    (("tables", 0, "rows"), -1, "rows=-1"),
    (("tables", 0, "rows"), None, "belong to nothing|do not fit|more entries"),
    (("tables", 0, "pages"), 2**40, "pages="),
    (("tables", 0, "pages"), 7, "page ids"),
    (("tables", 0, "page_size"), 0, "page_size=0"),
    (("tables", 0, "page_size"), 64, "does not fit its table"),
    (("tables", 0, "sink_tokens"), 10**9, "do not follow each other"),
    (("layers",), [], "no layers"),
    (("layers", 1, "kind"), "pickle", "unknown kind 'pickle'"),
    (("layers", 1, "config"), -1, "config=-1"),
    (("layers", 1, "table"), 1, "table=1"),
    (("layers", 1, "state"), None, "belong to nothing"),
    (("layers", 1, "state", "dtype"), "float64", "dtype 'float64'"),
    (("layers", 1, "state", "dtype"), "bfloat16", "ring_key"),
    (("layers", 1, "state", "kv_heads"), 2**30, "layers.1.pages"),
    (("layers", 1, "state", "key_dim"), 10**9, "head_dim"),
    (("layers", 1, "state", "value_dim"), 32, "ring_value"),
    (("layers", 1, "state", "device"), "meta", "no place for a cache"),
    (("layers", 1, "state", "device"), "cuda:77", "this machine lacks"),
    (("layers", 1, "state", "counters"), [110, 100], "no three numbers"),
    (("layers", 1, "state", "counters"), [110, 100, 2], "do not fit"),
    (("layers", 1, "state", "counters"), [110, 100, 4], "more entries"),
    (("layers", 1, "state", "counters"), [90, 100, 3], "do not fit"),
    (("layers", 1, "state", "counters"), [10**6, 100, 3], "do not fit"),
    (("layers", 1, "state", "counters"), [110, 100, -3], "no three numbers"),
    (("layers", 0, "layer", "class"), "QuantizedLayer", "unknown"),
    (("layers", 0, "layer", "class"), "EncoderDecoderCache", "unknown"),
    (("layers", 0, "layer", "class"), ["x"], "unknown|class"),
    (("layers", 0, "layer", "sliding_window"), "24", "sliding_window='24'"),
    (("layers", 0, "layer", "sliding_window"), 200, "do not fit"),
    (("layers", 0, "layer", "number_of_states"), 10**9, "number_of_states"),
    (("layers", 0, "layer", "nbits"), 4, "no options"),
    (("layers", 0, "numbers", "cumulative_length"), -5, "cumulative_length=-5"),
    (("layers", 0, "numbers", "cumulative_length"), 5, "do not fit"),
    (("layers", 0, "numbers"), {}, "has the numbers"),
    (("layers", 0, "device"), "meta", "no place"),
]


@pytest.mark.parametrize(("where", "value", "message"), HEADERS)
def test_a_hostile_header_is_refused(tmp_path: Path, good: Path, where: Any, value: Any, message: str) -> None:
    tensors, header, metadata = parts(good)
    at(header, *where[:-1])[where[-1]] = value
    safetensors.torch.save_file(tensors, tmp_path / "bad", {**metadata, "header": json.dumps(header)})
    with pytest.raises(ValueError, match=message):
        TurboQuantCache.load(tmp_path / "bad")


def test_no_entry_of_the_header_is_taken_on_trust(tmp_path: Path, good: Path) -> None:
    """Whatever entry is missing, or of another type, the file is refused by name."""
    tensors, header, metadata = parts(good)

    def paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        return [p for key, value in items for p in [(*path, key), *paths(value, (*path, key))]]

    free = {("preset",), ("layers", 0, "device")}  # any text will do; a device may be missing only where it is given
    for path in paths(header):
        for change in ("missing", {"x": 1}, [[]], -1.5):
            broken = json.loads(json.dumps(header))
            holder = at(broken, *path[:-1])
            if change == "missing":
                if isinstance(holder, list) or path[0] == "model" or path in free:
                    continue
                del holder[path[-1]]
            else:
                holder[path[-1]] = change
            if path == ("model",) and change == {"x": 1}:
                continue  # facts of some model
            safetensors.torch.save_file(tensors, tmp_path / "bad", {**metadata, "header": json.dumps(broken)})
            with pytest.raises(ValueError, match="cannot be loaded"):
                pytest.fail(f"{path} {change}: {TurboQuantCache.load(tmp_path / 'bad')}")


@pytest.mark.parametrize(
    "header", ["", "null", "[1]", "{", '{"version": 1e999}', '{"version": ' + "9" * 5000 + "}", "[" * 100000]
)
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, good: Path, header: str) -> None:
    tensors, _, metadata = parts(good)
    safetensors.torch.save_file(tensors, tmp_path / "bad", {**metadata, "header": header})
    with pytest.raises(ValueError, match="cannot be loaded"):
        TurboQuantCache.load(tmp_path / "bad")


TENSORS: list[tuple[str, Any, str]] = [
    ("layers.1.pages", lambda t: t[:-1], "layers.1.pages"),
    ("layers.1.pages", lambda t: t.float(), "layers.1.pages"),
    ("layers.1.ring_key", lambda t: t.half(), "ring_key"),
    ("layers.1.ring_key", lambda t: t[:, :, :3], "ring_key"),
    ("layers.1.sink_value", lambda t: t[:1], "sink_value"),
    ("layers.1.flags", lambda t: t.long(), "flags"),
    ("layers.1.balance", lambda t: t.double(), "balance"),
    ("layers.1.query_energy", None, "query_energy"),
    ("tables.0.page_ids", lambda t: t - 2, "page ids"),
    ("tables.0.page_ids", lambda t: t + 1, "page ids"),
    ("tables.0.page_ids", lambda t: t.clamp(max=2), "page ids"),
    ("tables.0.page_ids", lambda t: t.long(), "page_ids"),
    ("tables.0.page_ids", lambda t: t[:, :2], "page_ids"),
    ("tables.0.entries", lambda t: t + 1, "do not follow"),
    ("tables.0.entries", lambda t: t * 0, "do not follow"),
    ("tables.0.entries", lambda t: t[:, :1], "entries"),
    ("tables.0.entries", None, "entries"),
    ("tables.0.row_start", lambda t: t - 1, "before the first"),
    ("tables.0.row_start", lambda t: t + 111, "do not fit"),
    ("layers.0.keys", lambda t: t[:, :, :5], "do not fit"),
    ("layers.0.keys", lambda t: t.int(), "floating-point"),
    ("layers.0.values", None, "do not fit"),
    ("layers.0.conv_states.0", torch.zeros(3), "does not hold"),
    ("layers.2.pages", torch.zeros(3), "belong to nothing"),
    ("something", torch.zeros(3), "belong to nothing"),
]


@pytest.mark.parametrize(("name", "change", "message"), TENSORS)
def test_tensors_that_do_not_fit_the_header_are_refused(
    tmp_path: Path, good: Path, name: str, change: Any, message: str
) -> None:
    tensors, _, metadata = parts(good)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change if isinstance(change, Tensor) else change(tensors[name]).contiguous()
    safetensors.torch.save_file(tensors, tmp_path / "bad", metadata)
    with pytest.raises(ValueError, match=message):
        TurboQuantCache.load(tmp_path / "bad")


def test_a_static_cache_larger_than_the_machine_is_refused(tmp_path: Path) -> None:
    cache = filled(100, **SMALL, max_cache_len=200)
    cache.save(tmp_path / "cache")
    tensors, header, metadata = parts(tmp_path / "cache")
    header["max_cache_len"] = 2**31 - 1
    safetensors.torch.save_file(tensors, tmp_path / "bad", {**metadata, "header": json.dumps(header)})
    with pytest.raises(ValueError, match="GiB, and cpu has"):
        TurboQuantCache.load(tmp_path / "bad")


def test_a_device_that_is_not_there_is_refused(good: Path) -> None:
    with pytest.raises(ValueError, match="cuda:77"):
        TurboQuantCache.load(good, device="cuda:77")
    assert TurboQuantCache.load(good, device="cpu").layers[1].device == torch.device("cpu")
    assert isinstance(TurboQuantCache.load(good), Cache)
    assert DynamicCache(TurboQuantCache.load(good)).get_seq_length(1) == 110


def test_fast_rotary_embeddings_are_saved_and_loaded(tmp_path: Path) -> None:
    """longrope's factors below 1 (MiniCPM) and linear ones turn pairs by more than a radian a position."""
    model = tiny_model(rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 0.5})
    cache = TurboQuantCache(model.config, "tq4", **SMALL)
    generate(model, prompt(1, 100), cache, new=2)
    cache.save(tmp_path / "cache")
    assert same(bits(TurboQuantCache.load(tmp_path / "cache", model.config)), bits(cache))


def test_a_config_that_is_none_is_refused(good: Path) -> None:
    with pytest.raises(ValueError, match="config is a dict"):
        TurboQuantCache.load(good, {"model_type": "llama"})  # type: ignore[arg-type]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        filled(100).save(tmp_path / "missing" / "cache")
