"""The ablation grid: every setting that `scripts/ablation` measures, and why. Data, not code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig
from tq_hf.scoring.at_once import AtOnceCache
from tq_hf.scoring.page_by_page import PageByPageCache

from .outlier_split import Split
from .simulated_cache import SimulatedCache

OWN = ("tq4", "tq3", "tq3v2", "tq2")
PUBLISHED = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
PAPER = ("paper_mse", "paper_prod")
ABLATED = ("tq3", "tq2")  # what single changes are made to
GROUPS = ("presets", "keys", "values", "scale", "codebook", "window", "sinks", "page", "layers", "width", "split")


def _sizes(preset: str) -> dict[str, int]:
    return {field: getattr(PRESETS[preset], field) for field in ("page_size", "recent_window")}


OUR_EXACT = _sizes("tq3") | {"sink_tokens": PRESETS["tq3"].sink_tokens}


@dataclass(frozen=True)
class Setting:
    """One row of the ablation.

    Attributes:
        name: unique; results are kept under it.
        groups: the groups that show it. A setting that others are compared with is in all of theirs.
        reason: what the row tells.
        config: how the cache is configured.
        split: None: through the packed cache. Else a simulation, whose outlier channels take one more bit.
        at_once: pack tokens before anything reads them, as a scheme without exact tokens does.
    """

    name: str
    groups: tuple[str, ...]
    reason: str
    config: TurboQuantConfig
    split: Split | None = None
    at_once: bool = False

    def new_cache(self, model_config: PretrainedConfig) -> TurboQuantCache | SimulatedCache:
        """An empty cache.

        Raises:
            ValueError: the model has no packed layout in this setting.
        """
        if self.at_once:
            return AtOnceCache(model_config, self.config)
        if self.split is None:
            return PageByPageCache(model_config, preset=self.config)
        return SimulatedCache(model_config, self.config, self.split)


def all_settings() -> list[Setting]:
    """The whole grid."""
    grid = [*_presets(), *_keys(), *_values(), *_exact_tokens(), *_widths(), *_splits()]
    assert len({setting.name for setting in grid}) == len(grid)
    return grid


def select(groups: Sequence[str], names: Sequence[str]) -> list[Setting]:
    """The settings of these groups ("all": every one), or those of these names.

    Raises:
        ValueError: an unknown group or name.
    """
    grid = all_settings()
    if names:
        known = {setting.name: setting for setting in grid}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"setting {unknown[0]!r} is unknown: expected one of {', '.join(map(repr, known))}.")
        return [known[name] for name in dict.fromkeys(names)]
    if unknown := [group for group in groups if group not in (*GROUPS, "all")]:
        raise ValueError(f"group {unknown[0]!r} is unknown: expected one of {', '.join(GROUPS)}, all.")
    if "all" in groups:
        return grid
    return [setting for setting in grid if set(setting.groups) & set(groups)]


def _changed(base: str, name: str, group: str | tuple[str, ...], reason: str, **changes: Any) -> Setting:
    """A preset with fields changed."""
    return Setting(name, (group,) if isinstance(group, str) else group, reason, replace(PRESETS[base], **changes))


def _presets() -> Iterable[Setting]:
    yield Setting("tq4", ("presets", "values", "scale", "codebook", "page", "width"), "our default", PRESETS["tq4"])
    yield Setting("tq3v2", ("presets", "width", "split"), "ours: values lose less than keys", PRESETS["tq3v2"])
    for name in ABLATED:
        yield Setting(name, GROUPS, "ours: what single changes are made to", PRESETS[name])
    yield Setting("raw", ("presets",), "noise floor: the model's dtype in the same pages", PRESETS["raw"])
    for name in PUBLISHED:
        why = "as published schemes decode: every token is read packed, two exact layers at each end of a dense model"
        yield Setting(f"{name}, as published", ("presets",), why, PRESETS[name], at_once=True)
        why = "the preset: the same bytes, but a page is packed as a whole, and the newest 0 to 63 tokens are exact"
        yield Setting(name, ("presets",), why, PRESETS[name])
        ours = f"{name} + window, sinks"
        yield _changed(name, ours, "presets", "published codes with our exact tokens", **OUR_EXACT)
        why = "what the codes do by themselves: no exact layer either"
        yield _changed(name, f"{ours}, all layers", "presets", why, **OUR_EXACT, boundary_layers=0)
    for name in PAPER:
        if name in PRESETS:
            yield Setting(name, ("presets",), "the paper's own scheme", PRESETS[name])


def _keys() -> Iterable[Setting]:
    for base in ABLATED:
        yield _changed(base, f"{base}, no page mean", "keys", "what centring is worth", center_keys=False)
        yield _changed(base, f"{base}, no balance", "keys", "what balancing channels is worth", balance_keys=False)
        both = {"center_keys": False, "balance_keys": False}
        yield _changed(base, f"{base}, no page mean, no balance", "keys", "plain rotated keys", **both)


def _values() -> Iterable[Setting]:
    for base in ("tq4", *ABLATED):
        changes = {"value_format": "min_max"}
        yield _changed(base, f"{base}, min/max values", "values", "published values: a minimum and no rotation", **changes)
        why = "what scales fitted to scores and sums of values are worth"
        yield _changed(base, f"{base}, norm-corrected scales", "scale", why, scale="norm_corrected")
        for codebook in ("gaussian", "beta"):
            why = "what the 8-bit grid of levels costs"
            yield _changed(base, f"{base}, {codebook} codebook", "codebook", why, codebook=codebook)


def _exact_tokens() -> Iterable[Setting]:
    sweeps = (
        ("window", "recent_window", (0, 32, 64, 256), "how many recent tokens to keep exact"),
        ("sinks", "sink_tokens", (0, 1, 16), "how many first tokens to keep exact"),
        ("page", "page_size", (64, 128, 256), "tokens that share a mean: fewer follow it better and cost more header"),
        ("layers", "boundary_layers", (1, 2), "whether exact layers at both ends are worth their bytes"),
    )
    for base in ABLATED:
        for group, field, values, why in sweeps:
            for value in values:
                yield _changed(base, f"{base}, {field}={value}", group, why, **{field: value})
        yield _resized(base, "tq4")
    yield _resized("tq4", "tq3")


def _resized(base: str, other: str) -> Setting:
    sizes = _sizes(other)
    name = ", ".join([base, *(f"{field}={value}" for field, value in sizes.items())])
    return _changed(base, name, "page", f"the pages and the window of {other}", **sizes)


def _widths() -> Iterable[Setting]:
    why = "where an extra bit helps more, in keys or in values"
    for keys, values in ((4, 3), (3, 4), (4, 2), (2, 3), (2, 4)):
        groups = ("width", "split") if abs(keys - values) == 1 else ("width",)
        yield _changed("tq4", f"k{keys}v{values}", groups, why, key_bits=keys, value_bits=values)


def _splits() -> Iterable[Setting]:
    why = "the bytes of the split at k2.5 v2; those of k2.5 v3 are in tq3, page_size=64"
    yield _changed("tq3v2", "tq3v2, page_size=64", ("page", "split"), why, page_size=64)
    rows = (
        ("tq3", "the simulation beside the packed cache: both should agree", 3, 3, False, False),
        ("split k2.5 v2", "half of the key channels at 3 bits: compare tq3v2, page_size=64", 2, 2, True, False),
        ("split k2.5 v2.5", "keys and values alike: compare tq3v2, k2v3", 2, 2, True, True),
        ("split k2.5 v3", "half of the key channels at 3 bits: compare tq3, page_size=64", 2, 3, True, False),
        ("split k3.5 v3", "half of the key channels at 4 bits: compare k4v3, k3v4", 3, 3, True, False),
        ("split k3.5 v3.5", "keys and values alike: compare k4v3, k3v4", 3, 3, True, True),
    )
    for name, why, key_bits, value_bits, keys, values in rows:
        config = replace(PRESETS["tq3"], key_bits=key_bits, value_bits=value_bits)
        yield Setting(f"{name} (simulated)", ("split",), why, config, Split(keys=keys, values=values))
