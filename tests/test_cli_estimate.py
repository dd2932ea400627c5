"""`tq_hf estimate`: a real cache's bytes, from whatever names a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig

from tests.command_line import CommandLine
from tests.tiny_models import prompt
from tq_hf import TurboQuantCache, commands, embedded_model, estimate_memory
from tq_hf.generation.comparison import cache_argument, cache_nbytes


def test_json_is_what_a_real_cache_takes(tq_hf: CommandLine, word_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(word_folder, dtype=torch.bfloat16)
    ids = prompt(3, 500, vocab=60)
    argv = ["--config", word_folder, "--context", 500, "--batch", 3, "--new-tokens", 2, "-p", "tq4", "-p", "4bit_nc"]
    result = tq_hf("estimate", *argv, "--json").json
    assert [made["preset"] for made in result["presets"]] == ["tq4", "4bit_nc"]
    for made in result["presets"]:
        cache = TurboQuantCache(model.config, made["preset"])
        run(model, ids, cache)
        assert made["nbytes"] == cache.nbytes
        assert [layer["nbytes"] for layer in made["layers"]] == [layer.nbytes for layer in cache.report().layers]
        assert made["packed_tokens"] == cache.report().packed_tokens > 0
        assert made["ratio"] == result["bytes_dynamic"] / made["nbytes"]
    stock = DynamicCache(config=model.config)
    run(model, ids, stock)
    assert result["bytes_dynamic"] == cache_nbytes(stock)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert result["weight_bytes"] == pytest.approx(held, rel=1e-3)  # rotary frequencies stay fp32 in a loaded model


@torch.no_grad()
def run(model: Any, ids: torch.Tensor, cache: Any) -> None:
    for part in ids.split([498, 1, 1], dim=1):
        model(part, use_cache=True, **{cache_argument(model): cache})


def test_the_table_says_the_same(tq_hf: CommandLine, word_folder: Path) -> None:
    argv = ["estimate", "--config", word_folder / "config.json", "--context", 100_000, "--gpu", 8]
    result, text = tq_hf(*argv, "--json").json, tq_hf(*argv).out
    assert [made["preset"] for made in result["presets"]] == ["tq4", "tq3", "tq3v2", "tq2"]
    assert f"{word_folder}/config.json: 1 sequence of 100,000 tokens" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    for made in result["presets"]:
        assert f"{made['nbytes'] / 2**20:.2f} MiB" in rows[made["preset"]]
        assert rows[made["preset"]].split()[-2:] == [f"{made['ratio']:.2f}", f"{made['sequences']:,}"]
    assert rows["DynamicCache,"].split()[-1] == f"{result['sequences_dynamic']:,}"
    assert "left out of what fits" in text


def test_what_fits_is_beside_the_weights(tq_hf: CommandLine, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**shape)
    config.save_pretrained(tmp_path)
    result = tq_hf("estimate", "--config", tmp_path, "--context", 32_768, "--gpu", 40, "-p", "tq4", "--json").json
    estimate = estimate_memory(config, "tq4", 32_768)
    assert estimate.weight_bytes == result["weight_bytes"] == pytest.approx(2 * 8.03e9, rel=1e-3)
    (made,) = result["presets"]
    assert made["sequences"] == estimate.largest_batch(40 - result["weight_bytes"] / 2**30)
    assert result["sequences_dynamic"] * 3 < made["sequences"]
    argv = ["estimate", "--config", tmp_path, "--context", 32_768, "--gpu", 40, "-p", "tq4", "--weight-bits", 4]
    quarter = tq_hf(*argv, "--json").json
    assert quarter["weight_bytes"] == round(result["weight_bytes"] / 4)
    assert quarter["presets"][0]["sequences"] == estimate.largest_batch(40 - quarter["weight_bytes"] / 2**30)
    assert "Weights at 4 bits: 3.74 GiB, left out of what fits." in tq_hf(*argv).out
    assert tq_hf("estimate", "--config", tmp_path, "--gpu", 2, "-p", "tq4", "--json").json["presets"][0]["sequences"] == 0


def test_options_of_the_cache(tq_hf: CommandLine, word_folder: Path) -> None:
    argv = ["estimate", "--config", word_folder, "--context", 900, "--dtype", "float32", "-p", "tq2", "--json"]
    result = tq_hf(*argv, "--set", "recent_window=0", "--set", "center_keys=false", "--max-cache-len", 1000).json
    config = AutoConfig.from_pretrained(word_folder)
    changes = {"recent_window": 0, "center_keys": False, "max_cache_len": 1000}
    assert result["presets"][0]["nbytes"] == estimate_memory(config, "tq2", 900, 1, torch.float32, **changes).nbytes
    text = tq_hf(*argv[:-1], "--max-cache-len", 1000).out
    assert "StaticCache, bf16" in text


def test_the_embedded_model_is_the_default(tq_hf: CommandLine, word_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "embedded_model", lambda: word_folder)
    for argv in ([], ["--config", embedded_model.NAME]):
        assert tq_hf("estimate", *argv, "--json").json["config"] == embedded_model.NAME


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--context", "0"], "context=0 is not possible: expected an integer of at least 1."),
        (["--batch", "0"], "batch=0 is not possible: expected an integer of at least 1."),
        (["--new-tokens", "-1"], "new_tokens=-1 is not possible"),
        (["--preset", "tq5"], "preset='tq5' is unknown: expected one of tq4, tq3"),
        (["--dtype", "int8"], "--dtype int8 is unknown: expected one of bfloat16, float16, float32."),
        (["--gpu", "0"], "--gpu 0 is not possible: expected the GPU's memory in GiB, more than 0."),
        (["--gpu", "nan"], "--gpu nan is not possible"),
        (["--gpu", "inf"], "--gpu inf is not possible"),
        (["--weight-bits", "inf"], "--weight-bits inf is not possible"),
        (["--set", "context=5"], "unknown option context"),
        (["--set", "preset=tq4"], "unknown option preset"),
        (["--set", "new_tokens=5"], "unknown option new_tokens"),
        (["--set", "page_size"], "--set page_size names no value: expected FIELD=VALUE"),
        (["--set", "page_size=48"], "page_size=48 is not allowed"),
        (["--set", "pages=1"], "unknown option pages"),
        (["--max-cache-len", "100"], "max_cache_len=100 is less than context=8192"),
    ],
)
def test_numbers_that_cannot_be(tq_hf: CommandLine, word_folder: Path, argv: list[str], said: str) -> None:
    assert said in tq_hf("estimate", "--config", word_folder, *argv).error


def test_configs_that_are_none(tq_hf: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    for text, said in (
        ("{", "is no model's config: not JSON"),
        ("[1]", "model_type=None is none that transformers"),
        ('{"model_type": "nothing"}', "model_type='nothing' is none that transformers"),
        (json.dumps({"model_type": "llama", "num_hidden_layers": "many"}), "do not fit a llama model"),
        (json.dumps({"model_type": "clip"}), "no cache can be estimated for a 'clip' model"),
    ):
        file.write_text(text)
        assert said in tq_hf("estimate", "--config", file).error
    assert "the model folder no/such/folder does not exist" in tq_hf("estimate", "--config", "no/such/folder").error
    assert tq_hf("estimate", "--config", "confg.json").error == "the file confg.json does not exist."
    (tmp_path / "empty").mkdir()
    assert "no config could be loaded from" in tq_hf("estimate", "--config", tmp_path / "empty").error

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection.")

    monkeypatch.setattr(commands.AutoConfig, "from_pretrained", unreachable)
    error = tq_hf("estimate", "--config", "some/model").error
    assert "couldn't connect" in error and "\n" not in error
