"""Measuring several things, of which a broken one must not lose the others."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tq_hf.commands import first_line
from tq_hf.generation.comparison import Progress

Subject = TypeVar("Subject")
Result = dict[str, Any]


def measure_apart(
    batch: Sequence[Subject],
    measure: Callable[[Sequence[Subject], Progress], list[Result]],
    work: Callable[[Subject], int],
    bar: Any,
) -> list[Result]:
    """Measure subjects together; one by one if that fails, so that a broken subject is the only one lost.

    Args:
        batch: what `measure` takes at once.
        measure: gives a result a subject, and calls what it is given with the work done so far.
        work: how much of the bar a subject is.
        bar: from tqdm.

    Returns:
        A result a subject, with the `"seconds"` it took; `{"error": ...}` of those that failed.
    """
    began, done = time.perf_counter(), bar.n
    try:
        results = measure(batch, bar.update)
    except Exception as error:  # whatever is wrong with one subject, the others are worth having
        failure = f"{type(error).__name__}: {first_line(error)}"
        if len(batch) == 1:
            bar.write(traceback.format_exc(), file=sys.stderr)
    else:
        seconds = round((time.perf_counter() - began) / len(batch), 2)
        return [result | {"seconds": seconds} for result in results]
    # The error is gone by here, and with it the caches that its frames held.
    gc.collect()
    bar.update(done - bar.n)
    if len(batch) > 1:
        return [result for subject in batch for result in measure_apart([subject], measure, work, bar)]
    bar.update(work(batch[0]))
    return [{"error": failure}]
