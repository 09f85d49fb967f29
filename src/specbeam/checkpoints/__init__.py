"""Where weights come from: an alias, a folder, a hub id or a GGUF file."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from specbeam.checkpoints import hub, registry
from specbeam.errors import SpecbeamError

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.checkpoints.checkpoint import Checkpoint


def locate(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder or file a source stands for, fetched if need be.

    Args:
        source: an alias of the registry, a folder, a .gguf file, or a hub id ``org/name``; the first of these that
            fits.
        revision: a branch, tag or commit of a hub id.

    Raises:
        SpecbeamError: nothing fits, or it cannot be fetched.
    """
    name = os.fspath(source)
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or no such user
        raise SpecbeamError(f"{name[:80]!r} cannot be a source: {error}") from error
    if revision is not None and (exists or name in registry.ALIASES):
        raise SpecbeamError(f"revision={revision!r} goes with a hub id, and {name} is not a hub id")
    if name in registry.ALIASES:
        return registry.fetch(name)
    if exists:
        return path
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise SpecbeamError(f"there is no file or folder {name}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return hub.fetch(name, revision)
    near = difflib.get_close_matches(name, registry.ALIASES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise SpecbeamError(
        f"unknown model {name!r}: {hint}Aliases are {', '.join(registry.ALIASES)}; a folder, a .gguf file or a hub id "
        "(org/name) will do too"
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """Open what lies at a path, without reading the weights.

    Raises:
        SpecbeamError: it is no checkpoint, or a damaged one.
    """
    if path.is_dir():
        from specbeam.checkpoints.folder import FolderCheckpoint

        return FolderCheckpoint(path)
    from specbeam.checkpoints.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)
