"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write. It appears under its name once it is whole and on the disk, and replaces one that was there."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as a whole, text as UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
