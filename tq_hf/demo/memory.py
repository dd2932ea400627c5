"""The memory page: what a model's cache takes at a context and batch, and how many sequences fit into a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import gradio as gr
import torch
from transformers import PretrainedConfig

from ..commands import RequestError, first_line
from ..config import PRESETS
from ..sizing.estimate import MemoryEstimate, estimate_memory
from . import panels
from .architectures import ARCHITECTURES, MAX_LAYERS, config_of
from .charts import Bar, bar_chart, mib
from .serving import EXACT, Models, explain

LOADED, PASTED = "The loaded model", "A pasted config.json"
SHOWN_PRESETS = [name for name in PRESETS if name != "raw"]
WEIGHT_BITS = {"bf16": 16, "8 bits": 8, "4 bits": 4, "not on this GPU": 0}
MAX_CONTEXT, MAX_BATCH, MAX_GIB = 1 << 24, 1 << 16, 1 << 16
MAX_CONFIG_CHARACTERS = 200_000


@dataclass(frozen=True)
class Row:
    """A cache in the table: bytes at the chosen context and batch, how many times fewer than bfloat16 takes, how many
    sequences fit."""

    name: str
    nbytes: int
    ratio: float
    fits: int


class MemoryPage:
    """The page's handlers."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def show(
        self, choice: str, pasted: str, model: str, preset: str, context: float, batch: float, gib: float, weights: str
    ) -> tuple[str, str, str, str]:
        """HTML of the summary, both plots and the table."""
        try:
            config = self._config(choice, pasted, model)
            for name, value, most in (
                ("context", context, MAX_CONTEXT),
                ("batch", batch, MAX_BATCH),
                ("GPU", gib, MAX_GIB),
            ):
                if value is None or not 0 < value <= most:
                    raise RequestError(f"{name}: {value} is not possible. Expected a number from 1 to {most:,}.")
            rows, estimate, room = count(config, int(context), int(batch), float(gib), WEIGHT_BITS[weights])
        except (RequestError, ValueError) as error:
            return panels.error(first_line(error)), "", "", ""
        except Exception as error:
            return panels.error(explain(error)), "", "", ""
        chosen = next((row for row in rows[1:] if row.name == preset), rows[1])
        return _summary(rows[0], chosen, room), _bytes(rows, estimate), _fits(rows, estimate, gib), _table(rows, chosen)

    def _config(self, choice: str, pasted: str, model: str) -> PretrainedConfig:
        if choice == LOADED:
            return self.models.get(model).model.config
        if choice == PASTED:
            return parse_config(pasted)
        return config_of(ARCHITECTURES[choice])


def parse_config(text: str) -> PretrainedConfig:
    """The config in a model's `config.json`.

    Raises:
        RequestError: it is none, or beyond what this page counts.
    """
    if not text.strip():
        raise RequestError("Paste a model's config.json: its whole text, from { to }.")
    if len(text) > MAX_CONFIG_CHARACTERS:
        raise RequestError(f"This text has {len(text):,} characters, too many for a config.json.")
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"This is no JSON of a config: {first_line(error)}.") from error
    if not isinstance(settings, dict):
        raise RequestError("This is no config.json: expected an object, from { to }.")
    settings.pop("quantization_config", None)  # of the weights, which are counted at the chosen width
    try:
        config = config_of(settings)
        layers = config.get_text_config().num_hidden_layers
    except RequestError:
        raise
    except Exception as error:  # configs raise what they like
        raise RequestError(f"transformers cannot read this config: {first_line(error)}") from error
    if not 1 <= layers <= MAX_LAYERS:
        raise RequestError(f"num_hidden_layers is {layers}: expected 1 to {MAX_LAYERS}.")
    return config


def count(
    config: PretrainedConfig, context: int, batch: int, gib: float, weight_bits: int
) -> tuple[list[Row], MemoryEstimate, float | None]:
    """What each cache takes, bfloat16 first.

    Returns:
        The rows, the estimate of the default preset, and how many GiB the weights leave; None if their size is not known.
    """
    estimates = {name: estimate_memory(config, name, context, batch, torch.bfloat16) for name in SHOWN_PRESETS}
    one = estimates[SHOWN_PRESETS[0]]
    if weight_bits and one.weight_bytes is None:
        room = None
    else:
        room = max(0.0, gib - (one.weight_bytes or 0) * weight_bits / 16 / 2**30)
    free = gib if room is None else room
    rows = [Row(EXACT, one.bytes_dynamic, 1.0, one.largest_batch(free, dynamic=True))]
    rows += [Row(name, made.nbytes, made.ratio, made.largest_batch(free)) for name, made in estimates.items()]
    return rows, one, room


def _css(name: str) -> str:
    return "tq-exact" if name == EXACT else "tq-packed" if name.startswith("tq") else "tq-other"


def _summary(exact: Row, packed: Row, room: float | None) -> str:
    left = "unknown" if room is None else f"{room:,.1f} GiB"
    note = "their size is not known: all memory is taken" if room is None else "after the weights"
    return (
        '<div class="tq-counters">'
        + panels.counter(f"{packed.name} cache", mib(packed.nbytes), css="tq-packed", data=f'data-nbytes="{packed.nbytes}"')
        + panels.counter("in bf16", mib(exact.nbytes), css="tq-exact", data=f'data-bf16="{exact.nbytes}"')
        + panels.counter("smaller", f"{packed.ratio:.2f}×", css="tq-hero")
        + panels.counter(
            "sequences that fit", f"{packed.fits:,}", f"bf16: {exact.fits:,}", data=f'data-fits="{packed.fits}"'
        )
        + panels.counter("room for caches", left, note)
        + "</div>"
    )


def _bytes(rows: Sequence[Row], estimate: MemoryEstimate) -> str:
    title = f"Cache of {estimate.batch:,} × {estimate.context:,} tokens"
    return bar_chart(title, [Bar(row.name, _css(row.name), row.nbytes, mib(row.nbytes)) for row in rows])


def _fits(rows: Sequence[Row], estimate: MemoryEstimate, gib: float) -> str:
    title = f"Sequences of {estimate.context:,} tokens that fit into {gib:g} GiB"
    return bar_chart(title, [Bar(row.name, _css(row.name), row.fits, f"{row.fits:,}") for row in rows])


def _table(rows: Sequence[Row], chosen: Row) -> str:
    body = "".join(
        f'<tr class="{_css(row.name)}{" tq-chosen" if row is chosen else ""}"><th scope="row">{escape(row.name)}</th>'
        f'<td data-nbytes="{row.nbytes}">{mib(row.nbytes)}</td><td>{row.ratio:.2f}×</td>'
        f'<td data-fits="{row.fits}">{row.fits:,}</td></tr>'
        for row in rows
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("cache", "memory", "smaller", "sequences"))
    return f'<table class="tq-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def memory_page(models: Models, model: gr.Textbox, preset: gr.Dropdown, blocks: gr.Blocks) -> None:
    """Lay the page out. `model` and `preset` are shared with the other pages."""
    handlers = MemoryPage(models)
    with gr.Row():
        choice = gr.Dropdown(
            [*ARCHITECTURES, LOADED, PASTED], value=next(iter(ARCHITECTURES)), label="Architecture",
            elem_id="architecture", min_width=200, scale=2,
        )  # fmt: skip
        context = gr.Number(32768, label="Context, tokens", precision=0, elem_id="context", min_width=130)
        batch = gr.Number(8, label="Sequences", precision=0, elem_id="batch", min_width=110)
        gib = gr.Number(80, label="GPU memory, GiB", elem_id="gib", min_width=130)
        weights = gr.Dropdown(list(WEIGHT_BITS), value="bf16", label="Weights", elem_id="weights", min_width=130)
    pasted = gr.Code(label="config.json", language="json", lines=6, max_lines=12, visible=False, elem_id="config-json")
    summary = gr.HTML("", elem_id="memory-summary")
    with gr.Row():
        with gr.Column(min_width=320):
            sizes = gr.HTML("", elem_id="memory-bytes")
        with gr.Column(min_width=320):
            fits = gr.HTML("", elem_id="memory-fits")
    table = gr.HTML("", elem_id="memory-table")
    choice.change(
        lambda choice: gr.update(visible=choice == PASTED), choice, pasted,
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    gr.on(
        [blocks.load, *(part.change for part in (choice, pasted, preset, context, batch, gib, weights))],
        handlers.show,
        [choice, pasted, model, preset, context, batch, gib, weights],
        [summary, sizes, fits, table],
        show_progress="hidden", trigger_mode="always_last", api_visibility="private",
    )  # fmt: skip
