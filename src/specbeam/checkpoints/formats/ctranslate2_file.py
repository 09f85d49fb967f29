"""CTranslate2's ``model.bin``: its header, and rows of its variables as float32."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.files import check_fetched
from specbeam.checkpoints.fingerprint import Extent
from specbeam.errors import SpecbeamError, shown

VERSION = 6
"""Of the format. Since 2021 it has aliases, and names the kind of model."""
TYPES: list[tuple[np.dtype[Any], str]] = [
    *((np.dtype("<f4"), "F32"), (np.dtype("i1"), "I8"), (np.dtype("<i2"), "I16"), (np.dtype("<i4"), "I32")),
    *((np.dtype("<f2"), "F16"), (np.dtype("<u2"), "BF16")),
]
"""How NumPy reads the numbers of each type, and its name, by the number of the type in the file."""
MAX_VARIABLES, MAX_RANK = 1 << 16, 4
"""Far more than any model has. To read millions of names takes minutes."""
SCALE = "_scale"
"""What the name of a quantized variable's scales ends with."""


class Variable(NamedTuple):
    """A variable of a file.

    Attributes:
        dtype: its name in :data:`TYPES`.
        begin: the place of its first byte in the file.
        scales: of whole numbers: their divisors, one for each row or one for all, float32.
    """

    file: Path
    name: str
    kind: np.dtype[Any]
    dtype: str
    shape: tuple[int, ...]
    begin: int
    scales: NDArray[np.float32] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers."""
        return self.kind.kind == "i"

    @property
    def size(self) -> int:
        """In bytes."""
        return prod(self.shape) * self.kind.itemsize

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start`` to ``stop``, float32 [stop - start, ...]."""
        columns = prod(self.shape[1:])
        begin = self.begin + start * columns * self.kind.itemsize
        try:
            stored = np.fromfile(self.file, self.kind, (stop - start) * columns, offset=begin)
            stored = stored.reshape(stop - start, *self.shape[1:])
        except (OSError, ValueError) as error:
            problem = f"{self.file} has changed since it was opened ({error})"
            raise SpecbeamError(f"{problem}: load the model again") from error
        if self.dtype == "BF16":  # the first half of a float32
            return (stored.astype(np.uint32) << 16).view(np.float32)
        values = stored.astype(np.float32)
        if self.scales is None:
            return values
        scales = self.scales if self.scales.size == 1 else self.scales[start:stop]
        with np.errstate(all="ignore"):  # scales that are too small make weights that are refused
            return values / scales.reshape(-1, *[1] * (values.ndim - 1))


class ModelFile(NamedTuple):
    """The header of a file.

    Attributes:
        spec: the kind of model, such as "WhisperSpec".
        revision: of the names that this kind of model has.
        variables: by their names, without the scales of others.
        numbers: variables that are one number, such as ``decoder/num_heads``.
        aliases: the name of a variable, by another name for it.
    """

    spec: str
    revision: int
    variables: Mapping[str, Variable]
    numbers: Mapping[str, float]
    aliases: Mapping[str, str]

    @property
    def extents(self) -> list[Extent]:
        """Where the variables lie. Their names lie between them."""
        return [Extent(one.begin, one.size) for one in self.variables.values()]


def read_model_file(file: Path) -> ModelFile:
    """The header of a ``model.bin``.

    Raises:
        SpecbeamError: it is of another format or version, or damaged.
    """
    check_fetched(file)
    try:
        with file.open("rb") as opened:
            return _Reader(file, opened).read()
    except OSError as error:
        raise SpecbeamError(f"{file} cannot be read: {error.strerror}") from error


class _Reader:
    def __init__(self, file: Path, opened: BinaryIO) -> None:
        self.file, self.opened = file, opened
        self.size = opened.seek(0, 2)
        opened.seek(0)

    def read(self) -> ModelFile:
        (version,) = self._numbers("I")
        if version != VERSION:
            raise SpecbeamError(
                f"{self.file} is no model of CTranslate2 of version {VERSION}: it begins with the version {version}. "
                "Convert the model with a newer ct2-transformers-converter"
            )
        spec, (revision, count) = self._text(), self._numbers("II")
        self._demand(count <= MAX_VARIABLES, f"it has {count:,} variables")
        found: dict[str, Variable] = {}
        for _ in range(count):
            variable = self._variable()
            self._demand(variable.name not in found, f"it has two variables {shown(variable.name)}")
            found[variable.name] = variable
        aliases = self._aliases(found)
        scales = {name: one for name, one in found.items() if name.endswith(SCALE) and name[: -len(SCALE)] in found}
        numbers = {name: self._number(one) for name, one in found.items() if not one.shape}
        tensors = {name: one for name, one in found.items() if one.shape and name not in scales}
        return ModelFile(
            spec,
            revision,
            {name: self._scaled(one, scales.get(name + SCALE)) for name, one in tensors.items()},
            {name: number for name, number in numbers.items() if name not in scales},
            aliases,
        )

    def _variable(self) -> Variable:
        name, (rank,) = self._text(), self._numbers("B")
        self._demand(rank <= MAX_RANK, f"{shown(name)} has {rank} dimensions")
        shape = self._numbers(f"{rank}I")
        number, size = self._numbers("BI")
        self._demand(number < len(TYPES), f"{shown(name)} has a type of the number {number}")
        kind, dtype = TYPES[number]
        variable = Variable(self.file, name, kind, dtype, shape, self.opened.tell())
        self._demand(
            variable.size == size, f"{shown(name)} has {size:,} bytes, and its shape asks for {variable.size:,}"
        )
        self._demand(size <= self.size - variable.begin, f"it ends within {shown(name)}")
        self.opened.seek(size, 1)
        return variable

    def _aliases(self, variables: Mapping[str, Variable]) -> dict[str, str]:
        (count,) = self._numbers("I")
        self._demand(count <= MAX_VARIABLES, f"it has {count:,} aliases")
        aliases = {self._text(): self._text() for _ in range(count)}
        for alias, name in aliases.items():
            self._demand(name in variables, f"{shown(alias)} stands for {shown(name)}, which it lacks")
            self._demand(alias not in variables, f"{shown(alias)} is a variable, and stands for another one")
        self._demand(self.opened.tell() == self.size, "it goes on after its end")
        return aliases

    def _scaled(self, variable: Variable, scale: Variable | None) -> Variable:
        if scale is None:
            return variable
        self._demand(
            variable.is_whole and scale.kind.kind == "f" and prod(scale.shape) in (1, variable.shape[0]),
            f"{shown(variable.name)} has {prod(scale.shape)} scales and {variable.shape[0]} rows",
        )
        flat = scale._replace(shape=(prod(scale.shape),))
        return variable._replace(scales=flat.rows(0, flat.shape[0]))

    def _number(self, variable: Variable) -> float:
        return float(variable._replace(shape=(1,)).rows(0, 1)[0])

    def _numbers(self, kinds: str) -> tuple[int, ...]:
        layout = struct.Struct(f"<{kinds}")
        return layout.unpack(self._bytes(layout.size))

    def _text(self) -> str:
        """A text after its length. It ends with a zero."""
        (length,) = self._numbers("H")
        text = self._bytes(length)
        self._demand(text.endswith(b"\0"), "a name has no end")
        try:
            return text[:-1].decode()
        except ValueError:
            raise self._damaged("a name is no text") from None

    def _bytes(self, count: int) -> bytes:
        data = self.opened.read(count)
        self._demand(len(data) == count, "it ends within its header")
        return data

    def _demand(self, holds: bool, problem: str) -> None:
        if not holds:
            raise self._damaged(problem)

    def _damaged(self, problem: str) -> SpecbeamError:
        return SpecbeamError(f"{self.file} is damaged or no model of CTranslate2 ({problem}): fetch it again")
