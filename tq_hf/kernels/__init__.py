"""Triton kernels: the CUDA side of `tq_hf.ops`, each with its torch twin in `tq_hf.reference`."""

from .attend import attend
from .commit import commit, gather
from .observe import observe

__all__ = ["attend", "commit", "gather", "observe"]
