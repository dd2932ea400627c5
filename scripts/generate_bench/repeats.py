"""How often a cell is timed, and what is kept of several runs.

The host limits a decode step that is not compiled, and a shared host changes its speed by up to 3 times within a minute. So
such caches take turns, every one once a round, and the fastest run is kept, which is what the code can do undisturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .caches import BenchCache
from .measure import NEW_TOKENS, Prepared, Result, compilations, generate, measure, packed_facts, summary
from .shapes import Point, prompt

LONG = 1 << 16  # tokens of all rows, beyond which reading the prompt is what takes long
REPEATS, LONG_REPEATS = 3, 2


def repeats(cache: BenchCache, point: Point) -> int:
    """How many rounds a cache without compilation takes part in."""
    # It dequantizes all it holds at every step and takes an order of magnitude longer: more rounds of it would take longer
    # than those of all others together, and its distance from them is beyond what a host's speed changes.
    if cache.slow:
        return 1
    return REPEATS if point.rows * point.tokens <= LONG else LONG_REPEATS


def combined(runs: Sequence[Result]) -> Result:
    """What is kept of a cell's runs: the fastest one's result, with the least first-token time of all.

    Returns:
        `repeats_ms` besides: the median step of each run, in their order.
    """
    fastest = min(runs, key=lambda run: run["step_s"])
    return fastest | {
        "first_token_s": min(run["first_token_s"] for run in runs),
        "repeats_ms": [round(1e3 * run["step_s"], 3) for run in runs],
    }


def measure_compiled(model: Any, prepared: Prepared, new_tokens: int = NEW_TOKENS) -> Result:
    """Time a compiled cache behind a prompt, once more behind what it generated (the better run of both counts), and a third
    time with `decode_ahead`.

    The time of the first token and peaks are those of the first run, which alone reads the prompt. Of what was compiled
    in any, all are marked.

    Returns:
        What `measure` does; `ahead_step_s` and `ahead_steps_ms` are those of the third run.

    Raises:
        RuntimeError: as `measure` does.
    """
    first = measure(model, prepared, new_tokens)
    graphs = compilations()["graphs"]
    again = _go_on(model, prepared, new_tokens) | {"first_token_s": first["first_token_s"]}
    ahead = _go_on(model, prepared, new_tokens, ahead=True)
    if prepared.cache.packed:
        again |= packed_facts(prepared.made)
    facts = compilations() | {f"ahead_{name}": ahead[name] for name in ("step_s", "steps_ms")}
    facts["recompiled"] = first["recompiled"] + facts["graphs"] - graphs
    return combined([first | facts, first | again | facts])


def _go_on(model: Any, prepared: Prepared, new_tokens: int, **options: bool) -> Result:
    """Generate behind what the cache holds: all but the last of these tokens, with which `generate()` goes on."""
    ids = prompt(model, prepared.point.rows, int(prepared.made.get_seq_length()) + 1)
    return summary(generate(model, ids, prepared.cache, prepared.made, new_tokens, **options), prepared.point)
