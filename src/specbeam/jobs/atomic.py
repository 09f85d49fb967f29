"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from specbeam.system.interrupts import HeldInterrupts

KEPT_OF_NAME = 40
"""Characters of a file's name that its temporary name has, too. File systems allow 255 bytes."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write. It appears under its name once it is whole and on the disk, and replaces one that was there.

    It keeps the permissions of the file that it replaces. Of several writers, the last one's file stays.
    """
    new = path.with_name(f".{path.name[:KEPT_OF_NAME]}.{secrets.token_hex(4)}.new")
    interrupts = HeldInterrupts()
    with interrupts:
        try:
            with new.open("xb") as file:
                if path.exists():
                    new.chmod(stat.S_IMODE(path.stat().st_mode))
                with interrupts.released():
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
