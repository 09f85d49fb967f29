"""A disk on which a process ends, or a machine loses power, at the n-th operation that changes a file."""

import itertools
import os
import sys
from pathlib import Path

import pytest


class Crash(BaseException):
    """The process ends here: nothing it does afterwards reaches the disk."""


def crashes(action, power, prepare=lambda crash_at: None):
    """Do an action on disks that crash at its first operation, its second, and so on until it succeeds."""
    for crash_at in itertools.count(1):
        prepare(crash_at)
        with pytest.MonkeyPatch.context() as patch:
            CrashingDisk(patch, crash_at, power)
            try:
                action(crash_at)
                return
            except Crash:
                pass
        yield crash_at


class CrashingDisk:
    """Stands in for ``Path.open`` (for writing bytes), ``os.fsync``, ``os.replace`` and ``Path.unlink``.

    Args:
        patch: pytest's ``MonkeyPatch``.
        crash_at: the number of the operation (a write, fsync, truncate, replace or unlink; 1 is the first) that is
            interrupted. Half of the bytes of an interrupted write arrive; any other interrupted operation does nothing.
        power: the machine loses power too, so that files lose all bytes that were not synced.

    Attributes:
        operations: how many there were.
    """

    def __init__(self, patch, crash_at=None, power=False):
        self.crash_at, self.power, self.operations, self.crashed = crash_at, power, 0, False
        self.files = {}
        self.open, self.fsync, self.replace, self.unlink = Path.open, os.fsync, os.replace, Path.unlink
        patch.setattr(Path, "open", lambda path, mode="r", *more, **named: self._open(path, mode, *more, **named))
        patch.setattr(os, "fsync", self._fsync)
        patch.setattr(os, "replace", lambda *paths: self._operate() and self.replace(*paths))
        patch.setattr(Path, "unlink", lambda path, **named: self._operate() and self.unlink(path, **named))

    def _operate(self, interrupted=lambda: None):
        """Count an operation; crash in the one that was asked for, and in all after it."""
        if self.crashed:
            raise Crash
        self.operations += 1
        if self.operations != self.crash_at:
            return True
        self.crashed = True
        interrupted()
        if self.power:
            for file in self.files.values():
                os.truncate(file.path, file.synced)
        raise Crash

    def _open(self, path, mode="r", *more, **named):
        if mode not in ("wb", "xb", "ab"):
            return self.open(path, mode, *more, **named)
        if self.crashed:
            raise Crash
        file = CrashingFile(self, path, mode)
        self.files[file.fileno()] = file
        return file

    def _fsync(self, number):
        if number not in self.files:
            return self.fsync(number)
        self._operate()
        self.fsync(number)
        self.files[number].synced = os.fstat(number).st_size


class CrashingFile:
    """A buffered file: bytes reach the disk when it is flushed or closed."""

    def __init__(self, disk, path, mode):
        self.disk, self.path, self.buffer = disk, path, b""
        self.raw = disk.open(path, mode, buffering=0)
        self.synced = path.stat().st_size
        self.fileno = self.raw.fileno

    def write(self, data):
        self.buffer += bytes(data)
        return len(data)

    def flush(self):
        if data := self.buffer:
            self.disk._operate(lambda: self.raw.write(data[: len(data) // 2]))
            self.raw.write(data)
            self.buffer = b""

    def truncate(self, size):
        self.disk._operate()
        self.raw.truncate(size)
        self.synced = min(self.synced, size)

    def close(self):
        self.disk.files.pop(self.fileno(), None)
        try:
            if not self.disk.crashed:
                self.flush()
        finally:
            self.raw.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


KILLED_AT_SYNC = """
import os, signal, sys
from specbeam.cli import main
left, sync = [int(sys.argv.pop(1))], os.fsync
def fsync(file):
    left[0] -= 1
    os.kill(os.getpid(), signal.SIGKILL) if not left[0] else sync(file)
os.fsync = fsync
sys.exit(main())
"""


def killed_at_sync(number):
    """The command specbeam, whose process kills itself with SIGKILL at its n-th ``os.fsync``."""
    return [sys.executable, "-c", KILLED_AT_SYNC, str(number)]
