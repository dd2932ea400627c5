"""What tests take alike: which presets, at which sizes where their numbers count on them, and rotary embeddings."""

from __future__ import annotations

import torch

from tq_hf.config import PRESETS, TurboQuantConfig
from tq_hf.ops import has_kernels
from tq_hf.quantizer.rotary import Rotary

# The others run in the torch reference on every device.
KERNEL_PRESETS = [name for name, config in PRESETS.items() if has_kernels(config.layout(64, 64, torch.float16).name)]


def sizes(preset: str) -> dict[str, int]:
    """Pages of 64 tokens, and a window of 64 where the preset has one, whatever it says itself."""
    return {"page_size": 64, "recent_window": 64 if PRESETS[preset].recent_window else 0}


def sized(preset: str) -> TurboQuantConfig:
    """The preset at `sizes`: its first page is packed at 128 tokens besides the sinks, or at 64."""
    return TurboQuantConfig.from_preset(preset, **sizes(preset))


def usual_rotary(dim: int, pairs: int | None = None, interleaved: bool = False) -> Rotary:
    """Rotary embeddings of a head of `dim` channels as most models have them; `pairs` leaves the last ones out."""
    frequencies = 10_000 ** -(torch.arange(0, dim, 2) / dim)
    return Rotary(tuple(frequencies[:pairs].tolist()), interleaved)
