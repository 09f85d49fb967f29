"""The files of a folder in Hugging Face's layout. No file outside the folder is read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PureWindowsPath
from typing import Any

from specbeam.errors import SpecbeamError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL = "model.bin"
"""The weights of a folder that CTranslate2 has converted."""
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
"""Ends the name of one part of a split GGUF file."""
SHARDS = "model-*-of-*.safetensors"
UNFINISHED = ("*.incomplete", "*.part", "*.crdownload", "*.aria2")
"""What huggingface_hub, browsers and other programs call a file while it is fetched."""
LFS_POINTER = b"version https://git-lfs"
"""Begins the file that Git puts in place of a large one until Git LFS fetches that."""

MAX_NAME_BYTES = 255
VOCABULARIES = ("tokenizer.json", "tokenizer.*.json", "vocab*", "*.model", "*.spm", "*.tiktoken", "tekken.json")
"""The files that hold the vocabulary of a tokenizer. Tokenizers have one of them at least."""


def check_links(folder: Path) -> None:
    """Raises SpecbeamError if a file of the folder is a link to a file outside it."""
    try:
        files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    except OSError as error:
        raise SpecbeamError(f"{folder} cannot be read: {error.strerror}") from error
    for file in files:
        if not file.is_dir():
            _check_link(folder, file)


def file_inside(folder: Path, name: Any, named_in: str) -> Path:
    """The file of a folder that another of its files names.

    Args:
        name: as it stands in that file. Only a relative path without ".." is allowed.
        named_in: the file that names it, for the message.

    Raises:
        SpecbeamError: the name is no such path, or it is a link that leaves the folder.
    """
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        path = None
    else:
        path = PureWindowsPath(name)  # it splits at "/" and at "\\"
    if path is None or not path.name or path.drive or path.root or ".." in path.parts:
        raise SpecbeamError(
            f"{folder}: {named_in} names the file {str(name)[:80]!r}. Only files inside the folder are read"
        )
    _check_link(folder, folder / name)
    return folder / name


def _check_link(folder: Path, file: Path) -> None:
    try:
        home, target = folder.resolve(), file.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise SpecbeamError(f"{file} cannot be followed: {error}") from error
    allowed = [home]
    if home.parent.name == "snapshots":  # in the hub's cache, a snapshot's files are links to its repository's blobs
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise SpecbeamError(
            f"{file} is a link to {target}, outside the folder. Only files inside the folder are read: copy it there"
        )


def check_no_link(path: Path) -> None:
    """Raises SpecbeamError if a path that is to be removed is a link: that would leave what it leads to."""
    if path.is_symlink():
        raise SpecbeamError(f"{path} is a link to {os.readlink(path)}: remove both yourself. Nothing was removed")


def check_fetched(file: Path) -> None:
    """Raises SpecbeamError for a file whose content was not fetched: an empty one, or a pointer of Git LFS."""
    try:
        with file.open("rb") as opened:
            begin = opened.read(len(LFS_POINTER))
    except OSError as error:
        raise SpecbeamError(f"{file} cannot be read: {error.strerror}") from error
    if not begin:
        raise SpecbeamError(f"{file} is empty: fetch it again")
    if begin == LFS_POINTER:
        raise SpecbeamError(f"{file} is a pointer of Git LFS, and not the file itself: fetch it with git lfs pull")


def missing_weights(folder: Path, file: Path) -> SpecbeamError:
    """The error for a folder that lacks a file of weights: an unfinished download, or a model in another form."""
    name, is_begun = file.relative_to(folder).as_posix(), (folder / INDEX).is_file()
    if not is_begun and any(folder.glob(SHARDS)):
        name, is_begun = INDEX, True
    places = [folder, folder / ".cache" / "huggingface" / "download"]
    if (home := folder.resolve().parent).name == "snapshots":  # the hub's cache
        places.append(home.parent / "blobs")
    if is_begun or any(any(place.glob(kind)) for place in places for kind in UNFINISHED):
        return SpecbeamError(f"{folder} has no {name}: its download is not complete. Fetch it again")
    return SpecbeamError(
        f"{folder} has no {name}: only models saved as safetensors or by CTranslate2 (model.bin) can be loaded"
    )


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a folder; empty if there is no such file.

    Raises:
        SpecbeamError: the file holds something else.
    """
    file = folder / name
    if not file.is_file():
        return {}
    check_fetched(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecbeamError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise SpecbeamError(f"{file} holds no JSON object")
    return content


def weight_map(folder: Path) -> dict[str, Path]:
    """The file of each tensor as the index names it; empty for a folder without an index.

    It is empty also for a folder with all weights in one file: as in transformers, that file goes before an index.

    Raises:
        SpecbeamError: the index is damaged, or names a file outside the folder.
    """
    if (folder / WEIGHTS).is_file():
        return {}
    named = read_json(folder, INDEX).get("weight_map") or {}
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise SpecbeamError(f"{folder}: the weight_map of {INDEX} does not name a file for each tensor")
    files = {name: file_inside(folder, name, INDEX) for name in set(named.values())}
    return {tensor: files[name] for tensor, name in named.items()}
