"""What a text that names a draft stands for: a lookup, a custom drafter, a draft model or a draft head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from specbeam import plugins
from specbeam.errors import SpecbeamError
from specbeam.options.names import LOOKUPS, MTP


def draft_kind(name: str) -> Literal["lookup", "head", "custom", "model"]:
    """What a text names. An entry point that is a model as well is refused.

    The draft head of another source than the model's counts as a model: only its files tell.
    """
    if name in LOOKUPS:
        return "lookup"
    if name == MTP:
        return "head"
    if plugins.is_name(name):
        return "custom"
    if name not in plugins.entry_point_names("drafter"):
        return "model"
    from specbeam.checkpoints.sources.registry import ALIASES

    if name in ALIASES or Path(name).exists():
        raise SpecbeamError(f"draft={name!r} is an entry point and a model: give the one's module:name, or ./{name}")
    return "custom"


def resolve_draft(name: str | None, load: Callable[[str], Any], *, from_here: bool = False) -> Any:
    """The draft that a text names: the name itself of a lookup, a custom drafter, or what ``load`` returns for others.

    Args:
        from_here: as for :func:`specbeam.plugins.resolve`.
    """
    if name is None:
        return None
    match draft_kind(name):
        case "lookup":
            return name
        case "custom":
            return plugins.resolve(name, "drafter", from_here=from_here)
        case "model" | "head":
            return load(name)
