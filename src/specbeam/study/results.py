"""A run's folder: what it is of, and every finished generation, as soon as it is finished.

A run that is killed goes on where it was when the same command is given again: a line of ``generations.jsonl`` is
written, and on the disk, before the next generation begins, and one that was torn is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from specbeam.errors import SpecbeamError

Record = dict[str, Any]
GENERATIONS, SCORES, FINGERPRINT, CONFIG, SUMMARY = (
    "generations.jsonl",
    "scores.jsonl",
    "fingerprint.json",
    "config.yaml",
    "summary.json",
)
SAME = ("config", "models", "data", "versions", "machine")
"""Parts of a fingerprint that must not change in the middle of a run."""


class Run:
    """A run's folder, which one process at a time writes to.

    Attributes:
        folder: where it is.
        fingerprint: what its results are of: config, models, data, versions, machine.
        records: the finished generations by their keys, in the order they finished.
        scores: what was found out about texts after they were generated, by the same keys.

    Raises:
        SpecbeamError: the folder holds a run of something else, or another process is at it, or it cannot be written.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any], config: str) -> None:
        self.folder = folder
        self.fingerprint = json.loads(json.dumps(fingerprint))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / ".lock")
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise SpecbeamError(f"another process is at {folder}: wait for it, or give output=FOLDER") from error
        except OSError as error:
            raise SpecbeamError(f"the run folder {folder} cannot be written: {error.strerror}") from error
        before = read_json(folder / FINGERPRINT)
        if before is None and (folder / GENERATIONS).exists():
            raise SpecbeamError(f"{folder} has generations but no {FINGERPRINT}: give output=FOLDER for a new run")
        if before is not None and (difference := _difference(before, self.fingerprint)):
            raise SpecbeamError(
                f"{folder} holds a run of something else ({difference}): give output=FOLDER for a new one, or delete it"
            )
        with full_disk_told(folder):
            if before is None:
                write_whole(folder / CONFIG, config)
                write_whole(folder / FINGERPRINT, json.dumps(self.fingerprint, indent=2, ensure_ascii=False) + "\n")
            self.records = {record["key"]: record for record in mend(folder / GENERATIONS)}
            self.scores = {line["key"]: line["scores"] for line in mend(folder / SCORES)}
            self._generations = (folder / GENERATIONS).open("a", encoding="utf-8")
            self._scores = (folder / SCORES).open("a", encoding="utf-8")

    def add(self, record: Record) -> None:
        """Keep a finished generation."""
        self.records[record["key"]] = record
        with full_disk_told(self.folder):
            append(self._generations, record)

    def add_scores(self, key: str, scores: Mapping[str, Any]) -> None:
        """Keep what was found out about a generation."""
        self.scores[key] = dict(scores)
        with full_disk_told(self.folder):
            append(self._scores, {"key": key, "scores": scores})

    def close(self) -> None:
        self._generations.close()
        self._scores.close()
        self._lock.release()


def read(folder: Path) -> tuple[dict[str, Any], list[Record], dict[str, Any]]:
    """The fingerprint, generations and scores of a run, which may still be going on.

    Raises:
        SpecbeamError: the folder holds no run.
    """
    fingerprint = read_json(folder / FINGERPRINT)
    if fingerprint is None:
        raise SpecbeamError(f"{folder} is no run folder: it has no {FINGERPRINT}")
    records = {record["key"]: record for record, _ in lines(folder / GENERATIONS)}
    scores = {line["key"]: line["scores"] for line, _ in lines(folder / SCORES)}
    return fingerprint, [*records.values()], scores


def lines(path: Path) -> Iterator[tuple[Any, int]]:
    """The whole lines of a JSONL file, and where each ends, in bytes."""
    end = 0
    try:
        with path.open("rb") as file:
            for line in file:
                end += len(line)
                if not line.endswith(b"\n"):  # torn when the process was killed
                    return
                yield json.loads(line), end
    except FileNotFoundError:
        return
    except ValueError as error:
        raise SpecbeamError(f"{path} is damaged before byte {end:,} ({error}): restore it, or start anew") from error


def mend(path: Path) -> list[Any]:
    """The whole lines of a JSONL file, which then ends with the last of them."""
    whole, end = [], 0
    for line, end in lines(path):  # noqa: B007
        whole.append(line)
    if path.exists() and path.stat().st_size > end:
        os.truncate(path, end)
    return whole


def append(file: Any, line: Any) -> None:
    """Write a line of JSON, on the disk when this returns."""
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Says in one line that a file could not be written. What was finished before is on the disk."""
    try:
        yield
    except OSError as error:
        raise SpecbeamError(
            f"{folder} cannot be written ({error.strerror}): all that was finished is there, so make room and give the "
            "same command again"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which is there under its name, and on the disk, once it is whole."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is either there as a whole or not."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_json(path: Path) -> Any:
    """What a JSON file says; None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SpecbeamError(f"{path} cannot be read: {error}") from error


def write_parquet(path: Path, records: Iterable[Record]) -> None:
    """The generations as a table for pandas, polars or DuckDB, numbers a column each; what is nested is JSON text."""
    import pandas

    rows = []
    for record in records:
        flat = {name: value for name, value in record.items() if name != "stats"} | record.get("stats", {})
        rows.append({name: _plain(name, value) for name, value in flat.items()})
    with replacing(path) as file:
        pandas.DataFrame(rows).to_parquet(file)


def _plain(name: str, value: Any) -> Any:
    if name in ("token_ids", "times", "references"):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def fingerprint(config: Mapping[str, Any], models: Mapping[str, Path], data: Path | None) -> dict[str, Any]:
    """What results depend on: config, models, data, versions and the machine."""
    from importlib.metadata import version

    import psutil
    import torch

    import specbeam

    machine = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {
        "config": dict(config),
        "models": {name: digest(path) for name, path in models.items()},
        "data": digest(data) if data is not None else None,
        "versions": {
            "specbeam": specbeam.__version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "machine": machine,
    }


def digest(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files and their names."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    for part in sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")):
        whole.update(f"{part.relative_to(path)} {digest(part)}\n".encode())
    return whole.hexdigest()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first few things in which two fingerprints differ."""
    found = []
    for part in SAME:
        was, is_ = _flat(part, before.get(part)), _flat(part, now.get(part))
        for name in [*was, *(n for n in is_ if n not in was)]:
            if was.get(name) != is_.get(name):
                found.append(f"{name} was {_short(was.get(name))}, now {_short(is_.get(name))}")
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {key: v for part in value for key, v in _flat(f"{name}.{part}", value[part]).items()}
    return {name: value}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 40 else text[:36] + " ..."
