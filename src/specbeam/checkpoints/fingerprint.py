"""A digest of files at a cost that does not grow with their size: headers whole, data in sampled blocks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SAMPLED_BLOCKS, BLOCK_BYTES = 4, 4096
"""How many blocks of each extent are read, and their size. A block is a page, the least that a disk reads."""

READ_BYTES = 1 << 24
"""The most that is read into memory at once."""


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
