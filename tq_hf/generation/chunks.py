"""How to cut a text so that feeding it in chunks reads what feeding it token by token would read."""

from __future__ import annotations

from ..config import TurboQuantConfig


def first_page_tokens(config: TurboQuantConfig) -> int:
    """How many tokens a sequence has when its first page is packed."""
    return config.sink_tokens + config.recent_window + config.page_size


def text_chunks(
    length: int, config: TurboQuantConfig, positions: int | None = None, prompt: int = 0, pages: int = 1
) -> list[tuple[int, int]]:
    """Cut a text so that feeding it in chunks reads what feeding it token by token would read.

    After the first chunk, at least one page is packed; each later chunk ends where a page falls due: the next one, so that
    no page becomes due in the middle of a chunk, or a later one for a `PageByPageCache`, which reads the same.

    Args:
        length: tokens of the text.
        config: the packed cache's configuration.
        positions: how many positions after the first chunk are wanted, at least; None: as many as there can be.
        prompt: tokens that the first chunk takes, at least.
        pages: how many pages fall due in a later chunk, at most.

    Returns:
        [(start, end), ...], covering 0 .. length.
    """
    due = first_page_tokens(config)
    first = max(due, prompt)
    if positions is not None:
        first += max(0, length - positions - first) // config.page_size * config.page_size
    ends = [end for end in range(due, length, config.page_size) if end > first]
    ends = [*([first] if first < length else []), *ends[pages - 1 :: pages], length]
    return list(zip([0, *ends], ends))
