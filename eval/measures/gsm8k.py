"""`gsm8k`: exact match on grade-school problems, generated through the cache by lm-eval's own task and the model `tq-hf`.

Each question's answer is kept right or wrong, so that settings are compared with bf16 question by question (`mcnemar.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

from tq_hf.attention import ATTENTION_NAME
from tq_hf.commands import RequestError
from tq_hf.generation.comparison import Progress

from ..data import GSM8K, require_files
from ..results import described, markdown
from ..settings import OWN
from ..stored import StoredResults
from .base import EXACT, Cell, Result, Study, measured, title
from .mcnemar import mcnemar
from .text_quality import AS_PUBLISHED

TASKS = Path(__file__).parents[1] / "tasks"
ALL = 1319  # questions of the test set
FILTERS = ("strict-match", "flexible-extract")  # the answer behind "####", and the last number
# lm-eval's own defaults, said here because results depend on them: the few-shot examples are drawn with the last one.
SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}


@dataclass(frozen=True)
class GSM8KOptions:
    """The first `questions` of the test set, after `shots` examples each; greedy, up to `new_tokens`."""

    settings: tuple[str, ...] = (EXACT, *OWN, *AS_PUBLISHED)
    questions: int = ALL
    shots: int = 5
    new_tokens: int = 256
    batch: int = 64


class GSM8KStudy(Study):
    """Exact match of each setting."""

    kind = "gsm8k"
    options_type: ClassVar[type] = GSM8KOptions
    unit = "question"

    def prepare(self) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise RequestError(f"gsm8k runs through lm-eval ({error}): pip install -e '.[eval]'.") from error
        if self.data_dir is not None:
            require_files(self.data_dir, *GSM8K)
        # One folder's tasks are found in no time; lm-eval's own thousands take a while.
        self.task = "gsm8k" if self.data_dir is None else "gsm8k_local"
        local = {"include_path": str(TASKS), "include_defaults": False}
        self.manager = TaskManager(**({} if self.data_dir is None else local))

    def facts(self) -> dict[str, Any]:
        options: GSM8KOptions = self.options
        return {
            "questions": options.questions,
            "shots": options.shots,
            "new_tokens": options.new_tokens,
            "seeds": SEEDS,
        }

    def cells(self) -> list[Cell]:
        exact = [Cell(EXACT, {"cache": "DynamicCache"})] if EXACT in self.options.settings else []
        return exact + [Cell(each.name, described(each), each) for each in self.settings()]

    def work(self, cell: Cell) -> int:
        return int(self.options.questions)

    def measure(self, batch: Sequence[Cell], progress: Progress) -> list[Result]:
        return [self._answer(cell, progress) for cell in batch]

    def _answer(self, cell: Cell, progress: Progress) -> Result:
        import lm_eval

        options: GSM8KOptions = self.options
        model = self._lm(cell)
        with data_folder(self.data_dir):
            outcome = lm_eval.simple_evaluate(
                model=model,
                tasks=[self.task],
                task_manager=self.manager,
                num_fewshot=options.shots,
                limit=options.questions,
                gen_kwargs={"max_gen_toks": options.new_tokens},
                bootstrap_iters=0,
                **SEEDS,
            )
        progress(options.questions)
        result = {name: filtered(outcome["samples"][self.task], name) for name in FILTERS}
        if cell.subject is not None:
            used = model.get_model_info()["tq_hf"]
            result |= {name: used[name] for name in ("mode", "packed_share", "cache_ratio", "quantized_layers", "layers")}
        return result

    def _lm(self, cell: Cell) -> Any:
        """lm-eval's model over the loaded one."""
        from lm_eval.models.huggingface import HFLM

        from tq_hf.lm_eval_model import TurboQuantLM

        model, setting = self.loaded.model, cell.subject
        model.set_attn_implementation(ATTENTION_NAME)  # of all cells, so that the cache is all that differs
        common = {"pretrained": model, "tokenizer": self.loaded.tokenizer, "batch_size": self.options.batch}
        if setting is None:
            return HFLM(**common)
        if setting.split is not None:
            raise ValueError("a simulated setting cannot generate: choose one that is packed.")
        return TurboQuantLM(preset=setting.config, mode="packed" if setting.at_once else "decode", **common)

    @classmethod
    def tables(cls, results: Sequence[StoredResults]) -> dict[str, str]:
        shown = {}
        for found in results:
            run = found.run
            which = f"all {ALL:,}" if run["questions"] >= ALL else f"the first {run['questions']:,}"
            for name in FILTERS:
                heading = f"{title(found)}, {which} questions, {run['shots']}-shot, greedy, {name}"
                shown[heading] = _table(measured(found), name)
        return shown

    @staticmethod
    def line(result: Result) -> str:
        share = f"  packed {result['packed_share']:.0%}" if "packed_share" in result else ""
        strict = result[FILTERS[0]]
        return f"exact match {strict['exact_match']:.2%} ± {strict['stderr']:.2%}{share}"


def filtered(samples: Sequence[dict[str, Any]], name: str) -> Result:
    """Which answers are right to one of the task's filters, in the order of the questions, and what they are."""
    found = sorted((each for each in samples if each["filter"] == name), key=lambda each: each["doc_id"])
    right = [int(each["exact_match"]) for each in found]
    return {
        "exact_match": sum(right) / len(right),
        "stderr": standard_error_of_share(right),
        "right": right,
        "answers": [str(each["filtered_resps"][0]) for each in found],
    }


def _table(entries: dict[str, Result], name: str) -> str:
    head = ["setting", "exact match, %", "lost", "gained", "p (McNemar)", "times smaller", "packed, %"]
    rows = []
    for setting, entry in entries.items():
        mine = entry[name]
        row = [setting, f"{100 * mine['exact_match']:.2f} ± {100 * mine['stderr']:.2f}"]
        if setting == EXACT or EXACT not in entries:
            row += ["", "", ""]
        else:
            pair = mcnemar(entries[EXACT][name]["right"], mine["right"])
            row += [str(pair.lost), str(pair.gained), "< 0.001" if pair.p < 0.001 else f"{pair.p:.3f}"]
        if "packed_share" in entry:
            row += [f"{entry['cache_ratio']:.2f}", f"{100 * entry['packed_share']:.0f}"]
        else:
            row += ["1", "0"]
        rows.append(row)
    return markdown(head, rows)


def standard_error_of_share(right: Sequence[int]) -> float:
    """Standard error of the share of right answers, as lm-eval gives it for a mean: from the sample's variance."""
    n, share = len(right), sum(right) / len(right)
    return sqrt(share * (1 - share) / (n - 1)) if n > 1 else 0.0


@contextmanager
def data_folder(folder: Path | None) -> Iterator[None]:
    """Let the tasks of `eval/tasks` read a folder."""
    before = os.environ.get("TQ_HF_DATA")
    if folder is not None:
        os.environ["TQ_HF_DATA"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TQ_HF_DATA", None)
        else:
            os.environ["TQ_HF_DATA"] = before
