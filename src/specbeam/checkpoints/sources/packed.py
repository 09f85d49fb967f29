"""The files of packed weights that earlier loads have kept, and which of them stay."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbeam.checkpoints.sources import registry
from specbeam.errors import SpecbeamError

if TYPE_CHECKING:  # filelock imports asyncio, and a model whose packed weights are there needs no lock
    from filelock import FileLock

SUFFIX, KEPT = ".weights", ".kept"
"""The endings of files of packed weights, and of other results that take long to compute."""
DEFAULT_LIMIT_GB = 20.0
DIGEST_BYTES = hashlib.sha256().digest_size
NAME_CHARACTERS = 80
"""How much of a file's or folder's name is in the names of its packed files."""


@dataclass(frozen=True)
class PackedFile:
    """A file of packed weights.

    Attributes:
        size: bytes on disk.
        used: when a model was last loaded from it, in seconds since 1970.
    """

    path: Path
    size: int
    used: float


def folder() -> Path:
    """Where packed weights are kept."""
    return registry.home() / "packed"


def limit() -> int:
    """How many bytes all packed files may have together: $SPECBEAM_PACKED_GB, else DEFAULT_LIMIT_GB."""
    configured = os.environ.get("SPECBEAM_PACKED_GB") or DEFAULT_LIMIT_GB
    try:
        gigabytes = float(configured)
        if not 0 <= gigabytes < 1e9:
            raise ValueError
    except ValueError:
        raise SpecbeamError(f"SPECBEAM_PACKED_GB={configured!r} is not allowed: give a number of gigabytes") from None
    return int(gigabytes * 1e9)


def files() -> list[PackedFile]:
    """All packed files, the least recently used first."""
    packed = []
    for path in (*folder().glob(f"*{SUFFIX}"), *folder().glob(f"*{KEPT}")):
        try:
            facts = path.stat()
        except OSError:  # another process has just removed it
            continue
        packed.append(PackedFile(path, facts.st_size, facts.st_mtime))
    return sorted(packed, key=lambda file: file.used)


def note_use(path: Path) -> None:
    """Make a file the most recently used one."""
    with suppress(OSError):  # it is another user's, or gone
        os.utime(path)


def lock(path: Path, timeout: float = -1) -> FileLock:
    """The lock of a packed file. Who holds it may write or remove the file.

    Args:
        timeout: seconds to wait before filelock.Timeout is raised; -1 to wait as long as it takes.
    """
    from filelock import FileLock

    return FileLock(path.with_suffix(".lock"), timeout=timeout)


def unfinished(path: Path) -> Path:
    """The file to pack into, before it gets the name ``path``. The lock of ``path`` is its lock too."""
    return path.with_name(f".{path.stem}.new")


def kept(name: str, key: str, make: Callable[[], bytes]) -> bytes:
    """Bytes that take long to make, from the file of an earlier call if that is intact.

    Args:
        name: :func:`label` of the checkpoint.
        key: differs for other bytes.
    """
    path = folder() / f"{name}-{key}{KEPT}"
    with suppress(OSError):
        digest, content = (stored := path.read_bytes())[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            note_use(path)
            return content
    content = make()
    new = path.with_name(f".{path.stem}.{os.getpid()}.new")  # of several processes, the last one stays
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(hashlib.sha256(content).digest() + content)
        os.replace(new, path)
    except OSError:  # it is made again next time
        with suppress(OSError):
            new.unlink(missing_ok=True)
    return content


def evict(keep: Path) -> None:
    """Remove the least recently used files until the rest is within the limit.

    A process that has mapped a removed file goes on with it: its disk space is freed when that process ends.

    Args:
        keep: the file in use, which stays even if it is above the limit alone.
    """
    kept = files()
    total, limit_bytes = sum(file.size for file in kept), limit()
    for file in kept:
        if total > limit_bytes and file.path != keep and _remove(file.path):
            total -= file.size


def label(path: Path) -> str:
    """The beginning of the names of a checkpoint's packed files.

    Args:
        path: the checkpoint's. In the hub's cache the label is the name of the repository and of the GGUF file.
    """
    absolute = path.resolve() if path.is_dir() else path.absolute()  # in the hub's cache, files are links to blobs
    name = absolute.name if path.is_dir() else absolute.stem
    for place in (absolute, *absolute.parents):
        if place.parent.name == "snapshots":
            # Uncut, so that the name of the repository finds its files.
            file = "" if place == absolute else f"--{_plain(name)[:NAME_CHARACTERS]}"
            return _plain(place.parent.parent.name) + file
    return _plain(name)[:NAME_CHARACTERS].lstrip(".")


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)


def files_of(name: str) -> list[PackedFile]:
    """The packed files of the checkpoints with a label, and of the files of the repository of that name."""
    named = re.compile(rf"{re.escape(name)}(--.+)?-[^-]+-[0-9a-f]+({SUFFIX}|{KEPT})")
    return [file for file in files() if named.fullmatch(file.path.name)]


def remove(name: str) -> int:
    """Remove :func:`files_of` a label. Returns the bytes that were removed."""
    return sum(file.size for file in files_of(name) if _remove(file.path))


def clear() -> int:
    """Remove all packed files, and what killed processes have left behind. Returns the bytes that were removed."""
    leftovers = [path.with_name(path.stem[1:] + SUFFIX) for path in folder().glob(".*.new")]
    locks = [path.with_suffix(SUFFIX) for path in folder().glob("*.lock")]
    sizes = {file.path: file.size for file in files()}
    return sum(sizes.get(path, 0) for path in {*sizes, *leftovers, *locks} if _remove(path))


def _remove(path: Path) -> bool:
    """Whether a file could be removed. One that another process is packing just now stays."""
    from filelock import Timeout

    try:
        with lock(path, timeout=0):
            for file in (path, unfinished(path), path.with_suffix(".lock")):
                file.unlink(missing_ok=True)
    except (OSError, Timeout):
        return False
    return True
