"""Presets: what is kept at how many bits. A preset is data; `TurboQuantConfig` validates it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .layout import PageLayout, require_format, require_page, require_rotation
from .reporting.display import html_table

CODEBOOKS = ("gaussian", "beta", "int8_grid")
MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, repr=False)
class TurboQuantConfig:
    """How a `TurboQuantCache` stores keys and values.

    Args:
        key_format: `"lloyd_max"` (rotated, Lloyd-Max codes, one norm), `"qjl"` (the same with one bit less, which goes to
            the signs of a random projection of what is left over: unbiased scores), `"fp8"` (e4m3, no rotation) or
            `"raw"` (the model's dtype in the same pages, for exact tests).
        key_bits: 2, 3 or 4 for `lloyd_max` and `qjl`, 8 for `fp8`; ignored by `raw`, which takes the model's width.
        value_format: `"lloyd_max"` (rotated, one scale), `"min_max"` (scale and minimum per vector), `"grouped"` (scale
            and minimum per 32 dimensions of a vector) or `"raw"`.
        value_bits: 2, 3 or 4, for `min_max` also 8; ignored by `raw`.
        center_keys: subtract each page's mean key and keep it in the page's header (`lloyd_max` keys only).
        balance_keys: scale each key channel by a factor from the sequence's own queries and keys, and queries by its inverse
            (`quantizer/conditioning.py`; `lloyd_max` keys only).
        codebook: Lloyd-Max levels: `"gaussian"` for N(0, 1/d), `"beta"` for the exact marginal of a unit vector's
            coordinate, `"int8_grid"` for Gaussian levels on an 8-bit grid that integer tensor cores can multiply.
        rotation: what rotates `lloyd_max` and `qjl` vectors: `"hadamard"`, or `"qr"` (a random orthogonal matrix).
        scale: what is stored as a `lloyd_max` vector's scale: `"fitted"` (least harm to scores and to sums of values),
            `"norm_corrected"` (restores the norm), or `"norm"` (the paper's), see `PageLayout`.
        page_size: tokens packed at once: 32, 64, 128 or 256.
        recent_window: the newest tokens that stay exact, at least; a page is packed when all its tokens are older.
        sink_tokens: the first tokens of each sequence that stay exact for good (padding not counted).
        boundary_layers: how many layers at each end of a dense model stay in the model's dtype (`layer_rules.py`).

    Raises:
        ValueError: a field out of range, naming the value and what was expected.
    """

    key_format: str
    key_bits: int
    value_format: str
    value_bits: int
    center_keys: bool = False
    balance_keys: bool = False
    codebook: str = "gaussian"
    rotation: str = "hadamard"
    scale: str = "norm_corrected"
    page_size: int = 64
    recent_window: int = 0
    sink_tokens: int = 0
    boundary_layers: int = 0

    def __post_init__(self) -> None:
        for side in ("key", "value"):
            fmt = getattr(self, f"{side}_format")
            # Raw pages take their width from the model's dtype, which is not known yet.
            require_format(side, fmt, 16 if fmt == "raw" else getattr(self, f"{side}_bits"))
        require_page(self.page_size, self.center_keys, self.key_format)
        if type(self.balance_keys) is not bool:
            raise ValueError(f"balance_keys={self.balance_keys!r} is not allowed: expected True or False.")
        if self.balance_keys and self.key_format != "lloyd_max":
            raise ValueError(f"balance_keys=True needs key_format='lloyd_max', not {self.key_format!r}.")
        if self.codebook not in CODEBOOKS:
            raise ValueError(f"codebook={self.codebook!r} is unknown: expected one of {CODEBOOKS}.")
        require_rotation(self.rotation, self.scale, self.key_format)
        if self.codebook == "int8_grid" and self.key_format == "qjl" and self.key_bits == 2:
            raise ValueError(
                "codebook='int8_grid' has no 1-bit levels, which key_format='qjl' takes with key_bits=2: expected"
                " 'gaussian' or 'beta', or more key_bits."
            )
        for name in ("recent_window", "sink_tokens", "boundary_layers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} is not allowed: expected an integer of at least 0.")

    def __repr__(self) -> str:
        """The call that makes it, without what is at its default."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"TurboQuantConfig({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def _repr_html_(self) -> str:
        names = [name for name, config in PRESETS.items() if config == self]
        title = f"TurboQuantConfig, preset {' or '.join(names)}" if names else "TurboQuantConfig"
        return html_table(title, ["field", "value"], [[f.name, str(getattr(self, f.name))] for f in fields(self)])

    @classmethod
    def from_preset(cls, preset: str | TurboQuantConfig, /, **overrides: Any) -> TurboQuantConfig:
        """The preset of that name (or a config), with fields replaced by `overrides`.

        Raises:
            ValueError: an unknown preset or field, listing the known ones.
        """
        if isinstance(preset, TurboQuantConfig):
            base = preset
        elif isinstance(preset, str) and preset in PRESETS:
            base = PRESETS[preset]
        else:
            raise ValueError(f"preset={preset!r} is unknown: expected one of {', '.join(PRESETS)}.")
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(overrides) - set(known)):
            raise ValueError(f"unknown option {', '.join(unknown)}: expected one of {known}.")
        return replace(base, **overrides)

    def layout(self, key_dim: int, value_dim: int, dtype: torch.dtype) -> PageLayout:
        """The page layout for one layer's head dimensions and the model's dtype.

        Raises:
            ValueError: a head dimension or dtype that has no packed layout.
        """
        if dtype not in MODEL_DTYPES:
            raise ValueError(f"dtype={dtype} is not supported: expected one of {MODEL_DTYPES}.")
        raw_bits = dtype.itemsize * 8
        return PageLayout(
            key_dim=key_dim,
            value_dim=value_dim,
            page_size=self.page_size,
            key_format=self.key_format,
            key_bits=raw_bits if self.key_format == "raw" else self.key_bits,
            value_format=self.value_format,
            value_bits=raw_bits if self.value_format == "raw" else self.value_bits,
            center_keys=self.center_keys,
            codebook=self.codebook,
            rotation=self.rotation,
            scale=self.scale,
        )


def _own(key_bits: int, value_bits: int, page_size: int = 32, recent_window: int = 128) -> TurboQuantConfig:
    return TurboQuantConfig(
        key_format="lloyd_max",
        key_bits=key_bits,
        value_format="lloyd_max",
        value_bits=value_bits,
        center_keys=True,
        balance_keys=True,
        codebook="int8_grid",
        scale="fitted",
        page_size=page_size,
        recent_window=recent_window,
        sink_tokens=4,
    )


def _published(key_format: str, key_bits: int, value_bits: int) -> TurboQuantConfig:
    # The levels stand on an 8-bit grid, which the fast decode kernel multiplies: at most 0.5 % more squared error.
    return TurboQuantConfig(key_format, key_bits, "min_max", value_bits, codebook="int8_grid", boundary_layers=2)


def _paper(key_format: str) -> TurboQuantConfig:
    return TurboQuantConfig(
        key_format=key_format,
        key_bits=3,
        value_format="grouped",
        value_bits=2,
        codebook="beta",
        rotation="qr",
        scale="norm",
        recent_window=128,
    )


PRESETS: dict[str, TurboQuantConfig] = {
    # This project's own: centred and balanced keys, rotated Lloyd-Max values, exact window and sinks, no layer left out.
    # Below 4 bits a longer window pays; small pages keep it from growing by more than 31 tokens.
    "tq4": _own(4, 4, page_size=64, recent_window=64),
    "tq3": _own(3, 3),
    "tq3v2": _own(3, 2),
    "tq2": _own(2, 2),
    # As published with vLLM's implementation: https://arxiv.org/abs/2504.19874, norm correction ("nc"), boundary layers.
    "k8v4": _published("fp8", 8, 4),
    "4bit_nc": _published("lloyd_max", 4, 4),
    "k3v4_nc": _published("lloyd_max", 3, 4),
    "3bit_nc": _published("lloyd_max", 3, 3),
    # The two quantizers of the paper itself (https://arxiv.org/abs/2504.19874), with the widths, the values and the window
    # of the `turboquant` package: one minimizes the error of a key, the other gives unbiased scores.
    "paper_mse": _paper("lloyd_max"),
    "paper_prod": _paper("qjl"),
    # The model's own dtype in the same pages: for exact tests of everything but the quantizer.
    "raw": TurboQuantConfig("raw", 16, "raw", 16, recent_window=64, sink_tokens=4),
}
DEFAULT_PRESET = "tq4"
