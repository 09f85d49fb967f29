"""The parts of a model's layers in PyTorch, one file for each of :mod:`specbeam.checkpoints.parts`.

A file has the modules of one kind of part in ``PARTS``. A new file in this folder is found by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from specbeam.backends.torch.parts.part import PartModule
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts.part import Part

MODULES: dict[type[Part], Callable[[Any, Config], PartModule]] = {
    description: module
    for file in iter_modules(__path__)
    for description, module in getattr(import_module(f"{__name__}.{file.name}"), "PARTS", {}).items()
}
"""The module of each description of a part."""
