"""Finds and loads the native library, and declares the types of its functions."""

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

NAME = "libspecbeam_cpu" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

ABI_VERSION = 8
"""As in native/model.h. Raise both when a function or a structure changes."""


class ModelConfigStruct(ctypes.Structure):
    """``ModelConfig`` of native/model.h."""

    _fields_ = [
        *(
            (name, c_int64)
            for name in ("vocab", "hidden", "inner", "layers", "heads", "kv_heads", "head_dim", "context")
        ),
        *((name, c_int64) for name in ("layer_norm", "activation", "gated", "parallel", "whole_cache")),
        *((name, c_double) for name in ("norm_eps", "attention_scale", "embedding_scale")),
        *((name, c_double) for name in ("attention_softcap", "logits_softcap")),
    ]


class SegmentStruct(ctypes.Structure):
    """``Segment`` of native/model.h."""

    _fields_ = [
        ("nodes", c_int64),
        ("trunk_length", c_int64),
        ("branch_columns", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("trunk", c_void_p),
        ("branches", c_void_p),
    ]


class EditStruct(ctypes.Structure):
    """``Edit`` of native/select.h."""

    _fields_ = [(name, c_int64) for name in ("kind", "begin", "end", "values")]


class WishStruct(ctypes.Structure):
    """``Wish`` of native/select.h."""

    _fields_ = [
        *((name, c_int64) for name in ("first_row", "rows", "vocab", "most", "most_place", "given", "given_place")),
        *((name, c_int64) for name in ("row_place", "edits_begin", "edits_end", "one_of_begin", "one_of_end")),
        *((name, c_int64) for name in ("allowed_place", "noise_place", "normalize", "total", "top_k")),
        *((name, c_double) for name in ("temperature", "top_p", "min_p")),
        ("seed", c_uint64),
    ]


class ChoiceStruct(ctypes.Structure):
    """``Choice`` of native/select.h."""

    _fields_ = [
        *((name, c_int64) for name in ("logit_rows", "logit_columns", "wish_count", "edit_count", "entry_count")),
        *((name, c_int64) for name in ("value_count", "one_of_count", "given_count", "allowed_bytes", "noise_count")),
        *((name, c_int64) for name in ("most_count", "row_count")),
        *((name, c_void_p) for name in ("logits", "wishes", "edits", "edit_rows", "edit_tokens", "edit_values")),
        *((name, c_void_p) for name in ("one_of", "given", "allowed", "streams", "positions", "tokens", "log_probs")),
        *((name, c_void_p) for name in ("scores", "noise", "given_log_probs", "normalizers", "totals")),
    ]


class AheadStruct(ctypes.Structure):
    """``Ahead`` of native/ahead.h."""

    _fields_ = [("slots", c_void_p), ("scores", c_void_p), ("best_above", c_double), ("all_above", c_double)]


SHOW = ctypes.CFUNCTYPE(c_int32, c_int64)
"""Is called during passes ahead with the number of passes so far. Returns 0 if there is to be no further one."""

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "abi_version": (c_int32, [c_int64] * 5),
    "isa": (c_char_p, [c_char_p]),
    "matrix_bytes": (c_int64, [c_int32, c_int64, c_int64]),
    "format_of": (c_int32, [c_int32]),
    "pack": (c_int32, [c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "quantize": (c_int32, [c_int32, c_void_p, c_int64, c_int64, c_void_p]),
    "hash": (c_uint64, [c_void_p, c_int64]),
    "model_new": (c_char_p, [POINTER(ModelConfigStruct), c_int32, c_char_p, POINTER(c_void_p)]),
    "model_delete": (None, [c_void_p]),
    "model_threads": (c_int32, [c_void_p]),
    "model_add": (c_int32, [c_void_p, c_int64, c_int32, c_int32, c_int64, c_int64, c_void_p, c_int64]),
    "model_bias": (c_int32, [c_void_p, c_int64, c_int32, c_void_p, c_int64]),
    "model_norm": (c_int32, [c_void_p, c_int64, c_int32, c_void_p, c_void_p, c_int64]),
    "model_rope": (c_int32, [c_void_p, c_void_p, c_int64, c_float]),
    "model_layer": (c_int32, [c_void_p, c_int64, c_int64, c_int64]),
    "model_incomplete": (c_char_p, [c_void_p]),
    "cache_reserve": (c_char_p, [c_void_p, c_int64]),
    "cache_release": (c_int32, [c_void_p, c_int64, c_int64]),
    "forward": (c_char_p, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "choose": (c_char_p, [c_void_p, c_void_p]),
    "forward_ahead": (
        c_char_p,
        [c_void_p, c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_int64, c_void_p, c_int64, SHOW, c_void_p],
    ),
    "multiply": (c_int32, [c_char_p, c_int32, c_int32, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p]),
    "weight": (c_float, [c_int32, c_int64, c_int64, c_void_p, c_int64, c_int64]),
}
"""The result and the arguments of each function ``specbeam_...`` in native/api.cpp."""


def address(array: NDArray[Any]) -> int:
    """Of an array's first number, for native code; 0 if the array is empty."""
    return ctypes.addressof(c_char.from_buffer(array.data)) if array.size else 0


def find() -> Path | None:
    """The library's path, None if it was not built.

    It is in $SPECBEAM_CPU_LIBRARY, beside this file, or where an editable install has put it.
    """
    from specbeam.backends import cpu

    folders = [os.environ.get("SPECBEAM_CPU_LIBRARY", ""), *cpu.__path__]
    return next((path for folder in filter(None, folders) if (path := Path(folder) / NAME).is_file()), None)


@cache
def library() -> ctypes.CDLL:
    """The library, with typed functions. They release the GIL while they work.

    Raises:
        SpecbeamError: it was not built, cannot be loaded on this machine, or is of another version than this file.
    """
    path = find()
    if path is None:
        raise SpecbeamError(
            "the native CPU kernels were not built: no C++ compiler was found when specbeam was installed. "
            "Install one (g++ or clang++) and reinstall specbeam, or use backend='torch'"
        )
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise SpecbeamError(f"the native CPU kernels cannot be loaded ({error}): reinstall specbeam") from error
    if (version := _abi_version(loaded)) != ABI_VERSION:
        raise SpecbeamError(
            f"the native CPU kernels in {path} are of another version (ABI {version}) than this specbeam "
            f"(ABI {ABI_VERSION}): reinstall specbeam"
        )
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(loaded, f"specbeam_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


def _abi_version(loaded: ctypes.CDLL) -> int:
    """The version of a library's functions and structures; 0 for an old library without versions."""
    try:
        version = loaded.specbeam_abi_version
    except AttributeError:
        return 0
    version.restype, version.argtypes = FUNCTIONS["abi_version"]
    structures = (ModelConfigStruct, SegmentStruct, WishStruct, ChoiceStruct, AheadStruct)
    return int(version(*(ctypes.sizeof(structure) for structure in structures)))


def available() -> bool:
    """Whether the kernels can be used on this machine."""
    try:
        library()
    except SpecbeamError:
        return False
    return True
