"""Files of rows: .parquet, .jsonl and .csv are read, .parquet and .jsonl are written, a few rows at a time."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from specbeam.errors import SpecbeamError
from specbeam.jobs.atomic import replacing
from specbeam.jobs.journal import json_line

T = TypeVar("T")
Row = dict[str, Any]
"""The cells of a row, by column. Rows of a .jsonl file need not have the same columns."""
Write = Callable[[Iterable[Row]], None]
"""Writes all rows of a file, given the cells of the added columns, row by row."""
Type = str | list["Type"] | dict[str, "Type"]
"""The type of a cell: "string", "int64" or "float64"; in a list, a list of that; a dictionary for objects."""

ROWS_PER_TABLE = 128
"""Rows that are read or written at a time where they are columns. One row may be many megabytes."""
ROW_GROUP_BYTES = 4 * 2**20
"""The size of a row group in a Parquet file, before compression. It is in memory until it is written."""
PAGE_BUFFER_BYTES = 2**16
"""Bytes that are read at a time from each column of a Parquet file."""


def open_rows(path: Path) -> Rows:
    """The rows of a file.

    Raises:
        SpecbeamError: the file cannot be read, has another ending, is damaged, or has no rows.
    """
    kinds: dict[str, type[Rows]] = {".parquet": ParquetRows, ".jsonl": JsonlRows, ".csv": CsvRows}
    if path.suffix.lower() not in kinds:
        raise SpecbeamError(f"{path} has an unknown ending: name it {', '.join(kinds)}, after its format")
    return kinds[path.suffix.lower()](path)


class Rows(ABC):
    """The rows of a file. Each iteration reads them from the disk anew, and only a few are in memory at a time.

    A context manager that closes the file. Its constructor reads the whole file, so that it reports any damaged row.

    Attributes:
        path: the file.
        columns: the names of all columns, in the order in which they first appear.
        digest: the SHA-256 of the file's bytes, as hexadecimal digits.

    Raises:
        SpecbeamError: the file cannot be read, is damaged, has no rows, or was changed since it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reporting_damage():
            self._file = seekable(path)
        try:
            self._version = self._version_now()
            with self._reporting_damage():
                self.digest = hashlib.file_digest(self._file, "sha256").hexdigest()
            self._count, columns = 0, dict[str, None]()
            for row in self:
                self._count += 1
                columns.update(dict.fromkeys(row))
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

    def __iter__(self) -> Iterator[Row]:
        return self._checked(self._rows)

    @abstractmethod
    def _rows(self) -> Iterator[Row]:
        """The rows from the file's position on. Raises ValueError, or pyarrow's errors, for a damaged row."""

    def schema(self) -> Any:
        """The names and types of the columns of a Parquet file with these rows.

        Raises:
            SpecbeamError: the cells of a column have different types.
        """
        pa = pyarrow()
        schema = pa.schema([])
        for rows in chunks(self, ROWS_PER_TABLE):
            found = table_of(rows, {name: None for row in rows for name in row}).schema
            if not found.equals(schema):
                try:
                    schema = pa.unify_schemas([schema, found], promote_options="permissive")
                except pa.ArrowException as error:
                    raise SpecbeamError(
                        f"{self.path} cannot become a .parquet file ({error}): name OUT .jsonl"
                    ) from error
        for _ in self.tables(schema):  # whole numbers may be too large for a column that has fractions elsewhere
            pass
        return schema

    def tables(self, schema: Any) -> Iterator[Any]:
        """The rows as pyarrow's tables of a few rows each. The schema is the one that ``schema`` returns."""
        for rows in chunks(self, ROWS_PER_TABLE):
            yield table_of(rows, {field.name: field.type for field in schema})

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
        except (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError) as error:  # pyarrow's, too
            self._check_unchanged()
            raise SpecbeamError(f"{self.path} is damaged: {error}") from error


def seekable(path: Path) -> io.BufferedReader | io.BufferedRandom:
    """A file to read several times. A pipe's content is copied to a nameless file first."""
    file = path.open("rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    with file:
        copy = tempfile.TemporaryFile()  # noqa: SIM115
        shutil.copyfileobj(file, copy)
        copy.flush()
    return copy


class ParquetRows(Rows):
    """The rows of a Parquet file. Its columns keep their types."""

    def schema(self) -> Any:
        return self._parquet_file().schema_arrow

    def tables(self, schema: Any) -> Iterator[Any]:
        for batch in self._checked(self._batches):
            yield pyarrow().Table.from_arrays(batch.columns, schema=schema)

    def _rows(self) -> Iterator[Row]:
        check_distinct(self._parquet_file().schema_arrow.names)
        for batch in self._batches():
            yield from batch.to_pylist()

    def _batches(self) -> Iterator[Any]:
        batches: Iterator[Any] = self._parquet_file().iter_batches(ROWS_PER_TABLE, use_threads=False)
        return batches

    def _parquet_file(self) -> Any:
        # By default pyarrow reads a whole row group at a time, and many files have one row group.
        return pyarrow().parquet.ParquetFile(self._file, buffer_size=PAGE_BUFFER_BYTES, pre_buffer=False)


class JsonlRows(Rows):
    """The rows of a file with one JSON object per line."""

    def _rows(self) -> Iterator[Row]:
        for number, line in enumerate(lines_of(self._file), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number} is not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is no JSON object")
                yield row


class CsvRows(Rows):
    """The rows of a .csv file. All cells are texts, as they stand there."""

    def _rows(self) -> Iterator[Row]:
        csv.field_size_limit(2**31 - 1)  # prompts are long
        reader = csv.reader(self._lines(), strict=True)
        try:
            names = next(reader, [])
            check_distinct(names)
            for cells in reader:
                if cells and len(cells) != len(names):
                    raise ValueError(
                        f"line {reader.line_num} has {len(cells)} cells, but there are {len(names)} columns"
                    )
                if cells:
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


def table_of(rows: list[Row], types: Mapping[str, Any]) -> Any:
    """A table of rows.

    Args:
        rows: a cell that a row lacks is null.
        types: pyarrow's types of the columns, by name; None: as its cells have it.

    Raises:
        SpecbeamError: the cells of a column have different types.
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


def writer(path: Path, rows: Rows, types: Mapping[str, Type]) -> Write:
    """A function that writes a whole file of rows with added columns, given their cells, row by row.

    Args:
        path: a .parquet or .jsonl file. The columns of a Parquet file keep their types in another one.
        types: of the added columns, by name (see :data:`Type`).

    Raises:
        SpecbeamError: the rows do not fit into a Parquet file.
    """
    return parquet_writer(path, rows, types) if path.suffix.lower() == ".parquet" else jsonl_writer(path, rows)


def parquet_writer(path: Path, rows: Rows, types: Mapping[str, Type]) -> Write:
    pa = pyarrow()
    given = rows.schema()
    added = {name: arrow_type(pa, kind) for name, kind in types.items()}
    schema = given
    for name, kind in added.items():
        schema = schema.append(pa.field(name, kind))
    try:
        pa.parquet.ParquetWriter(io.BytesIO(), schema).close()
    except pa.ArrowException as error:
        raise SpecbeamError(f"{rows.path} cannot become a .parquet file ({error}): name OUT .jsonl") from error

    def write(cells: Iterable[Row]) -> None:
        rest = iter(cells)
        with replacing(path) as file, pa.parquet.ParquetWriter(file, schema) as out:
            group, size = [], 0
            for table in rows.tables(given):
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


def jsonl_writer(path: Path, rows: Rows) -> Write:
    def write(cells: Iterable[Row]) -> None:
        with replacing(path) as file:
            for row, added in zip(rows, cells, strict=True):
                file.write(json_line(row | added, default=str))  # JSON has no dates and the like: they become texts

    return write
