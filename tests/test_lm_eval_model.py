"""The lm-eval model `tq-hf`, beside lm-eval's own `hf`: the same answers where nothing is quantized."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import tiny_models
from tests.word_model import DATA, save_word_model, words
from tq_hf import PRESETS, cli

lm_eval = pytest.importorskip("lm_eval", reason="only the extra `eval` installs lm-eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from tq_hf import lm_eval_model  # noqa: E402
from tq_hf.lm_eval_model import TurboQuantLM  # noqa: E402
from tq_hf.scoring.cache_usage import CacheUsage  # noqa: E402

LOCAL = Path(__file__).parents[1] / "eval" / "tasks"
TASKS = ["tq_arithmetic", "tq_arithmetic_choice", "tq_prose"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder: a tiny Llama in float32 with far-apart logits, and a tokenizer with one token a word."""
    path = tmp_path_factory.mktemp("model")
    save_word_model(path)
    return str(path)


def ours(folder: str, **arguments: Any) -> TurboQuantLM:
    return TurboQuantLM(pretrained=folder, device="cpu", **{"preset": "raw", "batch_size": 3, **arguments})


def theirs(folder: str, **arguments: Any) -> HFLM:
    return HFLM(pretrained=folder, device="cpu", batch_size=3, **arguments)


def requests(kind: str, arguments: list[tuple[Any, ...]], task: str = "some_task") -> list[Any]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=(task, i, 1)) for i, each in enumerate(arguments)
    ]


def sentence(length: int, seed: int = 0) -> str:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = words()
    return " ".join(vocabulary[i] for i in torch.randint(0, len(vocabulary), (length,), generator=generator).tolist())


CONTINUATIONS = [
    ("", sentence(150, 1)),
    (sentence(150, 2), " water"),
    (sentence(150, 2), " bell"),
    (sentence(150, 2), " bell water"),
    (sentence(60, 3), " " + sentence(110, 4)),
    (sentence(20, 5), " " + sentence(3, 6)),
    (sentence(180, 7), " " + sentence(3, 8)),
]  # fmt: skip


def assert_same_scores(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5, abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("mode", ["decode", "packed", "prefill=100"])
def test_unquantized_scores_are_those_of_hf(folder: str, mode: str) -> None:
    model, reference = ours(folder, mode=mode), theirs(folder)
    asked = requests("loglikelihood", CONTINUATIONS)
    best = sentence(150, 2), " " + reference.tok_decode([int(most_likely(reference, sentence(150, 2)))])
    asked += requests("loglikelihood", [best])
    found = model.loglikelihood(asked, disable_tqdm=True)
    assert_same_scores(found, reference.loglikelihood(asked, disable_tqdm=True))
    assert found[-1][1]
    whole = requests("loglikelihood_rolling", [(sentence(n, n),) for n in (170, 20, 200)])
    rolling = model.loglikelihood_rolling(whole, disable_tqdm=True)
    assert rolling == pytest.approx(reference.loglikelihood_rolling(whole, disable_tqdm=True), rel=1e-5)


def most_likely(model: HFLM, text: str) -> torch.Tensor:
    with torch.no_grad():
        return model.model(torch.tensor([model.tok_encode(text)])).logits[0, -1].argmax()


@pytest.mark.parametrize("mode", ["decode", "packed", "prefill=100"])
def test_unquantized_generations_are_those_of_hf(folder: str, mode: str) -> None:
    """In a left-padded batch; each mode feeds the prompt in its own way."""
    settings = {"until": ["water"], "max_gen_toks": 40, "do_sample": False}
    prompts = [(sentence(n, n), settings) for n in (160, 90, 131, 170, 75)]
    asked = requests("generate_until", prompts)
    model = ours(folder, mode=mode)
    found = model.generate_until(asked, disable_tqdm=True)
    assert found == theirs(folder).generate_until(asked, disable_tqdm=True)
    assert len(set(found)) == len(found)
    assert 0.3 < model.usage["some_task"].packed_share < 1


def test_truncation_is_that_of_hf(folder: str) -> None:
    """Contexts are cut on the left to the model's maximum, and texts into windows."""
    model, reference = ours(folder, max_length=150), theirs(folder, max_length=150)
    asked = requests("loglikelihood", [(sentence(300, 1), " water"), (sentence(140, 2), " " + sentence(30, 3))])
    assert_same_scores(model.loglikelihood(asked, True), reference.loglikelihood(asked, True))
    whole = requests("loglikelihood_rolling", [(sentence(400, 4),), (sentence(160, 5),)])
    expected = reference.loglikelihood_rolling(whole, True)
    assert model.loglikelihood_rolling(whole, True) == pytest.approx(expected, rel=1e-5)
    assert model.usage["some_task"].texts == 5
    asked = requests("generate_until", [(sentence(300, 6), {"until": [], "max_gen_toks": 12})])
    assert model.generate_until(asked, True) == reference.generate_until(asked, True)


def test_batch_sizes_are_found_automatically(folder: str) -> None:
    model = ours(folder, batch_size="auto", max_batch_size=2, max_length=180)
    asked = requests("loglikelihood", CONTINUATIONS)
    assert_same_scores(model.loglikelihood(asked, True), theirs(folder, max_length=180).loglikelihood(asked, True))
    assert model.batch_sizes == {0: 2}
    whole = requests("loglikelihood_rolling", [(sentence(170, 1),)])
    assert model.loglikelihood_rolling(whole, True)[0] < 0
    asked = requests("generate_until", [(sentence(150, 2), {"until": [], "max_gen_toks": 6})])
    assert len(model.generate_until(asked, True)) == 1


@pytest.mark.parametrize("chat", [False, True])
def test_tasks_have_the_results_of_hf_where_nothing_is_quantized(folder: str, chat: bool) -> None:
    """Few-shot prompts, chat templates, stop sequences and filters, for each kind of request."""
    outcomes = [
        lm_eval.simple_evaluate(
            model=name,
            model_args={"pretrained": folder, **more},
            tasks=TASKS,
            task_manager=TaskManager(include_path=str(DATA), include_defaults=False),
            batch_size=4,
            device="cpu",
            apply_chat_template=chat,
            bootstrap_iters=0,
        )
        for name, more in (("hf", {}), ("tq-hf", {"preset": "raw"}))
    ]
    reference, found = outcomes
    for task in TASKS:
        for metric, value in reference["results"][task].items():
            same = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert found["results"][task][metric] == same
        for a, b in zip(reference["samples"][task], found["samples"][task]):
            assert a["arguments"] == b["arguments"]
            if task == "tq_arithmetic":
                assert a["resps"] == b["resps"]
    facts = found["config"]["tq_hf"]
    assert (facts["preset"], facts["mode"], facts["attention"]) == ("raw", "decode", "turboquant")
    assert set(facts["tasks"]) == set(TASKS)


def test_the_command_runs_tasks_through_the_cache(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # lm-eval reads the files of all its tasks first, which takes longer than the run.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    arguments = ["--model_args", f"pretrained={folder},preset=tq4,recent_window=32", "--device", "cpu", "--batch_size", "4"]
    arguments += ["--include_path", str(DATA), "--tasks", ",".join(TASKS), "--output_path", str(tmp_path / "out.json")]
    assert cli.main(["lm-eval", "run", "--model", "tq-hf", *arguments]) == 0
    printed = capsys.readouterr().out
    (path,) = tmp_path.glob("out_*.json")
    result = json.loads(path.read_text())
    facts = result["config"]["tq_hf"]
    assert facts["packed_share"] > 0.5 and facts["cache_ratio"] > 1.2
    assert facts["settings"]["recent_window"] == 32 and facts["layers"] == facts["quantized_layers"] == 2
    for task in TASKS:
        assert facts["tasks"][task]["packed_share"] > 0.5
        assert re.search(rf"tq-hf, {task}: preset tq4, mode decode: \d\d\.\d% of tokens read from packed pages", printed)
    assert set(result["results"]) == set(TASKS)


def yaml_of(path: Path) -> dict[str, Any]:
    """A task's YAML file, whose `!function` tags become the names they have."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node).rpartition(".")[2])
    return yaml.load(path.read_text(encoding="utf-8"), Loader)


@pytest.mark.parametrize("name", ["gsm8k", "wikitext"])
def test_tasks_with_local_data_are_those_of_lm_eval(name: str) -> None:
    theirs, found = yaml_of(Path(lm_eval.__file__).parent / f"tasks/{name}/{name}.yaml"), yaml_of(LOCAL / f"{name}.yaml")
    assert (theirs["task"], found["task"]) == (name, f"{name}_local")
    for key in set(found) - {"task", "custom_dataset"}:
        assert found[key] == theirs[key], key
    unused = {"dataset_path", "dataset_name", "tag", "repeats", "training_split", "validation_split"}
    assert set(theirs) - set(found) <= unused | {"should_decontaminate", "doc_to_decontamination_query"}


def test_tasks_with_local_data_read_the_folder(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        shutil.copy(DATA / f"arithmetic_{split}.jsonl", tmp_path / "gsm8k" / f"{split}.jsonl")
    manager = TaskManager(include_path=str(LOCAL), include_defaults=False)
    monkeypatch.setenv("TQ_HF_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"names no folder with wikitext2_raw/wikitext2_test_pages\.jsonl"):
        manager.load(["wikitext_local"])
    (tmp_path / "wikitext2_raw").mkdir()
    shutil.copy(DATA / "prose.jsonl", tmp_path / "wikitext2_raw" / "wikitext2_test_pages.jsonl")
    outcome = lm_eval.simple_evaluate(
        model=ours(folder, preset="tq3"), tasks=["gsm8k_local", "wikitext_local"], task_manager=manager,
        gen_kwargs={"max_gen_toks": 8}, limit=2, bootstrap_iters=0,
    )  # fmt: skip
    shares = {task: used["packed_share"] for task, used in outcome["config"]["tq_hf"]["tasks"].items()}
    assert set(shares) == {"gsm8k_local", "wikitext_local"} and min(shares.values()) > 0.5
    assert outcome["samples"]["gsm8k_local"][0]["arguments"][0][0].count("Question:") == 6


@pytest.mark.network
def test_a_real_model_keeps_its_perplexity(embedded_folder: Path) -> None:
    def perplexity(**arguments: Any) -> float:
        outcome = lm_eval.simple_evaluate(
            model="tq-hf",
            model_args={"pretrained": str(embedded_folder), **arguments},
            tasks=["tq_prose"],
            task_manager=TaskManager(include_path=str(DATA), include_defaults=False),
            limit=1,
            device="cpu",
            bootstrap_iters=0,
        )
        return outcome["results"]["tq_prose"]["word_perplexity,none"]

    exact, packed = perplexity(preset="raw"), perplexity(preset="tq4")
    assert 20 < exact < 100
    assert packed != exact and packed == pytest.approx(exact, rel=0.02)


def test_modes_and_presets_change_scores(folder: str) -> None:
    asked = requests("loglikelihood_rolling", [(sentence(250, 1),)])
    scores = {
        (preset, mode): ours(folder, preset=preset, mode=mode).loglikelihood_rolling(asked, True)[0]
        for preset in ("tq2", "4bit_nc")
        for mode in ("decode", "packed", "prefill=200")
    }
    assert len(set(scores.values())) == len(scores)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "tq5"}, f"preset='tq5' is unknown: expected one of {', '.join(PRESETS)}"),
        ({"mode": "exact"}, "mode='exact' is unknown: expected decode, packed or prefill=N"),
        ({"prefill": 0}, "mode='prefill=0' is unknown"),
        ({"mode": "packed", "prefill": 5}, "mode='packed' and prefill=5 contradict each other"),
        ({"mode": "packed", "recent_window": 64}, "recent_window=64 contradicts mode='packed'"),
        ({"page_size": 48}, "page_size=48"),
        ({"backend": "seq2seq"}, "tq-hf evaluates decoder-only models"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_loaded(
    folder: str, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HFLM, "_create_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=re.escape(message)):
        ours(folder, **arguments)


def test_a_prefill_may_be_given_by_number(folder: str) -> None:
    for arguments in ({"prefill": 77}, {"mode": "prefill", "prefill": 77}, {"mode": "prefill=77"}):
        assert str(ours(folder, **arguments).mode) == "prefill=77"


@pytest.mark.parametrize("family", ["bart", "t5_position_bias"])
def test_encoder_decoder_models_are_refused(folder: str, family: str, tmp_path: Path) -> None:
    tiny_models.tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is an encoder-decoder .*use --model hf"):
        ours(str(tmp_path), tokenizer=folder)


def test_a_model_without_packed_layers_is_refused(folder: str, tmp_path: Path) -> None:
    tiny_models.tiny_model("mistral_sliding").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantizes none of this 'mistral' model's 2 layers"):
        ours(str(tmp_path), tokenizer=folder)


def test_a_model_that_forgets_its_states_generates_only(folder: str, tmp_path: Path) -> None:
    tiny_models.tiny_model("jamba", vocab_size=900, initializer_range=0.1).save_pretrained(tmp_path)
    model = ours(str(tmp_path), tokenizer=folder, batch_size=1)
    asked = requests("generate_until", [(sentence(150), {"until": [], "max_gen_toks": 8})])
    reference = HFLM(pretrained=str(tmp_path), tokenizer=folder, device="cpu")
    assert model.generate_until(asked, True) == reference.generate_until(asked, True)
    with pytest.raises(ValueError, match="'jamba' model goes on from a cache with single tokens only"):
        model.loglikelihood(requests("loglikelihood", CONTINUATIONS), True)


def test_a_model_object_keeps_its_attention(folder: str) -> None:
    loaded = theirs(folder).model
    model = TurboQuantLM(pretrained=loaded, tokenizer=theirs(folder).tokenizer, preset="raw", batch_size=2)
    assert loaded.config._attn_implementation == "sdpa"
    asked = requests("loglikelihood", CONTINUATIONS)
    assert_same_scores(model.loglikelihood(asked, True), theirs(folder).loglikelihood(asked, True))
    assert ours(folder, attn_implementation="eager").model.config._attn_implementation == "eager"


def test_attention_code_of_a_models_own_stays(folder: str, tmp_path: Path) -> None:
    tiny_models.tiny_model("falcon_mqa", vocab_size=900).save_pretrained(tmp_path)
    model = ours(str(tmp_path), tokenizer=folder)
    asked = requests("loglikelihood", CONTINUATIONS)
    expected = HFLM(pretrained=str(tmp_path), tokenizer=folder, device="cpu").loglikelihood(asked, True)
    assert_same_scores(model.loglikelihood(asked, True), expected)


class TestAShareOfZero:
    """A run whose results owe nothing to the cache fails, and says what to do."""

    ADVICE = "pages are read behind the first 132 tokens.*Use mode=packed, longer prompts"

    def test_is_refused_before_continuations_are_scored(self, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lm_eval_model, "score_tokens", lambda *_: pytest.fail("something was scored"))
        asked = requests("loglikelihood", [(sentence(200), " water")], "long")
        asked += requests("loglikelihood", [(sentence(n), " water") for n in (30, 132)], "short")
        with pytest.raises(ValueError, match=f"task short: .*longest text has 132 tokens.*{self.ADVICE}"):
            ours(folder).loglikelihood(asked, True)

    def test_is_refused_after_texts_were_scored(self, folder: str) -> None:
        asked = requests("loglikelihood_rolling", [(sentence(100),)])
        with pytest.raises(ValueError, match=f"task some_task: no token was read.*{self.ADVICE}"):
            ours(folder).loglikelihood_rolling(asked, True)

    @pytest.mark.parametrize(("prompt", "new"), [(60, 20), (180, 1)])
    def test_is_refused_after_generating(self, folder: str, prompt: int, new: int) -> None:
        """Too short a text, or a first token only, which comes from the exact prompt."""
        asked = requests("generate_until", [(sentence(prompt), {"until": [], "max_gen_toks": new})])
        with pytest.raises(ValueError, match=self.ADVICE):
            ours(folder).generate_until(asked, True)

    def test_is_refused_with_an_exact_prefill_of_everything(self, folder: str) -> None:
        asked = requests("loglikelihood", [(sentence(200), " water")])
        with pytest.raises(ValueError, match="behind the first 500 tokens"):
            ours(folder, prefill=500).loglikelihood(asked, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((sentence(20), " " + sentence(60)), "continuation of 60 cannot be scored: .* at most max_length=50"),
        ((sentence(20), ""), "continuation of 0 cannot be scored: expected at least one token"),
    ],
)
def test_impossible_continuations_are_refused(folder: str, arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(folder, max_length=50, recent_window=0).loglikelihood(requests("loglikelihood", [arguments]), True)


def test_shares_count_what_the_last_query_reads(folder: str) -> None:
    model = ours(folder, preset="tq4")
    model.loglikelihood(requests("loglikelihood", [(sentence(199), " water"), (sentence(10), " bell")], "a"), True)
    used = model.usage["a"]
    # 199 and 10 tokens: of the first, 68 are exact before the chunk that starts at 196, and two pages are read.
    assert (used.texts, used.tokens, used.packed_tokens) == (2, 209, 128)
    model = ours(folder, preset="tq4", batch_size=2)
    asked = requests("generate_until", [(sentence(n, n), {"until": [], "max_gen_toks": 9}) for n in (190, 180)], "b")
    model.generate_until(asked, True)
    used = model.usage["b"]
    # 8 new tokens are fed: the last one, at 197, reads the two pages there were at 197; the second row starts at 10.
    assert (used.texts, used.tokens, used.packed_tokens) == (2, 198 + 188, 128 + 118)
    # A single new token comes from the prompt's last chunk, from 196 on; in `packed`, from a prompt whose pages are packed.
    asked = requests("generate_until", [(sentence(200, 1), {"until": [], "max_gen_toks": 1})], "c")
    for mode, packed in (("prefill=100", 128), ("packed", 192)):
        model = ours(folder, preset="tq4", mode=mode)
        model.generate_until(asked, True)
        assert (model.usage["c"].tokens, model.usage["c"].packed_tokens) == (200, packed)


def test_usage_is_summed_over_processes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"some_task": CacheUsage(1, 100, 60, 10.0, 30.0), "elsewhere": CacheUsage(1, 100, 50, 1.0, 2.0)}

    def gathered(mine: list[dict[str, Any]]) -> list[dict[str, Any]]:
        is_usage = all(isinstance(value, CacheUsage) for value in mine[0].values())
        return [*mine, other if is_usage else {"some_task": 100}]

    monkeypatch.setattr(lm_eval_model, "gather_object", gathered)
    model = ours(folder, preset="tq4")
    model._world_size = 2
    model.loglikelihood(requests("loglikelihood", [(sentence(199), " water")]), True)
    assert model.usage["some_task"].packed_tokens == 128 + 60
    assert model.usage["elsewhere"] == other["elsewhere"]


def test_short_texts_of_one_process_do_not_end_the_run(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task is refused where none of its texts reads a page in any process, and all processes refuse it then."""
    longest = {"some_task": 199, "elsewhere": 100}
    monkeypatch.setattr(lm_eval_model, "gather_object", lambda mine: [*mine, longest])
    model = ours(folder, preset="tq4")
    model._world_size = 2
    monkeypatch.setattr(model, "_account", lambda: None)
    with pytest.raises(ValueError, match=r"task elsewhere: .*longest text has 100 tokens"):
        model.loglikelihood(requests("loglikelihood", [(sentence(30), " water")]), True)
    del longest["elsewhere"]
    assert len(model.loglikelihood(requests("loglikelihood", [(sentence(30), " water")]), True)) == 1


def test_copies_that_fill_a_process_up_are_not_counted(folder: str) -> None:
    """lm-eval gives every process as many requests as the others have, by repeating its last one."""
    model = ours(folder, preset="tq4")
    scored = requests("loglikelihood_rolling", [(sentence(199, 1),), (sentence(150, 2),)])
    scores = model.loglikelihood_rolling([*scored, scored[-1], scored[-1]], True)
    assert len(scores) == 4 and scores[1:] == [pytest.approx(scores[1], rel=1e-5)] * 3
    assert (model.usage["some_task"].texts, model.usage["some_task"].tokens) == (2, 199 + 150)
    model = ours(folder, preset="tq4")
    asked = requests("generate_until", [(sentence(n, n), {"until": [], "max_gen_toks": 9}) for n in (190, 180)])
    texts = model.generate_until([*asked, asked[-1]], True)
    assert texts[2] == texts[1] != texts[0]
    assert model.usage["some_task"].texts == 2


def test_the_command_needs_lm_eval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.__main__", None)
    assert cli.main(["lm-eval", "ls"]) == 2
    assert capsys.readouterr().err == "error: lm_eval.__main__ is not installed: pip install 'tq-hf[eval]'.\n"
