"""tq_hf: keys and values of HuggingFace transformers models at 2 to 4 bits, read where they lie.

Importing the package registers the attention function `"turboquant"`.
"""

from .attention import ATTENTION_NAME
from .cache import TurboQuantCache
from .config import DEFAULT_PRESET, PRESETS, TurboQuantConfig
from .enable import disable, enable
from .generation.ahead import decode_ahead
from .reporting.reports import CacheReport, LayerReport
from .sizing.estimate import MemoryEstimate, estimate_memory

__version__ = "0.1.0"
__all__ = [
    "ATTENTION_NAME",
    "DEFAULT_PRESET",
    "PRESETS",
    "CacheReport",
    "LayerReport",
    "MemoryEstimate",
    "TurboQuantCache",
    "TurboQuantConfig",
    "__version__",
    "decode_ahead",
    "disable",
    "enable",
    "estimate_memory",
]
