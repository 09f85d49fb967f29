"""The finished result files of a folder, noted so that an interrupted command can be resumed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specbeam.errors import SpecbeamError
from specbeam.jobs.atomic import write_whole
from specbeam.jobs.journal import Entry, Journal
from specbeam.system.interrupts import HeldInterrupts


class FinishedFiles:
    """Results, each of which one source file was made into.

    A context manager that closes the journal. A result is noted just before it appears under its name, and it appears
    as a whole. So after any interruption, what is there and noted is finished.

    Args:
        journal: its path. The results are beside it.
        fingerprint: changes with everything else that the results depend on.

    Attributes:
        folder: where the results are.

    Raises:
        SpecbeamError: the journal cannot be written.
    """

    def __init__(self, journal: Path, fingerprint: str) -> None:
        self.folder, self._fingerprint = journal.parent, fingerprint
        self._noted: dict[str, Entry] = {}  # the latest entry of each result, by its name
        try:
            self._journal = Journal(journal, lambda entry, _: self._take(entry), drop_damaged=True)
        except OSError as error:
            raise SpecbeamError(f"{journal} cannot be written: {error.strerror}") from error

    def _take(self, entry: Entry) -> None:
        if isinstance(name := entry.get("result"), str):
            self._noted[name] = entry

    def __enter__(self) -> FinishedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        with HeldInterrupts():
            self._journal.close()
            if not self._noted:
                self._journal.path.unlink(missing_ok=True)

    def has(self, name: str, source: Path) -> bool:
        """Whether a result is finished.

        Raises:
            SpecbeamError: another file has its name.
        """
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
            self._journal.append(entry)
            self._noted[name] = entry
            write_whole(self.folder / name, content)

    def _entry(self, name: str, source: Path) -> Entry:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"result": name, "source": digest, "run": self._fingerprint}
