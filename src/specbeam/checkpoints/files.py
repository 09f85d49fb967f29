"""The files of a checkpoint, which is data: what lies outside the folder is not read, and no code is run.

Libraries that read a checkpoint's files may raise anything. :func:`refusing` makes one line of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

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
NEEDS_CODE = "needs code of its own (auto_map), and a checkpoint's code is never run"
TOKENIZER_FILES = ("fast_tokenizer_files", "gguf_file", "vocab", "merges")
"""The keys of tokenizer_config.json whose files transformers opens wherever they are."""
SAMPLED_BLOCKS, BLOCK_BYTES = 4, 4096
"""How many blocks of each extent are read, and their size. A block is a page, the least that a disk reads."""
READ_BYTES = 1 << 24
"""The maximum that is read into memory at once."""


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
    """The JSON object in a file of a folder; empty if there is no such file."""
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
    """
    if (folder / WEIGHTS).is_file():
        return {}
    named = read_json(folder, INDEX).get("weight_map") or {}
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise SpecbeamError(f"{folder}: the weight_map of {INDEX} does not name a file for each tensor")
    files = {name: file_inside(folder, name, INDEX) for name in set(named.values())}
    return {tensor: files[name] for tensor, name in named.items()}


def check_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse what ``trust_remote_code=False`` lets pass: the code of a part of the model, and files elsewhere.

    Args:
        config: the content of config.json.

    Raises:
        SpecbeamError: transformers would run code of the folder, or read a file outside it.
    """
    if any("auto_map" in part for value in config.values() for part in dictionaries(value)):
        raise SpecbeamError(f"{folder}: a part of the model {NEEDS_CODE}")
    if config.get("transformers_weights") is not None:
        raise SpecbeamError(f"{folder}: config.json names a file of weights (transformers_weights): remove that key")
    if (folder / "adapter_config.json").exists():
        raise SpecbeamError(
            f"{folder} holds an adapter (adapter_config.json), for which transformers would load another model"
        )


def check_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises SpecbeamError if a tokenizer_config.json names files outside the folder."""
    for key in TOKENIZER_FILES:
        names = config.get(key)
        for name in names if isinstance(names, list) else [names]:
            if isinstance(name, str):
                file_inside(folder, name, f"{key} of tokenizer_config.json")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any error of a library, raised by a checkpoint's files, into one line. It begins with ``what``.

    Raises:
        SpecbeamError: in place of the error.
    """
    try:
        yield
    except SpecbeamError:
        raise
    except BaseException as error:
        # A panic of Rust code is no Exception, because Python programs should not go on after it. These may.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SpecbeamError(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return f"it {NEEDS_CODE}"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """All dictionaries in a value that was read from JSON."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            yield part
            rest += part.values()
        elif isinstance(part, list):
            rest += part


class Extent(NamedTuple):
    """A part of a file, such as a tensor.

    Attributes:
        start, size: in bytes.
        whole: read all of it, such as a header.
    """

    start: int
    size: int
    whole: bool = False


def fingerprint(files: Iterable[tuple[Path, list[Extent]]]) -> str:
    """The digest of some parts of some files, as hexadecimal text.

    Of each part it reads SAMPLED_BLOCKS blocks at equal distances, the first and the last among them.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, extents in files:
        with path.open("rb", buffering=0) as file:
            digest.update(os.fstat(file.fileno()).st_size.to_bytes(8, "little"))
            for extent in extents:
                for start, size in _blocks(extent):
                    digest.update(os.pread(file.fileno(), size, start))
    return digest.hexdigest()


def _blocks(extent: Extent) -> list[tuple[int, int]]:
    """The start and the size of each block of an extent that is read."""
    if extent.whole or extent.size <= SAMPLED_BLOCKS * BLOCK_BYTES:
        end = extent.start + extent.size
        return [(start, min(READ_BYTES, end - start)) for start in range(extent.start, end, READ_BYTES)]
    last = extent.size - BLOCK_BYTES
    return [(extent.start + last * i // (SAMPLED_BLOCKS - 1), BLOCK_BYTES) for i in range(SAMPLED_BLOCKS)]
