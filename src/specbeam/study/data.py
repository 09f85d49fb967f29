"""The rows of a study: prompts of the configuration, and data sets in their usual formats."""

from __future__ import annotations

import gzip
import json
import os
import random
import string
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specbeam.checkpoints.sources.hub import no_answer
from specbeam.errors import SpecbeamError
from specbeam.jobs.formats import TextRows, ending_of, open_rows
from specbeam.options.names import nearest_name
from specbeam.study.config import Columns, Data

TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
USUAL_COLUMNS = {
    "prompt": ("prompt", "text", "question", "input", "instruction"),
    "reference": ("reference", "references", "answer", "target"),
    "category": ("category",),
    "id": ("id",),
}


@dataclass(frozen=True)
class Row:
    """A question, or a conversation of several turns.

    Attributes:
        id: different for each row.
        turns: messages of a user, each answered before the next is asked.
        references: right answers to the last turn.
        problem: a problem of HumanEval: "prompt", "test" and "entry_point".
    """

    id: str
    turns: list[str]
    category: str | None = None
    references: list[str] = field(default_factory=list)
    problem: dict[str, str] | None = None


def read_rows(data: Data, prompts: list[str], seed: int) -> list[Row]:
    """The rows of a study: its own prompts, then the rows drawn from its data set, in the set's order."""
    rows = [Row(f"prompt {i + 1}", [text]) for i, text in enumerate(prompts)]
    for row in rows:
        _text(row.turns[0], row.id)
    if data.source is not None:
        rows += _draw([*_rows_of(data)], data, seed)
    if len({row.id for row in rows}) < len(rows):
        rows = [replace(row, id=f"{i}: {row.id}") for i, row in enumerate(rows)]
    if not rows:
        raise SpecbeamError(f"{data.source} has no rows" + (f" of {data.categories}" if data.categories else ""))
    return rows


def local_file(data: Data) -> Path | None:
    """The file a data set is read from; None if it is not a file."""
    path = Path(os.path.expanduser(data.source)) if data.source is not None else None
    return path if path is not None and path.exists() else None


def _rows_of(data: Data) -> Iterator[Row]:
    assert data.source is not None
    path = local_file(data)
    if path is None:
        if data.source.endswith((*TABLES, ".txt", ".gz")) or data.source.startswith((".", "/", "~")):
            raise SpecbeamError(f"data.source={data.source}: there is no such file")
        records: Iterator[Any] = _of_hub(data)
        kind = data.format if data.format != "auto" else "table"
    else:
        kind = data.format if data.format != "auto" else _format_of(path)
        records = _lines(path) if kind == "text" else _records(path)
    reader: dict[str, Callable[[Data, Any, int], Row]] = {
        "table": _of_table,
        "text": lambda data, line, i: Row(f"line {i + 1}", [_templated(data, {"prompt": line}, line)]),
        "spec_bench": _of_spec_bench,
        "human_eval": _of_human_eval,
    }
    for i, record in enumerate(records):
        if kind != "text" and not isinstance(record, Mapping):
            raise SpecbeamError(f"{data.source} row {i + 1} is no object with columns, but {str(record)[:40]!r}")
        yield reader[kind](data, record, i)


def _format_of(path: Path) -> str:
    """The format of a file."""
    if ending_of(path) in ("", ".txt"):
        return "text"
    first = next(_records(path), None)
    if isinstance(first, Mapping):
        if {"turns", "category"} <= {*first}:
            return "spec_bench"
        if {"task_id", "entry_point", "test"} <= {*first}:
            return "human_eval"
    return "table"


def _records(path: Path) -> Iterator[Any]:
    suffix = ending_of(path)
    if suffix not in TABLES:
        raise SpecbeamError(f"data.source={path} is not a {', '.join(TABLES)} or .txt file: convert it")
    if suffix == ".json":
        text = _read(path)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecbeamError(f"{path} is not JSON: {error}") from error
        yield from value if isinstance(value, list) else [value]
        return
    with open_rows(path) as rows:
        yield from rows if isinstance(rows, TextRows) else rows.cells(rows.columns)


def _lines(path: Path) -> Iterator[str]:
    return (line.removesuffix("\r") for line in _read(path).split("\n") if line.strip())


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise SpecbeamError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise SpecbeamError(f"{path} is not UTF-8 text (byte {error.start:,}): convert it") from error


def _of_hub(data: Data) -> Iterator[Any]:
    try:
        from datasets import config, load_dataset
    except ImportError as error:
        raise SpecbeamError(
            f"data.source={data.source} is no file here, and data sets of the hub need the package {error.name}: "
            "pip install 'specbeam[study]'"
        ) from error
    assert data.source is not None
    silence, offline = no_answer(data.source, kind="dataset"), config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = offline or silence is not None  # a data set may be in the cache
    try:
        rows = load_dataset(data.source, data.subset, split=data.split)
    except Exception as error:  # the network, the name or the split: the message says which
        is_silent = silence is not None and isinstance(error, ConnectionError)
        why = "it is not in the local cache, and no hub answers: " if is_silent else ""
        line = " ".join(str(silence if is_silent else error).split())[:200]
        raise SpecbeamError(f"the data set {data.source} cannot be loaded ({why}{line}): give a file") from error
    finally:
        config.HF_HUB_OFFLINE = offline
    yield from rows


def _of_table(data: Data, record: Mapping[str, Any], i: int) -> Row:
    name = f"{data.source} row {i + 1}"
    columns = _columns(data.columns, record, name)
    prompt = _text(_cell(record, columns.prompt), name, columns.prompt)
    references = _cell(record, columns.reference) if columns.reference else []
    if not isinstance(references, list):
        references = [] if references is None else [references]
    if columns.reference and not references:
        raise SpecbeamError(f"{name} has nothing in the column {columns.reference!r}: fill it, or leave the row out")
    return Row(
        str(_cell(record, columns.id)) if columns.id else str(i + 1),
        [_templated(data, {**record, "prompt": prompt}, name)],
        str(_cell(record, columns.category)) if columns.category else None,
        [_text(reference, name, columns.reference) for reference in references],
    )


def _columns(configured: Columns, record: Mapping[str, Any], row: str) -> Columns:
    """The columns to use: the given names, or the usual ones."""
    columns: dict[str, str | None] = {}
    for which, column in vars(configured).items():
        if column is None:
            columns[which] = next((name for name in USUAL_COLUMNS[which] if name in record), None)
        else:
            columns[which] = column
            names = _names(record, column)
            _check_known(f"data.columns.{which}={column}", column, names, f"{row} has no such column")
    if columns["prompt"] is None:
        raise SpecbeamError(f"data.columns.prompt is missing: it is one of {', '.join(map(str, record))}")
    return Columns(**columns)


def _cell(record: Mapping[str, Any], column: str | None) -> Any:
    """The value of a column, or of a field in it, such as translation.en."""
    value: Any = record
    for name in (column or "").split(".") if column not in record else [column]:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _names(record: Mapping[str, Any], column: str) -> list[str]:
    """The columns of a record; for a column such as translation.en, the fields of translation."""
    first, _, field = column.partition(".")
    cell = record.get(first)
    if column in record or not field or not isinstance(cell, Mapping | None) or first not in record:
        return [*record]
    return [column] if cell is None else [f"{first}.{name}" for name in _names(cell, field)]


def _check_known(setting: str, name: str, known: Collection[str], problem: str) -> None:
    """Raise SpecbeamError, with the names that are there and the nearest of them, unless the name is among them."""
    if name not in known:
        near = nearest_name(name, [*known])
        hint = f"did you mean {near!r}? " if near else ""
        raise SpecbeamError(f"{setting}: {problem}: {hint}there are {', '.join(map(str, known)) or 'none'}")


def _templated(data: Data, record: Mapping[str, Any], name: str) -> str:
    if data.template is None:
        return str(record["prompt"])
    try:
        return string.Formatter().vformat(data.template, (), record)
    except (LookupError, ValueError, AttributeError) as error:
        columns = ", ".join(f"{{{key}}}" for key in record)
        raise SpecbeamError(f"data.template does not fit {name} ({error}): there are {columns}") from error


def _of_spec_bench(data: Data, record: Mapping[str, Any], i: int) -> Row:
    name = f"{data.source} row {i + 1}"
    turns, references = record.get("turns"), record.get("reference") or []
    if not isinstance(turns, list) or not turns:
        raise SpecbeamError(f"{name} has no turns: it is not Spec-Bench's format")
    asked = [_text(turn, name, "turns") for turn in turns[: data.turns]]
    # MT-Bench has one reference per turn, the other sets have one per question.
    last = references[len(asked) - 1 : len(asked)] if len(turns) > 1 else references
    references = [str(reference) for reference in last]
    return Row(str(record.get("question_id", i + 1)), asked, str(record.get("category")), references)


def _of_human_eval(data: Data, record: Mapping[str, Any], i: int) -> Row:
    name = f"{data.source} row {i + 1}"
    problem = {key: _text(record.get(key), name, key) for key in ("prompt", "test", "entry_point")}
    asked = f"Complete this Python function. Answer with the whole function.\n\n```python\n{problem['prompt']}```"
    text = _templated(data, {**record, "prompt": asked if data.template is None else problem["prompt"]}, name)
    return Row(str(record.get("task_id", i + 1)), [text], None, [], problem)


def _text(value: Any, name: str, column: str | None = None) -> str:
    where = "" if column is None else f" in the column {column!r}"
    if value is not None and not isinstance(value, str):
        raise SpecbeamError(f"{name} has {str(value)[:40]}{where}, where a text belongs: write it as a text")
    if value is None or not value.strip():
        raise SpecbeamError(f"{name} has no text{where}: fill it, or leave the row out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SpecbeamError(f"{name} has half a surrogate pair, which is no character: give valid Unicode") from error
    return value


def _draw(rows: list[Row], data: Data, seed: int) -> list[Row]:
    """A sample, in the set's order. The same seed draws the same rows."""
    if data.categories is not None:
        categories = {row.category: None for row in rows if row.category}
        for category in data.categories:
            _check_known(f"data.categories={category}", category, categories, f"{data.source} has no such category")
        rows = [row for row in rows if row.category in data.categories]
    indices = [*range(len(rows))]
    if data.per_category is not None:
        by_category: dict[str | None, list[int]] = {}
        for index in indices:
            by_category.setdefault(rows[index].category, []).append(index)
        drawn = random.Random(seed)
        indices = [n for some in by_category.values() for n in drawn.sample(some, min(data.per_category, len(some)))]
    if data.limit is not None:
        indices = random.Random(seed).sample(indices, min(data.limit, len(indices)))
    return [rows[index] for index in sorted(indices)]
