"""The header of a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from specbeam.checkpoints.fingerprint import Extent
from specbeam.errors import SpecbeamError


def shapes_of(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and the dtype (as the format names it) of each tensor.

    Raises:
        SpecbeamError: the file is damaged.
    """
    try:
        with safe_open(file, "pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (not a dictionary)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise SpecbeamError(f"{file} is damaged or not a safetensors file ({error}): fetch it again") from error


def extents_of(file: Path) -> list[Extent]:
    """Where the header and the tensors lie."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    data = 8 + length
    places = (tensor["data_offsets"] for tensor in header.values())
    return [Extent(0, data, whole=True), *(Extent(data + start, end - start) for start, end in places)]
