"""What a command refuses, without the imports that it takes to serve it."""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be served; the message is one line."""


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__
