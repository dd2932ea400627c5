"""The text that the pages begin with: a few chapters of the project's own handbook of a tide station."""

from __future__ import annotations

import re
from importlib.resources import files


def chapters(*numbers: int) -> str:
    """The handbook's title and these chapters. Few enough, and a CPU answers within seconds."""
    text = files("tq_hf").joinpath("handbook.txt").read_text(encoding="utf-8")
    title, *parts = re.split(r"\n\n(?=\d\. )", text.partition("\n\nHere ends the handbook.")[0])
    return "\n\n".join([title, *(part.strip() for part in parts if int(part[0]) in numbers)])
