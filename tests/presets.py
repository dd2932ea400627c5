"""Which presets a test can take, and at which sizes where its numbers count on them."""

from __future__ import annotations

import torch

from tq_hf.config import PRESETS, TurboQuantConfig
from tq_hf.ops import has_kernels

# The others run in the torch reference on every device.
KERNEL_PRESETS = [name for name, config in PRESETS.items() if has_kernels(config.layout(64, 64, torch.float16).name)]


def sizes(preset: str) -> dict[str, int]:
    """Pages of 64 tokens, and a window of 64 where the preset has one, whatever it says itself."""
    return {"page_size": 64, "recent_window": 64 if PRESETS[preset].recent_window else 0}


def sized(preset: str) -> TurboQuantConfig:
    """The preset at `sizes`: its first page is packed at 128 tokens besides the sinks, or at 64."""
    return TurboQuantConfig.from_preset(preset, **sizes(preset))
