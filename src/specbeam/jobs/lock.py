"""A lock that one process at a time holds. The system ends it with the process, also if the process is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from specbeam.errors import SpecbeamError
from specbeam.system.interrupts import HeldInterrupts


@contextmanager
def locked(path: Path, written: Path, else_give: str) -> Iterator[None]:
    """Hold the lock of something that one process at a time writes.

    Args:
        path: the lock's file, which is deleted afterwards. filelock does not take a deleted file for the lock.
        written: the file or folder that is written, for the message.
        else_give: what to give on the command line instead, for the message.

    Raises:
        SpecbeamError: another process holds the lock, or the file cannot be made.
    """
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
