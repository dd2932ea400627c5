"""The mask that `generate()` makes at every step of a static cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import sdpa_mask

from tq_hf.attention import turboquant_mask


class Count(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("offset", [0, 20, torch.tensor(20), torch.tensor(39)])
@pytest.mark.parametrize("given", [21, 40, 50])
def test_a_single_tokens_mask_is_transformers_own(offset: int | Tensor, given: int) -> None:
    padding = torch.ones(3, given, dtype=torch.long)
    padding[0, :5] = padding[2, 17] = 0
    sizes = {"batch_size": 3, "q_length": 1, "kv_length": 40, "q_offset": offset, "attention_mask": padding}
    with Count() as ours:
        mask = turboquant_mask(**sizes, allow_is_causal_skip=False)
    with Count() as theirs:
        expected = sdpa_mask(**sizes, allow_is_causal_skip=False)
    assert mask is not None and mask.dtype == torch.bool and torch.equal(mask, expected)
    assert 2 * ours.operations < theirs.operations
