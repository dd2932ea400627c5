"""Take the pictures of the demo that READMEs show: a real session in headless Chromium, at a desktop's and a phone's width.

    python scripts/screenshots.py            into scripts/space/pictures

Needs the extra test and Debian's package chromium. The embedded model writes; nothing is staged.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from tq_hf.demo import build, launch

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
WIDTHS = {"desktop": 1280, "phone": 390}
PATIENCE = 240_000.0  # milliseconds
COLOURS = 250  # of a picture's palette: a page has few
FOLDER = Path(__file__).parent / "space" / "pictures"


def chromium() -> str | None:
    """The system's Chromium; None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium that keeps to itself."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        yield started
        started.close()


@contextmanager
def serving(**options: Any) -> Iterator[str]:
    """The demo's address; `options` are those of `build`."""
    blocks = build(**options)
    _, address, _ = launch(blocks, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    try:
        yield address
    finally:
        blocks.close(verbose=False)


def message_box(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message")


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def chat(page: Page, message: str) -> None:
    """Ask, and wait for the end of the answer."""
    message_box(page).fill(message)
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").wait_for(timeout=PATIENCE)
    page.get_by_role("button", name="Send").wait_for(timeout=PATIENCE)


def compare(page: Page) -> None:
    """Both caches on the prompt that is there, and wait until the divergence is measured."""
    open_tab(page, "Side by side")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("button", name="Stop").wait_for(timeout=PATIENCE)
    page.get_by_role("button", name="Compare").wait_for(timeout=PATIENCE)


def memory(page: Page) -> None:
    open_tab(page, "Memory")
    page.locator("#memory-table table").wait_for(timeout=PATIENCE)


def take(page: Page, path: Path) -> None:
    """The whole page as a PNG with a palette, which is a third of the size."""
    page.mouse.move(0, 0)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(600)
    page.screenshot(path=path, full_page=True)
    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", file=sys.stderr)


STEPS: dict[str, Callable[[Page], None]] = {
    "chat": lambda page: chat(page, "What is the first task of the day?"),
    "side_by_side": compare,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: scripts/space/pictures")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    with serving() as address, browser() as started:
        for device, width in WIDTHS.items():
            for name, step in STEPS.items():
                page = started.new_page(viewport={"width": width, "height": 800})
                page.goto(address)
                message_box(page).wait_for(timeout=PATIENCE)
                step(page)
                take(page, folder / f"demo_{name}_{device}.png")
                page.close()


if __name__ == "__main__":
    main()
