"""16-bit models on CPUs that cannot multiply 16-bit numbers: before AVX-512, torch reads a prompt five times as fast with
products in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def has_16_bit_products() -> bool:
    """Whether oneDNN multiplies bfloat16 tensors on this CPU: with AVX-512 and with SVE it does."""
    return torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))


def multiply_in_float32(model: nn.Module) -> None:
    """Let the model's linear layers keep float32 weights, and multiply in float32.

    They take and return the model's dtype, so that keys, values and caches stay in it. Weights take twice the memory, and
    that of an embedding which shares its weight with a layer comes on top.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype in (torch.bfloat16, torch.float16):
            dtype = module.weight.dtype
            module.weight = nn.Parameter(module.weight.detach().float(), requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.detach().float(), requires_grad=False)
            module.register_forward_pre_hook(_to_float32)
            module.register_forward_hook(lambda _module, _inputs, output, dtype=dtype: output.to(dtype))


def _to_float32(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.float() if isinstance(x, Tensor) else x for x in inputs)
