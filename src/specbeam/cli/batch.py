"""``specbeam batch``: a text for each row of a file, here or on a cluster, resumed where it was interrupted."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import add_draft_to, add_model_to, add_options_to, load_draft, load_model, options_of
from specbeam.cli.printing import one_line
from specbeam.errors import SpecbeamError
from specbeam.options import Options, check_names

if TYPE_CHECKING:
    from specbeam.engine.request import Request
    from specbeam.study.launchers import Work

Row = dict[str, Any]

COLUMNS = {
    "text": "string",
    "token_ids": "tokens",
    "finish_reason": "string",
    "new_tokens": "int64",
    "seconds": "float64",
    "error": "string",
}
"""What is added to the columns of the input, and of what kind it is."""
BATCHES = 4
"""A job is so many batches, so that few passes run half empty because its last texts are long."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        help="generate a text for each row of a file",
        description="Generate a text for each row of IN. OUT holds the columns of IN and text, finish_reason, "
        "new_tokens, seconds and error, in the same order. What is finished is kept in OUT.partial.jsonl: if the "
        "command is interrupted, the same command goes on from there.",
    )
    parser.add_argument("input", metavar="IN", help="a .parquet, .jsonl or .csv file with a column of prompts")
    parser.add_argument("output", metavar="OUT", help="a .parquet or .jsonl file that is not there yet")
    parser.add_argument(
        "--column",
        metavar="NAME",
        help='the column of prompts: texts, lists of messages or of token ids (default "prompt", else "messages" or '
        '"text")',
    )
    parser.add_argument("--tokens", action="store_true", help="add a column token_ids")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="so many prompts share passes (default %(default)s)"
    )
    add_model_to(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to put first")
    parser.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    add_options_to(parser)
    add_draft_to(parser)
    add_launcher_to(parser)
    parser.set_defaults(run=run)


def add_launcher_to(parser: argparse.ArgumentParser) -> None:
    """Where workers run, and how many."""
    add = parser.add_argument_group("workers").add_argument
    add("--launcher", choices=("local", "ray"), default="local", help="here, or on a Ray cluster (default %(default)s)")
    add("--address", help="the cluster: auto, host:port or ray://host:port (default: one that is started here)")
    add("--workers", type=int, metavar="N", help="at most so many (default: what the cluster has room for)")
    add("--cpus", type=float, metavar="N", help="processors, and so threads, a worker (default 1)")
    add("--gpus", type=float, metavar="N", help="GPUs a worker; less than 1 shares one (default 0)")


def launcher_of(given: argparse.Namespace) -> Callable[..., None]:
    """What runs jobs, as the options of add_launcher_to say.

    Raises:
        SpecbeamError: options of a cluster, and no cluster.
    """
    from specbeam.study.launchers import local, on_ray

    how = {name: getattr(given, name) for name in ("address", "workers", "cpus", "gpus")}
    how = {name: value for name, value in how.items() if value is not None}
    if given.launcher == "ray":
        from tqdm import tqdm

        return partial(on_ray, **how, tell=lambda line: tqdm.write(f"specbeam: {line}", file=sys.stderr))
    for name in how:
        raise SpecbeamError(f"--{name} goes with --launcher ray")
    return local


def run(given: argparse.Namespace) -> int:
    from tqdm import tqdm

    options = checked_options(given)  # wrong input is refused before a model is loaded
    launch = launcher_of(given)
    source, output = Path(given.input), Path(given.output)
    check_output(source, output)
    data, rows = read(source)
    names = list(dict.fromkeys(name for row in rows for name in row))
    column = column_of(source, names, given.column)
    added = added_columns(source, names, given.tokens)
    write = (
        write_parquet(output, data, rows, names) if output.suffix.lower() == ".parquet" else write_jsonl(output, rows)
    )

    with (
        Finished(output, fingerprint(data, column, given, options)) as finished,
        tqdm(total=len(rows), initial=len(finished.answers), unit="row", disable=None) as bar,
    ):

        def done(job: list[tuple[int, Any]], result: Any) -> None:
            if isinstance(result, Exception):
                result = [failed(number, one_line(result)) for number, _ in job]
            finished.add(result)
            bar.update(len(result))

        todo = ((number, row.get(column)) for number, row in enumerate(rows) if number not in finished.answers)
        launch(batches(todo, BATCHES * given.batch_size), Generation(given, options), done)
        answers = [finished.answers[number] for number in range(len(rows))]
        with finished.kept_if_the_disk_is_full():
            write({new: [answer.get(name) for answer in answers] for name, new in added.items()})
    finished.path.unlink()

    wrong = [(number, answer["error"]) for number, answer in enumerate(answers, 1) if answer["error"] is not None]
    for number, error in wrong[:1]:
        print(f"specbeam: {len(wrong)} of {len(rows)} rows failed, first row {number}: {error}", file=sys.stderr)
    return 1 if wrong else 0


def checked_options(given: argparse.Namespace) -> Options:
    """The Options that were given. Raises SpecbeamError for those that cannot go together here."""
    options: Options = options_of(given)
    if options.num_return_sequences > 1:
        raise SpecbeamError("--num-return-sequences is for specbeam generate: a row has one text")
    if given.batch_size < 1:
        raise SpecbeamError(f"--batch-size {given.batch_size} is not allowed: give at least 1")
    if given.draft_corpus is not None and given.draft != "suffix":
        raise SpecbeamError("--draft-corpus goes with --draft suffix")
    if given.draft is None:
        from specbeam.engine.drafters import check_draft_sizes

        check_draft_sizes(options)
    return options


# What workers do.


@dataclass(frozen=True)
class Generation:
    """Makes, in a worker, what generates the texts of some rows."""

    given: argparse.Namespace
    options: Options

    def __call__(self) -> Work:
        lm = load_model(self.given, self.given.model, revision=self.given.revision)
        return partial(generate, lm, load_draft(self.given, lm), self.options, self.given)


def generate(lm: Any, draft: Any, options: Options, given: argparse.Namespace, job: list[tuple[int, Any]]) -> list[Row]:
    """The answers to numbered prompts, of which so many as the batch size share passes."""
    from specbeam.engine import Engine

    engine = Engine(lm, max_requests=given.batch_size)
    answers = []

    def submissions() -> Iterator[tuple[int, Request]]:
        for number, prompt in job:
            try:
                if prompt is None:
                    raise SpecbeamError("the row has no prompt")
                request = engine.submit(prompt, options, system=given.system, raw=given.raw, draft=draft)
            except SpecbeamError as error:
                answers.append(failed(number, str(error)))
            else:
                yield number, request

    for number, request in engine.as_completed(submissions()):
        try:
            answers.append(answer(number, request.result(), given.tokens))
        except Exception as error:  # whatever it was, the other rows go on
            answers.append(failed(number, one_line(error)))
    return answers


def answer(number: int, result: Any, tokens: bool) -> Row:
    """What a row gave, by the names of COLUMNS, and its number."""
    told = {"text": result.text, "token_ids": result.token_ids if tokens else None}
    told |= {"finish_reason": result.finish_reason, "new_tokens": result.stats.new_tokens}
    return {"row": number, **told, "seconds": round(result.stats.seconds, 6), "error": None}


def failed(number: int, error: str) -> Row:
    return {"row": number, **dict.fromkeys(COLUMNS), "error": " ".join(error.split())}


def batches(rows: Iterator[tuple[int, Any]], size: int) -> Iterator[list[tuple[int, Any]]]:
    while job := list(islice(rows, size)):
        yield job


# What is kept of a run that is interrupted.


class Finished:
    """The rows that are finished, in memory and in OUT.partial.jsonl.

    Each is on the disk before the next job is begun or right after, so that whatever ends the process costs no more
    than the jobs it was at. A context manager: it opens the file, and closes it.

    Args:
        output: the file that all will be in.
        fingerprint: what the rows depend on. The first line of the file has it.

    Raises:
        SpecbeamError: the file is of a run with another fingerprint, or cannot be read or written.
    """

    def __init__(self, output: Path, fingerprint: str) -> None:
        self.path = Path(f"{output}.partial.jsonl")
        self.answers: dict[int, Row] = {}
        try:
            self._file = self.path.open("ab+")
        except OSError as error:
            raise SpecbeamError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            self._read(fingerprint)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Finished:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what is not on a full disk by now was told of
            self._file.close()
        if not self.answers:
            self.path.unlink(missing_ok=True)

    def add(self, answers: list[Row]) -> None:
        """Append rows; when this returns they are on the disk."""
        with self.kept_if_the_disk_is_full():
            self._append(answers)
        self.answers |= {row["row"]: row for row in answers}

    @contextmanager
    def kept_if_the_disk_is_full(self) -> Iterator[None]:
        """Says of an error in writing that what is finished stays."""
        try:
            yield
        except OSError as error:
            rows = f"{len(self.answers):,} finished rows stay in {self.path}"
            message = f"{error.strerror}; {rows}, and the same command goes on from there"
            raise OSError(error.errno, message) from error

    def _read(self, fingerprint: str) -> None:
        self._file.seek(0)
        lines: list[Row] = []
        good = 0
        for line in self._file:
            # A line that the process or the machine did not live to finish ends what counts.
            try:
                told = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                told = None
            if not isinstance(told, dict) or ("row" if lines else "fingerprint") not in told:
                break
            lines.append(told)
            good += len(line)
        if lines[1:] and lines[0]["fingerprint"] != fingerprint:
            raise SpecbeamError(
                f"{self.path} is of another run (another input file, model or option): give the same again, or delete "
                "that file to begin anew"
            )
        for row in lines[1:]:
            self.answers.setdefault(row["row"], row)
        with self.kept_if_the_disk_is_full():
            self._file.truncate(good if lines[1:] else 0)
            if not lines[1:]:
                self._append([{"fingerprint": fingerprint}])

    def _append(self, lines: list[Row]) -> None:
        self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())


def fingerprint(data: bytes, column: str, given: argparse.Namespace, options: Options) -> str:
    """Of all that the answers depend on: not of how many workers give them, or where."""
    names = ("model", "revision", "backend", "device", "dtype", "quantize", "system", "raw", "tokens")
    told = {name: getattr(given, name) for name in (*names, "draft", "draft_corpus")}
    about = json.dumps([column, told, repr(options)])
    return hashlib.sha256(about.encode() + b"\0" + data).hexdigest()


# Files.


def check_output(source: Path, output: Path) -> None:
    """Raises SpecbeamError unless rows can be written there."""
    if output.suffix.lower() not in (".parquet", ".jsonl"):
        raise SpecbeamError(f"{output} has an unknown ending: name it .parquet or .jsonl")
    if output.suffix.lower() == ".parquet" or source.suffix.lower() == ".parquet":
        pyarrow()
    if output.exists() and not Path(f"{output}.partial.jsonl").exists():
        raise SpecbeamError(f"{output} is there already: delete it, or name another")
    if not output.parent.is_dir():
        raise SpecbeamError(f"{output} cannot be written: there is no folder {output.parent}")
    if not os.access(output.parent, os.W_OK):
        raise SpecbeamError(f"{output} cannot be written: the folder {output.parent} is not yours to write in")


def pyarrow() -> Any:
    """The library that reads and writes Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SpecbeamError("Parquet files need pyarrow: pip install specbeam[study]") from error
    return pyarrow


def read(file: Path) -> tuple[bytes, list[Row]]:
    """The bytes of a file, and its rows. The cells of a CSV file are texts, as they stand there.

    Raises:
        SpecbeamError: it cannot be read, is none of the three kinds, is damaged, or has no rows.
    """
    kinds = {".parquet": parquet_rows, ".jsonl": jsonl_rows, ".csv": csv_rows}
    if file.suffix.lower() not in kinds:
        raise SpecbeamError(f"{file} has an unknown ending: name it {', '.join(kinds)}, after what it is")
    try:
        data = file.read_bytes()
        rows = list(kinds[file.suffix.lower()](data))
    except OSError as error:
        raise SpecbeamError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecbeamError(f"{file} is not UTF-8 text (byte {error.start:,}): convert it") from error
    except (ValueError, TypeError, NotImplementedError, csv.Error) as error:  # pyarrow's errors are among them
        raise SpecbeamError(f"{file} is damaged: {error}") from error
    if not rows:
        raise SpecbeamError(f"{file} has no rows")
    return data, rows


def parquet_rows(data: bytes) -> list[Row]:
    rows: list[Row] = parquet_table(data).to_pylist()
    return rows


def parquet_table(data: bytes) -> Any:
    return pyarrow().parquet.read_table(pyarrow().BufferReader(data))


def jsonl_rows(data: bytes) -> Iterator[Row]:
    for number, line in enumerate(data.decode("utf-8-sig").split("\n"), 1):  # splitlines() would cut at U+2028 too
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


def column_of(file: Path, names: list[str], asked: str | None) -> str:
    """The column of prompts. Raises SpecbeamError if there is none, or it is not clear which."""
    try:
        if asked is not None:
            check_names([asked], names, "column")
            return asked
    except SpecbeamError as error:
        raise SpecbeamError(f"{file}: {error}") from error
    usual = [name for name in ("prompt", "messages", "text") if name in names]
    if usual[:1] == ["prompt"] or len(usual) == 1:
        return usual[0]
    raise SpecbeamError(f"{file} has the columns {', '.join(names)}: say with --column which one has the prompts")


def added_columns(file: Path, names: list[str], tokens: bool) -> dict[str, str]:
    """What the columns of COLUMNS are called in the output: not as one of the input."""
    added = {name: f"generated_{name}" if name in names else name for name in COLUMNS if tokens or name != "token_ids"}
    for name in added.values():
        if name in names:
            raise SpecbeamError(f"{file} has the columns {name.removeprefix('generated_')} and {name}: rename one")
    return added


Write = Callable[[dict[str, list[Any]]], None]
"""Writes the rows of the input with further columns."""


def write_parquet(output: Path, data: bytes, rows: list[Row], names: list[str]) -> Write:
    """Raises SpecbeamError if the rows do not fit into a table."""
    pa = pyarrow()
    if data.startswith(b"PAR1"):
        table = parquet_table(data)
    else:
        columns = {}
        for name in names:
            try:
                columns[name] = pa.array([row.get(name) for row in rows])
            except (pa.ArrowException, ValueError, OverflowError) as error:
                raise SpecbeamError(
                    f"column {name!r} cannot be in a .parquet file ({error}): name OUT .jsonl"
                ) from error
        table = pa.table(columns)

    def write(new: dict[str, list[Any]]) -> None:
        from specbeam.study.results import replacing

        whole = table
        for name, values in new.items():
            kind = COLUMNS[name.removeprefix("generated_")]
            kind = pa.list_(pa.int64()) if kind == "tokens" else pa.type_for_alias(kind)
            whole = whole.append_column(name, pa.array(values, kind))
        with replacing(output) as file:
            pa.parquet.write_table(whole, file)

    return write


def write_jsonl(output: Path, rows: list[Row]) -> Write:
    def write(new: dict[str, list[Any]]) -> None:
        from specbeam.study.results import replacing

        with replacing(output) as file:
            for number, row in enumerate(rows):
                file.write(json_line(row | {name: values[number] for name, values in new.items()}))

    return write


def json_line(row: Row) -> bytes:
    """A row as a line of JSON; what JSON has not (dates, say) as text."""
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can spell
        return json.dumps(row, default=str).encode() + b"\n"
