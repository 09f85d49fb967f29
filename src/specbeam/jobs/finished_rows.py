"""The finished rows of a batch, so that an interrupted batch can be resumed."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError
from specbeam.jobs.journal import Entry, Journal
from specbeam.system.interrupts import HeldInterrupts

NOT_FINISHED = -1


class FinishedRows:
    """The answers to rows that are finished, in OUT.partial.jsonl. In memory a row takes eight bytes.

    A context manager that closes the file. The first line of the file holds the fingerprint, and each other line the
    answer to one row.

    Args:
        output: the file that will hold all answers.
        fingerprint: changes with everything that the answers depend on.
        rows: the number of rows. They are numbered from 0.

    Attributes:
        path: OUT.partial.jsonl.
        count: how many rows are finished.

    Raises:
        SpecbeamError: the file is of a run with another fingerprint, or cannot be written.
    """

    def __init__(self, output: Path, fingerprint: str, rows: int) -> None:
        self.path = Path(f"{output}.partial.jsonl")
        self.count = 0
        self._fingerprint = fingerprint
        self._head: Entry = {}
        self._places = array("q", [NOT_FINISHED]) * rows  # the byte at which a row's answer begins
        try:
            self._journal = Journal(self.path, self._take, drop_damaged=True)
        except OSError as error:
            raise SpecbeamError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            if not self.count:  # the process ended before it finished a row
                self._journal.clear()
                self._journal.append({"fingerprint": fingerprint})
            self._file = self.path.open("rb")
        except BaseException:
            self._close_journal()
            raise

    def _take(self, entry: Entry, place: int) -> None:
        """Take an entry of an earlier process."""
        if place == 0:
            self._head = entry
        elif self._head.get("fingerprint") != self._fingerprint:
            raise SpecbeamError(
                f"{self.path} is of another run (another input file, model, option or version): give the same "
                "again, or delete that file to begin anew"
            )
        elif self._is_answer(entry):  # the row of a damaged answer is made again
            self._keep(entry["row"], place)

    def _is_answer(self, entry: Entry) -> bool:
        row = entry.get("row")
        numbered = isinstance(row, int) and not isinstance(row, bool) and 0 <= row < len(self._places)
        return numbered and "error" in entry and isinstance(entry["error"], str | None)

    def _keep(self, row: int, place: int) -> None:
        self.count += self._places[row] == NOT_FINISHED
        self._places[row] = place

    def __enter__(self) -> FinishedRows:
        return self

    def __exit__(self, *_: object) -> None:
        with HeldInterrupts():
            self._file.close()
            self._close_journal()

    def _close_journal(self) -> None:
        self._journal.close()
        if not self.count:
            self.path.unlink(missing_ok=True)

    def __contains__(self, row: int) -> bool:
        return self._places[row] != NOT_FINISHED

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The answers to the finished rows, read from the disk in the order of the rows."""
        for place in self._places:
            if place != NOT_FINISHED:
                self._file.seek(place)
                yield json.loads(self._file.readline())

    def add(self, answers: Sequence[dict[str, Any]]) -> None:
        """Keep answers, each with the number of its row as "row". When this returns, they are on the disk."""
        with self.reporting_kept_rows():
            places = self._journal.append(*answers)
        for answer, place in zip(answers, places, strict=True):
            self._keep(answer["row"], place)

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
