"""The types of tensors in GGUF files: how large their blocks are, and what values the bytes stand for.

The formats are llama.cpp's (``ggml-common.h`` and ``ggml-quants.c``). Each sum and product is made in the order
of its reference, so that the values are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[Any]
"""Blocks of one type, as records of its fields. Shape (blocks,)."""
Values = NDArray[np.float32]

SUPERBLOCK = 256
"""Values of a block of the newer types."""
CHUNK = 1 << 16
"""Values that are dequantized at once: what they need fits into a core's cache."""
HALF = np.float32(0.5)
QUARTER = np.float32(0.25)
FOUR_BITS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The values of IQ4_NL and IQ4_XS."""
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of the 4-bit floats of MXFP4 and NVFP4."""
SIGNS = np.array([i | (i.bit_count() % 2 << 7) for i in range(128)], np.uint8)
"""Eight signs, of which seven are stored: the number of negative ones is even."""


class GGMLType(NamedTuple):
    """A type of tensors.

    Attributes:
        number: in the file.
        size: values of a block.
        fields: of a block, as NumPy's type for records.
        dequantize: from blocks to their values, of shape (blocks, size). None for types that cannot be dequantized.
    """

    number: int
    name: str
    size: int
    fields: np.dtype[Any]
    dequantize: Callable[[Blocks], Values] | None

    @property
    def bytes(self) -> int:
        """The bytes of a block."""
        return self.fields.itemsize


def dequantize(raw: NDArray[np.uint8], kind: GGMLType) -> Values:
    """The values of rows of bytes.

    Args:
        raw: of shape (rows, bytes per row), contiguous.

    Returns:
        shape (rows, values per row).
    """
    if kind.dequantize is None:
        raise NotImplementedError(f"values of type {kind.name}")
    blocks = raw.reshape(-1).view(kind.fields)
    if kind.size == 1:
        return kind.dequantize(blocks).reshape(len(raw), -1)
    values = np.empty((len(blocks), kind.size), np.float32)
    step = CHUNK // kind.size
    for start in range(0, len(blocks), step):
        values[start : start + step] = kind.dequantize(blocks[start : start + step])
    return values.reshape(len(raw), -1)


def planes(packed: NDArray[Any], bits: int) -> NDArray[Any]:
    """Unpack small numbers: first the lowest bits of all entries, then the next bits. (..., k) to (..., parts, k)."""
    shifts = np.arange(0, 8 * packed.itemsize, bits, dtype=packed.dtype)
    return packed[..., None, :] >> shifts[:, None] & packed.dtype.type((1 << bits) - 1)


def in_turn(packed: NDArray[Any], bits: int, parts: int | None = None) -> NDArray[Any]:
    """Unpack small numbers: all numbers of an entry, then of the next one. (..., k) to (..., k * parts)."""
    parts = 8 * packed.itemsize // bits if parts is None else parts
    shifts = np.arange(parts, dtype=packed.dtype) * packed.dtype.type(bits)
    unpacked = packed[..., None] >> shifts & packed.dtype.type((1 << bits) - 1)
    return unpacked.reshape(*packed.shape[:-1], -1)


def flat(values: NDArray[Any]) -> NDArray[Any]:
    """(blocks, ...) to (blocks, values)."""
    return values.reshape(len(values), -1)


def scaled(scales: NDArray[Any], numbers: NDArray[Any]) -> Values:
    """Each group of numbers times its scale. Shapes (blocks, groups) and (blocks, anything with ``size`` numbers)."""
    groups = numbers.reshape(*scales.shape, -1).astype(np.float32)
    return flat(scales[..., None] * groups)


def single(blocks: Blocks, name: str = "d") -> Values:
    """A field with one float16, of shape (blocks, 1)."""
    return blocks[name].astype(np.float32)[:, None]


def signed(numbers: NDArray[Any], zero: int) -> NDArray[np.int8]:
    """Numbers of which ``zero`` stands for 0."""
    return numbers.astype(np.int8) - np.int8(zero)


def f32(blocks: Blocks) -> Values:
    return blocks["x"][:, None]


def f16(blocks: Blocks) -> Values:
    return single(blocks, "x")


def bf16(blocks: Blocks) -> Values:
    return (blocks["x"].astype(np.uint32) << 16).view(np.float32)[:, None]


def q4_0(blocks: Blocks) -> Values:
    return single(blocks) * signed(flat(planes(blocks["q"], 4)), 8).astype(np.float32)


def q4_1(blocks: Blocks) -> Values:
    return single(blocks) * flat(planes(blocks["q"], 4)).astype(np.float32) + single(blocks, "m")


def five_bits(blocks: Blocks) -> NDArray[np.uint8]:
    return flat(planes(blocks["q"], 4)) | in_turn(blocks["high"], 1) << np.uint8(4)


def q5_0(blocks: Blocks) -> Values:
    return single(blocks) * signed(five_bits(blocks), 16).astype(np.float32)


def q5_1(blocks: Blocks) -> Values:
    return single(blocks) * five_bits(blocks).astype(np.float32) + single(blocks, "m")


def q8_0(blocks: Blocks) -> Values:
    return blocks["q"].astype(np.float32) * single(blocks)


def q2_k(blocks: Blocks) -> Values:
    scales = single(blocks) * (blocks["scales"] & 0xF)
    minima = single(blocks, "dmin") * (blocks["scales"] >> 4)
    numbers = planes(blocks["q"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return flat(scales[..., None] * numbers.astype(np.float32) - minima[..., None])


def q3_k(blocks: Blocks) -> Values:
    low, high = flat(planes(blocks["scales"][:, :8], 4)), flat(planes(blocks["scales"][:, 8:], 2))
    scales = single(blocks) * signed(low | high << np.uint8(4), 32).astype(np.float32)
    low = flat(planes(blocks["q"].reshape(-1, 2, 32), 2))
    return scaled(scales, signed(low | flat(planes(blocks["high"], 1)) << np.uint8(2), 4))


def k_scales(blocks: Blocks) -> tuple[Values, Values]:
    """The scales and minima of the eight groups of Q4_K and Q5_K, which have 6 bits each in 12 bytes."""
    first, second, third = np.split(blocks["scales"], 3, axis=1)
    scales = np.concatenate([first & 0x3F, third & 0xF | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 0x3F, third >> 4 | second >> 6 << 4], axis=1)
    return single(blocks) * scales, single(blocks, "dmin") * minima


def q4_k(blocks: Blocks) -> Values:
    scales, minima = k_scales(blocks)
    numbers = planes(blocks["q"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return flat(scales[..., None] * numbers.astype(np.float32) - minima[..., None])


def q5_k(blocks: Blocks) -> Values:
    scales, minima = k_scales(blocks)
    low = planes(blocks["q"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    numbers = low | planes(blocks["high"], 1) << np.uint8(4)
    return flat(scales[..., None] * numbers.astype(np.float32) - minima[..., None])


def q6_k(blocks: Blocks) -> Values:
    low = flat(planes(blocks["q"].reshape(-1, 2, 64), 4))
    high = flat(planes(blocks["high"].reshape(-1, 2, 32), 2))
    return scaled(single(blocks) * blocks["scales"].astype(np.float32), signed(low | high << np.uint8(4), 32))


def tq1_0(blocks: Blocks) -> Values:
    """Five digits to the base of 3 in a byte, as a fraction of 256."""

    def digits(packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
        powers = np.array([3**i for i in range(count)], np.uint8)
        return flat(packed[:, None, :] * powers[:, None])

    parts = digits(blocks["q"][:, :32], 5), digits(blocks["q"][:, 32:], 5), digits(blocks["high"], 4)
    numbers = np.concatenate(parts, axis=1).astype(np.uint16) * np.uint16(3) >> np.uint16(8)
    return single(blocks) * signed(numbers, 1).astype(np.float32)


def tq2_0(blocks: Blocks) -> Values:
    return single(blocks) * signed(flat(planes(blocks["q"].reshape(-1, 2, 32), 2)), 1).astype(np.float32)


def mxfp4(blocks: Blocks) -> Values:
    exponents = blocks["e"].astype(np.uint32)  # half of 2 ** (e - 127), and the two smallest are subnormal
    small = np.uint32(0x00200000) << np.minimum(exponents, 1)
    bits = np.where(exponents < 2, small, np.maximum(exponents, 1) - 1 << 23)
    return bits.view(np.float32)[:, None] * E2M1[flat(planes(blocks["q"], 4))]


def nvfp4(blocks: Blocks) -> Values:
    """Scales are floats of 8 bits without a sign: 4 of the exponent, 3 of the mantissa."""
    packed = blocks["scales"]
    exponents, mantissas = (packed >> 3 & 0xF).astype(np.float32), (packed & 7).astype(np.float32)
    normal = (1 + mantissas / 8) * np.float32(2) ** (exponents - 7)
    scales = np.where(exponents == 0, mantissas * np.float32(2**-9), normal) * HALF
    scales[(packed == 0) | (packed == 0x7F)] = 0
    return scaled(scales, E2M1[planes(blocks["q"].reshape(-1, 4, 8), 4)])


def iq4_nl(blocks: Blocks) -> Values:
    return single(blocks) * FOUR_BITS[flat(planes(blocks["q"], 4))]


def iq4_xs(blocks: Blocks) -> Values:
    low, high = in_turn(blocks["low"], 4), in_turn(blocks["high"][:, None], 2).astype(np.uint8)
    scales = single(blocks) * signed(low | high << np.uint8(4), 32).astype(np.float32)
    return scaled(scales, FOUR_BITS[planes(blocks["q"].reshape(-1, 8, 16), 4)])


@cache
def grid(name: str) -> Values:
    """The vectors that a type of the IQ series chooses from. Shape (vectors, values per vector)."""
    with (files("specbeam.checkpoints.formats") / "gguf_grids.npz").open("rb") as file:
        return np.load(file)[name].astype(np.float32)


def from_grid(scales: Values, vectors: Values, signs: NDArray[np.uint8]) -> Values:
    """Vectors with the signs of their bits, in groups with a scale each.

    Args:
        scales: (blocks, groups).
        vectors: (blocks, vectors, values per vector).
        signs: (blocks, values / 8), a bit for each value.
    """
    factors = np.where(in_turn(signs, 1), np.float32(-1), np.float32(1))
    grouped = vectors.reshape(*scales.shape, -1)
    return flat(scales[..., None] * grouped * factors.reshape(grouped.shape))


def iq2_xxs(blocks: Blocks) -> Values:
    indices, packed = np.split(blocks["q"].reshape(-1, 8, 2), 2, axis=2)
    scales = single(blocks) * (HALF + (packed[..., 0] >> 28).astype(np.float32)) * QUARTER
    vectors = grid("iq2_xxs")[np.ascontiguousarray(flat(indices)).view(np.uint8)]
    return from_grid(scales, vectors, SIGNS[in_turn(flat(packed), 7, 4)])


def iq2_xs(blocks: Blocks) -> Values:
    scales = single(blocks) * (HALF + in_turn(blocks["scales"], 4).astype(np.float32)) * QUARTER
    return from_grid(scales, grid("iq2_xs")[blocks["q"] & 511], SIGNS[blocks["q"] >> 9])


def iq2_s(blocks: Blocks) -> Values:
    scales = single(blocks) * (HALF + in_turn(blocks["scales"], 4).astype(np.float32)) * QUARTER
    indices = blocks["q"].astype(np.uint16) | in_turn(blocks["high"], 2).astype(np.uint16) << 8
    return from_grid(scales, grid("iq2_s")[indices], blocks["signs"])


def iq3_xxs(blocks: Blocks) -> Values:
    packed = blocks["scales"]
    scales = single(blocks) * (HALF + (packed >> 28).astype(np.float32)) * HALF
    return from_grid(scales, grid("iq3_xxs")[blocks["q"]], SIGNS[in_turn(packed, 7, 4)])


def iq3_s(blocks: Blocks) -> Values:
    scales = single(blocks) * (1 + 2 * in_turn(blocks["scales"], 4))
    indices = blocks["q"].astype(np.uint16) | in_turn(blocks["high"], 1).astype(np.uint16) << 8
    return from_grid(scales, grid("iq3_s")[indices], blocks["signs"])


def shifted(scales: Values, vectors: Values, negative: NDArray[np.bool_]) -> Values:
    """Vectors of -1, 0 and 1 that are moved by an eighth, up or down, in groups with a scale each."""
    moves = np.where(negative, np.float32(-0.125), np.float32(0.125))
    moved = (vectors.reshape(*moves.shape, -1) + moves[..., None]).reshape(*scales.shape, -1)
    return flat(scales[..., None] * moved)


def iq1_s(blocks: Blocks) -> Values:
    high = blocks["high"]
    indices = blocks["q"].astype(np.uint16) | in_turn(high, 3, 4) << 8
    return shifted(single(blocks) * (2 * (high >> 12 & 7) + 1), grid("iq1")[indices], high >= 0x8000)


def iq1_m(blocks: Blocks) -> Values:
    packed = blocks["scales"]  # the highest bits of all four are the scale of the block
    d = np.bitwise_or.reduce((packed & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=1)
    scales = d.view(np.float16).astype(np.float32)[:, None] * (2 * in_turn(packed, 3, 4) + 1)
    high = in_turn(blocks["high"], 4)
    indices = blocks["q"].astype(np.uint16) | (high & 7).astype(np.uint16) << 8
    return shifted(scales, grid("iq1")[indices], high >= 8)


def _type(
    number: int, name: str, size: int, fields: str | Sequence[Any], values: Callable[[Blocks], Values] | None = None
) -> GGMLType:
    """A type whose fields are (name, type, number of entries), or one value "x"."""
    listed = [("x", fields)] if isinstance(fields, str) else fields
    return GGMLType(number, name, size, np.dtype([tuple(field) for field in listed]), values)


D, M, DMIN = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2")
TYPES = {
    kind.number: kind
    for kind in (
        _type(0, "F32", 1, "<f4", f32),
        _type(1, "F16", 1, "<f2", f16),
        _type(2, "Q4_0", 32, [D, ("q", "u1", 16)], q4_0),
        _type(3, "Q4_1", 32, [D, M, ("q", "u1", 16)], q4_1),
        _type(6, "Q5_0", 32, [D, ("high", "u1", 4), ("q", "u1", 16)], q5_0),
        _type(7, "Q5_1", 32, [D, M, ("high", "u1", 4), ("q", "u1", 16)], q5_1),
        _type(8, "Q8_0", 32, [D, ("q", "i1", 32)], q8_0),
        _type(9, "Q8_1", 32, [("d", "<f4"), ("s", "<f4"), ("q", "i1", 32)]),
        _type(10, "Q2_K", SUPERBLOCK, [("scales", "u1", 16), ("q", "u1", 64), D, DMIN], q2_k),
        _type(11, "Q3_K", SUPERBLOCK, [("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), D], q3_k),
        _type(12, "Q4_K", SUPERBLOCK, [D, DMIN, ("scales", "u1", 12), ("q", "u1", 128)], q4_k),
        _type(13, "Q5_K", SUPERBLOCK, [D, DMIN, ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)], q5_k),
        _type(14, "Q6_K", SUPERBLOCK, [("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), D], q6_k),
        _type(15, "Q8_K", SUPERBLOCK, [("d", "<f4"), ("q", "i1", 256), ("sums", "<i2", 16)]),
        _type(16, "IQ2_XXS", SUPERBLOCK, [D, ("q", "<u4", 16)], iq2_xxs),
        _type(17, "IQ2_XS", SUPERBLOCK, [D, ("q", "<u2", 32), ("scales", "u1", 8)], iq2_xs),
        _type(18, "IQ3_XXS", SUPERBLOCK, [D, ("q", "u1", 64), ("scales", "<u4", 8)], iq3_xxs),
        _type(19, "IQ1_S", SUPERBLOCK, [D, ("q", "u1", 32), ("high", "<u2", 8)], iq1_s),
        _type(20, "IQ4_NL", 32, [D, ("q", "u1", 16)], iq4_nl),
        _type(
            21,
            "IQ3_S",
            SUPERBLOCK,
            [D, ("q", "u1", 64), ("high", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)],
            iq3_s,
        ),
        _type(
            22,
            "IQ2_S",
            SUPERBLOCK,
            [D, ("q", "u1", 32), ("signs", "u1", 32), ("high", "u1", 8), ("scales", "u1", 8)],
            iq2_s,
        ),
        _type(23, "IQ4_XS", SUPERBLOCK, [D, ("high", "<u2"), ("low", "u1", 4), ("q", "u1", 128)], iq4_xs),
        _type(24, "I8", 1, "i1"),
        _type(25, "I16", 1, "<i2"),
        _type(26, "I32", 1, "<i4"),
        _type(27, "I64", 1, "<i8"),
        _type(28, "F64", 1, "<f8"),
        _type(29, "IQ1_M", SUPERBLOCK, [("q", "u1", 32), ("high", "u1", 16), ("scales", "<u2", 4)], iq1_m),
        _type(30, "BF16", 1, "<u2", bf16),
        _type(34, "TQ1_0", SUPERBLOCK, [("q", "u1", 48), ("high", "u1", 4), D], tq1_0),
        _type(35, "TQ2_0", SUPERBLOCK, [("q", "u1", 64), D], tq2_0),
        _type(39, "MXFP4", 32, [("e", "u1"), ("q", "u1", 16)], mxfp4),
        _type(40, "NVFP4", 64, [("scales", "u1", 4), ("q", "u1", 32)], nvfp4),
        _type(41, "Q1_0", 128, [D, ("q", "u1", 16)]),
    )
}
"""By their numbers. Types that no file has for weights, such as Q8_K, have a size alone."""

MIXTURES = (
    *("F32", "F16", "Q4_0", "Q4_1", None, None, None, "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L"),
    *("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S"),
    *("IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16", None, None, None, "TQ1_0", "TQ2_0"),
    *("MXFP4_MOE", "NVFP4", "Q1_0"),
)
"""What llama.cpp calls files by the types in them, by the number in ``general.file_type``."""
