"""Files of rows: .parquet, .jsonl and .csv are read, .parquet and .jsonl are written."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError
from specbeam.jobs.atomic import replacing
from specbeam.jobs.journal import json_line

Row = dict[str, Any]
"""The cells of a row, by column. Rows of a .jsonl file need not have the same columns."""
Write = Callable[[Mapping[str, Sequence[Any]]], None]
"""Writes rows, with the values of the added columns, one per row."""


def read_rows(path: Path) -> tuple[bytes, list[Row]]:
    """The bytes of a file, and its rows. The cells of a .csv file are texts, as they stand there.

    Raises:
        SpecbeamError: the file cannot be read, has another ending, is damaged, or has no rows.
    """
    readers = {".parquet": parquet_rows, ".jsonl": jsonl_rows, ".csv": csv_rows}
    if path.suffix.lower() not in readers:
        raise SpecbeamError(f"{path} has an unknown ending: name it {', '.join(readers)}, after its format")
    try:
        data = path.read_bytes()
        rows = list(readers[path.suffix.lower()](data))
    except OSError as error:
        raise SpecbeamError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecbeamError(f"{path} is not UTF-8 text (byte {error.start:,}): convert it") from error
    except (ValueError, TypeError, NotImplementedError, csv.Error) as error:  # pyarrow's errors are among them
        raise SpecbeamError(f"{path} is damaged: {error}") from error
    if not rows:
        raise SpecbeamError(f"{path} has no rows")
    return data, rows


def parquet_rows(data: bytes) -> list[Row]:
    rows: list[Row] = parquet_table(data).to_pylist()
    return rows


def parquet_table(data: bytes) -> Any:
    return pyarrow().parquet.read_table(pyarrow().BufferReader(data))


def pyarrow() -> Any:
    """The library that reads and writes Parquet.

    Raises:
        SpecbeamError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SpecbeamError("Parquet files need pyarrow: pip install specbeam[study]") from error
    return pyarrow


def jsonl_rows(data: bytes) -> Iterator[Row]:
    for number, line in enumerate(data.decode("utf-8-sig").split("\n"), 1):  # splitlines() would also cut at U+2028
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            yield row


def csv_rows(data: bytes) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # prompts are long
    lines = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
    names = next(lines, [])
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two columns are called {name!r}")
    for cells in lines:
        if cells and len(cells) != len(names):
            raise ValueError(f"line {lines.line_num} has {len(cells)} cells, but there are {len(names)} columns")
        if cells:
            yield dict(zip(names, cells, strict=True))


def writer(path: Path, data: bytes, rows: list[Row], types: Mapping[str, str]) -> Write:
    """A function that writes a whole file of rows and added columns, given the values of these columns.

    Args:
        path: a .parquet or .jsonl file.
        data: the bytes that the rows were read from. The types of a Parquet file's columns are kept.
        types: of the added columns, by name: "string", "int64", "float64" or "int64 list".

    Raises:
        SpecbeamError: the rows do not fit into a table.
    """
    return parquet_writer(path, data, rows, types) if path.suffix.lower() == ".parquet" else jsonl_writer(path, rows)


def parquet_writer(path: Path, data: bytes, rows: list[Row], types: Mapping[str, str]) -> Write:
    pa = pyarrow()
    table = parquet_table(data) if data.startswith(b"PAR1") else table_of(rows)

    def write(added: Mapping[str, Sequence[Any]]) -> None:
        whole = table
        for name, values in added.items():
            value_type = pa.type_for_alias(types[name].removesuffix(" list"))
            column_type = pa.list_(value_type) if types[name].endswith(" list") else value_type
            whole = whole.append_column(name, pa.array(values, column_type))
        with replacing(path) as file:
            pa.parquet.write_table(whole, file)

    return write


def table_of(rows: list[Row]) -> Any:
    """A table of rows. Raises SpecbeamError if the cells of a column have different types."""
    pa = pyarrow()
    columns = {}
    for name in columns_of(rows):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise SpecbeamError(f"column {name!r} cannot be in a .parquet file ({error}): name OUT .jsonl") from error
    return pa.table(columns)


def columns_of(rows: list[Row]) -> list[str]:
    """The names of all columns, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def jsonl_writer(path: Path, rows: list[Row]) -> Write:
    def write(added: Mapping[str, Sequence[Any]]) -> None:
        with replacing(path) as file:
            for number, row in enumerate(rows):
                whole = row | {name: values[number] for name, values in added.items()}
                file.write(json_line(whole, default=str))  # JSON has no dates and the like: they become texts

    return write
