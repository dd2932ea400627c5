"""The demo: `tq_hf demo`, or a Space (`scripts/space`). Needs `pip install 'tq-hf[demo]'`."""

from .app import build, launch

__all__ = ["build", "launch"]
