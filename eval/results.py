"""Results on disk: a JSON file for a model and window, and the table of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tq_hf.commands import RequestError

from .settings import Setting, all_settings
from .stored import StoredResults

TABLE_NAME = "ablation.md"


class ModelResults(StoredResults):
    """What `scripts/ablation` measured of one model at one window; an entry a setting."""

    key = "settings"
    command = "scripts/ablation"

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        return self.entries

    @classmethod
    def open(cls, out: Path, run: dict[str, Any]) -> ModelResults:
        """The results that `out` has of this run, or none yet.

        Raises:
            RequestError: the file holds another run's results, or cannot be read.
        """
        return cls.opened(out / f"{Path(run['model']).name}-w{run['window']}.json", run)

    def has(self, setting: Setting) -> bool:
        """Whether the setting was measured, configured as it is now."""
        return self.holds(setting.name, described(setting))

    def add(self, setting: Setting, result: dict[str, Any]) -> None:
        """Keep a setting's result, and write the file."""
        facts = {"groups": list(setting.groups), "reason": setting.reason, "simulated": setting.split is not None}
        self.put(setting.name, facts | {"config": described(setting)} | result)


def described(setting: Setting) -> dict[str, Any]:
    """A setting's configuration, as JSON keeps it."""
    described = asdict(setting.config)
    if setting.split is not None:
        described["split"] = asdict(setting.split)
    if setting.at_once:
        described["at_once"] = True
    return described


def read_all(out: Path) -> list[ModelResults]:
    """Every model's results in a folder, by window and name.

    Raises:
        RequestError: there are none, or a file cannot be read.
    """
    found = [ModelResults.read(path) for path in sorted(out.glob("*-w*.json"))]
    if not found:
        raise RequestError(f"{out} holds no results: run scripts/ablation --out {out} first.")
    return sorted(found, key=lambda results: (results.run["window"], results.run["model"]))


def table(models: Sequence[ModelResults]) -> str:
    """All results as one Markdown table: a row a setting, three columns a model and window."""
    order = [setting.name for setting in all_settings()]
    names = list(dict.fromkeys(name for results in models for name in results.settings))
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    head = ["setting", "what it tells"]
    for results in models:
        shown = f"{Path(results.run['model']).name}, {results.run['window']:,}"
        head += [f"{shown}: bytes", "ΔPPL %", "KL", "top-1 %"]
    rows = []
    for name in names:
        found = [results.settings.get(name) for results in models]
        reason = next(result["reason"] for result in found if result is not None)
        rows.append([name, reason, *(cell for result in found for cell in _cells(result))])
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells as a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)) + "\n"


def _cells(result: dict[str, Any] | None) -> list[str]:
    """Bytes a token and KV head (a second number: exact layers included), change of perplexity, KL, agreement."""
    if result is None:
        return ["", "", "", ""]
    if "error" in result:
        return ["failed", "", "", ""]
    size, mean = result["page_bytes"], result["mean_bytes"]
    kl_error, ppl_error = result["kl_stderr"], result.get("ppl_delta_stderr")  # which older files lack
    return [
        f"{size:g}" if mean == size else f"{size:g} ({mean:.0f})",
        f"{result['ppl_delta_percent']:+.2f}" + ("" if ppl_error is None else f" ± {ppl_error:.2f}"),
        f"{result['kl']:.4f}" + ("" if kl_error is None else f" ± {kl_error:.4f}"),
        f"{100 * result['top1']:.1f}",
    ]
