"""The demo's memory page, without a browser: the estimate for a known architecture, a pasted config or the loaded model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

pytest.importorskip("gradio", reason="the demo needs the extra demo")

from tq_hf.demo import architectures, memory, serving
from tq_hf.sizing.estimate import estimate_memory


@pytest.fixture(scope="module")
def models() -> serving.Models:
    return serving.Models(torch.device("cpu"))


PUBLISHED = {  # billions of parameters, from the models' cards
    "Llama 3.1 8B": 8.03, "Llama 3.3 70B": 70.6, "Qwen3 4B": 4.02, "Qwen3 8B": 8.19, "Qwen3 32B": 32.8,
    "Qwen3 30B-A3B": 30.5, "Qwen2.5 7B": 7.62, "Mistral 7B v0.3": 7.25, "Mistral Nemo 12B": 12.2, "Mixtral 8x7B": 46.7,
    "Gemma 3 12B": 11.8, "Gemma 3 27B": 27.0, "gpt-oss 20B": 20.9, "Phi-4 14B": 14.7, "SmolLM3 3B": 3.08,
}  # fmt: skip


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_architectures_have_the_published_size(name: str) -> None:
    config = architectures.config_of(architectures.ARCHITECTURES[name])
    assert estimate_memory(config, context=1).weight_bytes / 2e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def cells(html: str, attribute: str) -> list[int]:
    return [int(value) for value in re.findall(rf'data-{attribute}="(\d+)"', html)]


def test_the_memory_page_is_the_estimate(models: serving.Models, word_folder: Path) -> None:
    folder = str(word_folder)
    page = memory.MemoryPage(models)
    summary, sizes, fits, table = page.show("Llama 3.1 8B", "", "", "tq3", 10_000, 3, 80, "bf16")
    config = architectures.config_of(architectures.ARCHITECTURES["Llama 3.1 8B"])
    estimates = {name: estimate_memory(config, name, 10_000, 3) for name in memory.SHOWN_PRESETS}
    tq3 = estimates["tq3"]
    assert cells(table, "nbytes") == [tq3.bytes_dynamic, *(made.nbytes for made in estimates.values())]
    room = 80 - tq3.weight_bytes / 2**30
    assert cells(table, "fits") == [
        tq3.largest_batch(room, dynamic=True),
        *(m.largest_batch(room) for m in estimates.values()),
    ]
    assert cells(summary, "nbytes") == [tq3.nbytes] and cells(summary, "bf16") == [tq3.bytes_dynamic]
    assert re.search(r'class="tq-packed tq-chosen"><th scope="row">tq3<', table)
    assert f"{room:.1f} GiB" in summary and "3 × 10,000" in sizes and "80 GiB" in fits
    without = page.show("Llama 3.1 8B", "", "", "tq3", 10_000, 3, 80, "not on this GPU")
    assert cells(without[3], "fits")[0] == tq3.largest_batch(80, dynamic=True)

    loaded = page.show(memory.LOADED, "", folder, "tq4", 500, 2, 1, "bf16")
    assert cells(loaded[0], "nbytes") == [estimate_memory(models.get(folder).model.config, "tq4", 500, 2).nbytes]


def test_a_pasted_config_counts_as_its_model() -> None:
    config = LlamaConfig(num_hidden_layers=3, quantization_config={"bits": 4})
    parsed = memory.parse_config(json.dumps(config.to_dict()))
    assert estimate_memory(parsed, "tq4", 999).nbytes == estimate_memory(LlamaConfig(num_hidden_layers=3), "tq4", 999).nbytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pasted": ""}, "Paste a model"),
        ({"pasted": "{"}, "This is no JSON of a config"),
        ({"pasted": "[1]"}, "expected an object"),
        ({"pasted": "{}"}, "no model_type"),
        ({"pasted": '{"model_type": "unheard-of"}'}, "unheard-of"),
        ({"pasted": '{"model_type": "llama", "num_hidden_layers": 1000000000}'}, "1e+09: expected at most 256"),
        ({"pasted": '{"model_type": "llama", "num_hidden_layers": -1}'}, "expected 1 to 256"),
        ({"pasted": '{"model_type": "llama", "num_labels": 1000000000}'}, "num_labels is 1e+09"),
        ({"pasted": '{"model_type": "gemma3", "vision_config": {"num_hidden_layers": 20000}}'}, "is 20000: expected at"),
        ({"pasted": '{"model_type": "llama", "x": ' + "[" * 9 + "]" * 9 + "}"}, "nested more than 8 deep"),
        ({"pasted": "[" * 100_000}, "This is no JSON of a config"),
        ({"pasted": "x" * 200_001}, "200,001 characters"),
        ({"choice": "Llama 3.1 8B", "context": 0}, "context: 0 is not possible"),
        ({"choice": "Llama 3.1 8B", "batch": None}, "batch: None is not possible"),
        ({"choice": "Llama 3.1 8B", "gib": -3}, "GPU: -3 is not possible"),
        ({"choice": memory.LOADED, "model": "/no/model"}, "does not exist"),
    ],
)  # fmt: skip
def test_what_the_memory_page_refuses(models: serving.Models, change: dict[str, Any], said: str) -> None:
    asked = {
        "choice": memory.PASTED, "pasted": "", "model": "", "preset": "tq4", "context": 100, "batch": 1, "gib": 24,
        "weights": "bf16", **change,
    }  # fmt: skip
    summary, *others = memory.MemoryPage(models).show(**asked)
    assert said in summary and 'role="alert"' in summary and others == ["", "", ""]
