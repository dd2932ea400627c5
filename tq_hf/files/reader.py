"""Checked access to a file of which nothing is taken for granted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
LARGEST = 2**31 - 1  # of any position, count or page number


class SavedFile:
    """An open file: checked access to the header, and to tensors whose types and shapes are known beforehand."""

    def __init__(self, path: str, opened: Any) -> None:
        self.path, self._opened = path, opened
        self.slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        self.expected: set[str] = set()

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.path} cannot be loaded as a TurboQuantCache: {what}.")

    def require(self, fits: bool, what: str) -> None:
        if not fits:
            raise self.error(what)

    def get(self, holder: Any, name: str, *kinds: type) -> Any:
        """`holder[name]`, which must be of one of these types exactly."""
        self.require(isinstance(holder, dict) and name in holder, f"its header lacks {name!r}")
        value = holder[name]
        wanted = " or ".join(kind.__name__ for kind in kinds)
        self.require(type(value) in kinds, f"{name}={str(value)[:80]!r} in its header is no {wanted}")
        return value

    def number(self, holder: Any, name: str, least: int, most: int = LARGEST) -> int:
        value: int = self.get(holder, name, int)
        self.require(least <= value <= most, f"{name}={value} in its header is not between {least} and {most}")
        return value

    def expect(self, name: str, dtype: torch.dtype, *shape: int) -> None:
        """Require a tensor of this type and shape."""
        self.require(name in self.slices, f"the tensor {name!r} is missing")
        found = (DTYPES.get(self.slices[name].get_dtype()), tuple(self.slices[name].get_shape()))
        self.require(found == (dtype, shape), f"the tensor {name!r} is {found}, not {(dtype, shape)}")
        self.expected.add(name)

    def tensor(self, name: str, device: torch.device | None = None) -> Tensor:
        """A tensor that was expected, in memory of its own."""
        tensor: Tensor = self._opened.get_tensor(name)
        return tensor.clone() if device is None else tensor.to(device, copy=True)
