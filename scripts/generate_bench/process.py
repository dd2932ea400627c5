"""A worker as its parent sees it: requests, replies, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Reply = dict[str, Any]


class OutOfTime(Exception):
    """The budget of the whole run is spent."""


class Deadline:
    """When a run has to end; `seconds` None: never."""

    def __init__(self, seconds: float | None) -> None:
        self.at = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        return float("inf") if self.at is None else self.at - time.monotonic()


class WorkerProcess:
    """A `generate_bench.worker` in a process of its own, with what it prints in `log`."""

    def __init__(self, shape: str, device: str, log: Path, deadline: Deadline, environment: dict[str, str]) -> None:
        paths = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.log, self.deadline = log, deadline
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "generate_bench.worker", shape, device],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True, bufsize=1,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
                start_new_session=True,  # the compiler's own processes end with it
            )  # fmt: skip
        self.replies: queue.Queue[Reply] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # imports may print, before the worker keeps its output to itself
                self.replies.put(json.loads(line))
        code = self.process.wait()
        self.replies.put({"error": f"the worker ended with exit code {code}"})

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # where it has ended, its exit code is among the replies
            self.process.stdin.write(json.dumps(request) + "\n")

    def receive(self, seconds: float) -> Reply:
        """Its next reply; an error if there is none in time, and then the worker is ended.

        Raises:
            OutOfTime: the run's budget ends before that.
        """
        left = self.deadline.left()
        try:
            return self.replies.get(timeout=max(0.0, min(seconds, left)))
        except queue.Empty:
            self.end()
            if left <= seconds:
                raise OutOfTime from None
            return {"error": f"no answer within {seconds:.0f} s"}

    def ask(self, seconds: float, **request: Any) -> Reply:
        self.send(**request)
        return self.receive(seconds)

    def end(self) -> None:
        """End it and what it has started, at once; its memory is free afterwards."""
        assert self.process.stdin is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def last_words(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
