"""`python -m eval.study`: the five studies on a tiny model, resumed, broken, and asked for nonsense."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer, DynamicCache

from eval import study
from eval.measures import STUDIES, gsm8k, needle, other_caches
from eval.measures.haystack import needles, question, statement
from eval.measures.mcnemar import Paired, mcnemar
from eval.measures.text_quality import curve
from eval.settings import Setting
from eval.stored import StoredResults
from eval.study_config import FOLDER
from tests.word_model import DATA, save_word_model
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.generation.comparison import TextScores, cache_argument, cache_nbytes

PUBLISHED = "4bit_nc, as published"
CONFIGS: dict[str, dict[str, Any]] = {
    "perplexity": {"settings": ["tq4", "tq2", PUBLISHED], "window": 256, "tokens": 512, "parts": 8},
    "gsm8k": {"settings": ["bf16", "tq4", PUBLISHED], "questions": 3, "new_tokens": 12, "batch": 2},
    "needle": {"settings": ["bf16", "tq2", PUBLISHED], "lengths": [300, 400, 1024], "depths": 3, "repeats": 2},
    "longctx": {"settings": ["tq4", "tq2"], "positions": [200, 300, 1024], "around": 20, "texts": 2},
    "compare": {"prompt": 256, "new_tokens": 4, "scored": 140, "caches": ["DynamicCache", "fp8 cast", "tq4", "tq2"]},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model (of a context of 512 tokens), data in the layout of `eval/tasks/local_data.py` and configs."""
    folder = tmp_path_factory.mktemp("studies")
    save_word_model(folder / "tiny", max_position_embeddings=512)
    for split in ("train", "test"):
        (folder / "data" / "gsm8k").mkdir(exist_ok=True, parents=True)
        shutil.copy(DATA / f"arithmetic_{split}.jsonl", folder / "data" / "gsm8k" / f"{split}.jsonl")
    (folder / "data" / "wikitext2_raw").mkdir()
    shutil.copy(DATA / "prose.jsonl", folder / "data" / "wikitext2_raw" / "wikitext2_test_pages.jsonl")
    for kind, options in CONFIGS.items():
        (folder / f"{kind}.yaml").write_text(yaml.safe_dump({"study": kind} | options))
    return folder


def arguments(place: Path, config: str, out: Path, *more: str) -> list[str]:
    given = [str(place / f"{config}.yaml"), "--model", str(place / "tiny"), "--data-dir", str(place / "data")]
    return [*given, "--out", str(out), "--device", "cpu", "--dtype", "float32", *more]


def stored(out: Path, kind: str) -> dict[str, Any]:
    return json.loads((out / f"{kind}-tiny.json").read_text())


def require(kind: str) -> None:
    if kind == "gsm8k":
        pytest.importorskip("lm_eval", reason="only the extra `eval` installs lm-eval")


@pytest.mark.parametrize("kind", STUDIES)
def test_a_study_runs_and_is_resumed(kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require(kind)
    assert study.main(arguments(place, kind, tmp_path, "--part", "2/2")) == 0
    some = stored(tmp_path, kind)["cells"]
    assert study.main(arguments(place, kind, tmp_path)) == 0
    whole = stored(tmp_path, kind)
    assert 0 < len(some) < len(whole["cells"])
    for name, entry in some.items():
        assert whole["cells"][name] == entry  # measured once, the first time
    assert set(whole["run"]["versions"]) >= {"torch", "transformers", "tq_hf_code", "eval_code"}
    assert whole["run"]["study"] == kind and whole["run"]["dtype"] == "float32"
    text = (tmp_path / f"{kind}.md").read_text()
    assert all(name.split(", ")[0] in text for name in whole["cells"])
    assert any("--part 2/2" in entry["command"] for entry in whole["cells"].values()) and "--part" not in text
    capsys.readouterr()
    assert study.main(arguments(place, kind, tmp_path)) == 0
    assert f"0 cells measured, {len(whole['cells'])} were there already" in capsys.readouterr().out
    assert stored(tmp_path, kind) == whole

    for name, entry in whole["cells"].items():
        assert entry["seconds"] > 0 and entry["command"].startswith("python -m eval.study ")
        quantized = "bf16" not in name and name != "DynamicCache"
        share = entry.get("packed_share", entry.get("quantized_share", 0))
        assert (share > 0.3) == quantized, name


@pytest.mark.parametrize("kind", STUDIES)
def test_plots_are_drawn_from_what_is_there(kind: str, place: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the extra `eval` installs it")
    require(kind)
    assert study.main(arguments(place, kind, tmp_path)) == 0
    picture = tmp_path / f"{kind}.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    picture.unlink()
    assert study.main([kind, "--out", str(tmp_path), "--report"]) == 0  # with the shipped config: options play no part
    assert picture.exists()


def test_a_broken_cell_loses_nothing_else(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Setting.new_cache

    def fragile(setting: Setting, config: Any) -> Any:
        if setting.name == "tq2":
            raise ValueError("no such layout")
        return whole(setting, config)

    with monkeypatch.context() as patch:
        patch.setattr(Setting, "new_cache", fragile)
        assert study.main(arguments(place, "needle", tmp_path)) == 1
    captured = capsys.readouterr()
    assert "FAILED  ValueError: no such layout" in captured.out and "2 cells failed" in captured.err
    cells = stored(tmp_path, "needle")["cells"]
    assert {name for name, entry in cells.items() if "error" in entry} == {"tq2, 300", "tq2, 400"}
    assert "- tiny, tq2, 300: failed: ValueError: no such layout" in (tmp_path / "needle.md").read_text()
    assert study.main(arguments(place, "needle", tmp_path)) == 0  # tries them again, and only them
    assert "2 cells measured, 4 were there already" in capsys.readouterr().out


def test_results_of_other_code_are_not_mixed_in(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert study.main(arguments(place, "longctx", tmp_path)) == 0
    monkeypatch.setattr(study, "code_fingerprint", lambda folder: "other")
    assert study.main(arguments(place, "longctx", tmp_path)) == 2
    assert "was measured with versions=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"study": "colour"}, "study: 'colour' is unknown: expected one of perplexity, gsm8k"),
        ({"colour": 1}, "unknown option 'colour': expected one of settings, window"),
        ({"window": "long"}, "window: 'long' is not allowed: expected a whole number"),
        ({"window": 0}, "window: 0 is not possible"),
        ({"settings": "tq4"}, "settings: 'tq4' is not allowed: expected a list"),
        ({"settings": ["tq9"]}, "setting 'tq9' is unknown: expected one of 'tq4'"),
        ({"window": 1024, "tokens": 1024}, "a window of 1024 is more than the context of"),
        ({"tokens": 100}, "tokens: 100 is less than a window of 256"),
        ({"parts": 7}, "window: 256 has no 7 equal parts"),
        ({"bos": "perhaps"}, "bos: 'perhaps' is unknown: expected one of auto, always, never"),
    ],
)
def test_a_wrong_config_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({"study": "perplexity"} | CONFIGS["perplexity"] | changes))
    assert study.main([str(path), *arguments(place, "perplexity", tmp_path / "out")[1:]]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and message in lines[-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--part", "3/2"], "--part 3/2 is not possible"),
        (["--part", "half"], "--part half is not possible"),
        (["--data-dir", "./nowhere"], "--data-dir nowhere is no folder"),
        (["--model", "./nowhere"], "the model folder ./nowhere does not exist"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_a_wrong_request_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    argv = [str(place / "perplexity.yaml"), "--out", str(tmp_path), "--device", "cpu", *more]
    assert study.main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and message in lines[-1]


def test_what_is_no_config_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (("a: [", "cannot be read"), ("- a\n- b\n", "is no mapping"), ("1: 2\n", "is no mapping")):
        (tmp_path / "bad.yaml").write_text(text)
        assert study.main([str(tmp_path / "bad.yaml")]) == 2
        assert message in capsys.readouterr().err
    assert study.main(["colour"]) == 2
    assert "expected a YAML file, or one of compare, gsm8k, longctx, needle, perplexity" in capsys.readouterr().err
    assert study.main(["compare", "--out", str(tmp_path / "empty"), "--report"]) == 2
    assert "holds no results of compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("longctx", {"positions": [300, 200]}, "expected growing numbers"),
        ("longctx", {"around": 201}, "the first at least `around`"),
        ("needle", {"depths": 17}, "depths: 17 is not possible: expected at most 16"),
        ("needle", {"lengths": [64]}, "lengths: 64 is not possible"),
        ("gsm8k", {"shots": 0}, "shots: 0 is not possible"),
        ("compare", {"caches": ["StaticCache"]}, "caches: 'StaticCache' is unknown: expected one of DynamicCache"),
        ("compare", {"new_tokens": 1}, "expected at least 2"),
    ],
)
def test_options_out_of_range_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({"study": kind} | CONFIGS[kind] | changes))
    assert study.main([str(tmp_path / "wrong.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_folder_without_the_data_is_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(arguments(place, "perplexity", tmp_path, "--data-dir", str(tmp_path))) == 2
    assert "has no wikitext2_raw/wikitext2_test_pages.jsonl" in capsys.readouterr().err


def test_without_a_folder_the_data_come_from_the_hub(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    argv = [str(place / "longctx.yaml"), "--model", str(place / "tiny"), "--out", str(tmp_path), "--device", "cpu"]
    assert study.main(argv) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("or give --data-dir DIR.")


@pytest.mark.parametrize("kind", STUDIES)
def test_the_shipped_configs_are_sound(kind: str) -> None:
    found, options = study.read_study(kind)
    assert found.kind == kind and isinstance(options, found.options_type)
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(STUDIES)


# -- what is measured ----------------------------------------------------------------------------------------------------
def test_a_curve_is_made_of_the_positions_in_its_spans() -> None:
    """Two texts of 10 tokens, of which the last 6 positions were scored."""
    kl = torch.arange(12.0).view(2, 6)
    nll = torch.zeros(2, 6)
    nll[:, -1] = torch.nan
    scores = TextScores(kl=kl, same=(kl < 6).float(), nll_exact=nll, nll_packed=nll + math.log(2))
    points = curve(scores, 10, [(0, 4), (2, 6), (6, 9), (9, 10)])
    assert [(point["from"], point["to"]) for point in points] == [(4, 6), (6, 9), (9, 10)]
    assert [point["kl"] for point in points] == [3.5, 6.0, 8.0]  # means of 0 1 6 7, of 2 3 4 8 9 10, of 5 11
    assert points[0]["kl_stderr"] == pytest.approx(3.0)  # of 0.5 and 6.5
    assert [point["top1"] for point in points] == [0.5, 0.5, 0.5]
    assert [point["ppl_exact"] for point in points] == [1.0, 1.0, None]
    assert points[1]["ppl_packed"] == pytest.approx(2.0)


def test_perplexity_curves_add_up_to_the_whole(place: Path, tmp_path: Path) -> None:
    assert study.main(arguments(place, "perplexity", tmp_path)) == 0
    cells = stored(tmp_path, "perplexity")["cells"]
    assert set(cells) == {"tq4", "tq2", PUBLISHED}
    for entry in cells.values():
        points = entry["curve"]
        counts = [point["to"] - point["from"] for point in points]
        assert 2 * sum(counts) == entry["positions"] and points[-1]["to"] == 256
        mean = sum(n * point["kl"] for n, point in zip(counts, points)) / sum(counts)
        assert mean == pytest.approx(entry["kl"])
    assert 0 < cells["tq4"]["kl"] < cells["tq2"]["kl"]


def test_long_contexts_end_where_the_models_does(place: Path, tmp_path: Path) -> None:
    assert study.main(arguments(place, "longctx", tmp_path)) == 0
    found = stored(tmp_path, "longctx")
    assert (found["run"]["window"], found["run"]["windows"]) == (300, 2)
    spans = [(point["from"], point["to"]) for point in found["cells"]["tq2"]["curve"]]
    assert spans == [(180, 200), (280, 300)]


def test_needles_lie_where_they_should(place: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(place / "tiny")
    characters = Characters()
    hidden = needles(4, 1)
    assert len({number for _, number in hidden}) == len({keeper for keeper, _ in hidden}) == 4
    assert needles(4, 1) == hidden != needles(4, 2)
    for length in (300, 1000, 4001):
        ids = needle.log_with_needles(characters, length, hidden, 1)
        assert len(ids) == length
        text = "".join(map(chr, ids))
        for i, (keeper, number) in enumerate(hidden):
            at = text.index(f"{statement(keeper)} {number}.")
            assert abs(at / length - (i + 0.5) / 4) < 200 / length + 0.05
            assert question(keeper).endswith(statement(keeper)) and text.count(keeper) == 1
    assert len(needle.log_with_needles(tokenizer, 400, hidden, 1)) == 400
    with pytest.raises(ValueError, match="4 needles do not fit into 20 tokens"):
        needle.log_with_needles(characters, 20, hidden, 1)


class Characters:
    """A tokenizer with one token a character."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}


def test_a_needle_is_found_if_greedy_decoding_gives_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against single tokens through the same cache, whose window keeps pages from falling due in between."""
    from tq_hf.commands import load

    loaded = load(str(place / "tiny"), torch.device("cpu"), torch.float32)
    options = needle.NeedleOptions(settings=("bf16",), lengths=(300,), depths=3, repeats=1)
    found = needle.Needle(loaded, options, None)
    model, tokenizer = loaded.model, loaded.tokenizer
    hidden = needles(3, 0)
    log = needle.log_with_needles(tokenizer, 200, hidden, 0)

    def greedy(keeper: str) -> str:
        ids = torch.tensor([log + tokenizer(question(keeper), add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            return tokenizer.decode(model(ids).logits[0, -1].argmax())

    # Numbers are single tokens here: make one of them what the model says.
    told = [(hidden[0][0], greedy(hidden[0][0])), *hidden[1:]]
    monkeypatch.setattr(needle, "log_with_needles", lambda *_: log)
    right, nats, share = found._ask(DynamicCache(config=model.config), 200, told, 0)
    assert right[0] == 1 and share == 0
    ids = torch.tensor([log + tokenizer(question(told[0][0]), add_special_tokens=False)["input_ids"]])
    target = tokenizer(f" {told[0][1]}", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        log_p = model(ids).logits[0, -1].log_softmax(-1)[target[0]]
    assert nats[0] == pytest.approx(-log_p.item(), rel=1e-4)
    with pytest.raises(ValueError, match="a log of 200 tokens leaves no page packed"):
        found._ask(TurboQuantCache(model.config, "tq4", recent_window=256), 200, told, 0)


def test_a_grid_has_a_row_a_depth() -> None:
    cells = {1: {"right": [[1, 0], [1, 1]]}, 4: {"right": [[0, 0], [0, 1]]}}
    shares = needle.grid(cells, [1, 2, 4])
    assert [row[::2] for row in shares] == [[1.0, 0.0], [0.5, 0.5]]
    assert all(math.isnan(row[1]) for row in shares)


def test_answers_are_those_of_lm_eval(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("gsm8k")
    monkeypatch.setenv("TQ_HF_DATA", "before")
    assert study.main(arguments(place, "gsm8k", tmp_path)) == 0
    assert gsm8k.os.environ["TQ_HF_DATA"] == "before"
    found = stored(tmp_path, "gsm8k")
    assert found["run"]["seeds"] == gsm8k.SEEDS and found["run"]["questions"] == 3
    for entry in found["cells"].values():
        for name in gsm8k.FILTERS:
            assert len(entry[name]["right"]) == len(entry[name]["answers"]) == 3
            assert entry[name]["exact_match"] == sum(entry[name]["right"]) / 3
    assert found["cells"]["tq4"]["mode"] == "decode" and found["cells"][PUBLISHED]["mode"] == "packed"


def test_the_table_pairs_each_setting_with_bf16() -> None:
    def entry(right: list[int]) -> dict[str, Any]:
        answers = {"exact_match": sum(right) / 8, "stderr": 0.1, "right": right}
        return dict.fromkeys(gsm8k.FILTERS, answers) | {"packed_share": 0.9, "cache_ratio": 3.5}

    cells = {"tq2": entry([1, 0, 0, 0, 0, 0, 0, 1]) | {"order": 1}, "bf16": entry([1] * 7 + [0]) | {"order": 0}}
    run = {"model": "some/tiny", "questions": 8, "shots": 5}
    tables = gsm8k.GSM8KStudy.tables([StoredResults(Path("x"), run, cells)])
    assert list(tables) == [f"tiny, the first 8 questions, 5-shot, greedy, {name}" for name in gsm8k.FILTERS]
    assert [line.split(" | ")[0] for line in next(iter(tables.values())).splitlines()[2:]] == ["| bf16", "| tq2"]
    # 6 lost and 1 gained: 2 · (1 + 7) / 128.
    assert (
        "| tq2 | 25.00 ± 10.00 | 6 | 1 | 0.125 | 3.50 | 90 |"
        in tables["tiny, the first 8 questions, 5-shot, greedy, strict-match"]
    )


def test_an_accuracys_error_is_that_of_lm_eval() -> None:
    """lm-eval's `mean_stderr`: the sample's standard deviation over √n; of 1 1 1 0 it is 0.5 / 2."""
    assert gsm8k.standard_error_of_share([1, 1, 1, 0]) == pytest.approx(0.25)
    assert gsm8k.standard_error_of_share([1]) == 0.0


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 · 1/2
        (5, 0, 0.0625),  # 2 · 1/32
        (6, 0, 0.03125),
        (1, 7, 0.0703125),  # 2 · (1 + 8) / 256
        (10, 2, 0.03857421875),  # 2 · (1 + 12 + 66) / 4096
        (4, 4, 1.0),
    ],
)
def test_mcnemar_is_the_exact_binomial_test(lost: int, gained: int, p: float) -> None:
    first = [1] * lost + [0] * gained + [1, 1, 0]
    second = [0] * lost + [1] * gained + [1, 1, 0]
    assert mcnemar(first, second) == Paired(lost, gained, p)
    assert mcnemar(second, first) == Paired(gained, lost, p)


def test_only_the_same_questions_can_be_paired() -> None:
    with pytest.raises(ValueError, match="2 and 3 answers cannot be paired"):
        mcnemar([1, 0], [1, 0, 1])


def test_compare_measures_all_on_the_same_positions(place: Path, tmp_path: Path) -> None:
    assert study.main(arguments(place, "compare", tmp_path)) == 0
    cells = stored(tmp_path, "compare")["cells"]
    assert {entry["positions"] for entry in cells.values()} == {140}
    exact = cells["DynamicCache"]
    for entry in cells.values():
        assert entry["ppl_exact"] == pytest.approx(exact["ppl"], rel=1e-4)
    assert exact["kl"] == pytest.approx(0, abs=1e-9) and exact["top1"] == 1.0
    assert exact["bytes"] == 2 * 2 * (256 + 3) * (32 + 32) * 4  # layers, heads, tokens, K and V, float32
    assert cells["fp8 cast"]["bytes"] * 4 == exact["bytes"]
    quantized = {name: (entry["quantized_layers"], entry["layers"]) for name, entry in cells.items()}
    assert quantized == {"DynamicCache": (0, 2), "fp8 cast": (2, 2), "tq4": (2, 2), "tq2": (2, 2)}
    for name in ("tq4", "tq2"):  # no token takes less than a packed one
        packed = PRESETS[name].layout(32, 32, torch.float32).bytes_per_token
        assert 2 * 2 * (256 + 3) * packed < cells[name]["bytes"] < exact["bytes"]
    assert 0 < cells["fp8 cast"]["kl"] < cells["tq2"]["kl"]


def test_fp8_is_a_plain_cast_however_tokens_come(tiny_model: Any) -> None:
    ids = torch.randint(3, 99, (2, 60), generator=torch.Generator().manual_seed(0))
    argument = cache_argument(tiny_model)
    whole, parts = (other_caches.Fp8CastCache(tiny_model.config) for _ in range(2))
    with torch.no_grad():
        a = tiny_model(ids, **{argument: whole}).logits
        b = torch.cat([tiny_model(part, **{argument: parts}).logits for part in ids.split(17, 1)], 1)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    layer = other_caches.Fp8CastLayer()
    states = torch.tensor([0.1, 1.0, -500.0, 448.0]).view(1, 1, 1, 4)
    key, _ = layer.update(states, states)
    assert key.flatten().tolist() == [0.1015625, 1.0, -448.0, 448.0]
    assert cache_nbytes(whole) * 4 == 3 * 2 * 2 * 60 * 64 * 4


def test_chunks_read_what_single_tokens_would_in_transformers_own_cache(tiny_model: Any) -> None:
    """`other_chunks`, with a rounding quantizer in the place of a backend that is not installed here."""
    from transformers.cache_utils import QuantizedLayer

    class Rounded(QuantizedLayer):
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return (tensor * 4).round() / 4

        def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    def cache() -> Any:
        made = DynamicCache(config=tiny_model.config)
        made.layers = [Rounded(residual_length=16) for _ in made.layers]
        return made

    ids, argument = (
        torch.randint(3, 99, (1, 90), generator=torch.Generator().manual_seed(0)),
        cache_argument(tiny_model),
    )
    chunks = other_caches.other_chunks(30, 90, residual=16)
    assert chunks == [(0, 30), (30, 45), (45, 46), (46, 61), (61, 62), (62, 77), (77, 78), (78, 90)]
    chunked, single = cache(), cache()
    with torch.no_grad():
        a = [tiny_model(part, **{argument: chunked}).logits for part in [ids[:, i:j] for i, j in chunks]]
        b = [tiny_model(part, **{argument: single}).logits for part in ids.split([30, *[1] * 60], 1)]
    torch.testing.assert_close(torch.cat(a, 1), torch.cat(b, 1), rtol=1e-3, atol=1e-3)
    assert other_caches.quantized_share(chunked) == pytest.approx(78 / 90)
    assert other_caches.quantized_share(DynamicCache(config=tiny_model.config)) == 0


def test_backends_that_are_not_installed_are_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_caches, "_is_there", lambda module: False)
    path = tmp_path / "some.yaml"
    caches = ["QuantizedCache quanto, 4 bits", "QuantizedCache hqq, 2 bits", "tq4"]
    path.write_text(yaml.safe_dump({"study": "compare"} | CONFIGS["compare"] | {"caches": caches}))
    argv = [str(path), *arguments(place, "compare", tmp_path)[1:]]
    assert study.main(argv) == 0
    text = (tmp_path / "compare.md").read_text()
    assert "hqq, 2 bits: not measured: hqq is not installed: pip install hqq" in text
    assert "optimum-quanto is not installed" in text
    capsys.readouterr()
    assert study.main(argv) == 0  # looks again
    assert "2 cells measured, 1 were there already" in capsys.readouterr().out


def test_a_cache_that_quantizes_nothing_is_an_error(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump({"study": "compare", "prompt": 100, "new_tokens": 2, "scored": 150, "caches": ["tq4"]}))
    assert study.main([str(path), *arguments(place, "compare", tmp_path)[1:]]) == 1
    assert "quantized none of 101 tokens" in stored(tmp_path, "compare")["cells"]["tq4"]["error"]
