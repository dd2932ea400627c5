"""The whole app: three pages, one model and preset for all of them."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import gradio as gr
import torch

from .. import embedded_model
from ..commands import choose_device
from ..config import DEFAULT_PRESET
from .chat import chat_page
from .memory import memory_page
from .serving import Models, Sessions, new_cache, preset_choices
from .side_by_side import side_by_side_page

TITLE = "tq_hf: a packed KV cache"
INTRO = (
    '<header class="tq-head"><h1>tq_hf</h1><p>A KV cache of 2 to 4 bits for Hugging Face transformers. Watch what it saves'
    " while a model writes, and what it changes.</p></header>"
)
ON_CPU = (
    "This machine has no GPU: packed pages are read by the reference in torch, which is slower than bf16 here. On NVIDIA"
    " GPUs Triton kernels read them."
)
FONT = ("ui-sans-serif", "system-ui", "sans-serif")  # nothing is fetched
MONO = ("ui-monospace", "monospace")


def build(
    device: torch.device | None = None, model: str = "", preset: str = DEFAULT_PRESET, public: bool = False
) -> gr.Blocks:
    """The app, to be launched by `launch`. Its first model is loaded now, so that no visitor has to wait.

    Args:
        device: where models run; None: CUDA where there is one.
        model: the hub id or folder to begin with; empty: the embedded model.
        preset: the preset to begin with, or `EXACT`.
        public: visitors are strangers, who may name models of the hub (safetensors, no code), but no folders here.

    Raises:
        RequestError: an unknown preset, or a model that cannot be loaded.
    """
    device = choose_device(None) if device is None else device
    sessions = Sessions()
    models = Models(device, own=model, public=public, dropped=sessions.forget)
    new_cache(models.get(model).model, preset)
    others = "or a hub id" if public else "or a hub id, or a folder"
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=False) as blocks:
        gr.HTML(INTRO)
        with gr.Row(elem_classes="tq-choice"):
            name = gr.Textbox(
                model, label="Model", placeholder=f"{embedded_model.NAME} ({others})", elem_id="model",
                scale=2, min_width=200, max_lines=1,
            )  # fmt: skip
            chosen = gr.Dropdown(preset_choices(), value=preset, label="Cache", elem_id="preset", min_width=200)
        with gr.Tab("Chat", elem_id="tab-chat"):
            chat_page(models, sessions, name, chosen)
        with gr.Tab("Side by side", elem_id="tab-side"):
            side_by_side_page(models, sessions, name, chosen)
        with gr.Tab("Memory", elem_id="tab-memory"):
            memory_page(models, name, chosen, blocks)
        if device.type == "cpu":
            gr.HTML(f'<p class="tq-hint">{ON_CPU}</p>')

        def left(request: gr.Request) -> None:
            for page in ("", " side by side"):
                sessions.drop(f"{request.session_hash}{page}")

        blocks.unload(left)
    return blocks.queue(max_size=64)


def launch(blocks: gr.Blocks | None = None, **options: Any) -> Any:
    """Serve the app; `options` are those of `gr.Blocks.launch`. Returns what that returns."""
    blocks = build() if blocks is None else blocks
    theme = gr.themes.Default(primary_hue="teal", neutral_hue="slate", font=FONT, font_mono=MONO)
    css = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    defaults = {"ssr_mode": False, "footer_links": ["gradio"], "show_error": True, "max_file_size": 1}  # no page takes files
    return blocks.launch(theme=theme, css=css, **(defaults | options))
