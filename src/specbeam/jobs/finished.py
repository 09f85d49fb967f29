"""Finished work that survives the process: the rows of a file, and the result files of a folder."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from specbeam.errors import SpecbeamError
from specbeam.jobs.files import write_whole
from specbeam.jobs.journal import Entry, Journal
from specbeam.system.interrupts import HeldInterrupts
from specbeam.system.numbers import is_integer

NOT_FINISHED = -1


class Finished:
    """A journal of finished work: a context manager that closes it, and deletes it if nothing is finished.

    Args:
        fingerprint: changes with everything else that the results depend on.

    Attributes:
        path: of the journal.
        count: the number of results that are noted in it.
    """

    count = 0

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        try:
            self.journal = Journal(path, self.take, drop_damaged=True)
        except OSError as error:
            raise SpecbeamError(f"{path} cannot be written: {error.strerror}") from error

    def take(self, entry: Entry, begin: int) -> None:
        """Take an entry of an earlier process, and the byte at which it begins."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with HeldInterrupts():
            self.journal.close()
            if not self.count:
                self.path.unlink(missing_ok=True)


class FinishedRows(Finished):
    """The answers to rows that are finished, in OUT.partial.jsonl. In memory a row takes eight bytes.

    The first line of the journal holds the fingerprint, and each other line the answer to one row.

    Args:
        output: the file that will hold all answers.
        rows: the number of rows. They are numbered from 0.
    """

    def __init__(self, output: Path, fingerprint: str, rows: int) -> None:
        self._head: Entry = {}
        self._begins = array("q", [NOT_FINISHED]) * rows  # the byte at which a row's answer begins
        super().__init__(Path(f"{output}.partial.jsonl"), fingerprint)
        try:
            if not self.count:  # the process ended before it finished a row
                self.journal.clear()
                self.journal.append({"fingerprint": fingerprint})
            self._file = self.path.open("rb")
        except BaseException:
            super().__exit__()
            raise

    def take(self, entry: Entry, begin: int) -> None:
        if begin == 0:
            self._head = entry
        elif self._head.get("fingerprint") != self.fingerprint:
            raise SpecbeamError(
                f"{self.path} is of another run (another input file, model, option or version): give the same "
                "again, or delete that file to begin anew"
            )
        elif self._is_answer(entry):  # the row of a damaged answer is made again
            self._keep(entry["row"], begin)

    def _is_answer(self, entry: Entry) -> bool:
        row = entry.get("row")
        numbered = is_integer(row) and 0 <= row < len(self._begins)
        return numbered and "error" in entry and isinstance(entry["error"], str | None)

    def _keep(self, row: int, begin: int) -> None:
        self.count += self._begins[row] == NOT_FINISHED
        self._begins[row] = begin

    def __exit__(self, *exception: object) -> None:
        with HeldInterrupts():
            self._file.close()
            super().__exit__(*exception)

    def __contains__(self, row: int) -> bool:
        return self._begins[row] != NOT_FINISHED

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The answers to the finished rows, read from the disk in the order of the rows."""
        for begin in self._begins:
            if begin != NOT_FINISHED:
                self._file.seek(begin)
                yield json.loads(self._file.readline())

    def add(self, answers: Sequence[dict[str, Any]]) -> None:
        """Keep answers, each with the number of its row as "row". When this returns, they are on the disk."""
        with self.reporting_kept_rows():
            begins = self.journal.append(*answers)
        for answer, begin in zip(answers, begins, strict=True):
            self._keep(answer["row"], begin)

    @contextmanager
    def reporting_kept_rows(self) -> Iterator[None]:
        """Add to an OSError that the finished rows are kept."""
        try:
            yield
        except OSError as error:
            if not self.count:
                raise
            rows = f"{self.count:,} finished rows stay in {self.path}"
            message = f"{error.strerror}; {rows}, and the same command goes on from there"
            raise OSError(error.errno, message) from error


class FinishedFiles(Finished):
    """Results, each of which one source file was made into. They lie beside the journal.

    A result is noted just before it appears under its name, and it appears as a whole. So after any interruption, what
    is there and noted is finished.
    """

    def __init__(self, journal: Path, fingerprint: str) -> None:
        self.folder = journal.parent
        self._noted: dict[str, Entry] = {}  # the latest entry of each result, by its name
        super().__init__(journal, fingerprint)

    def take(self, entry: Entry, begin: int = 0) -> None:
        if isinstance(name := entry.get("result"), str):
            self._noted[name] = entry
            self.count = len(self._noted)

    def has(self, name: str, source: Path) -> bool:
        """Whether a result is finished. A file of that name from another run is refused."""
        path = self.folder / name
        if not path.exists():
            return False
        try:
            if self._noted.get(name) == self._entry(name, source):
                return True
        except OSError as error:
            raise SpecbeamError(f"{source}: it cannot be read: {error.strerror}") from error
        raise SpecbeamError(
            f"{path} is there already, and not from this run (another file, model, option or version): delete it, or "
            "name another folder"
        )

    def add(self, name: str, source: Path, content: str) -> None:
        """Note a result and write it. When this returns, it is on the disk."""
        entry = self._entry(name, source)
        with HeldInterrupts():
            self.journal.append(entry)
            self.take(entry)
            write_whole(self.folder / name, content)

    def _entry(self, name: str, source: Path) -> Entry:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"result": name, "source": digest, "run": self.fingerprint}
