"""Finds and loads the native libraries. Each says the types of its functions and structures (native/interface.def).

There is a library for each instruction set, with the same functions. The one that any processor can run is loaded
first. It packs weights, and asks the processor which of the others may be loaded.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from collections.abc import Iterable, Mapping
from ctypes import c_char, c_char_p, c_int64, c_void_p
from functools import cache, cached_property
from itertools import starmap
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import SpecbeamError

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
BASELINE = "portable"
"""The instruction set that any processor has."""

ABI_VERSION = 1082650212
"""A hash of the native/interface.def that this source is for. After a change of that file, the refusal of the new
library has the new hash. A name that gets another meaning does not change the hash, so it needs to be another name."""


class Structure:
    """A structure of native code.

    Attributes:
        types: the C++ type of each field.
    """

    def __init__(self, types: dict[str, str]) -> None:
        self.types = types
        self._values = itemgetter(*types)
        self._pack = struct.Struct("".join(c_type(cpp)._type_ for cpp in types.values())).pack

    @cached_property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Of the arrays that fields point to."""
        return {
            name: np.dtype(c_type(cpp.removeprefix("const ").removesuffix(" *")))
            for name, cpp in self.types.items()
            if cpp.endswith("*")
        }

    def pack(self, rows: Iterable[Mapping[str, Any]]) -> bytes:
        """Structures, one after another. A row has the value of each field by its name."""
        return b"".join(starmap(self._pack, map(self._values, rows)))


class Library(ctypes.CDLL):
    """A native library, with typed functions. They release the GIL while they work.

    Attributes:
        enums: the numbers of each enumeration's names, in lower case.
        structures: by their names.
        functions: their names, which begin with "specbeam_" in the library.

    Raises:
        OSError: it cannot be loaded.
        SpecbeamError: it is of another version than this file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        if (version := self.specbeam_abi_version()) != ABI_VERSION:
            raise SpecbeamError(
                f"the native CPU kernels in {path} are of another version (ABI {version}) than this specbeam "
                f"(ABI {ABI_VERSION}): reinstall specbeam"
            )
        self.specbeam_interface.restype = c_char_p
        text = self.specbeam_interface().decode()
        self.enums, self.structures, self.functions = {}, {}, []
        for line in text.splitlines():
            head, name, body = re.split(r" (\w+)[{(]", line[:-1], maxsplit=1)
            if head == "enum":
                self.enums[name] = {one: number for number, one in enumerate(body.lower().split(", "))}
            elif head == "struct":
                self.structures[name] = Structure(types_by_name(body))
            else:
                self.functions.append(name)
                function = getattr(self, f"specbeam_{name}")
                function.restype, function.argtypes = c_type(head), [c_type(cpp) for cpp in body.split(", ")]

    def fields_of(self, part: str) -> dict[str, str] | None:
        """The C++ types of the numbers of a kind of part, by their names. None if there is no such part."""
        text = self.specbeam_part_fields(part.encode())
        return None if text is None else types_by_name(text.decode())


def types_by_name(fields: str) -> dict[str, str]:
    """C++ types by the names of fields, of a text such as ``int64_t rows;double scale;``."""
    return {name: cpp for cpp, _, name in (field.rpartition(" ") for field in fields.split(";")[:-1])}


def c_type(cpp: str) -> Any:
    """The type of ctypes for a C++ type. Enumerations are int64."""
    if cpp == "void":
        return None
    if cpp.endswith("*"):
        return c_char_p if cpp == "const char *" else c_void_p
    return getattr(ctypes, f"c_{cpp.removesuffix('_t')}", c_int64)


def address(array: NDArray[Any]) -> int:
    """Of an array's first number, for native code; 0 if the array is empty."""
    return ctypes.addressof(c_char.from_buffer(array.data)) if array.size else 0


def find(isa: str = BASELINE) -> Path | None:
    """The path of an instruction set's library, None if it was not built.

    It is in $SPECBEAM_CPU_LIBRARY, beside this file, or where an editable install has put it.
    """
    package = sys.modules[__name__.rpartition(".")[0]]
    name = f"libspecbeam_cpu_{isa}{SUFFIX}"
    folders = [os.environ.get("SPECBEAM_CPU_LIBRARY", ""), *package.__path__]
    return next((path for folder in filter(None, folders) if (path := Path(folder) / name).is_file()), None)


@cache
def library(isa: str = BASELINE) -> Library:
    """The library of an instruction set.

    Args:
        isa: a result of :func:`choose_isa`. The processor must have it.

    Raises:
        SpecbeamError: it was not built, cannot be loaded on this machine, or is of another version than this file.
    """
    path = find(isa)
    if path is None:
        raise SpecbeamError(
            "the native CPU kernels were not built: no C++ compiler was found when specbeam was installed. "
            "Install a wheel of specbeam, or install g++ or clang++ and reinstall specbeam, or use backend='torch'",
            option="backend",
        )
    try:
        return Library(path)
    except OSError as error:
        raise SpecbeamError(f"the native CPU kernels cannot be loaded ({error}): reinstall specbeam") from error


def choose_isa(isa: str = "") -> str:
    """The instruction set to use: the machine's best, or the given one.

    Raises:
        SpecbeamError: this machine lacks it, or the kernels cannot be used.
    """
    if (name := library().specbeam_isa(isa.encode())) is None:
        raise SpecbeamError(
            f"isa={isa!r} is not available on this machine: give avx512, avxvnni, avx2, neon or portable"
        )
    return str(name.decode())
