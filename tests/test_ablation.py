"""`scripts/ablation`: its scores are those of decoding token by token, and its simulation is what it stands for."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

from eval import ablation, results, settings, simulated_cache
from eval.measures.scoring import lockstep_batches, measure
from eval.outlier_split import Split, bytes_per_token
from eval.settings import Setting
from eval.text import read_text, windows
from tests import tiny_models
from tests.tiny_models import prompt
from tq_hf import PRESETS, TurboQuantConfig
from tq_hf.commands import RequestError
from tq_hf.generation.chunks import first_page_tokens, text_chunks
from tq_hf.generation.comparison import cache_argument, score_texts

ROOT = Path(__file__).parents[1]
ROWS = 2
LENGTH = 128 + max(first_page_tokens(PRESETS[name]) for name in settings.OWN)


@pytest.fixture
def sharp_model() -> Any:
    """Far-apart logits, and keys with a bias, which centring and balance are for."""
    return tiny_models.tiny_model("qwen2_bias", initializer_range=0.2, head_dim=32, max_position_embeddings=1024)


def named(name: str) -> Setting:
    (found,) = settings.select([], [name])
    return found


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("tq3", {}), ("tq2", {"page_size": 32}), ("tq2", {"page_size": 64, "recent_window": 0}), ("4bit_nc", {}), ("k8v4", {})],
)
def test_lockstep_scores_are_those_of_single_tokens(sharp_model: Any, preset: str, changes: dict[str, Any]) -> None:
    setting = Setting("", (), "", replace(PRESETS[preset], **changes))
    ids, argument = prompt(ROWS, LENGTH), cache_argument(sharp_model)
    first = first_page_tokens(setting.config)
    caches = [setting.new_cache(sharp_model.config) for _ in range(2)]
    chunks = text_chunks(LENGTH, setting.config)
    found, again = score_texts(sharp_model, ids, DynamicCache(config=sharp_model.config), caches, chunks)
    torch.testing.assert_close(vars(again), vars(found), rtol=0, atol=0, equal_nan=True)
    assert found.kl.shape == (ROWS, LENGTH - first)
    assert found.nll_packed[:, -1].isnan().all() and not found.nll_packed[:, :-1].isnan().any()

    single, exact = setting.new_cache(sharp_model.config), DynamicCache(config=sharp_model.config)
    log_p, log_q = [], []
    with torch.no_grad():
        for i in range(LENGTH):
            assert (single.report().packed_tokens > 0) == (i >= first)  # what counts reads pages, and all of that counts
            for cache, out in ((exact, log_p), (single, log_q)):
                logits = sharp_model(ids[:, i : i + 1], **{argument: cache}).logits
                out.append(F.log_softmax(logits.float(), -1))
    p, q = (torch.cat(out, 1)[:, first:] for out in (log_p, log_q))
    following = ids[:, first + 1 :, None]
    for nll, single_log in ((found.nll_exact, p), (found.nll_packed, q)):
        expected = -single_log[:, :-1].gather(-1, following)[..., 0]
        torch.testing.assert_close(nll[:, :-1], expected, rtol=1e-2, atol=1e-2)
    expected = (p.exp() * (p - q)).sum(-1)
    # A rounding difference may carry a coordinate over a quantizer's boundary: rarely, and not far.
    assert ((found.kl - expected).abs() > 0.05 * expected + 1e-4).float().mean() < 0.02
    assert found.kl.mean().item() == pytest.approx(expected.mean().item(), rel=5e-3)


def test_unpacked_states_give_no_distance(sharp_model: Any) -> None:
    (result,) = measure(sharp_model, prompt(ROWS, LENGTH), [named("raw")])
    assert result["kl"] == pytest.approx(0, abs=1e-6) and result["top1"] == 1
    assert result["ppl_delta_percent"] == pytest.approx(0, abs=1e-3)
    assert result["page_ratio"] == 0.5  # float32 pages, compared with bfloat16


def test_results_of_a_lockstep_batch(sharp_model: Any) -> None:
    ids = prompt(3, LENGTH)
    sizes = {"page_size": 32, "recent_window": 64}  # a batch shares its chunks
    batch = [Setting(name, (), "", replace(PRESETS[name], **sizes)) for name in ("tq4", "tq2")]
    fine, coarse = measure(sharp_model, ids, batch)
    assert 0 < fine["kl"] < coarse["kl"] and coarse["top1"] <= fine["top1"] <= 1
    (alone,) = measure(sharp_model, ids, batch[1:])
    assert alone == coarse
    for result, setting in zip((fine, coarse), batch):
        layout = setting.config.layout(32, 32, torch.float32)
        assert result["page_bytes"] == result["mean_bytes"] == layout.bytes_per_token
        assert result["positions"] == 3 * (LENGTH - first_page_tokens(setting.config))
        # Pages are full where they start behind the sinks, and end before the window.
        size, window = setting.config.page_size, setting.config.recent_window
        assert result["packed_share"] == (LENGTH - setting.config.sink_tokens - window) // size * size / LENGTH > 0
        assert result["kl"] < result["kl_p99"] and 0 < result["kl_stderr"] < result["kl"]
        assert result["ppl_delta_percent"] == pytest.approx(100 * (result["ppl_packed"] / result["ppl_exact"] - 1))
        cache = setting.new_cache(sharp_model.config)
        sharp_model(ids, **{cache_argument(sharp_model): cache})
        assert result["cache_bytes_bf16"] == cache.report().bytes_bf16
    (single,) = measure(sharp_model, ids[:1], batch[:1])
    assert single["kl_stderr"] is None and single["ppl_delta_stderr"] is None


def test_the_error_of_a_change_of_perplexity_is_that_over_windows(sharp_model: Any) -> None:
    ids, setting = prompt(4, LENGTH), named("tq2")
    (whole,) = measure(sharp_model, ids, [setting])
    logs = []
    for row in ids:  # a window at a time
        (result,) = measure(sharp_model, row[None], [setting])
        logs.append(math.log(result["ppl_packed"] / result["ppl_exact"]))
    expected = statistics.stdev(logs) / 2  # of four
    relative = whole["ppl_delta_stderr"] / (100 + whole["ppl_delta_percent"])
    assert relative == pytest.approx(expected, rel=1e-2) and expected > 1e-4


def test_the_second_half_is_the_same_positions_in_all_settings(sharp_model: Any) -> None:
    ids = prompt(ROWS, 400)
    for window in (64, 128):
        setting = Setting("", (), "", replace(PRESETS["tq3"], page_size=32, recent_window=window))
        (result,) = measure(sharp_model, ids, [setting])
        caches = DynamicCache(config=sharp_model.config), [setting.new_cache(sharp_model.config)]
        (scores,) = score_texts(sharp_model, ids, *caches, text_chunks(400, setting.config))
        late = scores.kl[:, 200 - first_page_tokens(setting.config) :]
        assert result["kl_second_half"] == pytest.approx(late.mean().item(), rel=1e-5)
        assert result["kl_second_half"] != pytest.approx(result["kl"], rel=1e-5)
        assert len(result["kl_by_text"]) == len(ids)
        assert sum(result["kl_by_text"]) / len(ids) == pytest.approx(result["kl"])


def test_exact_layers_count_in_the_mean_of_bytes() -> None:
    model = tiny_models.tiny_model(num_hidden_layers=8, head_dim=32)
    (result,) = measure(model, prompt(1, 200), [named("4bit_nc")])
    page, exact = PRESETS["4bit_nc"].layout(32, 32, torch.float32).bytes_per_token, 2 * 64
    assert (result["layers"], result["quantized_layers"]) == (8, 4)
    assert (result["page_bytes"], result["mean_bytes"]) == (page, (page + exact) / 2)


def test_windows_that_pack_nothing_are_an_error(sharp_model: Any) -> None:
    first = first_page_tokens(PRESETS["tq4"])
    with pytest.raises(ValueError, match=rf"{first} tokens reads no packed page"):
        measure(sharp_model, prompt(1, first), [named("tq4")])


@pytest.mark.parametrize("family", ["qwen2_bias", "gemma3_hybrid"])
@pytest.mark.parametrize("changes", [{}, {"balance_keys": False}, {"center_keys": False}, {"key_bits": 2, "page_size": 32}])
def test_the_simulation_is_the_packed_cache(family: str, changes: dict[str, Any]) -> None:
    model = tiny_models.tiny_model(family, initializer_range=0.2, head_dim=32, max_position_embeddings=1024)
    config = replace(PRESETS["tq3"], **changes)
    ids = prompt(ROWS, first_page_tokens(config) + 168)
    packed = Setting("packed", (), "", config)
    simulated = replace(packed, split=Split(keys=False, values=False))
    a, b = (measure(model, ids, [setting])[0] for setting in (packed, simulated))
    assert a["kl"] > 1e-5
    assert b["kl"] == pytest.approx(a["kl"], rel=0.02)
    assert b["ppl_packed"] == pytest.approx(a["ppl_packed"], rel=1e-3)
    for name in ("positions", "packed_share", "page_bytes", "page_ratio", "cache_bytes_bf16", "quantized_layers"):
        assert a[name] == b[name], name


def test_a_split_lies_between_its_widths(sharp_model: Any) -> None:
    ids = prompt(ROWS, 400)
    both = Split(keys=True, values=True)

    def kl(bits: int, split: Split | None) -> float:
        config = replace(PRESETS["tq3"], key_bits=bits, value_bits=bits)
        return float(measure(sharp_model, ids, [Setting("", (), "", config, split)])[0]["kl"])

    assert kl(4, None) < kl(3, both) < kl(3, None) < kl(2, both) < kl(2, None)


def test_bytes_of_a_split() -> None:
    none, keys, both = Split(False, False), Split(True, False), Split(True, True)
    for name in settings.OWN:
        config = PRESETS[name]
        for dim in (64, 80, 128, 256):
            assert bytes_per_token(dim, dim, config, none) == config.layout(dim, dim, torch.bfloat16).bytes_per_token
    pages_of_64 = replace(PRESETS["tq2"], page_size=64)
    assert bytes_per_token(128, 128, pages_of_64, keys) == 72 + 64 / 8 + 2
    assert bytes_per_token(128, 128, pages_of_64, both) == 72 + 2 * (64 / 8 + 2)


def test_a_simulation_that_sees_no_queries_is_an_error(sharp_model: Any) -> None:
    cache = named("tq3 (simulated)").new_cache(sharp_model.config)
    sharp_model(prompt(1, first_page_tokens(PRESETS["tq3"]) + 8), **{cache_argument(sharp_model): cache})
    with pytest.raises(RuntimeError, match=simulated_cache.ATTENTION_NAME):
        cache.report()


def test_what_cannot_be_simulated_is_refused(sharp_model: Any) -> None:
    with pytest.raises(ValueError, match="cannot be simulated"):
        simulated_cache.SimulatedCache(sharp_model.config, PRESETS["4bit_nc"], Split(False, False))


def test_the_grid_is_sound() -> None:
    grid = settings.all_settings()
    assert len({setting.name for setting in grid}) == len(grid)
    shown = {group: [setting for setting in grid if group in setting.groups] for group in settings.GROUPS}
    assert all(len(found) >= 3 for found in shown.values())
    assert settings.select(["all"], []) == grid
    assert settings.select(["keys"], []) == shown["keys"]
    assert {setting.name for setting in shown["window"]} >= {"tq3", "tq3, recent_window=256"}
    packed = [(setting.config, setting.at_once) for setting in grid if setting.split is None]
    assert len(set(packed)) == len(packed)  # no setting is measured under two names
    with pytest.raises(ValueError, match="setting 'tq9' is unknown: expected one of 'tq4'"):
        settings.select([], ["tq3", "tq9"])
    with pytest.raises(ValueError, match="group 'colour' is unknown: expected one of presets"):
        settings.select(["colour"], [])


def test_batches_share_their_chunks() -> None:
    grid = settings.all_settings()
    batches = lockstep_batches(grid, 2048, 3)
    assert sorted(s.name for batch in batches for s in batch) == sorted(s.name for s in grid)
    for batch in batches:
        assert 1 <= len(batch) <= 3
        assert len({tuple(text_chunks(2048, s.config)) for s in batch}) == 1
        assert len({s.split is None for s in batch}) == 1


# -- the command ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, tiny_model: Any) -> Path:
    vocabulary = {"<unk>": 0, "<s>": 1} | {f"w{i}": i for i in range(2, 99)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tiny_model.save_pretrained(tmp_path / "tiny")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(
        tmp_path / "tiny"
    )
    (tmp_path / "text").write_text(" ".join(f"w{2 + i * i % 95}" for i in range(700)))
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    given = ["--model", str(folder / "tiny"), "--text", str(folder / "text"), "--out", str(folder / "out")]
    return [*given, "--window", "200", "--tokens", "600", "--device", "cpu", *more]


def chosen(*names: str) -> list[str]:
    return [part for name in names for part in ("--setting", name)]


def test_the_command_resumes_setting_by_setting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "out" / "tiny-w200.json"
    assert ablation.main(arguments(folder, *chosen("tq4", "tq2"))) == 0
    first = json.loads(path.read_text())
    assert list(first["settings"]) == ["tq4", "tq2"]
    assert (first["run"]["window"], first["run"]["windows"], first["run"]["dtype"]) == (200, 3, "bfloat16")
    assert "2 settings in" in capsys.readouterr().out

    first["settings"]["tq4"]["kl"] = 0.5  # a mark: what is there stays
    size = first["settings"]["tq2"]["config"]["page_size"]
    assert size == PRESETS["tq2"].page_size
    first["settings"]["tq2"]["config"]["page_size"] = 2 * size  # measured in another form: measured again
    path.write_text(json.dumps(first))
    assert ablation.main(arguments(folder, *chosen("tq4", "tq3", "tq2"))) == 0
    assert "2 settings in" in (text := capsys.readouterr().out) and "1 were there already" in text
    second = json.loads(path.read_text())
    assert second["settings"]["tq4"]["kl"] == 0.5
    assert list(second["settings"]) == ["tq4", "tq2", "tq3"]
    assert second["settings"]["tq2"]["config"]["page_size"] == size
    assert second["settings"]["tq2"]["kl"] == first["settings"]["tq2"]["kl"]

    table = (folder / "out" / results.TABLE_NAME).read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| tq4", "| tq3", "| tq2"]
    assert "tiny, 200: bytes" in table[0] and "0.5000" in table[2]
    change, error = (second["settings"]["tq3"][name] for name in ("ppl_delta_percent", "ppl_delta_stderr"))
    assert f"| {change:+.2f} ± {error:.2f} |" in table[3]


def test_two_runs_may_share_a_file(tmp_path: Path) -> None:
    run = {"model": "some/tiny", "window": 200}
    first, second = (results.ModelResults.open(tmp_path, run) for _ in range(2))
    first.add(named("tq4"), {"kl": 1.0})
    second.add(named("tq3"), {"kl": 2.0})
    found = results.ModelResults.open(tmp_path, run)
    assert {name: result["kl"] for name, result in found.settings.items()} == {"tq4": 1.0, "tq3": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-w200.json"]


def test_a_broken_setting_loses_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Setting.new_cache

    def fragile(setting: Setting, config: Any) -> Any:
        if setting.name == "tq3":
            raise ValueError("no such layout")
        return whole(setting, config)

    with monkeypatch.context() as patch:
        patch.setattr(Setting, "new_cache", fragile)
        assert ablation.main(arguments(folder, *chosen("tq4", "tq3", "tq2"))) == 1
    captured = capsys.readouterr()
    assert "FAILED  ValueError: no such layout" in captured.out and "1 settings failed" in captured.err
    found = json.loads((folder / "out" / "tiny-w200.json").read_text())["settings"]
    assert [("error" in found[name]) for name in ("tq4", "tq3", "tq2")] == [False, True, False]
    assert "| failed |" in (folder / "out" / results.TABLE_NAME).read_text()

    assert ablation.main(arguments(folder, *chosen("tq4", "tq3", "tq2"))) == 0  # tries it again
    assert "2 were there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--setting", "tq9"], "setting 'tq9' is unknown"),
        (["--group", "colour"], "group 'colour' is unknown"),
        (["--group", "keys", "--setting", "tq4"], "not allowed with argument"),
        (["--model", "./nowhere"], "the model folder ./nowhere does not exist"),
        (["--text", "nowhere"], "the text file nowhere cannot be read"),
        (["--tokens", "100"], "tokens: 100 is less than a window of 200"),
        (["--tokens", "8000"], "the text has 700 tokens, too few for 40 windows of 200"),
        (["--window", "2048"], "--window 2048 is more than the context of"),
        (["--lockstep", "0"], "--lockstep 0 is not possible"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_a_wrong_request_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    argv = arguments(folder, *more)
    if "--model" in more:
        del argv[:2]
    assert ablation.main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert expected in lines[-1] and lines[-1].startswith("error: ")


def test_results_of_another_run_are_not_mixed_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablation.main(arguments(folder, *chosen("tq4"))) == 0
    assert ablation.main(arguments(folder, *chosen("tq4"), "--tokens", "400")) == 2
    assert "was measured with windows=3, and this is 2" in capsys.readouterr().err
    (folder / "out" / "tiny-w200.json").write_text("{ cut off")
    assert ablation.main(arguments(folder, *chosen("tq4"))) == 2
    assert "holds no results" in capsys.readouterr().err


def test_windows_start_with_bos_where_the_model_does(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tiny")
    text = (folder / "text").read_text()
    plain = windows(tokenizer, text, 50, 500, False)
    assert plain.shape == (10, 50) and plain.flatten().tolist() == tokenizer(text)["input_ids"][:500]
    started = windows(tokenizer, text, 50, 500, True)
    assert started.shape == (10, 50) and (started[:, 0] == 1).all()
    assert started[:, 1:].flatten().tolist() == plain.flatten()[:490].tolist()
    tokenizer.bos_token = None
    with pytest.raises(RequestError, match="no BOS"):
        windows(tokenizer, text, 50, 500, True)


def test_a_model_that_the_text_means_nothing_to_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablation.main(arguments(folder, *chosen("tq4"))) == 0
    captured = capsys.readouterr()
    assert "warning:" not in captured.err and "Windows start without BOS" in captured.err
    path = folder / "out" / "tiny-w200.json"
    found = json.loads(path.read_text())
    assert found["run"]["bos"] is False
    found["settings"]["tq4"]["ppl_exact"] = 5117.0
    path.write_text(json.dumps(found))
    assert ablation.main(arguments(folder, *chosen("tq4"))) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert "the exact perplexity is 5,117: is a BOS token missing? --bos always" in line

    assert ablation.main(arguments(folder, *chosen("tq4"), "--bos", "always", "--out", str(folder / "started"))) == 0
    assert json.loads((folder / "started" / path.name).read_text())["run"]["bos"] is True


def test_wikitext_comes_back_as_the_published_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ModuleType("datasets")
    data.load_dataset = lambda *name, split: {"text": ["", " = Title = \n", "", " A line . \n"]}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", data)
    assert read_text(None) == " \n = Title = \n \n A line . \n"

    def offline(*name: str, split: str) -> Any:
        raise ConnectionError("no route to the hub\nafter 5 attempts")

    data.load_dataset = offline  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match=r"could not be loaded: no route to the hub. Give --text FILE.$"):
        read_text(None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RequestError, match="pip install -e"):
        read_text(None)


def test_the_plot_shows_what_was_measured(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the extra `eval` installs it")
    from eval import plot_ablation

    assert ablation.main(arguments(folder, *chosen("tq4", "tq2", "4bit_nc", "raw"))) == 0
    assert plot_ablation.main([str(folder / "out")]) == 0
    drawn = (folder / "out" / "ablation.svg").read_text()
    assert plot_ablation.main([str(folder / "out")]) == 0
    assert (folder / "out" / "ablation.svg").read_text() == drawn
    for label in ("tq4", "tq2", "4bit_nc"):
        assert f">{label}<" in drawn
    assert ">tq3<" not in drawn


def test_nothing_to_plot_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eval import plot_ablation

    assert plot_ablation.main([str(tmp_path)]) == 2
    assert "holds no results" in capsys.readouterr().err


def test_the_script_runs_from_anywhere() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "ablation", "--out", "x", "--group", "colour"],
        capture_output=True, text=True, cwd="/", env={"PATH": "/usr/bin:/bin"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: group 'colour' is unknown") and done.stderr.count("\n") == 1


def test_at_once_every_query_reads_packed_states(sharp_model: Any) -> None:
    """The exact states of a chunk play no part: it reads what the pages give back, causally and its own tokens included."""
    setting = named("4bit_nc, as published")
    config = replace(setting.config, page_size=32, boundary_layers=0)
    ids = prompt(2, 96)
    cache = replace(setting, config=config).new_cache(sharp_model.config)
    sharp_model.set_attn_implementation("turboquant")
    with torch.no_grad():
        logits = torch.cat([sharp_model(part, past_key_values=cache).logits for part in ids.split(32, 1)], 1)
        one_page = sharp_model(ids[:, :32], past_key_values=replace(setting, config=config).new_cache(sharp_model.config))
        exact = sharp_model(ids).logits
    assert cache.report().exact_tokens == 0
    assert torch.allclose(one_page.logits, logits[:, :32], atol=1e-5)
    # The very first token reads itself, which an exact window would have kept.
    assert not torch.allclose(logits[:, 0], exact[:, 0], atol=1e-3)
    assert (logits - exact).norm() < 0.5 * exact.norm()
    raw = replace(setting, config=TurboQuantConfig("raw", 16, "raw", 16, page_size=32)).new_cache(sharp_model.config)
    with torch.no_grad():
        same = torch.cat([sharp_model(part, past_key_values=raw).logits for part in ids.split(32, 1)], 1)
    torch.testing.assert_close(same, exact, rtol=1e-4, atol=1e-4)


def test_at_once_refuses_exact_tokens_and_keeps_parts_of_pages(sharp_model: Any) -> None:
    setting = named("4bit_nc, as published")
    with pytest.raises(ValueError, match="recent_window=64"):
        replace(setting, config=replace(setting.config, recent_window=64)).new_cache(sharp_model.config)
    cache = setting.new_cache(sharp_model.config)
    sharp_model.set_attn_implementation("turboquant")
    sharp_model(prompt(1, 70), past_key_values=cache)
    report = cache.report().layers[0]
    assert (report.packed_tokens, report.exact_tokens) == (64, 6)


def test_at_once_needs_whole_pages_before_anything_runs(sharp_model: Any) -> None:
    with pytest.raises(ValueError, match="windows of 100 tokens do not fill pages of 64"):
        measure(sharp_model, prompt(1, 100), [named("4bit_nc, as published")])


def test_modes_are_told_apart_on_resume(tmp_path: Path) -> None:
    at_once = named("4bit_nc, as published")
    stored = results.ModelResults(tmp_path / "m-w64.json", {}, {})
    stored.add(at_once, {"kl": 0.0})
    assert stored.has(at_once)
    assert not stored.has(replace(at_once, at_once=False))
