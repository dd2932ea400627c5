"""The byte layout of a page: the one source of truth for every offset, for the kernels and their references.

A **page** holds `page_size` tokens of one KV head as int32 words, contiguous in the pool `[pages, kv_heads, page_words]`::

    page   = header | group 0 | group 1 | ...            header: the page's key mean, fp16, where keys are centred
    group  = key codes | value codes | metadata          32 tokens

**Lanes.** A group is laid out for the 32 lanes of a warp, in the order in which `mma.sync` wants its fragments, so that
what a lane loads is ready to multiply. Lane `4g + t` (g in 0..7, t in 0..3) owns, for every chunk `c` of 32 padded
dimensions and every `r` (0..3), one **run** of 8 codes `i` (0..7)::

    keys      r = octet,  code i           token 8r + g                           dimension  t * D/4 + 8c + i
    values    r = 2p + h, code i = 4e + a  token 16h + 8 * (a // 2) + 2t + a % 2  dimension  g * D/8 + 4c + 2p + e

So four codes of a key belong to one token, and four codes of a value to one dimension: what one 32-bit register of an
8-bit product takes.

**Lane words.** The runs `4c + r` of a lane are packed into its `words_per_lane = bits * D/32` words:

    4 bits    one run a word: a 3-bit magnitude m in nibble i, and the signs where a byte permute can replicate them, code
              i < 4 in bit 8i + 7, code i >= 4 in bit 8(i - 4) + 3. Codes count up: 8 + m, or 7 - m with the sign set.
    3 bits    the four runs of a chunk in three words: the low 3 bits of a nibble hold a code of run r < 3, and the spare
              bit of word w holds bit w of the code of run 3 in the same nibble.
    2 bits    two runs a word: the low 2 bits of a nibble hold a code of the even run, the high 2 bits one of the odd.
    8 bits    two words a run: bytes 0, 2 hold codes 4h, 4h + 1 and bytes 1, 3 codes 4h + 2, 4h + 3 of half h.
    16, 32    `raw`: two codes a word (low half first), or one.

Word `p` of a lane stands at `128 * (p // 4) + 4 * lane + p % 4`, so that four words are one 16-byte load; the last
`words_per_lane % 4` words of each lane stand side by side behind the whole quads.

**Codes.** A `lloyd_max` code counts the levels of the codebook upwards, a `min_max` or `grouped` one the steps above the
minimum. A `qjl` code of b bits at dimension i has in its low bits the (b - 1)-bit Lloyd-Max code of coordinate i of the
rotated key, and in its top bit whether coordinate i of the residual's sketch is not negative.

**Metadata** is fp16, one value per token and field, in the order key scale, norm of the key's residual (`qjl`), value scale,
value minimum (those that the formats have); `grouped` has a scale and a minimum for each 32 dimensions that follow each
other, in the order scale 0, minimum 0, scale 1, ... Two fields share a block `[g][2][r]`, blocks follow each other, and the
last of an odd number of fields has its own block `[g][r]`; the token is 8r + g.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache

GROUP_TOKENS = 32
LANES = 32
RUN_CODES = 8
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
PAGE_SIZES = (32, 64, 128, 256)
KEY_WIDTHS = {"lloyd_max": (2, 3, 4), "qjl": (2, 3, 4), "fp8": (8,), "raw": (16, 32)}
VALUE_WIDTHS = {"lloyd_max": (2, 3, 4), "min_max": (2, 3, 4, 8), "grouped": (2, 3, 4), "raw": (16, 32)}
VALUE_GROUP_DIMS = 32  # the dimensions of a `grouped` vector that share a scale and a minimum
ROTATIONS = ("hadamard", "qr")
SCALES = ("norm", "norm_corrected", "fitted")
# The bits of a layer's `flags`: a vector that was stored as zero, or a number clamped to its stored format.
NON_FINITE_KEY, NON_FINITE_VALUE, SATURATED = 1, 2, 4


class RunOrder(Enum):
    """How a run's 8 codes map to tokens and dimensions (module docstring)."""

    KEYS = "keys"
    VALUES = "values"


def padded_dim(head_dim: int) -> int:
    """The stored dimension: `head_dim` rounded up to a whole number of 32-dimension chunks."""
    return -(-head_dim // 32) * 32


def require_format(side: str, fmt: str, bits: int) -> None:
    """Raise `ValueError` unless `side` ("key" or "value") can be stored in this format at this width."""
    widths = KEY_WIDTHS if side == "key" else VALUE_WIDTHS
    if fmt not in widths:
        raise ValueError(f"{side}_format={fmt!r} is unknown: expected one of {sorted(widths)}.")
    if type(bits) is not int or bits not in widths[fmt]:
        raise ValueError(f"{side}_bits={bits!r} does not fit {side}_format={fmt!r}: expected one of {widths[fmt]}.")


def require_page(page_size: int, center_keys: bool, key_format: str) -> None:
    """Raise `ValueError` unless there are pages of this size, with a header if `center_keys`."""
    if type(center_keys) is not bool:
        raise ValueError(f"center_keys={center_keys!r} is not allowed: expected True or False.")
    if center_keys and key_format != "lloyd_max":
        raise ValueError(f"center_keys=True needs key_format='lloyd_max', not {key_format!r}.")
    if type(page_size) is not int or page_size not in PAGE_SIZES:
        raise ValueError(f"page_size={page_size!r} is not allowed: expected one of {PAGE_SIZES}.")


def require_rotation(rotation: str, scale: str, key_format: str) -> None:
    """Raise `ValueError` unless vectors can be rotated so, and keys of this format scaled so."""
    if rotation not in ROTATIONS:
        raise ValueError(f"rotation={rotation!r} is unknown: expected one of {ROTATIONS}.")
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r} is unknown: expected one of {SCALES}.")
    if scale != "norm" and key_format == "qjl":
        raise ValueError(
            f"scale={scale!r} would bias the scores of key_format='qjl', which are unbiased without it: pass scale='norm'."
        )


@dataclass(frozen=True)
class PageLayout:
    """Where everything stands in a page.

    Args:
        key_dim, value_dim: dimensions of a key and a value head; even, 16 to 256.
        page_size: tokens a page; one of `PAGE_SIZES`.
        key_format: `"lloyd_max"`, `"qjl"`, `"fp8"` or `"raw"`.
        key_bits: bits a key code: 2, 3, 4 (`lloyd_max`, and `qjl` with its sign), 8 (`fp8`), 16 or 32 (`raw`).
        value_format: `"lloyd_max"`, `"min_max"`, `"grouped"` or `"raw"`.
        value_bits: bits a value code: 2, 3, 4 (also 8 for `min_max`), 16 or 32 (`raw`).
        center_keys: whether the page starts with the mean of its keys.
        codebook: which Lloyd-Max levels the codes index: `"gaussian"`, `"beta"` or `"int8_grid"`.
        rotation: the matrix that rotates what is rotated: `"hadamard"` or `"qr"`.
        scale: what a `lloyd_max` vector's stored scale does. Levels are means of their cells, so they alone are too short.
            `"norm_corrected"`: restores the vector's norm. `"fitted"`: a value's image projects onto the value as long as
            it is, which leaves sums of values unbiased (EDEN, https://proceedings.mlr.press/v162/vargaftik22a.html); a
            key gets the geometric mean of that and the norm correction, as noisy scores weigh more under the softmax's
            exponential. `"norm"`: a key keeps its norm over sqrt(padded dim), as in the paper; values are corrected.

    Raises:
        ValueError: a dimension, page size, format or width that has no layout.
    """

    key_dim: int
    value_dim: int
    page_size: int
    key_format: str
    key_bits: int
    value_format: str
    value_bits: int
    center_keys: bool
    codebook: str
    rotation: str = "hadamard"
    scale: str = "norm_corrected"

    def __post_init__(self) -> None:
        for name, dim in (("keys", self.key_dim), ("values", self.value_dim)):
            if not (MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM and dim % 2 == 0):
                raise ValueError(
                    f"head_dim={dim} (of the {name}) has no packed layout: expected an even head_dim from {MIN_HEAD_DIM} to"
                    f" {MAX_HEAD_DIM}. Use transformers' DynamicCache for this model."
                )
        require_format("key", self.key_format, self.key_bits)
        require_format("value", self.value_format, self.value_bits)
        require_page(self.page_size, self.center_keys, self.key_format)
        require_rotation(self.rotation, self.scale, self.key_format)

    # -- names: an op of torch.library takes a layout as a string ----------------------------------------------------
    @property
    def name(self) -> str:
        """A compact string that `from_name` turns back into this layout."""
        return ",".join(str(int(v) if isinstance(v, bool) else v) for v in (getattr(self, f.name) for f in fields(self)))

    @staticmethod
    @lru_cache(maxsize=None)
    def from_name(name: str) -> PageLayout:
        """The layout that `name` describes (cached: ops call this at every step)."""
        kd, vd, page, kf, kb, vf, vb, center, codebook, rotation, scale = name.split(",")
        return PageLayout(int(kd), int(vd), int(page), kf, int(kb), vf, int(vb), center == "1", codebook, rotation, scale)

    # -- dimensions --------------------------------------------------------------------------------------------------
    @property
    def key_dim_padded(self) -> int:
        return padded_dim(self.key_dim)

    @property
    def value_dim_padded(self) -> int:
        return padded_dim(self.value_dim)

    @property
    def rotates_keys(self) -> bool:
        return self.key_format in ("lloyd_max", "qjl")

    @property
    def rotates_values(self) -> bool:
        return self.value_format == "lloyd_max"

    # -- metadata fields ---------------------------------------------------------------------------------------------
    @property
    def metadata(self) -> tuple[str, ...]:
        """The fp16 fields each token has, in their order in the group."""
        key = {"lloyd_max": ("key_scale",), "qjl": ("key_scale", "key_residual")}.get(self.key_format, ())
        value = {"lloyd_max": ("value_scale",), "min_max": ("value_scale", "value_min")}.get(self.value_format, ())
        if self.value_format == "grouped":
            for i in range(self.value_dim_padded // VALUE_GROUP_DIMS):
                value += (f"value_scale_{i}", f"value_min_{i}")
        return key + value

    def metadata_offset(self, field: str, token: int = 0) -> int:
        """Offset in halves (fp16), from the start of the group's metadata, of `field` of a token (0..31)."""
        g, r = token % 8, token // 8
        i = self.metadata.index(field)
        block, alone = 64 * (i // 2), i % 2 == 0 and i + 1 == len(self.metadata)
        return block + (4 * g + r if alone else 8 * g + 4 * (i % 2) + r)

    # -- words -------------------------------------------------------------------------------------------------------
    @property
    def key_words_per_lane(self) -> int:
        return self.key_bits * self.key_dim_padded // 32

    @property
    def value_words_per_lane(self) -> int:
        return self.value_bits * self.value_dim_padded // 32

    @property
    def key_words(self) -> int:
        """Words of a group's key codes; the value codes follow."""
        return LANES * self.key_words_per_lane

    @property
    def value_words(self) -> int:
        return LANES * self.value_words_per_lane

    @property
    def metadata_words(self) -> int:
        return GROUP_TOKENS * len(self.metadata) // 2

    @property
    def group_words(self) -> int:
        return self.key_words + self.value_words + self.metadata_words

    @property
    def header_words(self) -> int:
        """Words of the key mean (fp16, unpadded), rounded up to 16 bytes so that groups stay aligned."""
        return -(-self.key_dim // 8) * 4 if self.center_keys else 0

    @property
    def groups(self) -> int:
        return self.page_size // GROUP_TOKENS

    @property
    def page_words(self) -> int:
        return self.header_words + self.groups * self.group_words

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token and KV head, header included."""
        return 4 * self.page_words / self.page_size


def lane_word_offset(lane: int, word: int, words_per_lane: int) -> int:
    """Offset in words, within a group's key or value codes, of word `word` of `lane`."""
    quads = words_per_lane // 4
    if word < 4 * quads:
        return 128 * (word // 4) + 4 * lane + word % 4
    return 128 * quads + lane * (words_per_lane - 4 * quads) + (word - 4 * quads)
