"""tq_hf: keys and values of HuggingFace transformers models at 2 to 4 bits, read where they lie.

Importing the package registers the attention function `"turboquant"`, at once or when transformers' models are imported. All
else, torch included, is imported when a name is first used: `tq_hf --help` need not wait for it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .registration import when_imported

if TYPE_CHECKING:
    from .attention import ATTENTION_NAME
    from .cache import TurboQuantCache
    from .config import DEFAULT_PRESET, PRESETS, TurboQuantConfig
    from .enabling import disable, enable
    from .estimate import MemoryEstimate, estimate_memory
    from .reports import CacheReport, LayerReport

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
    "disable",
    "enable",
    "estimate_memory",
]

_HOMES = {
    "attention": ("ATTENTION_NAME",),
    "cache": ("TurboQuantCache",),
    "config": ("DEFAULT_PRESET", "PRESETS", "TurboQuantConfig"),
    "enabling": ("disable", "enable"),
    "estimate": ("MemoryEstimate", "estimate_memory"),
    "reports": ("CacheReport", "LayerReport"),
}


def __getattr__(name: str) -> Any:
    """A public name, imported with all others, or a module of the package."""
    if name in __all__:
        modules = {home: import_module(f".{home}", __name__) for home in _HOMES}
        globals().update({each: getattr(modules[home], each) for home, names in _HOMES.items() for each in names})
        return globals()[name]
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module 'tq_hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


when_imported("transformers.modeling_utils", "tq_hf.attention")
