"""The architectures that specbeam runs, one file per family. A new file in this folder is found by itself.

A file holds subclasses of :class:`Architecture`, and lists their instances in ``ARCHITECTURES``. A part of a layer that
no other architecture has needs more: its description in checkpoints/parts/, and its code in backends/torch/parts/ and
backends/cpu/native/parts/.
"""

from __future__ import annotations

from collections.abc import Container
from importlib import import_module
from pkgutil import iter_modules

from specbeam.checkpoints.architecture import Architecture
from specbeam.errors import Unsupported

_FOUND: list[Architecture] = [
    architecture
    for file in iter_modules(__path__)
    for architecture in import_module(f"{__name__}.{file.name}").ARCHITECTURES
]
ARCHITECTURES = {a.name: a for a in sorted(_FOUND, key=lambda a: a.name)}
"""By ``model_type`` of config.json."""
GGUF_ARCHITECTURES = {a.gguf_name: a for a in _FOUND if a.gguf_name is not None}
"""By ``general.architecture`` of GGUF files."""
CTRANSLATE2_ARCHITECTURES = {a.ctranslate2_spec: a for a in _FOUND if a.ctranslate2_spec is not None}
"""By the name of the specification in files of CTranslate2."""


def require_supported(name: str, known: Container[str] = ARCHITECTURES) -> None:
    """Raises Unsupported for the name of an architecture that is not known."""
    if name not in known:
        raise Unsupported(f"architecture {name!r} is not supported: supported are {', '.join(ARCHITECTURES)}")
