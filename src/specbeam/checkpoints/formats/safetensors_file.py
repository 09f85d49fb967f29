"""Safetensors files: their headers, and rows of their tensors as float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from specbeam.checkpoints.files import Extent, check_fetched
from specbeam.errors import SpecbeamError

Floats = NDArray[np.float32]
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E5M2": "u1", "F8_E4M3": "u1"}
"""How NumPy reads the numbers of each floating type. It has none for the last three."""
INTEGERS = {"I64": "<i8", "I32": "<i4"}
ROWS_AT_ONCE = 1024
"""Rows of two tensors that are compared, so that only a few megabytes are held."""


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: in the file.
        dtype: as the format names it.
        begin: the offset of its first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def rows(self, start: int, stop: int) -> Floats:
        """Rows ``start`` to ``stop``, float32 [stop - start, ...]."""
        self._check_dtype()
        columns = int(np.prod(self.shape[1:], dtype=np.int64))
        kind = np.dtype(FLOATS[self.dtype])
        begin = self.begin + start * columns * kind.itemsize
        with self._as_it_was_opened():
            values = np.fromfile(self.file, kind, (stop - start) * columns, offset=begin)
            values = values.reshape(stop - start, *self.shape[1:])
        return _float32(values, self.dtype)

    def integers(self) -> NDArray[np.int64]:
        """All numbers of a vector of integers, int64 [n]."""
        with self._as_it_was_opened():
            values = np.fromfile(self.file, INTEGERS[self.dtype], prod(self.shape), offset=self.begin)
        return values.astype(np.int64)

    def raw(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows ``start`` to ``stop`` of a tensor of bytes, [stop - start, ...]."""
        columns = prod(self.shape[1:])
        with self._as_it_was_opened():
            values = np.fromfile(self.file, np.uint8, (stop - start) * columns, offset=self.begin + start * columns)
            return values.reshape(stop - start, *self.shape[1:])

    def columns(self, start: int, stop: int) -> Floats:
        """Columns ``start`` to ``stop`` of a matrix [out, in], float32 [out, stop - start]."""
        self._check_dtype()
        # Pages that a mapping has touched count as ours until it is closed, and it is closed at the end of this call.
        with self._as_it_was_opened():
            values = np.array(np.memmap(self.file, FLOATS[self.dtype], "r", self.begin, self.shape)[:, start:stop])
        return _float32(values, self.dtype)

    @contextmanager
    def _as_it_was_opened(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            problem = f"{self.file} has changed since it was opened ({error})"
            raise SpecbeamError(f"{problem}: load the model again") from error

    def _check_dtype(self) -> None:
        if self.dtype not in FLOATS:
            raise SpecbeamError(f"{self.file}: tensor {self.name} holds {self.dtype}: load an unquantized folder")


def _float32(values: NDArray[np.generic], dtype: str) -> Floats:
    if dtype == "BF16":  # the first half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":  # the first half of a float16
        return (values.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        return E4M3[values]
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32, copy=False)


def _e4m3() -> Floats:
    """The values of the 256 numbers with 4 bits of exponent and 3 of mantissa (Micikevicius et al. 2022, Table 1)."""
    bits = np.arange(256)
    exponents, mantissas = bits >> 3 & 15, (bits & 7) / 8
    sizes = np.where(exponents == 0, mantissas * 2.0**-6, (1 + mantissas) * 2.0 ** (exponents - 7))
    sizes[bits & 127 == 127] = np.nan
    return np.where(bits < 128, sizes, -sizes).astype(np.float32)


E4M3 = _e4m3()


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same shape and the same numbers."""
    if one.shape != other.shape:
        return False
    rows = prod(one.shape[:1])
    pieces = ((start, min(start + ROWS_AT_ONCE, rows)) for start in range(0, rows, ROWS_AT_ONCE))
    return all(np.array_equal(one.rows(*piece), other.rows(*piece)) for piece in pieces)


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by their names."""
    check_fetched(file)
    try:
        with file.open("rb"), safe_open(file, "np") as opened:  # Python says why a file cannot be opened
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a dictionary)
            facts = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        length, header = _header(file)
        begins = {name: 8 + length + header[name]["data_offsets"][0] for name in facts}
    except OSError as error:
        raise SpecbeamError(f"{file} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise SpecbeamError(f"{file} is damaged or not a safetensors file ({error}): fetch it again") from error
    return {name: StoredTensor(file, name, *facts[name], begins[name]) for name in facts}


def extents_of(file: Path) -> list[Extent]:
    """Where the header and the tensors lie."""
    length, header = _header(file)
    data = 8 + length
    places = (tensor["data_offsets"] for tensor in header.values())
    return [Extent(0, data, whole=True), *(Extent(data + start, end - start) for start, end in places)]


def _header(file: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    """The length of a header in bytes, and the tensors that it describes."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return length, header
