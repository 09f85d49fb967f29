"""Files of rows: .parquet, .jsonl, .csv and .tsv files are read and written, a few rows at a time."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import os
import shutil
import stat
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from specbeam.errors import SpecbeamError
from specbeam.jobs.files import replacing
from specbeam.jobs.journal import json_line

T = TypeVar("T")
Row = dict[str, Any]
"""The cells of a row, by column. Rows of a .jsonl file need not have the same columns."""
Write = Callable[[Iterable[Row]], None]
"""Writes all rows of a file, given the cells of the added columns, row by row."""
Type = str | list["Type"] | dict[str, "Type"]
"""The type of a cell: "string", "int64", "float64" or "bool"; in a list, a list of that; a dictionary for objects."""

ROWS_PER_TABLE = 128
"""Rows that are read or written at a time where they are columns. One row may be many megabytes."""
ROW_GROUP_BYTES = 4 * 2**20
"""The size of a row group in a Parquet file, before compression. It is in memory until it is written."""
PAGE_BUFFER_BYTES = 2**16
"""Bytes that are read at a time from each column of a Parquet file."""
CONVERSION_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, EOFError, zlib.error)
"""Raised for damaged bytes, and by pyarrow for a cell without a value in Python."""


DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""What separates the cells of a line, by the file's ending."""


def open_rows(path: Path, limit: int | None = None, delimiter: str | None = None) -> Rows:
    """The rows of a file, or the first ``limit`` of them: then the others are not read.

    Args:
        delimiter: what separates the cells of a .csv or .tsv file; None: a comma or a tab.
    """
    if (ending := ending_of(path)) not in FORMATS:
        raise SpecbeamError(f"{path} has an unknown ending: name it {', '.join(FORMATS)}, after its format")
    make, _ = FORMATS[ending]
    return make(path, limit, delimiter or DELIMITERS.get(ending, ""))


def ending_of(path: Path) -> str:
    """The ending of a file's name that tells its format: of a compressed file the one before .gz."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


class Rows(ABC):
    """The rows of a file. They are read from the disk anew each time, and only a few are in memory at a time.

    A context manager that closes the file. Its constructor reads all of the rows, so that it reports a damaged one.

    Attributes:
        path: the file.
        limit: only the first ``limit`` rows count; None: all.
        delimiter: what separates the cells of a line, if the format has one.
        columns: the names of all columns, in the order in which they first appear.
        digest: the SHA-256 of the file's bytes, as hexadecimal digits.
    """

    def __init__(self, path: Path, limit: int | None = None, delimiter: str = "") -> None:
        self.path, self.limit, self.delimiter = path, limit, delimiter
        with self._reporting_damage():
            self._file = seekable(path)
        try:
            self._version = self._version_now()
            with self._reporting_damage():
                self.digest = hashlib.file_digest(self._file, "sha256").hexdigest()
            self._count, columns = 0, dict[str, None]()
            for count, names in self._checked(self._counts):
                self._count += count
                columns.update(dict.fromkeys(names))
            self.columns = [*columns]
            if not self._count:
                raise SpecbeamError(f"{path} has no rows")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._count

    @abstractmethod
    def _counts(self) -> Iterator[tuple[int, Iterable[str]]]:
        """For all rows, a few at a time: how many there are, and the names of their columns.

        Raises ValueError, or pyarrow's errors, for a damaged row.
        """

    @abstractmethod
    def cells(self, columns: Sequence[str]) -> Iterator[Row]:
        """The cells of some columns, row by row, as Python's values. A cell that a row lacks is None.

        Raises:
            SpecbeamError: a cell has no value in Python.
        """

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """The rows as JSON objects.

        Raises:
            SpecbeamError: JSON has no value for a cell.
        """

    @abstractmethod
    def schema(self) -> Any:
        """The names and types of the columns of a Parquet file with these rows.

        Raises SpecbeamError, or pyarrow's errors, if the cells of a column have different types.
        """

    @abstractmethod
    def tables(self, schema: Any) -> Iterator[Any]:
        """The rows as pyarrow's tables of a few rows each. The schema is the one that ``schema`` returns."""

    def _checked(self, read: Callable[[], Iterator[T]]) -> Iterator[T]:
        """The items that a function reads from the file's beginning on."""
        with self._reporting_damage():
            self._file.seek(0)
            for item in read():
                self._check_unchanged()
                yield item
            self._check_unchanged()

    def _version_now(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _check_unchanged(self) -> None:
        if self._version_now() != self._version:
            raise SpecbeamError(f"{self.path} was changed while it was read: restore it, or begin anew")

    @contextmanager
    def _reporting_damage(self) -> Iterator[None]:
        """Turn errors in reading into SpecbeamErrors."""
        try:
            yield
        except SpecbeamError:
            raise
        except OSError as error:
            raise SpecbeamError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except CONVERSION_ERRORS as error:
            self._check_unchanged()
            raise SpecbeamError(f"{self.path} is damaged: {error}") from error


def seekable(path: Path) -> io.BufferedReader | io.BufferedRandom:
    """A file to read several times. The content of a pipe or of a .gz file is copied to a nameless file first."""
    file = path.open("rb")
    is_gzip = path.suffix == ".gz"
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and not is_gzip:
        return file
    with file, gzip.open(file) if is_gzip else file as content:
        copy = tempfile.TemporaryFile()  # noqa: SIM115
        shutil.copyfileobj(content, copy)
        copy.flush()
    return copy


class ParquetRows(Rows):
    """The rows of a Parquet file. Only cells that are asked for become Python's values: the others keep their types."""

    def cells(self, columns: Sequence[str]) -> Iterator[Row]:
        for batch in self._checked(partial(self._batches, [*columns])):
            cells_by_column = []
            for column in columns:
                try:
                    cells_by_column.append(batch.column(column).to_pylist())
                except CONVERSION_ERRORS as error:
                    raise SpecbeamError(f"the column {column!r} of {self.path} cannot be used: {error}") from error
            for cells in zip(*cells_by_column, strict=True):
                yield dict(zip(columns, cells, strict=True))

    def lines(self) -> Iterator[str]:
        for batch in self._checked(self._batches):
            columns = [self._members(batch.column(name), name) for name in self.columns]
            for members in zip(*columns, strict=True):
                yield "{" + ", ".join(members) + "}"

    def _members(self, cells: Any, column: str) -> list[str]:
        """Cells of a column as the members of JSON objects."""
        try:
            if cells.type == pyarrow().time64("ns"):  # which Python would cut to microseconds
                cells = cells.cast("time64[us]")
            key = json_of(column)
            return [f"{key}: {json_of(cell)}" for cell in cells.to_pylist()]
        except CONVERSION_ERRORS as error:
            message = f"the column {column!r} of {self.path} cannot be in a .jsonl or .csv file ({error})"
            raise SpecbeamError(f"{message}: name OUT .parquet, or leave the column out") from error

    def schema(self) -> Any:
        return self._parquet_file().schema_arrow

    def tables(self, schema: Any) -> Iterator[Any]:
        for batch in self._checked(self._batches):
            yield pyarrow().Table.from_arrays(batch.columns, schema=schema)

    def _counts(self) -> Iterator[tuple[int, Iterable[str]]]:
        names = self.schema().names
        check_distinct(names)
        for batch in self._batches():
            yield batch.num_rows, names

    def _batches(self, columns: list[str] | None = None) -> Iterator[Any]:
        file = self._parquet_file()
        left = file.metadata.num_rows if self.limit is None else self.limit
        for batch in file.iter_batches(ROWS_PER_TABLE, columns=columns, use_threads=False):
            yield batch.slice(0, left)
            left -= batch.num_rows
            if left <= 0:
                return

    def _parquet_file(self) -> Any:
        # By default pyarrow reads a whole row group at a time, and many files have one row group.
        # Spark's INT96 timestamps have microseconds. By default they become nanoseconds, which end in 2262.
        how = {"buffer_size": PAGE_BUFFER_BYTES, "pre_buffer": False, "coerce_int96_timestamp_unit": "us"}
        return pyarrow().parquet.ParquetFile(self._file, **how)


class TextRows(Rows):
    """The rows of a file of text. Iteration reads them as dictionaries."""

    def __iter__(self) -> Iterator[Row]:
        return self._checked(self._rows)

    @abstractmethod
    def _rows(self) -> Iterator[Row]:
        """The rows from the file's position on. Raises ValueError for a damaged row."""

    def _counts(self) -> Iterator[tuple[int, Iterable[str]]]:
        return ((1, row) for row in self._rows())

    def cells(self, columns: Sequence[str]) -> Iterator[Row]:
        return ({column: row.get(column) for column in columns} for row in self)

    def lines(self) -> Iterator[str]:
        return map(json_of, self)

    def schema(self) -> Any:
        pa = pyarrow()
        schema = pa.schema([])
        for rows in chunks(self, ROWS_PER_TABLE):
            schema_of_part = table_of(rows, {name: None for row in rows for name in row}).schema
            schema = pa.unify_schemas([schema, schema_of_part], promote_options="permissive")
        for _ in self.tables(schema):  # whole numbers may be too large for a column that has fractions elsewhere
            pass
        return schema

    def tables(self, schema: Any) -> Iterator[Any]:
        for rows in chunks(self, ROWS_PER_TABLE):
            yield table_of(rows, {field.name: field.type for field in schema})


class JsonlRows(TextRows):
    """The rows of a file with one JSON object per line."""

    def lines(self) -> Iterator[str]:
        # As they stand there: Python would write some numbers in another way, and others as Infinity.
        for _, line in self._checked(self._numbered):
            yield line.replace("\r", " ")  # no JSON string has one

    def _rows(self) -> Iterator[Row]:
        for number, line in self._numbered():
            try:
                row = ROW_DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            yield row

    def _numbered(self) -> Iterator[tuple[int, str]]:
        """The lines that are not empty, with their numbers."""
        stripped = ((number, line.strip(" \t\r\n")) for number, line in enumerate(lines_of(self._file), 1))
        return islice((numbered for numbered in stripped if numbered[1]), self.limit)


def finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {digits[:24]} is too large")
    return value


def distinct_members(members: list[tuple[str, Any]]) -> Row:
    row: Row = {}
    for name, value in members:
        if name in row:
            raise ValueError(f"the key {name!r} is there twice")
        row[name] = value
    return row


ROW_DECODER = json.JSONDecoder(object_pairs_hook=distinct_members, parse_float=finite)


class CsvRows(TextRows):
    """The rows of a .csv or .tsv file. All cells are texts, as they stand there."""

    def _rows(self) -> Iterator[Row]:
        csv.field_size_limit(2**31 - 1)  # prompts are long
        reader = csv.reader(self._lines(), strict=True, delimiter=self.delimiter)
        try:
            names = next(reader, [])
            check_distinct(names)
            for cells in islice(filter(None, reader), self.limit):
                if len(cells) != len(names):
                    raise ValueError(
                        f"line {reader.line_num} has {len(cells)} cells, but there are {len(names)} columns"
                    )
                yield dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}") from error

    def _lines(self) -> Iterator[str]:
        for line in lines_of(self._file):
            yield from io.StringIO(line, newline="")  # a carriage return alone, too, ends a line


def check_distinct(names: list[str]) -> None:
    """Raise ValueError if two columns have one name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"two columns are called {name!r}")


def lines_of(file: Iterable[bytes]) -> Iterator[str]:
    """The lines of a text in UTF-8. Only a line feed ends a line: JSON may hold U+2028, at which str.splitlines cuts.

    Raises:
        ValueError: a line is not UTF-8.
    """
    begin = 0
    for number, line in enumerate(file, 1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            at = begin + error.start
            raise ValueError(f"line {number} is not UTF-8 text (byte {at:,}): convert the file") from error
        yield text.removeprefix("\ufeff") if number == 1 else text
        begin += len(line)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` items; the last one may have fewer."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def pyarrow() -> Any:
    """The library that reads and writes Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SpecbeamError("Parquet files need pyarrow: pip install 'specbeam[study]'") from error
    return pyarrow


def table_of(rows: list[Row], types: Mapping[str, Any]) -> Any:
    """A table of rows.

    Args:
        rows: a cell that a row lacks is null.
        types: pyarrow's types of the columns, by name; None: as its cells have it.
    """
    pa = pyarrow()
    columns = {}
    for name, kind in types.items():
        try:
            name.encode()  # half of a surrogate pair is no text for pyarrow
            columns[name] = pa.array([row.get(name) for row in rows], kind)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise SpecbeamError(f"column {name!r} cannot be in a .parquet file ({error}): name OUT .jsonl") from error
    return pa.table(columns)


def writer(path: Path, rows: Rows, types: Mapping[str, Type], delimiter: str | None = None) -> Write:
    """A function that writes a whole file of rows with added columns, given their cells, row by row.

    Args:
        path: a file with an ending of :data:`FORMATS`. The columns of a Parquet file keep their types in another one.
        types: of the added columns, by name (see :data:`Type`).
        delimiter: as for :func:`open_rows`.
    """
    _, make = FORMATS[ending := path.suffix.lower()]
    return make(path, rows, types, delimiter or DELIMITERS.get(ending, ""))


def parquet_writer(path: Path, rows: Rows, types: Mapping[str, Type], _delimiter: str) -> Write:
    pa = pyarrow()
    added = {name: arrow_type(pa, kind) for name, kind in types.items()}
    try:
        input_schema = rows.schema()
        schema = pa.schema([*input_schema, *pa.schema(added)], input_schema.metadata)
        pa.parquet.ParquetWriter(io.BytesIO(), schema).close()
    except pa.ArrowException as error:
        raise SpecbeamError(f"{rows.path} cannot become a .parquet file ({error}): name OUT .jsonl") from error

    def write(cells: Iterable[Row]) -> None:
        rest = iter(cells)
        with replacing(path) as file, pa.parquet.ParquetWriter(file, schema) as out:
            group, size = [], 0
            for table in rows.tables(input_schema):
                new = table_of([*islice(rest, table.num_rows)], added)
                group.append(pa.Table.from_arrays([*table.columns, *new.columns], schema=schema))
                size += group[-1].nbytes
                if size >= ROW_GROUP_BYTES:
                    out.write_table(pa.concat_tables(group))
                    group, size = [], 0
            if group:
                out.write_table(pa.concat_tables(group))

    return write


def arrow_type(pa: Any, kind: Type) -> Any:
    if isinstance(kind, list):
        return pa.list_(arrow_type(pa, kind[0]))
    if isinstance(kind, dict):
        return pa.struct({name: arrow_type(pa, field) for name, field in kind.items()})
    return pa.type_for_alias(kind)


def jsonl_writer(path: Path, rows: Rows, _types: Mapping[str, Type], _delimiter: str) -> Write:
    for _ in rows.lines():  # a cell that JSON does not have is reported before there is anything to write
        pass

    def write(cells: Iterable[Row]) -> None:
        with replacing(path) as file:
            for line, added in zip(rows.lines(), cells, strict=True):
                row = line[:-1].rstrip()  # without the closing brace
                file.write(row.encode() + (b"" if row == "{" else b", ") + json_line(added)[1:])

    return write


def csv_writer(path: Path, rows: Rows, types: Mapping[str, Type], delimiter: str) -> Write:
    """Texts are cells as they are. Other values are JSON, and a cell without a value is empty."""

    def input_cells() -> Iterator[list[Any]]:
        for text in rows.lines():
            row = ROW_DECODER.decode(text)
            yield [row.get(name) for name in rows.columns]

    head = [*rows.columns, *types]
    try:
        for cells in chain([head], input_cells()):
            csv_line(cells, delimiter)
    except UnicodeEncodeError as error:
        message = f"{rows.path} has half a surrogate pair, which is no character"
        raise SpecbeamError(f"{message}: name OUT .jsonl, or correct it") from error

    def write(cells: Iterable[Row]) -> None:
        with replacing(path) as file:
            file.write(csv_line(head, delimiter))
            for before, new in zip(input_cells(), cells, strict=True):
                file.write(csv_line([*before, *(new[name] for name in types)], delimiter))

    return write


def csv_line(cells: Iterable[Any], delimiter: str) -> bytes:
    line = io.StringIO()
    # This end of a line lets Python 3.11, too, quote a lone carriage return, which readers take for the end of a row.
    csv.writer(line, delimiter=delimiter, lineterminator="\r\n").writerow(map(csv_cell, cells))
    return line.getvalue()[:-2].encode() + b"\n"


def csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def json_of(value: Any) -> str:
    """A value as JSON.

    Raises:
        TypeError: it holds bytes, or another value that JSON does not have.
        ValueError: it holds a number that is not finite.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=json_text)


def json_text(value: Any) -> str:
    """The text for a date and the like: JSON knows only texts and numbers."""
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


FORMATS: dict[str, tuple[type[Rows], Callable[[Path, Rows, Mapping[str, Type], str], Write]]] = {
    ".parquet": (ParquetRows, parquet_writer),
    ".jsonl": (JsonlRows, jsonl_writer),
    ".csv": (CsvRows, csv_writer),
    ".tsv": (CsvRows, csv_writer),
}
"""What reads and what writes a file, by its ending in lower case."""
