"""Which presets a test can take."""

from __future__ import annotations

import torch

from tq_hf.config import PRESETS
from tq_hf.ops import has_kernels

# The others run in the torch reference on every device.
KERNEL_PRESETS = [name for name, config in PRESETS.items() if has_kernels(config.layout(64, 64, torch.float16).name)]
