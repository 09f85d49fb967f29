"""Where weights come from: an alias, a folder, a hub id or a GGUF file."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from specbeam.checkpoints.files import ADAPTER, INDEX, MODEL, WEIGHTS, check_links
from specbeam.checkpoints.sources import hub, registry
from specbeam.errors import SpecbeamError, wrong_value

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.checkpoints.checkpoint import Checkpoint

LEAST_LIKENESS, MAX_SUGGESTIONS = 0.6, 3
"""Of an alias that is suggested for an unknown name, from 0 to 1; how many are suggested."""


def locate(source: str | os.PathLike[str], revision: str | None = None, *, download: bool = True) -> Path:
    """The folder or file a source stands for, fetched if need be.

    Args:
        source: an alias of the registry, a folder, a .gguf file, or a hub id ``org/name``; the first of these that
            fits. A hub id may name a GGUF file or its quantization: ``org/name:Q4_K_M``.
        revision: a branch, tag or commit of a hub id.
        download: False to look only on this machine.
    """
    name = os.fspath(source)
    if not name:
        raise SpecbeamError("the source is empty: give an alias, a folder, a .gguf file or a hub id (org/name)")
    path = _local(name)
    if revision is not None and (path is not None or name in registry.ALIASES):
        raise wrong_value("revision", revision, f"goes with a hub id, and {name} is not a hub id")
    if name in registry.ALIASES:
        fetched = registry.fetch(name) if download else registry.find(name)
        if fetched is None:
            raise SpecbeamError(f"{name} is not on this machine: fetch it with specbeam models pull {name}")
        return fetched
    if path is not None:
        return path
    named = hub.ID.fullmatch(name)
    if named is not None and (named["pick"] or not name.endswith(".gguf")) and not name.startswith("."):
        return hub.fetch(named["repository"], revision, named["pick"], download=download)
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise SpecbeamError(f"there is no file or folder {name}")
    raise SpecbeamError(
        f"unknown model {name!r}: {_did_you_mean(name)}specbeam models list shows the short names. A model of the hub "
        "is named org/name, and one on this machine by its folder or its .gguf file"
    )


def _did_you_mean(name: str) -> str:
    """A question with the aliases that are like a name, the likest first. A name may be the beginning of an alias.
    Whisper's own programs name it by its size alone."""

    def likeness(alias: str) -> float:
        lowered, size = name.lower(), alias.removeprefix("whisper-")
        texts = (alias, alias[: len(lowered)], size[: len(lowered)], size[-len(lowered) :])
        return max(difflib.SequenceMatcher(None, lowered, text).ratio() for text in texts)

    ranked = sorted(registry.ALIASES, key=likeness, reverse=True)
    near = [alias for alias in ranked if likeness(alias) >= max(LEAST_LIKENESS, likeness(ranked[0]) - 0.01)]
    return f"did you mean {' or '.join(near[:MAX_SUGGESTIONS])}? " if near else ""


def _local(name: str) -> Path | None:
    """The file or folder of that name; None if there is no such file or folder."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError) as error:  # too long, or no such user
        raise SpecbeamError(f"{name[:80]!r} cannot be a source: {error}") from error


def open_checkpoint(path: Path, adapter: Path | None = None, *, download: bool = True) -> Checkpoint:
    """Open what lies at a path, without reading the weights.

    Args:
        path: a GGUF file; or a folder with a model as transformers saves it, as CTranslate2 converts it, with one GGUF
            file, or with a LoRA adapter. The base model that the adapter names is then located, and fetched if need be.
        adapter: the folder of a LoRA adapter to merge into the model's weights.
        download: False to look for the base model only on this machine.
    """
    if path.is_dir() and (path / ADAPTER).is_file():
        if adapter is not None:
            says = f"{path} is an adapter, too: load its base model with adapter={os.fspath(adapter)!r}"
            raise SpecbeamError(says, option="adapter")
        path, adapter = _base_of(path, download), path
    if path.is_dir() and (path / MODEL).is_file() and not any((path / name).is_file() for name in (WEIGHTS, INDEX)):
        if adapter is not None:
            raise SpecbeamError(f"an adapter cannot be merged into a model of CTranslate2 such as {path}")
        from specbeam.checkpoints.formats.ctranslate2 import CTranslate2Checkpoint

        return CTranslate2Checkpoint(path)
    if path.is_dir() and not (path / "config.json").is_file():
        path = _only_gguf(path)
    if path.is_dir():
        from specbeam.checkpoints.formats.adapter import Adapter
        from specbeam.checkpoints.formats.folder import FolderCheckpoint

        return FolderCheckpoint(path, None if adapter is None else Adapter(adapter))
    if adapter is not None:
        raise SpecbeamError(
            f"an adapter cannot be merged into a GGUF file such as {path}: give the base model as a folder or hub id"
        )
    from specbeam.checkpoints.formats.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _base_of(folder: Path, download: bool) -> Path:
    """The base model of an adapter, as the adapter names it."""
    from specbeam.checkpoints.formats.adapter import Adapter

    adapter = Adapter(folder)
    if adapter.base is None:
        raise SpecbeamError(
            f"the adapter {folder} names no base model: load the base model with adapter={str(folder)!r}",
            option="adapter",
        )
    try:
        # PEFT writes a revision beside every base, also beside a folder.
        on_disk = adapter.base in registry.ALIASES or _local(adapter.base) is not None
        base = locate(adapter.base, None if on_disk else adapter.base_revision, download=download)
        if base.is_dir() and (base / ADAPTER).is_file():
            raise SpecbeamError(f"{base} is an adapter itself")
    except SpecbeamError as error:
        raise SpecbeamError(
            f"the base model {adapter.base!r} of the adapter {folder} cannot be used: {error}. To use another base "
            f"model, load that with adapter={str(folder)!r}",
            option=(*error.options, "adapter"),
        ) from error
    return base


def _only_gguf(folder: Path) -> Path:
    """The GGUF file of a folder; the folder itself if there is no such file."""
    check_links(folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SpecbeamError(f"{folder} holds {len(files)} GGUF files: give the path of one of them ({names})")
    return files[0] if files else folder
