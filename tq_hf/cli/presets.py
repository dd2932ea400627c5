"""`tq_hf presets`: what each preset keeps at how many bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import Json
from .output import print_json, print_table

if TYPE_CHECKING:
    from ..config import TurboQuantConfig

HEAD_DIM = 128
PURPOSES = {
    "tq4": "default: next to no loss",
    "tq3": "a little loss",
    "tq3v2": "between tq3 and tq2",
    "tq2": "smallest; loses most",
    "k8v4": "vLLM's, for comparison",
    "4bit_nc": "vLLM's, for comparison",
    "k3v4_nc": "vLLM's, for comparison",
    "3bit_nc": "vLLM's, for comparison",
    "paper_mse": "the paper's, for comparison",
    "paper_prod": "the paper's, for comparison",
    "raw": "exact, for tests",
}


def presets(as_json: Json = False) -> None:
    """List the presets: bits, what stays exact, bytes a token and KV head, ratio to bfloat16."""
    from ..config import PRESETS

    rows = [row(name, config) for name, config in PRESETS.items()]
    if as_json:
        print_json({"head_dim": HEAD_DIM, "presets": rows})
        return
    print_table(
        f"Bytes a packed token and KV head at head_dim {HEAD_DIM}, page header included (bfloat16: {4 * HEAD_DIM})",
        ["preset", "keys", "values", "stays exact", "for", "bytes", "ratio"],
        [
            [*(r[c] for c in ("preset", "keys", "values", "exact", "for")), f"{r['bytes']:g}", f"{r['ratio']:.2f}"]
            for r in rows
        ],
        left=5,
    )


def row(name: str, config: TurboQuantConfig) -> dict[str, Any]:
    """What a preset is, in words and numbers."""
    import torch

    per_token = config.layout(HEAD_DIM, HEAD_DIM, torch.bfloat16).bytes_per_token
    return {
        "preset": name,
        "keys": keys(config),
        "values": values(config),
        "exact": exact(config),
        "for": PURPOSES[name],
        "bytes": per_token,
        "ratio": 4 * HEAD_DIM / per_token,
        "page_size": config.page_size,
    }


def keys(config: TurboQuantConfig) -> str:
    """How keys are kept, as the README's table says it."""
    if config.key_format in ("raw", "fp8"):
        return {"raw": "the model's dtype", "fp8": "fp8"}[config.key_format]
    parts = {
        "QR rotation": config.rotation == "qr",
        "QJL": config.key_format == "qjl",
        "centred": config.center_keys,
        "balanced": config.balance_keys,
    }
    return ", ".join([f"{config.key_bits} bits", *(part for part, has in parts.items() if has)])


def values(config: TurboQuantConfig) -> str:
    """How values are kept, as the README's table says it."""
    if config.value_format == "raw":
        return "the model's dtype"
    how = {"lloyd_max": "rotated", "min_max": "min/max", "grouped": "min/max in groups of 32"}
    return f"{config.value_bits} bits, {how[config.value_format]}"


def exact(config: TurboQuantConfig) -> str:
    """What is not packed, as the README's table says it."""
    if config.boundary_layers:
        return f"first and last {config.boundary_layers} layers"
    sinks = f", first {config.sink_tokens} tokens" if config.sink_tokens else " tokens"
    return f"newest {config.recent_window}{sinks}"
