"""Pieces of HTML that more than one page shows: counters, messages, the growth of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

from ..generation.streaming import CacheSize
from ..sizing.estimate import MemoryEstimate
from .charts import Line, line_chart, mib

SHORT = "short texts: the exact window is allocated at once"
Growth = list[tuple[int, int, int]]  # tokens in the cache, its bytes, and what they take in bfloat16


def counter(label: str, value: str, note: str = "", css: str = "", data: str = "") -> str:
    """A number with its label. `data` is an HTML attribute for who reads the page by program."""
    small = f"<small>{escape(note)}</small>" if note else ""
    return f'<div class="tq-counter {css}"><span>{escape(label)}</span><b {data}>{escape(value)}</b>{small}</div>'


def size_counters(preset: str, size: CacheSize, tokens: int, speed: float, full: MemoryEstimate | None) -> str:
    """A cache beside what bfloat16 would take, now and (`full`) at the end of the model's context."""
    packed = f"{size.packed_tokens:,} / {tokens:,}"
    later = ""
    if full is not None:
        note = f"{mib(full.nbytes)}, bf16 {mib(full.bytes_dynamic)}"
        later = counter(f"at {full.context:,} tokens", f"{full.ratio:.2f}×", note)
    return (
        '<div class="tq-counters">'
        + counter(f"{preset} cache", mib(size.nbytes), css="tq-packed", data=f'data-nbytes="{size.nbytes}"')
        + counter("in bf16", mib(size.bytes_bf16), css="tq-exact", data=f'data-bf16="{size.bytes_bf16}"')
        + counter("smaller", f"{size.ratio:.2f}×", "" if size.ratio >= 1 else SHORT, "tq-hero")
        + later
        + counter("tokens packed", packed, data=f'data-tokens="{tokens}"')
        + counter("speed", f"{speed:.1f}" if speed else "–", "tokens/s")
        + "</div>"
    )


def promise(preset: str, full: MemoryEstimate) -> str:
    """What a chat is going to save, before it has begun."""
    return (
        '<div class="tq-counters">'
        + counter(f"{preset} cache at {full.context:,} tokens", mib(full.nbytes), css="tq-packed")
        + counter("in bf16", mib(full.bytes_dynamic), css="tq-exact")
        + counter("smaller", f"{full.ratio:.2f}×", css="tq-hero")
        + "</div>"
    )


def growth_chart(preset: str, growth: Sequence[tuple[int, int, int]]) -> str:
    """Bytes against tokens, both caches."""
    lines = [Line("bf16", "tq-exact", [(tokens, in_bf16) for tokens, _, in_bf16 in growth])]
    if preset != "bf16":
        lines.append(Line(preset, "tq-packed", [(tokens, nbytes) for tokens, nbytes, _ in growth]))
    return line_chart("Cache memory as the text grows", lines, "tokens", mib)


def error(text: str) -> str:
    return f'<div class="tq-error" role="alert">{escape(text)}</div>'


def status(text: str) -> str:
    return f'<div class="tq-status" role="status">{escape(text)}</div>'


def buttons(running: bool) -> tuple[Any, Any]:
    """Updates of the button that starts and of the one that stops: one of them is there."""
    return gr.update(visible=not running), gr.update(visible=running)
