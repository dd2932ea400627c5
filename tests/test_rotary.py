"""What `rotary_of` reads from a config against what the model's own rotary embeddings do."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, DynamicCache

from tests.tiny_models import COMMON, FAMILIES, HEADS, tiny_model
from tq_hf.layers.plan import decoder_config
from tq_hf.quantizer.rotary import Rotary, rotaries_of, rotary_of


def frequencies_of(model: nn.Module, kind: str | None) -> list[Tensor]:
    """The buffers that a text model's rotary embeddings keep, those of one kind of layer where there are several."""
    found = {}
    for name, module in model.named_modules():
        if "vis" not in name and "audio" not in name:
            buffers = module.named_buffers(recurse=False)
            found |= {f"{name}.{key}": value for key, value in buffers if key.endswith("inv_freq")}
    own = {name: value for name, value in found.items() if kind is not None and f".{kind}_inv_freq" in name}
    return [value for name, value in (own or found).items() if "original" not in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = tiny_model(family)
    config = decoder_config(model.config)
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    all_layers = rotaries_of(config, range(len(kinds)))
    for layer, kind in enumerate(kinds):
        rotary = rotary_of(config, layer)
        assert all_layers[layer] == rotary
        buffers = frequencies_of(model, kind)
        if rotary is None:
            unused = getattr(config, "alibi", False) or getattr(config, "no_rope_layers", [1] * len(kinds))[layer] == 0
            assert unused or not buffers, f"layer {layer} of {family} has rotary embeddings: {buffers}"
        else:
            expected = buffers[0]
            torch.testing.assert_close(torch.tensor(rotary.frequencies), expected, msg=lambda m, i=layer: f"layer {i}: {m}")


WINDOW = {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
ALL_FULL = {"layer_types": ["full_attention", "full_attention"]}
ONE_EXPERT = {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
HYBRID = {**ALL_FULL, "num_local_experts": 0, "shared_intermediate_size": 32}
COHERE_MOE = {**ONE_EXPERT, "prefix_dense_intermediate_size": 64}
# Models that turn keys in some of their layers: their config, what else they are made with, and which layers do.
SOME_TURN: list[tuple[str, dict[str, Any], tuple[bool, bool]]] = [
    ("Cohere2", WINDOW, (True, False)),
    ("Cohere2Moe", {**WINDOW, **COHERE_MOE, "mlp_layer_types": ["sparse", "sparse"]}, (True, False)),
    ("Cohere2Moe", {**WINDOW, **COHERE_MOE, **ALL_FULL, "mlp_layer_types": ["dense", "sparse"]}, (True, False)),
    ("Exaone4", WINDOW, (True, False)),
    ("Exaone4", {**WINDOW, **ALL_FULL, "sliding_window": None}, (True, True)),
    ("ExaoneMoe", {**WINDOW, **ONE_EXPERT, "mlp_layer_types": ["dense", "dense"]}, (True, False)),
    ("Afmoe", {**WINDOW, **ONE_EXPERT}, (True, False)),
    ("Flint", {**WINDOW, **ONE_EXPERT}, (True, False)),
    ("Kolibri1", {**WINDOW, **ONE_EXPERT}, (True, False)),
    ("LaraMini", {**WINDOW, **ONE_EXPERT}, (True, False)),
    ("GraniteSWA", {**WINDOW, "layer_rope_theta": [500.0, 0]}, (True, False)),
    ("GraniteSWA", {**WINDOW, "layer_rope_theta": [500.0, 70.0]}, (True, True)),
    ("MuseGlimmerText", WINDOW, (True, False)),
    ("GraniteMoeHybrid", HYBRID, (False, False)),
    ("GraniteMoeHybrid", {**HYBRID, "position_embedding_type": "rope"}, (True, True)),
    ("Beam", WINDOW, (True, False)),
    ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": 0}, (True, False)),
    ("GPTNeoX", {}, (True, True)),
]


@pytest.mark.parametrize(("name", "settings", "expected"), SOME_TURN)
def test_layers_that_turn_their_keys(name: str, settings: dict[str, Any], expected: tuple[bool, bool]) -> None:
    """Of a prompt of one token over and over, all keys of a layer are alike but for what rotary embeddings turn."""
    settings = {**COMMON, **HEADS, "bos_token_id": 1, "eos_token_id": 2, **settings}
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(settings))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModel.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if "sinks" in name:  # attention to them would fall as the prompt grows
                parameter.fill_(-1e4)
        cache = DynamicCache(config=config)
        model(torch.full((1, 20), 7), past_key_values=cache)
    turn = []
    found = rotaries_of(config, range(len(cache.layers)))
    for i, layer in enumerate(cache.layers):
        keys, rotary = layer.keys[0], found[i]
        assert rotary == rotary_of(config, i)
        partner, frequency = (rotary or Rotary((), interleaved=False)).pairs(keys.shape[-1])
        angle = torch.arange(20.0)[:, None] * frequency
        quarter = torch.where(partner > torch.arange(len(partner)), -1, 1) * keys[:, :1, partner]
        torch.testing.assert_close(keys, keys[:, :1] * angle.cos() + quarter * angle.sin(), atol=1e-4, rtol=1e-4)
        turn.append(rotary is not None)
    assert tuple(turn) == expected


def test_every_rotary_family_is_known() -> None:
    without = {name for name in FAMILIES if rotary_of(decoder_config(tiny_model(name).config), 0) is None}
    assert {"gpt2", "bloom_alibi", "falcon_alibi", "bart", "t5_position_bias"} <= without
    assert not without & {"llama", "gemma3_hybrid", "gpt_neox", "qwen2_vl", "smollm3_no_rope", "llama4_chunked"}


@pytest.mark.parametrize(
    ("kind", "interleaved"),
    [("llama", False), ("gpt_oss", False), ("gpt_neox", False), ("cohere", True), ("glm4", True), ("llama4_text", True)],
)
def test_pairs_are_those_that_the_model_turns(kind: str, interleaved: bool) -> None:
    rotary = rotary_of(AutoConfig.for_model(kind), 0)
    assert rotary is not None and rotary.interleaved is interleaved
    if kind in ("llama", "cohere", "glm4"):
        module = importlib.import_module(type(AutoConfig.for_model(kind)).__module__.replace("configuration", "modeling"))
        dim = 2 * len(rotary.frequencies)
        partner, frequency = rotary.pairs(dim)
        turned = module.rotate_half(torch.eye(dim))  # row j: where channel j goes by a quarter of a turn
        assert torch.equal(turned.abs().argmax(1), partner)
        assert torch.equal(frequency, frequency[partner])


def test_scaled_frequencies_are_the_models() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 10_000.0}
    model = tiny_model("llama", rope_parameters=scaling, max_position_embeddings=512)
    rotary = rotary_of(model.config, 0)
    plain = rotary_of(tiny_model("llama").config, 0)
    assert rotary is not None and plain is not None
    torch.testing.assert_close(torch.tensor(rotary.frequencies), frequencies_of(model, None)[0])
    assert rotary.frequencies[-1] == pytest.approx(plain.frequencies[-1] / 8)


def test_channels_beyond_the_pairs_stay() -> None:
    partner, frequency = Rotary((0.5, 0.25), interleaved=False).pairs(6)
    assert partner.tolist() == [2, 3, 0, 1, 4, 5] and frequency.tolist() == [0.5, 0.25, 0.5, 0.25, 0, 0]


@pytest.mark.parametrize("config", [{}, {"rope_parameters": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_config_that_tells_nothing(config: dict[str, Any]) -> None:
    assert rotary_of(type("Config", (), config)(), 0) is None


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # no sizes under names that are known
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}, "head_dim": 16},
        {"rope_parameters": {"rope_type": "its own", "rope_theta": [1e4, 1e6]}, "head_dim": 16},
        {"rope_parameters": {"rope_type": "its own", "rope_theta": "1e4"}, "head_dim": 16},
        {"rope_parameters": [1e4], "head_dim": 16},
        {"rope_parameters": {"rope_type": "its own", "rope_theta": 1e-60}, "head_dim": 16},  # frequencies beyond fp32
        {"rope_parameters": {"rope_theta": 1e4}, "head_dim": 16, "no_rope_layers": []} | {"layer_types": ["x"]},
    ],
)
def test_a_config_unlike_transformers_own_is_no_error(config: dict[str, Any]) -> None:
    assert rotary_of(type("Config", (), config)(), 1) is None


@pytest.mark.parametrize(
    "code",
    [
        "raise RuntimeError('no GPU')",
        "def (",
        "def rotate_half(x, interleaved): return x",
        "def rotate_half(x): return x.unflatten(3, (2, -1))",
        "rotate_half = None",
        "import torch; torch.manual_seed(7)",
    ],
)
def test_code_beside_a_config_is_not_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models outside transformers: their module is asked only if it has been imported, and may be like nothing known."""
    folder = tmp_path / f"remote_{abs(hash(code))}"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(code)
    (folder / "configuration_own.py").write_text("from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig): pass")
    monkeypatch.syspath_prepend(tmp_path)
    config = importlib.import_module(f"{folder.name}.configuration_own").OwnConfig()
    before = torch.get_rng_state()
    for imported in (False, True):
        rotary = rotary_of(config, 0)
        assert rotary is not None and not rotary.interleaved
        assert torch.equal(torch.get_rng_state(), before)
        if not imported:
            assert f"{folder.name}.modeling_own" not in sys.modules
            module = types.ModuleType(f"{folder.name}.modeling_own")
            with torch.random.fork_rng(), contextlib.suppress(Exception):
                exec(code, module.__dict__)
            monkeypatch.setitem(sys.modules, module.__name__, module)


def test_an_imported_module_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama")
    own = type("OwnConfig", (type(config),), {"__module__": "own.configuration_own"})()
    module = types.ModuleType("own.modeling_own")
    module.rotate_half = lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rotary = rotary_of(own, 0)
    assert rotary is not None and rotary.interleaved
