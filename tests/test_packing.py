"""Codes to words and back: words written by hand, a slow encoder straight from the layout's text, and round trips."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tq_hf.layout import RunOrder, lane_word_offset
from tq_hf.reference.packing import pack_codes, pack_metadata, unpack_codes, unpack_metadata

KEYS, VALUES = RunOrder.KEYS, RunOrder.VALUES
CODE_TYPES = {2: torch.uint8, 3: torch.uint8, 4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}
WIDTHS = sorted(CODE_TYPES)


def words_with(size: int, contents: dict[int, int]) -> Tensor:
    """Zero words, but for some given as unsigned numbers."""
    words = torch.zeros(size, dtype=torch.int32)
    for offset, word in contents.items():
        words[offset] = word - (1 << 32) if word >> 31 else word
    return words


def random_codes(bits: int, dim: int, *lead: int) -> Tensor:
    generator = torch.Generator().manual_seed(bits * 1000 + dim)
    low, high = (0, 1 << bits) if bits <= 8 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return torch.randint(low, high, (*lead, 32, dim), generator=generator, dtype=torch.int64).to(CODE_TYPES[bits])


class TestWordsByHand:
    """Each word below was worked out with pen and paper from the docstring of `tq_hf.layout`."""

    def test_4_bits_keys(self) -> None:
        # Lane 9 is g=2, t=1; D=32 has 4 words a lane, so run r=3 is word 3 at 4 * 9 + 3. Token 8*3 + 2, dimensions 8..15.
        # Codes 8 7 15 0 9 6 12 3: magnitudes 0 0 7 7 1 1 4 4, codes 1 3 5 7 negative: bits 15, 31, 11, 27.
        codes = unpack_codes(words_with(128, {39: 0xCC11FF00}), 4, KEYS)
        assert codes[26, 8:16].tolist() == [8, 7, 15, 0, 9, 6, 12, 3]
        codes[26, 8:16] = 8
        assert (codes == 8).all()  # magnitude 0, positive

    def test_4_bits_values(self) -> None:
        # The same word as values: r=3 is p=1, h=1, so tokens 16 + 2*1 and the next, and those 8 later; dimensions 2*4 + 2
        # and the next.
        codes = unpack_codes(words_with(128, {39: 0xCC11FF00}), 4, VALUES)
        assert codes[[18, 19, 26, 27], 10].tolist() == [8, 7, 15, 0]
        assert codes[[18, 19, 26, 27], 11].tolist() == [9, 6, 12, 3]
        assert (codes != 8).sum() == 7

    def test_3_bits_keys_with_the_last_run_in_the_spare_bits(self) -> None:
        # D=64: 6 words a lane, chunk 1 in words 3 to 5. Lane 5 (g=1, t=1): word 3 at 4*5 + 3, words 4 and 5 in the rest
        # behind the whole quad, at 128 + 2*5. Run 0 counts up, run 1 is all 5, run 2 counts down, run 3 is 1 2 4 7 0 3 5 6.
        words = words_with(192, {23: 0x7ED4B218, 138: 0xD5D5D5D5, 139: 0x8923CD67})
        codes = unpack_codes(words, 3, KEYS)
        assert codes[1, 24:32].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        assert codes[9, 24:32].tolist() == [5] * 8
        assert codes[17, 24:32].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
        assert codes[25, 24:32].tolist() == [1, 2, 4, 7, 0, 3, 5, 6]
        assert codes.count_nonzero() == 7 + 8 + 7 + 7

    def test_3_bits_values(self) -> None:
        # The same words as values: dimensions 1*8 + 4 to +3, two for each p; tokens 2, 3, 10, 11, and 16 later for h=1.
        words = words_with(192, {23: 0x7ED4B218, 138: 0xD5D5D5D5, 139: 0x8923CD67})
        codes = unpack_codes(words, 3, VALUES)
        assert codes[[2, 3, 10, 11], 12].tolist() == [0, 1, 2, 3]
        assert codes[[2, 3, 10, 11], 13].tolist() == [4, 5, 6, 7]
        assert codes[[18, 19, 26, 27], 14].tolist() == [1, 2, 4, 7]
        assert codes[[18, 19, 26, 27], 15].tolist() == [0, 3, 5, 6]
        assert codes.count_nonzero() == 7 + 8 + 7 + 7

    def test_2_bits_in_a_remainder_word(self) -> None:
        # D=96: 6 words a lane; runs 0 and 1 of chunk 2 are word 4, the first of the two behind the quads. Lane 31 (g=7,
        # t=3) has it at 128 + 2*31. Even run 0 1 2 3 3 2 1 0, odd run 3 3 0 0 1 1 2 2.
        words = words_with(192, {190: 0x896732DC})
        codes = unpack_codes(words, 2, KEYS)
        assert codes[7, 88:96].tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
        assert codes[15, 88:96].tolist() == [3, 3, 0, 0, 1, 1, 2, 2]
        assert codes.count_nonzero() == 12
        codes = unpack_codes(words, 2, VALUES)  # p=0, h=0 and 1
        assert codes[[6, 7, 14, 15], 92].tolist() == [0, 1, 2, 3]
        assert codes[[6, 7, 14, 15], 93].tolist() == [3, 2, 1, 0]
        assert codes[[22, 23, 30, 31], 92].tolist() == [3, 3, 0, 0]
        assert codes[[22, 23, 30, 31], 93].tolist() == [1, 1, 2, 2]
        assert codes.count_nonzero() == 12

    def test_8_bits(self) -> None:
        # D=32: 8 words a lane, two a run. Lane 4 (g=1, t=0), run 2, half 1: word 5 at 128 + 4*4 + 1.
        words = words_with(256, {145: 0x44332211})
        assert unpack_codes(words, 8, KEYS)[17, 4:8].tolist() == [0x11, 0x33, 0x22, 0x44]
        codes = unpack_codes(words, 8, VALUES)  # p=1, h=0, e=1
        assert codes[[0, 1, 8, 9], 7].tolist() == [0x11, 0x33, 0x22, 0x44]
        assert codes.count_nonzero() == 4

    def test_16_bits(self) -> None:
        # D=32: 16 words a lane, four a run. Lane 2 (g=0, t=2), run 1, codes 2 and 3: word 5 at 128 + 4*2 + 1.
        words = words_with(512, {137: 0x3F80C000})
        keys = unpack_codes(words, 16, KEYS).view(torch.bfloat16)
        assert keys[8, 18:20].tolist() == [-2.0, 1.0]
        values = unpack_codes(words, 16, VALUES).view(torch.bfloat16)  # h=1, e=0, a=2 and 3: tokens 24 + 4 and the next
        assert (values[28, 0].item(), values[29, 0].item()) == (-2.0, 1.0)
        assert values.count_nonzero() == 2

    def test_32_bits(self) -> None:
        # D=32: 32 words a lane, eight a run. Lane 2, run 1, code 3: word 11 at 128*2 + 4*2 + 3.
        words = words_with(1024, {267: 0xBF800000})
        assert unpack_codes(words, 32, KEYS).view(torch.float32)[8, 19] == -1.0
        values = unpack_codes(words, 32, VALUES).view(torch.float32)
        assert values[29, 0] == -1.0 and values.count_nonzero() == 1


def slow_words(codes: Tensor, bits: int, order: RunOrder) -> list[int]:
    """The words of a group, one code at a time."""
    dim = codes.shape[1]
    per_lane = bits * dim // 32
    words = [0] * (32 * per_lane)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for c in range(dim // 32):
            for r in range(4):
                for i in range(8):
                    if order is KEYS:
                        token, d = 8 * r + g, t * dim // 4 + 8 * c + i
                    else:
                        (p, h), (e, a) = divmod(r, 2), divmod(i, 4)
                        token, d = 16 * h + 8 * (a // 2) + 2 * t + a % 2, g * dim // 8 + 4 * c + 2 * p + e
                    code = int(codes[token, d]) & ((1 << bits) - 1)
                    for word, bit in slow_bits(code, bits, c, r, i):
                        words[lane_word_offset(lane, word, per_lane)] |= 1 << bit
    return [word - (1 << 32) if word >> 31 else word for word in words]


def slow_bits(code: int, bits: int, c: int, r: int, i: int) -> list[tuple[int, int]]:
    """The (word of the lane, bit) that are 1 for code i of run 4c + r."""
    run = 4 * c + r
    if bits == 4:
        magnitude, negative = (code - 8, 0) if code >= 8 else (7 - code, 1)
        sign = [(run, 8 * i + 7 if i < 4 else 8 * (i - 4) + 3)] if negative else []
        return [(run, 4 * i + k) for k in range(3) if magnitude >> k & 1] + sign
    if bits == 3 and r == 3:
        return [(3 * c + k, 4 * i + 3) for k in range(3) if code >> k & 1]
    if bits == 8:
        first = {0: 0, 1: 16, 2: 8, 3: 24}[i % 4]
        return [(2 * run + i // 4, first + k) for k in range(8) if code >> k & 1]
    word, first = {
        2: (run // 2, 4 * i + 2 * (r % 2)),
        3: (3 * c + r, 4 * i),
        16: (4 * run + i // 2, 16 * (i % 2)),
        32: (8 * run + i, 0),
    }[bits]
    return [(word, first + k) for k in range(bits) if code >> k & 1]


@pytest.mark.parametrize("order", RunOrder, ids=lambda order: order.value)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", [32, 96])
def test_packing_puts_every_code_where_the_layout_says(bits: int, order: RunOrder, dim: int) -> None:
    codes = random_codes(bits, dim)
    assert pack_codes(codes, bits, order).tolist() == slow_words(codes, bits, order)


@pytest.mark.parametrize("order", RunOrder, ids=lambda order: order.value)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", range(32, 257, 32))
def test_round_trip(bits: int, order: RunOrder, dim: int) -> None:
    codes = random_codes(bits, dim, 2, 3)
    words = pack_codes(codes, bits, order)
    assert words.dtype == torch.int32 and words.shape == (2, 3, bits * dim)
    assert torch.equal(unpack_codes(words, bits, order), codes)
    # A group's words do not depend on its neighbours, nor on strides.
    assert torch.equal(pack_codes(codes.transpose(0, 1), bits, order)[2, 1], words[1, 2])
    assert torch.equal(unpack_codes(words.transpose(0, 1), bits, order)[2, 1], codes[1, 2])


class TestMetadata:
    def test_two_fields_share_a_block_and_the_third_follows(self) -> None:
        # Token 13 is g=5, r=1: halves 8*5 + 1, 8*5 + 4 + 1 and 64 + 4*5 + 1. Halves are small integers: bits = value.
        words = torch.arange(96, dtype=torch.int16).view(torch.int32)
        fields = [field.view(torch.int16) for field in unpack_metadata(words, 3)]
        assert [field[13].item() for field in fields] == [41, 45, 85]
        assert [field[31].item() for field in fields] == [59, 63, 95]
        two = [field.view(torch.int16) for field in unpack_metadata(words[:32], 2)]
        assert all(torch.equal(a, b) for a, b in zip(two, fields[:2], strict=True))

    def test_one_field(self) -> None:
        (field,) = unpack_metadata(torch.arange(32, dtype=torch.int16).view(torch.int32), 1)
        assert field.view(torch.int16)[[0, 8, 1, 13, 31]].tolist() == [0, 1, 4, 21, 31]

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 17, 18])
    def test_round_trip(self, count: int) -> None:
        fields = torch.arange(count * 5 * 32, dtype=torch.float16).view(count, 5, 32).unbind(0)
        words = pack_metadata(fields)
        assert words.shape == (5, 16 * count)
        assert all(torch.equal(a, b) for a, b in zip(unpack_metadata(words, count), fields, strict=True))
