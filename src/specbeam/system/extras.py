"""Packages that the native core does without. They come with extras, most of them with ``specbeam[torch]``."""

from __future__ import annotations

from importlib.util import find_spec

from specbeam.errors import SpecbeamError

MODULES = {"hf": ("torch", "transformers"), "ladder": ("torch",), "lm_eval": ("lm_eval",)}
"""The public modules that need more packages than the core, and these packages."""


def are_installed(*packages: str) -> bool:
    """Whether all of some packages are here. None of them is imported."""
    return all(find_spec(package) is not None for package in packages)


def require(what: str, *packages: str, extra: str = "torch") -> None:
    """Raises SpecbeamError if a package is missing.

    Args:
        what: needs the packages.
        extra: the one that has them.
    """
    missing = [package for package in packages if not are_installed(package)]
    if missing:
        raise SpecbeamError(f"{what} needs {' and '.join(missing)}: pip install 'specbeam[{extra}]'")


def require_for(module: str) -> None:
    """Raises SpecbeamError if a package that a public module of the extra ``torch`` needs is missing."""
    require(module, *MODULES[module.rpartition(".")[2]])
