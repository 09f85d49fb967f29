"""A journal: results as lines of JSON, each of them on the disk before the next piece of work begins.

A process that is killed at any moment loses only the entry that it was writing. The next process that opens the
journal drops this torn line and goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError

Entry = dict[str, Any]
"""A JSON object: one line of the file."""


class Journal:
    """A file of entries, to which one process at a time appends.

    Args:
        path: the file. It is made if it is not there.
        take: called with each entry that the file holds, first to last, and with the byte at which it begins. Its
            exceptions are passed on, and the file is left as it is.
        drop_damaged: drop a damaged line, and all lines after it, instead of raising. This suits entries that are
            appended several at a time: when a machine loses power, any of them may be damaged.

    Raises:
        SpecbeamError: a line is damaged.
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, take: Callable[[Entry, int], object], *, drop_damaged: bool = False) -> None:
        self.path = path
        self._end = 0
        self._file = path.open("ab")
        try:
            for entry, end in entries_in(path, drop_damaged=drop_damaged):
                take(entry, self._end)
                self._end = end
            if path.stat().st_size > self._end:
                self._file.truncate(self._end)
        except BaseException:
            self._file.close()
            raise

    def append(self, *entries: Entry) -> list[int]:
        """Write entries. When this returns, they are on the disk.

        Returns:
            The bytes at which the entries begin.
        """
        begins = []
        for line in map(json_line, entries):
            begins.append(self._end)
            self._file.write(line)
            self._end += len(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        return begins

    def clear(self) -> None:
        """Drop all entries."""
        self._file.truncate(0)
        self._end = 0

    def close(self) -> None:
        with suppress(OSError):  # append has reported a full disk
            self._file.close()


def entries_in(path: Path, *, drop_damaged: bool = False) -> Iterator[tuple[Entry, int]]:
    """The whole lines of a journal, and the byte at which each ends. A process may still be writing it.

    A last line without a line end was torn, and is left out. So is everything if there is no such file.
    """
    end = 0
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError("it is no JSON object")
            except (ValueError, RecursionError) as error:
                if drop_damaged:
                    return
                message = f"{path} is damaged before byte {end:,} ({error}): restore it, or start anew"
                raise SpecbeamError(message) from error
            yield entry, end


def json_line(entry: Entry) -> bytes:
    """An entry as one line of JSON in UTF-8."""
    try:
        return json.dumps(entry, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can spell
        return json.dumps(entry).encode() + b"\n"
