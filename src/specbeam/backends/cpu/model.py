"""A native model by its configuration: its own numbers, and the numbers of each part as one array."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from specbeam.backends.cpu.library import Library
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts.part import Part
from specbeam.checkpoints.rope import Rope
from specbeam.errors import SpecbeamError

NOTHING = -1
"""In place of the number of a rotation, or of a layer."""


def new_model(native: Library, config: Config, threads: int, integer_cache: bool) -> int:
    """The address of a native model without parameters. ``specbeam_model_delete`` deletes it.

    Args:
        integer_cache: keys and values are integers, not float32.

    Raises:
        SpecbeamError: the kernels cannot run such a model.
    """
    encoder, model = config.encoder, ctypes.c_void_p()
    packed = [None if one is None else _pack(native, one, integer_cache) for one in (config, encoder)]
    _check(native.specbeam_model_new(*packed, threads, ctypes.byref(model)))
    try:
        ropes: dict[Rope, int] = {}
        for rope in (getattr(part, "rope", None) for part in config.parts):
            if rope is not None and rope not in ropes:
                frequencies = np.array(rope.frequencies(), np.float32)
                number = native.specbeam_model_rope(model, frequencies.ctypes.data, len(frequencies), rope.scale)
                if number < 0:  # which a part would read as no rotation
                    raise MemoryError("the native model has no memory for a rotation")
                ropes[rope] = number
        for one in (config, encoder):
            for number, layer in enumerate(() if one is None else one.layers):
                for part in layer:
                    numbers = _numbers(native, part, ropes)
                    _check(
                        native.specbeam_model_part(
                            model, one is encoder, number, part.name.encode(), numbers.ctypes.data, len(numbers)
                        )
                    )
    except BaseException:
        native.specbeam_model_delete(model)
        raise
    return int(model.value or 0)


def bytes_of_slot(native: Library, config: Config, integer_cache: bool) -> int:
    """What a model keeps of each token in its slot, in bytes. Arguments as for :func:`new_model`."""
    model = new_model(native, config, 1, integer_cache)
    try:
        return int(native.specbeam_cache_slot_bytes(model))
    finally:
        native.specbeam_model_delete(model)


def _pack(native: Library, config: Config, integer_cache: bool) -> bytes:
    """The fields of the native ModelConfig have the names of the configuration's, but for the numbers of its stem."""
    structure, stem = native.structures["ModelConfig"], config.stem
    others = {
        "integer_cache": integer_cache,
        "embedding_scale": getattr(stem, "scale", 1.0),
        "bands": getattr(stem, "bands", 0),
        "feature_size": getattr(stem, "feature_size", 0),
        "joins_embedding": getattr(stem, "joins_embedding", False),
    }
    values = {name: others[name] if name in others else getattr(config, name) for name in structure.types}
    return structure.pack([{name: _number(native, structure.types, name, values[name]) for name in values}])


def _numbers(native: Library, part: Part, ropes: Mapping[Rope, int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The numbers of a part, float64 [n], in the order in which its native code has them."""
    types = native.fields_of(part.name)
    if types is None:
        raise SpecbeamError(f"the native CPU kernels have no {part.name}: reinstall specbeam, or use backend='torch'")
    values = {name: getattr(part, name) for name in types}
    if "rope" in values:
        # No rotation has the number len(ropes). So the native model refuses one that only the encoder has.
        values["rope"] = NOTHING if values["rope"] is None else ropes.get(values["rope"], len(ropes))
    if "shares_keys_of" in values and values["shares_keys_of"] is None:
        values["shares_keys_of"] = NOTHING
    return np.array([_number(native, types, name, values[name]) for name in types], np.float64)


def _number(native: Library, types: Mapping[str, str], name: str, value: Any) -> float:
    """A value as native code has it: the number of a name in its enumeration; 0 for None."""
    number: float = native.enums[types[name]][value] if isinstance(value, str) else value or 0
    return number


def _check(wrong: bytes | None) -> None:
    if wrong:
        raise SpecbeamError(f"the cpu backend refuses the configuration: {wrong.decode()}")
