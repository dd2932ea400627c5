"""`tq_hf demo`: the app in the browser."""

from __future__ import annotations

import os
import threading
from typing import Annotated

import typer

from ..errors import RequestError, first_line
from . import options
from .output import say

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def demo(
    model: options.Model = None,
    cache: options.Cache = "tq4",
    device: options.Device = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0: all addresses. Visitors from elsewhere may name no folders.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, show_default="the first free one from 7860 on")] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve the demo: a chat, bf16 and packed cache side by side, and what caches take on your GPU.

    tq_hf demo

    tq_hf demo --model Qwen/Qwen3-0.6B --cache tq3 --open
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: its threads share the cores with the server
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is not installed: pip install 'tq-hf[demo]'.") from error
    from ..commands import choose_device, quiet
    from ..demo import build, launch

    quiet()
    blocks = build(choose_device(device), model or "", cache, public=host not in LOOPBACK)
    try:
        _, address, _ = launch(
            blocks, server_name=host, server_port=port, inbrowser=open_browser, prevent_thread_lock=True, quiet=True
        )
    except OSError as error:
        where = f"--port {port}" if port else f"--host {host}"
        raise RequestError(f"{where} cannot be listened on: choose another ({first_line(error)})") from error
    say(f"The demo is at {address} . Ctrl-C ends it.")
    try:
        threading.Event().wait()
    finally:
        blocks.close(verbose=False)
