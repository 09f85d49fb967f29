"""The rows of a batch that are finished, kept so that an interrupted batch goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError
from specbeam.jobs.journal import Journal


class FinishedRows:
    """The answers to rows that are finished, in memory and in OUT.partial.jsonl.

    A context manager that closes the file. The first line of the file holds the fingerprint, and each other line the
    answer to one row.

    Args:
        output: the file that will hold all answers.
        fingerprint: changes with everything that the answers depend on.

    Attributes:
        path: OUT.partial.jsonl.
        answers: the answer to each finished row, by its number.

    Raises:
        SpecbeamError: the file is of a run with another fingerprint, or cannot be written.
    """

    def __init__(self, output: Path, fingerprint: str) -> None:
        self.path = Path(f"{output}.partial.jsonl")
        self.answers: dict[int, dict[str, Any]] = {}
        try:
            self._journal = Journal(self.path, drop_damaged=True)
        except OSError as error:
            raise SpecbeamError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            self._resume(fingerprint)
        except BaseException:
            self._journal.close()
            raise

    def _resume(self, fingerprint: str) -> None:
        head, *rows = self._journal.entries or [{}]
        if rows and "fingerprint" in head:
            if head["fingerprint"] != fingerprint:
                raise SpecbeamError(
                    f"{self.path} is of another run (another input file, model or option): give the same again, or "
                    "delete that file to begin anew"
                )
            self.answers = {row["row"]: row for row in rows if "row" in row}
        else:  # the process ended before it finished a row
            with self.reporting_kept_rows():
                self._journal.clear()
                self._journal.append({"fingerprint": fingerprint})

    def __enter__(self) -> FinishedRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        if not self.answers:
            self.path.unlink(missing_ok=True)

    def add(self, answers: Sequence[dict[str, Any]]) -> None:
        """Keep answers, each with the number of its row as "row". When this returns, they are on the disk."""
        with self.reporting_kept_rows():
            self._journal.append(*answers)
        self.answers |= {answer["row"]: answer for answer in answers}

    @contextmanager
    def reporting_kept_rows(self) -> Iterator[None]:
        """Add to an OSError that the finished rows are kept."""
        try:
            yield
        except OSError as error:
            rows = f"{len(self.answers):,} finished rows stay in {self.path}"
            message = f"{error.strerror}; {rows}, and the same command goes on from there"
            raise OSError(error.errno, message) from error
