"""Finds and loads the native libraries, and declares the types of their functions.

There is a library for each instruction set, with the same functions. The one that any processor can run is loaded
first. It packs weights, and asks the processor which of the others may be loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from specbeam.errors import SpecbeamError

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
BASELINE = "portable"
"""The instruction set that any processor has."""

ABI_VERSION = 15
"""As in native/model.h. Raise both when a function changes."""


class ModelConfigStruct(ctypes.Structure):
    """``ModelConfig`` of native/model.h."""

    _fields_ = [
        *(
            (name, c_int64)
            for name in ("vocab", "hidden", "inner", "layers", "heads", "kv_heads", "head_dim", "context")
        ),
        ("bands", c_int64),
        *((name, c_int64) for name in ("layer_norm", "activation", "gated", "parallel", "whole_cache")),
        *((name, c_double) for name in ("norm_eps", "attention_scale", "embedding_scale")),
        *((name, c_double) for name in ("attention_softcap", "logits_softcap")),
    ]


class SegmentStruct(ctypes.Structure):
    """``Segment`` of native/model.h."""

    _fields_ = [
        *((name, c_int64) for name in ("nodes", "prefix_length", "suffix_columns", "source_length")),
        *((name, c_void_p) for name in ("tokens", "positions", "slots", "prefix", "suffixes", "source")),
        *((name, c_int64) for name in ("watched", "rows", "shown")),
        *((name, c_void_p) for name in ("heads", "scores")),
    ]


class EditStruct(ctypes.Structure):
    """``Edit`` of native/select.h."""

    _fields_ = [(name, c_int64) for name in ("kind", "begin", "end", "values")]


class SelectionRequestStruct(ctypes.Structure):
    """``SelectionRequest`` of native/select.h."""

    _fields_ = [
        *((name, c_int64) for name in ("first_row", "rows", "vocab", "top", "top_place", "given", "given_place")),
        *((name, c_int64) for name in ("row_place", "edits_begin", "edits_end", "one_of_begin", "one_of_end")),
        *((name, c_int64) for name in ("together_begin", "together_end")),
        *((name, c_int64) for name in ("allowed_place", "noise_place", "normalize", "renormalize", "total", "top_k")),
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "typical_p")),
        ("seed", c_uint64),
    ]


class ChoiceStruct(ctypes.Structure):
    """``Choice`` of native/select.h."""

    _fields_ = [
        *((name, c_int64) for name in ("logit_rows", "logit_columns", "request_count", "edit_count", "entry_count")),
        *((name, c_int64) for name in ("value_count", "one_of_count", "given_count", "allowed_bytes", "noise_count")),
        *((name, c_int64) for name in ("top_count", "row_count")),
        *((name, c_void_p) for name in ("logits", "requests", "edits", "edit_rows", "edit_tokens", "edit_values")),
        *((name, c_void_p) for name in ("one_of", "given", "allowed", "streams", "positions", "tokens", "log_probs")),
        *((name, c_void_p) for name in ("scores", "noise", "given_log_probs", "normalizers", "totals")),
    ]


class AheadStruct(ctypes.Structure):
    """``Ahead`` of native/ahead.h."""

    _fields_ = [("slots", c_void_p), ("scores", c_void_p), ("best_above", c_double), ("all_above", c_double)]


STRUCTURES = (ModelConfigStruct, SegmentStruct, EditStruct, SelectionRequestStruct, ChoiceStruct, AheadStruct)

"""Is called during passes ahead with the number of passes so far. Returns 0 if there is to be no further one."""

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "abi_version": (c_int32, []),
    "offset": (c_int64, [c_char_p]),
    "isa": (c_char_p, [c_char_p]),
    "matrix_bytes": (c_int64, [c_int32, c_int64, c_int64]),
    "format_of": (c_int32, [c_int32]),
    "pack": (c_int32, [c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "quantize": (c_int32, [c_int32, c_void_p, c_int64, c_int64, c_void_p]),
    "model_new": (c_char_p, [*[POINTER(ModelConfigStruct)] * 2, c_int32, POINTER(c_void_p)]),
    "model_delete": (None, [c_void_p]),
    "model_threads": (c_int32, [c_void_p]),
    "model_matrix": (c_int32, [c_void_p, c_int64, c_char_p, c_int32, c_int64, c_int64, c_void_p, c_int64]),
    "model_vector": (c_int32, [c_void_p, c_int64, c_char_p, c_void_p, c_int64]),
    "model_rope": (c_int32, [c_void_p, c_void_p, c_int64, c_float]),
    "model_layer": (c_int32, [c_void_p, c_int64, c_int64, c_int64]),
    "model_incomplete": (c_char_p, [c_void_p]),
    "cache_reserve": (c_char_p, [c_void_p, c_int64]),
    "cache_slot_bytes": (c_int64, [c_void_p]),
    "cache_release": (c_int32, [c_void_p, c_int64, c_int64]),
    "encode": (c_char_p, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p]),
    "place": (c_char_p, [c_void_p, c_void_p, c_void_p, c_int64]),
    "forward": (c_char_p, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "choose": (c_char_p, [c_void_p, c_void_p]),
    "forward_ahead": (
        c_char_p,
        [c_void_p, c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_int64, *[c_void_p] * 2],
    ),
    "multiply": (c_int32, [c_int32, c_int32, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p]),
    "weight": (c_float, [c_int32, c_int64, c_int64, c_void_p, c_int64, c_int64]),
}
"""The result and the arguments of each function ``specbeam_...`` in native/."""


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
def library(isa: str = BASELINE) -> ctypes.CDLL:
    """The library of an instruction set, with typed functions. They release the GIL while they work.

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
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise SpecbeamError(f"the native CPU kernels cannot be loaded ({error}): reinstall specbeam") from error
    if (version := loaded.specbeam_abi_version()) != ABI_VERSION:
        raise SpecbeamError(
            f"the native CPU kernels in {path} are of another version (ABI {version}) than this specbeam "
            f"(ABI {ABI_VERSION}): reinstall specbeam"
        )
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(loaded, f"specbeam_{name}")
        function.restype, function.argtypes = result, arguments
    for name, offset in offsets().items():
        if (found := loaded.specbeam_offset(name.encode())) != offset:
            raise SpecbeamError(
                f"the native CPU kernels in {path} have {name} at {found} and this specbeam has it at {offset}: "
                "reinstall specbeam"
            )
    return loaded


def offsets() -> dict[str, int]:
    """The offset of each field, such as "Segment.nodes", and the size of each structure, such as "Segment"."""
    found = {}
    for structure in STRUCTURES:
        owner = structure.__name__.removesuffix("Struct")
        found[owner] = ctypes.sizeof(structure)
        for name, *_ in structure._fields_:
            found[f"{owner}.{name}"] = getattr(structure, name).offset
    return found


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
