"""A run's folder: its fingerprint, and every generation as soon as it is finished.

``generations.jsonl``, ``scores.jsonl`` and ``recordings.jsonl`` are journals (:mod:`specbeam.jobs.journal`). So a run
that was killed goes on where it was when the same command is given again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from specbeam.backends.devices import name_of_gpu
from specbeam.errors import SpecbeamError
from specbeam.jobs.files import locked, replacing, write_whole
from specbeam.jobs.journal import Entry, Journal, entries_in
from specbeam.study.composition import leaves

Record = dict[str, Any]
GENERATIONS, SCORES, RECORDINGS = "generations.jsonl", "scores.jsonl", "recordings.jsonl"
FINGERPRINT, CONFIG, SUMMARY = "fingerprint.json", "config.yaml", "summary.json"
KEYS = {
    GENERATIONS: ("key", "method", "row", "turn", "repeat", "mode", "prompt", "started", "error", "wall"),
    SCORES: ("key", "scores"),
    RECORDINGS: ("key", "events"),
    FINGERPRINT: ("config",),
}
"""The keys that every entry of a file has. A generation that failed has them, too."""
NOT_IN_TABLE = ("stats", "own", "recording")
"""The keys of a generation that are no column: each statistic and custom metric is one, and recordings are large."""
ASKED_PARTS = ("config", "models", "data")
"""The parts of a fingerprint that the user chose. The others describe where the study ran."""
MAX_NAME_BYTES = 200
"""Bytes of a folder's name before a hash. File systems allow 255."""
RUNS = Path("runs")
"""Where runs lie that have no folder of their own."""


def default_folder(project: str, fingerprint: Mapping[str, Any], swept: str = "") -> Path:
    """The folder of a run that was given none: the same for the same configuration, models and data.

    Args:
        swept: the keys and values of a sweep that this run stands for. They name a new folder. A run that is there
            already keeps its folder, whichever sweep it was made in.
    """
    asked = json.dumps({part: fingerprint[part] for part in ASKED_PARTS}, sort_keys=True)
    about = _short_hash(asked)
    earlier = sorted(path.parent for path in RUNS.glob(f"*-{about}/{FINGERPRINT}"))
    return next(iter(earlier), RUNS / f"{_plain_name('-'.join(filter(None, [project, swept])))}-{about}")


def file_name(text: str) -> str:
    """A text as the name of a file or folder. A hash tells texts from each other that would have one name."""
    name = _plain_name(text)
    return name if name == text else f"{name}-{_short_hash(text)}"


def _plain_name(text: str) -> str:
    """A text as the name of a file, without what no file system takes."""
    return text.replace("/", "_").encode()[:MAX_NAME_BYTES].decode(errors="ignore")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def latest_run() -> Path:
    """The run below RUNS that was written to last."""
    files = [path for pattern in ("*", "*/*") for path in RUNS.glob(f"{pattern}/{FINGERPRINT}")]
    if not files:
        raise SpecbeamError(f"there is no run in {RUNS}/: give show RUN, the folder of a run")
    written = {path.parent: max(p.stat().st_mtime for p in path.parent.iterdir()) for path in files}
    return max(written, key=written.__getitem__)


class Entries(dict[str, Any]):
    """The entries of a journal by their keys, in memory and on the disk.

    Args:
        part: the only part of an entry that is kept in memory; None keeps all of it.
    """

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__()
        self._path, self._part = path, part
        self._journal = Journal(path, self._take)

    def _take(self, entry: Entry, _: int = 0) -> None:
        key = checked(entry, self._path)["key"]
        self[key] = entry if self._part is None else entry[self._part]

    def add(self, entry: Entry) -> None:
        self._take(entry)
        with reporting_full_disk(self._path.parent):
            self._journal.append(entry)

    def close(self) -> None:
        self._journal.close()


class Run:
    """A run's folder, which one process at a time writes to.

    Attributes:
        folder: its path.
        fingerprint: all that the results depend on: config, models, data, versions, machine.
        records: the finished generations by their keys, in the order in which they finished.
        scores: the scores of texts, measured after their generation, by the same keys.
        recordings: the events of some generations, by the same keys. Each was recorded in a generation of its own.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any], config: str) -> None:
        self.folder = folder
        self.fingerprint = json.loads(json.dumps(fingerprint))
        with ExitStack() as opened:
            self._open(opened, config)
            self._opened = opened.pop_all()

    def _open(self, opened: ExitStack, config: str) -> None:
        """Open the folder and its journals; the stack closes them."""
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecbeamError(f"the run folder {folder} cannot be written: {error.strerror}") from error
        opened.enter_context(locked(folder / ".lock", folder, "output=FOLDER"))
        before = read_fingerprint(folder)
        if before is None and (folder / GENERATIONS).exists():
            raise SpecbeamError(f"{folder} has generations but no {FINGERPRINT}: give output=FOLDER for a new run")
        if before is not None and (difference := _difference(before, self.fingerprint)):
            raise SpecbeamError(
                f"{folder} holds another run ({difference}): give output=FOLDER for a new one, or delete it"
            )

        with reporting_full_disk(folder):
            if before is None:
                write_whole(folder / CONFIG, config)
                write_whole(folder / FINGERPRINT, json.dumps(self.fingerprint, indent=2, ensure_ascii=False) + "\n")
            self.records = opened.enter_context(closing(Entries(folder / GENERATIONS)))
            self.scores = opened.enter_context(closing(Entries(folder / SCORES, "scores")))
            self.recordings = opened.enter_context(closing(Entries(folder / RECORDINGS, "events")))

    def close(self) -> None:
        self._opened.close()


def read(folder: Path) -> tuple[dict[str, Any], list[Record], dict[str, Any]]:
    """The fingerprint, generations and scores of a run, which may still be going on."""
    fingerprint = read_fingerprint(folder)
    if fingerprint is None:
        raise SpecbeamError(f"{folder} is no run folder: it has no {FINGERPRINT}")
    checked(fingerprint, folder / FINGERPRINT)
    generations, scored = folder / GENERATIONS, folder / SCORES
    records = {checked(r, generations)["key"]: r for r, _ in entries_in(generations)}
    scores = {checked(e, scored)["key"]: e["scores"] for e, _ in entries_in(scored)}
    return fingerprint, [*records.values()], scores


@contextmanager
def reporting_full_disk(folder: Path) -> Iterator[None]:
    """Turn an OSError in writing into a SpecbeamError, which says that finished generations are kept."""
    try:
        yield
    except OSError as error:
        raise SpecbeamError(
            f"{folder} cannot be written ({error.strerror}): finished generations are kept, so make room and give the "
            "same command again"
        ) from error


def checked(entry: Entry, path: Path) -> Entry:
    """An entry of a file. Raises SpecbeamError unless it has the keys that are in every one."""
    for name in KEYS[path.name]:
        if name not in entry:
            raise SpecbeamError(f"{path} is damaged (an entry has no {name!r}): restore it, or start anew")
    return entry


def read_fingerprint(folder: Path) -> dict[str, Any] | None:
    """The fingerprint of a run; None if the folder has no such file yet."""
    fingerprint = read_json(folder / FINGERPRINT)
    if not isinstance(fingerprint, dict | None):
        raise SpecbeamError(f"{folder / FINGERPRINT} is damaged (it is no JSON object): restore it, or start anew")
    return fingerprint


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecbeamError(f"{path} cannot be read: {error}") from error


def write_parquet(path: Path, records: Iterable[Record]) -> None:
    """The generations as a table for pandas, polars or DuckDB. Each statistic is a column; nested values are JSON."""
    import pandas

    rows = []
    for record in records:
        flat = {name: value for name, value in record.items() if name not in NOT_IN_TABLE}
        flat |= record.get("stats", {}) | record.get("own", {})
        rows.append({name: _plain(name, value) for name, value in flat.items()})
    with replacing(path) as file:
        pandas.DataFrame(rows).to_parquet(file)


def _plain(name: str, value: Any) -> Any:
    if name in ("token_ids", "times", "piece_tokens", "references"):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def fingerprint(config: Mapping[str, Any], models: Mapping[str, Path], data: Path | None) -> dict[str, Any]:
    """All that results depend on: config, models, data, versions and the machine."""
    from importlib.metadata import PackageNotFoundError, version

    import psutil

    import specbeam

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    machine = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "system": platform.platform(),
    }
    if (gpu := name_of_gpu()) is not None:
        machine["gpu"] = gpu
    return {
        "config": dict(config),
        "models": {name: digest(path) for name, path in models.items()},
        "data": digest(data) if data is not None else None,
        "versions": {
            "specbeam": specbeam.__version__,
            "torch": installed("torch"),
            "transformers": installed("transformers"),
            "python": platform.python_version(),
        },
        "machine": machine,
    }


def digest(path: Path) -> str:
    """The SHA-256 of a file, or of a folder's files and their names, as hexadecimal digits."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest_of_all = hashlib.sha256()
    for part in sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")):
        digest_of_all.update(f"{part.relative_to(path)} {digest(part)}\n".encode())
    return digest_of_all.hexdigest()


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first few differences of two fingerprints; "" if they are equal."""
    differences = []
    for part in now:
        was, is_ = leaves(part, before.get(part)), leaves(part, now[part])
        for name in was | is_:
            if was.get(name) != is_.get(name):
                differences.append(f"{name} was {_short(was.get(name))}, now {_short(is_.get(name))}")
    more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 40 else text[:36] + " ..."
