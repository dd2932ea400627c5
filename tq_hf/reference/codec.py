"""A page as vectors and as words: the quantizers, the page's mean key, and where both stand in the page.

Source of the scheme: TurboQuant, https://arxiv.org/abs/2504.19874; here with the norm correction folded into the stored
scale (`PageLayout.scale`), and with the mean of a page's keys kept apart (`center_keys`). `qjl` keys are the paper's own
form with unbiased inner products, and `grouped` values those of the `turboquant` package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layout import GROUP_TOKENS, NON_FINITE_KEY, NON_FINITE_VALUE, SATURATED, VALUE_GROUP_DIMS, PageLayout, RunOrder
from ..quantizer.codebooks import boundaries, levels
from ..quantizer.rotation import rotate, unrotate
from ..quantizer.sketch import sign_weight, sketch, unsketch
from .packing import pack_codes, pack_metadata, unpack_codes, unpack_metadata

FP16_MAX = 65504.0
FP8_MAX = 448.0


@dataclass(frozen=True)
class PageContent:
    """Tokens as factors, the form in which attention takes them. All fp32.

    A key is `key_mean + key_scale * key` (the latter divided by its channels' balance), a value is `value_min + value_scale
    * value`; a factor that is None is left out. Where the layout rotates, `key` and `value` are in rotated coordinates
    (`key_mean` never is). A `qjl` key has two parts side by side: the rotated coordinates, and the weighted signs of the
    residual's sketch, which meet the query's own sketch.

    Args:
        key, value: `[..., P, padded dim]`, `qjl` keys `[..., P, 2 * padded dim]`.
        key_scale, value_scale, value_min: `[..., P]` or None.
        key_mean: `[..., key_dim]` or None.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    key_mean: Tensor | None = None
    value_scale: Tensor | None = None
    value_min: Tensor | None = None


def encode_page(
    key: Tensor,
    value: Tensor,
    valid: Tensor,
    layout: PageLayout,
    averaged: Tensor | None = None,
    balance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pack whole pages.

    Args:
        key: `[..., P, key_dim]` in the model's dtype, P the page size.
        value: `[..., P, value_dim]`.
        valid: bool, broadcastable to `[..., P]`: tokens to store. The others are stored as zero vectors and do not
            enter the mean; so are vectors with a non-finite coordinate, each for itself.
        layout: the format.
        averaged: bool like `valid`: tokens that enter the mean if they are valid; None: all.
        balance: fp32 `[..., key_dim]`, factors of the key channels (`tq_hf.quantizer.conditioning`), or None.

    Returns:
        words int32 `[..., page_words]` and flags int32 `[...]` (`NON_FINITE_KEY`, `NON_FINITE_VALUE`, `SATURATED`).
    """
    finite_key, finite_value = key.abs().amax(-1).isfinite(), value.abs().amax(-1).isfinite()
    flags = _flag(valid & ~finite_key, NON_FINITE_KEY) | _flag(valid & ~finite_value, NON_FINITE_VALUE)
    key = key.masked_fill(~(valid & finite_key).unsqueeze(-1), 0)
    value = value.masked_fill(~(valid & finite_value).unsqueeze(-1), 0)

    header: list[Tensor] = []
    if layout.center_keys:
        stored = (valid & finite_key).unsqueeze(-1)
        counted = stored if averaged is None else stored & averaged.unsqueeze(-1)
        key, mean = _center(key.float(), stored, counted)
        header.append(pad(mean, (0, 2 * layout.header_words - layout.key_dim)).view(torch.int32))
    if balance is not None:
        key = key.float() * balance.unsqueeze(-2)

    key_codes, key_fields, key_full = _encode_keys(key, layout)
    value_codes, value_fields, value_full = _encode_values(value, layout)
    for full in (key_full, value_full):
        if full is not None:
            flags = flags | _flag(full & valid, SATURATED)

    group = [
        pack_codes(_in_groups(key_codes, 1), layout.key_bits, RunOrder.KEYS),
        pack_codes(_in_groups(value_codes, 1), layout.value_bits, RunOrder.VALUES),
    ]
    if layout.metadata:
        group.append(pack_metadata([_in_groups(field, 0) for field in key_fields + value_fields]))
    return torch.cat([*header, torch.cat(group, -1).flatten(-2)], -1), flags


def unpack_page(words: Tensor, layout: PageLayout, dtype: torch.dtype) -> PageContent:
    """Pages `[..., page_words]` as factors. `dtype` is the model's, which `raw` formats are stored in."""
    groups = words[..., layout.header_words :].unflatten(-1, (layout.groups, layout.group_words))
    key_words, value_words, metadata_words = groups.split((layout.key_words, layout.value_words, layout.metadata_words), -1)
    key_codes = unpack_codes(key_words, layout.key_bits, RunOrder.KEYS)
    value_codes = unpack_codes(value_words, layout.value_bits, RunOrder.VALUES)
    key_codes, value_codes = key_codes.flatten(-3, -2), value_codes.flatten(-3, -2)

    fields: dict[str, Tensor] = {}
    if layout.metadata:
        stored = unpack_metadata(metadata_words, len(layout.metadata))
        fields = {name: field.flatten(-2).float() for name, field in zip(layout.metadata, stored, strict=True)}

    if layout.key_format == "lloyd_max":
        key = _look_up(key_codes, layout.key_bits, layout.key_dim_padded, layout.codebook)
    elif layout.key_format == "qjl":
        key = _read_qjl(key_codes, fields.pop("key_scale"), fields.pop("key_residual"), layout)
    elif layout.key_format == "fp8":
        key = key_codes.view(torch.float8_e4m3fn).float()
    else:
        key = key_codes.view(dtype).float()
    if layout.value_format == "lloyd_max":
        value = _look_up(value_codes, layout.value_bits, layout.value_dim_padded, layout.codebook)
    elif layout.value_format == "min_max":
        value = value_codes.float()
    elif layout.value_format == "grouped":
        value = _read_grouped(value_codes, fields)
    else:
        value = value_codes.view(dtype).float()

    mean = None
    if layout.center_keys:
        header = words[..., : layout.header_words].contiguous().view(torch.float16)
        mean = header[..., : layout.key_dim].float()
    return PageContent(key, value, key_mean=mean, **fields)


def decode_page(
    words: Tensor, layout: PageLayout, dtype: torch.dtype, balance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Pages `[..., page_words]` as vectors: key `[..., P, key_dim]` and value `[..., P, value_dim]`, both fp32.

    `balance` is what `encode_page` was given.
    """
    page = unpack_page(words, layout, dtype)
    key, value = page.key, page.value
    if page.key_scale is not None:
        key = key * page.key_scale.unsqueeze(-1)
    if layout.key_format == "qjl":
        key, signs = key.chunk(2, -1)
        key = key + unsketch(signs)
    key = unrotate(key, layout.key_dim, layout.rotation) if layout.rotates_keys else key[..., : layout.key_dim]
    if balance is not None:
        key = key / balance.unsqueeze(-2)
    if page.key_mean is not None:
        key = key + page.key_mean.unsqueeze(-2)
    if page.value_scale is not None:
        value = value * page.value_scale.unsqueeze(-1)
    if page.value_min is not None:
        value = value + page.value_min.unsqueeze(-1)
    rotated = layout.rotates_values
    value = unrotate(value, layout.value_dim, layout.rotation) if rotated else value[..., : layout.value_dim]
    return key, value


def _encode_keys(key: Tensor, layout: PageLayout) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Codes `[..., P, padded]`, fp16 fields `[..., P]` and which tokens' fields saturated."""
    if layout.key_format == "lloyd_max":
        return _lloyd_max(key, layout.key_bits, layout.key_dim_padded, layout, is_key=True)
    if layout.key_format == "qjl":
        return _qjl(key, layout)
    extra = (0, layout.key_dim_padded - layout.key_dim)
    if layout.key_format == "fp8":
        # torch's cast gives NaN beyond the largest number.
        code = key.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return pad(code, extra), [], (key.float().abs() > FP8_MAX).any(-1)
    return pad(_bits(key, layout.key_bits), extra), [], None


def _encode_values(value: Tensor, layout: PageLayout) -> tuple[Tensor, list[Tensor], Tensor | None]:
    if layout.value_format == "lloyd_max":
        return _lloyd_max(value, layout.value_bits, layout.value_dim_padded, layout, is_key=False)
    if layout.value_format == "grouped":
        return _grouped(value, layout)
    extra = (0, layout.value_dim_padded - layout.value_dim)
    if layout.value_format == "min_max":
        codes, fields, full = _min_max(value, layout.value_bits)
        return pad(codes, extra), fields, full
    return pad(_bits(value, layout.value_bits), extra), [], None


def _center(key: Tensor, stored: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Keys less the mean of the counted ones, where stored, and the mean as fp16 `[..., key_dim]`."""
    share = counted.sum(-2, keepdim=True).clamp_min(1).float()
    # Dividing first keeps the sum finite; the rounded mean is what reading adds back, so its rounding cancels.
    mean = (key.masked_fill(~counted, 0) / share).sum(-2, keepdim=True).clamp(-FP16_MAX, FP16_MAX).half()
    return (key - mean.float()).masked_fill(~stored, 0), mean.squeeze(-2)


def _lloyd_max(vector: Tensor, bits: int, dim: int, layout: PageLayout, is_key: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """Rotate, scale to unit variance a coordinate, take the nearest level; `PageLayout.scale` says what goes with them."""
    vector = vector.float()
    norm = torch.linalg.vector_norm(vector, dim=-1)
    rotated = rotate(vector, dim, layout.rotation)
    codes = _nearest_levels(rotated, norm, bits, layout.codebook)
    if layout.scale == "norm" and is_key:
        scale = norm / math.sqrt(dim)
    else:
        level = _look_up(codes, bits, dim, layout.codebook)
        scale = norm / torch.linalg.vector_norm(level, dim=-1)
        if layout.scale == "fitted":
            unit = rotated / norm.clamp_min(1e-30).unsqueeze(-1)
            unbiased = norm / (unit * level).sum(-1).clamp_min(1e-30)
            scale = (scale * unbiased).sqrt() if is_key else unbiased
    full = ~(scale <= FP16_MAX)  # NaN as well: of a norm that overflows
    return codes, [scale.masked_fill(full, FP16_MAX).half()], full


def _nearest_levels(rotated: Tensor, norm: Tensor, bits: int, codebook: str) -> Tensor:
    """The codes of rotated vectors, uint8 `[..., dim]`: a coordinate of variance 1 on a boundary goes to the right."""
    dim = rotated.shape[-1]
    unit = rotated * (math.sqrt(dim) / norm.clamp_min(1e-30)).unsqueeze(-1)  # finite for a zero vector
    codes = torch.zeros_like(unit, dtype=torch.uint8)
    for edge in boundaries(bits, dim, codebook).tolist():
        codes += (unit >= edge).view(torch.uint8)
    return codes


def _qjl(key: Tensor, layout: PageLayout) -> tuple[Tensor, list[Tensor], Tensor]:
    """Lloyd-Max codes of one bit less, and on top of them the signs of the sketch of what they leave."""
    bits, dim = layout.key_bits - 1, layout.key_dim_padded
    key = key.float()
    norm = torch.linalg.vector_norm(key, dim=-1)
    rotated = rotate(key, dim, layout.rotation)
    codes = _nearest_levels(rotated, norm, bits, layout.codebook)
    scale = (norm / math.sqrt(dim)).clamp_max(FP16_MAX).half()
    # What reading sees, the rounded scale, leaves this residual: rounding does not bias the scores.
    residual = rotated - scale.float().unsqueeze(-1) * _look_up(codes, bits, dim, layout.codebook)
    left = torch.linalg.vector_norm(residual, dim=-1)
    full = ~(left <= FP16_MAX) | (norm > FP16_MAX * math.sqrt(dim))  # a NaN too: the norm itself is beyond fp32
    codes |= (sketch(residual) >= 0).view(torch.uint8) << bits
    return codes, [scale, left.masked_fill(full, FP16_MAX).half()], full


def _read_qjl(codes: Tensor, scale: Tensor, residual: Tensor, layout: PageLayout) -> Tensor:
    """The two parts of `qjl` keys side by side, `[..., P, 2 * padded dim]`."""
    bits, dim = layout.key_bits - 1, layout.key_dim_padded
    key = scale.unsqueeze(-1) * _look_up(codes & (2**bits - 1), bits, dim, layout.codebook)
    signs = (codes >> bits).float() * 2 - 1
    return torch.cat((key, signs * (sign_weight(dim) * residual).unsqueeze(-1)), -1)


def _grouped(value: Tensor, layout: PageLayout) -> tuple[Tensor, list[Tensor], Tensor]:
    """Codes between the minimum and the maximum of each 32 dimensions; the last group may be smaller than that."""
    parts = [_min_max(part, layout.value_bits) for part in value.split(VALUE_GROUP_DIMS, -1)]
    codes = pad(torch.cat([part[0] for part in parts], -1), (0, layout.value_dim_padded - layout.value_dim))
    fields = [field for part in parts for field in part[1]]
    return codes, fields, torch.stack([part[2] for part in parts]).any(0)


def _read_grouped(codes: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """Values `[..., P, padded dim]`; takes their scales and minima out of `fields`."""
    groups = range(codes.shape[-1] // VALUE_GROUP_DIMS)
    scale = torch.stack([fields.pop(f"value_scale_{i}") for i in groups], -1).unsqueeze(-1)
    minimum = torch.stack([fields.pop(f"value_min_{i}") for i in groups], -1).unsqueeze(-1)
    return (codes.unflatten(-1, (-1, VALUE_GROUP_DIMS)) * scale + minimum).flatten(-2)


def _min_max(value: Tensor, bits: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Codes between each vector's minimum and maximum."""
    value, top = value.float(), 2**bits - 1
    low, high = value.aminmax(dim=-1)
    minimum = low.clamp(-FP16_MAX, FP16_MAX).half()
    step = ((high - minimum.float()) / top).clamp_min(1e-8)
    scale = step.clamp_max(FP16_MAX).half()
    steps = (value - minimum.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)
    codes = (steps + 0.5).floor().masked_fill((scale == 0).unsqueeze(-1), 0).clamp(0, top).to(torch.uint8)
    return codes, [scale, minimum], (low.abs() > FP16_MAX) | (step > FP16_MAX)


def _bits(vector: Tensor, bits: int) -> Tensor:
    if vector.element_size() * 8 != bits:
        raise ValueError(f"dtype={vector.dtype} does not fill the {bits} bits of this layout: build the layout for it.")
    return vector.view(torch.int16 if bits == 16 else torch.int32)


def _look_up(codes: Tensor, bits: int, dim: int, codebook: str) -> Tensor:
    table = levels(bits, dim, codebook).to(codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _in_groups(tensor: Tensor, trailing: int) -> Tensor:
    """Split the token axis, which `trailing` axes follow, into groups."""
    return tensor.unflatten(-1 - trailing, (-1, GROUP_TOKENS))


def _flag(tokens: Tensor, bit: int) -> Tensor:
    return tokens.any(-1).int() * bit
