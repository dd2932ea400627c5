"""The ops in plain torch: the path on CPU, and what the kernels are checked against."""

from .attend import attend
from .observe import observe
from .state import commit, gather

__all__ = ["attend", "commit", "gather", "observe"]
