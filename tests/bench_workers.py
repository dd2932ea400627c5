"""Stands for a worker process of `scripts/bench_generate.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FakeWorker:
    """Answers as it is told, by cache and point."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.answer, self.replies = answer, []
        self.ended = False

    def send(self, **request: Any) -> None:
        assert not self.ended
        self.replies.append(self.answer(request))

    def receive(self, seconds: float) -> dict[str, Any]:
        return self.replies.pop(0)

    def ask(self, seconds: float, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.receive(seconds)

    def end(self) -> None:
        self.ended = True

    def last_words(self) -> str:
        return "what it said"
