"""Files that one process at a time writes, and that are there as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from specbeam.errors import SpecbeamError
from specbeam.system.interrupts import HeldInterrupts

MAX_NAME_CHARACTERS = 40
"""Characters of a file's name that its temporary name has, too. File systems allow 255 bytes."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write. It appears under its name once it is whole and on the disk, and replaces one that was there.

    It keeps the permissions of the file that it replaces. Of several writers, the last one's file stays.
    """
    new = path.with_name(f".{path.name[:MAX_NAME_CHARACTERS]}.{secrets.token_hex(4)}.new")
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


@contextmanager
def locked(path: Path, written: Path, else_give: str) -> Iterator[None]:
    """Hold the lock of something that one process at a time writes. The system ends it with a process that is killed.

    Args:
        path: the lock's file, which is deleted afterwards. filelock does not take a deleted file for the lock.
        written: the file or folder that is written, for the message.
        else_give: what to give on the command line instead, for the message.
    """
    from filelock import FileLock, Timeout  # it imports asyncio

    lock, interrupts = FileLock(path), HeldInterrupts()
    with interrupts:
        try:
            path.touch()  # filelock takes a folder in which no file can be made, such as /proc, for a lock that is held
            lock.acquire(timeout=0)
        except Timeout as error:
            raise SpecbeamError(f"another process writes {written}: wait for it, or give {else_give}") from error
        except OSError as error:
            raise SpecbeamError(f"{written} cannot be written: {error.strerror}") from error
        try:
            with interrupts.released():
                yield
        finally:
            try:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            finally:
                lock.release()
