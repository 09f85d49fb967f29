"""Commands that make an answer for each row of a file, here or on a cluster. They can be interrupted and resumed."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specbeam import plugins
from specbeam.cli.arguments import load_strategy, typed_text
from specbeam.cli.printing import check_writable, one_line, print_lines
from specbeam.cli.prompts import read_rows
from specbeam.drafting.resolve import draft_kind
from specbeam.errors import FAILED, SpecbeamError, located, shown_counts
from specbeam.options.declared import OPTIONS
from specbeam.options.options import ARGUMENTS, check_names

if TYPE_CHECKING:
    from specbeam.api.scoring import Text
    from specbeam.jobs import Work
    from specbeam.jobs.formats import Rows, Type
    from specbeam.jobs.progress import Progress

Asked = TypeVar("Asked")
NumberedItem = tuple[int, Any]
"""The number of a row, and what its answer is made of."""
Answer = dict[str, Any]
"""The values of a task's columns for one row, and the row's number as "row"."""
Answers = Callable[[Iterable[NumberedItem]], Iterator[Answer]]
"""Makes the answers to items, in the order in which they are known. Items are taken as there is room for them."""

OPTION_NAMES = [*OPTIONS]
SETTINGS_WITHOUT_EFFECT = (
    *("command", "run", "input", "output", "batch_size"),
    *("threads", "launcher", "address", "workers", "cpus", "gpus"),
    *("column", "candidates", "given", "template", "labels", "choices", "audio"),
)
"""Settings on which no answer depends, or which a task's facts have in another form. The fingerprint has all others."""
BATCHES_PER_JOB = 4
"""A worker of a cluster gets this many batches at a time, and this many are kept together. With few batches, many
passes run half empty for the job's last texts."""


@dataclass(frozen=True)
class Task:
    """What a command does with the rows of a file.

    Attributes:
        reads: the columns of IN that answers are made of.
        item: makes of these cells of a row what the work takes.
        columns: the types of the columns that are added, by name, "error" among them.
        facts: all that answers depend on beside the command's other settings, IN and the models.
        make_answers: loads the models, in the process that makes the answers.
        counted: a column whose values are counted at the end, such as "finish_reason"; None: none is.
        tokens: the column with a row's number of tokens; None: they are not summed up.
        check_counts: what to say of these counts; None if all is well.
        write: writes OUT, given the values of the added columns, row by row; None for the columns of IN and these.
    """

    reads: Sequence[str]
    item: Callable[[Mapping[str, Any]], Any]
    columns: Mapping[str, Type]
    facts: Sequence[Any]
    make_answers: Callable[[], Answers]
    counted: str | None = None
    tokens: str | None = None
    check_counts: Callable[[Counter[str]], str | None] = lambda _: None
    write: Callable[[Iterable[Answer]], None] | None = None


def add_files_to(parser: argparse.ArgumentParser, reads: str) -> None:
    """The arguments for IN and OUT."""
    parser.add_argument("input", metavar="IN", help=f"a .parquet, .jsonl, .csv or .tsv file with {reads}")
    parser.add_argument("output", metavar="OUT", help="a .parquet, .jsonl, .csv or .tsv file that does not exist yet")
    about = "what separates the cells of .csv and .tsv files (default a comma and a tab)"
    parser.add_argument("--delimiter", type=delimiter, metavar="CHARACTER", help=about)


def delimiter(text: str) -> str:
    """The character that a typed text stands for, such as ; or \\t."""
    character = typed_text(text)
    if len(character) != 1 or character in '"\r\n':
        raise argparse.ArgumentTypeError(rf"{text!r} is not allowed: give one character, such as ';' or '\t'")
    return character


def add_running_to(parser: argparse.ArgumentParser) -> None:
    """Options for how many rows there are, how many share a pass, and where workers run."""
    parser.add_argument("--limit", type=int, metavar="N", help="take only the first N rows")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="prompts that share a pass (default %(default)s)"
    )
    add = parser.add_argument_group("workers").add_argument
    add("--launcher", choices=("local", "ray"), default="local", help="here, or on a Ray cluster (default %(default)s)")
    add("--address", help="the cluster: auto, host:port or ray://host:port (default: one that is started here)")
    add("--workers", type=int, metavar="N", help="at most N workers (default: as many as the cluster has room for)")
    add("--cpus", type=float, metavar="N", help="CPUs, and so threads, per worker (default 1)")
    add("--gpus", type=float, metavar="N", help="GPUs per worker; a number below 1 shares one (default 0)")


def cluster_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """The cluster that the options of add_running_to ask for; None: the rows' answers are made here."""
    cluster = {name: getattr(args, name) for name in ("address", "workers", "cpus", "gpus")}
    cluster = {name: value for name, value in cluster.items() if value is not None}
    if args.launcher == "ray":
        return cluster
    for name in cluster:
        raise SpecbeamError(f"--{name} goes with --launcher ray")
    return None


def run_rows(
    args: argparse.Namespace,
    task_of: Callable[[Rows], Task],
    open_input: Callable[[Path, int | None], Rows] | None = None,
) -> int:
    """Make the answers for all rows of IN, and write them to OUT. Returns the exit status.

    Args:
        args: the arguments of add_files_to and add_running_to, and others.
        task_of: what to do with the rows. It raises SpecbeamError for columns that IN does not have.
        open_input: opens IN; None for a file whose ending says what it is.
    """
    from specbeam.jobs.files import locked
    from specbeam.jobs.formats import DELIMITERS, ending_of

    for name in ("batch_size", "limit"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise SpecbeamError(f"--{name.replace('_', '-')} {number} is not allowed: give at least 1")
    cluster = cluster_of(args)
    source, output = Path(args.input), Path(args.output)
    check_output(source, output)
    if args.delimiter is not None and not {ending_of(source), ending_of(output)} & {*DELIMITERS}:
        raise SpecbeamError("--delimiter is for .csv and .tsv files: leave it out")
    with locked(output.with_name(f".{output.name}.lock"), output, "another OUT"):
        return _run_alone(args, task_of, open_input, cluster, source, output)


def _run_alone(
    args: argparse.Namespace,
    task_of: Callable[[Rows], Task],
    open_input: Callable[[Path, int | None], Rows] | None,
    cluster: dict[str, Any] | None,
    source: Path,
    output: Path,
) -> int:
    """Make the answers for the rows that are not finished, and write all rows. Returns the exit status."""
    from specbeam.jobs.finished import FinishedRows
    from specbeam.jobs.formats import chunks, open_rows, writer
    from specbeam.jobs.progress import Progress

    with (open_input or partial(open_rows, delimiter=args.delimiter))(source, args.limit) as rows:
        task = task_of(rows)

        def items() -> Iterator[NumberedItem]:
            return enumerate(map(task.item, rows.cells(task.reads)))

        for _ in items():  # a cell that cannot be used is reported before a model is loaded
            pass
        if (write := task.write) is None:
            added = added_columns(source, rows.columns, [*task.columns])
            write = writer(output, rows, {new: task.columns[name] for name, new in added.items()}, args.delimiter)
            for notice in notices(source, rows.columns, task.reads, added):
                print(f"specbeam: {notice}", file=sys.stderr)
        else:
            added = {name: name for name in task.columns}
        summary = Summary(task)
        with (
            FinishedRows(output, fingerprint(rows.digest, task.facts, args), len(rows)) as finished,
            Progress(progress_line, len(rows), finished.count, unit="row") as progress,
        ):
            earlier = finished.count
            if output.exists() and earlier < len(rows):
                raise SpecbeamError(f"{output} is there already: delete it, or name another")

            def keep(answers: list[Answer]) -> None:
                finished.add(answers)
                summary.take_new(answers)
                progress.show(finished.count)

            def cells() -> Iterator[Answer]:
                for number, answer in enumerate(finished, 1):
                    summary.take(number, answer)
                    yield {new: answer.get(name) for name, new in added.items()}

            todo = (item for item in items() if item[0] not in finished)
            size = BATCHES_PER_JOB * args.batch_size
            try:
                if cluster is None:
                    work_here(task, todo, size, keep, lambda more: progress.show(finished.count + more))
                else:
                    work_on_ray(task, chunks(todo, size), keep, cluster)
                with finished.reporting_kept_rows():
                    write(cells())
            except KeyboardInterrupt:
                kept = f"{finished.count:,} of {len(rows):,} rows are finished"
                where = f", in {finished.path}. The same command goes on from there" if finished.count else ""
                raise KeyboardInterrupt(kept + where) from None
        finished.path.unlink(missing_ok=True)
    print(*summary.lines(len(rows), earlier, output), sep="\n", file=sys.stderr)
    return FAILED if summary.failed else 0


def work_here(
    task: Task,
    todo: Iterator[NumberedItem],
    size: int,
    keep: Callable[[list[Answer]], object],
    show_progress: Callable[[int], object],
) -> None:
    """Make answers in this process, and keep ``size`` at a time, and the rest when it ends or fails."""
    answers: list[Answer] = []
    try:
        for answer in answers_here(task, todo):
            answers.append(answer)
            show_progress(len(answers))
            if len(answers) == size:
                full, answers = answers, []
                keep(full)
    finally:
        if answers:
            keep(answers)


def answers_here(task: Task, todo: Iterator[NumberedItem]) -> Iterator[Answer]:
    """Make answers in this process. A row begins when another one ends, so that a long one holds up no others."""
    answer_all = None
    for first in todo:
        answer_all = answer_all or task.make_answers()
        started: set[int] = set()
        try:
            for answer in answer_all(recording_starts(chain([first], todo), started)):
                started.remove(answer["row"])
                yield answer
        except SpecbeamError:  # IN cannot be read: an error of a row is its answer
            raise
        except Exception as error:  # the rows that have not begun go on after any error
            for number in started:
                yield failure(task.columns, number, error)


def recording_starts(items: Iterable[NumberedItem], started: set[int]) -> Iterator[NumberedItem]:
    """Items as they are taken. Their numbers are put into a set."""
    for item in items:
        started.add(item[0])
        yield item


def work_on_ray(
    task: Task, jobs: Iterator[list[NumberedItem]], keep: Callable[[list[Answer]], object], cluster: Mapping[str, Any]
) -> None:
    """Make answers on a Ray cluster, job by job."""
    from specbeam.jobs.launchers import run_on_ray

    def take(job: list[NumberedItem], result: Any) -> None:
        if isinstance(result, Exception):
            result = [failure(task.columns, number, result) for number, _ in job]
        keep(result)

    warn = partial(print_lines, file=sys.stderr)
    run_on_ray(jobs, partial(work_of, task.make_answers), take, **cluster, warn=lambda line: warn(f"specbeam: {line}"))


def work_of(make_answers: Callable[[], Answers]) -> Work:
    """The work of a worker on a cluster."""
    answers = make_answers()
    return lambda job: [*answers(job)]


@dataclass
class Summary:
    """What the last lines say.

    Attributes:
        tokens: of the rows whose answers this process made.
        failed: rows with an error.
        first: the first of these rows, and its error.
        counts: how often each value of the counted column is there.
    """

    task: Task
    tokens: int = 0
    failed: int = 0
    first: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    began_at: float = field(default_factory=time.perf_counter)

    def take_new(self, answers: Sequence[Answer]) -> None:
        """Take answers that this process made."""
        if self.task.tokens is not None:
            self.tokens += sum(answer[self.task.tokens] or 0 for answer in answers)

    def take(self, number: int, answer: Answer) -> None:
        """Take the answer to a row of OUT. The first row has number 1."""
        if answer["error"] is not None:
            self.failed += 1
            self.first = self.first or f"first row {number}: {answer['error']}"
        elif self.task.counted is not None:  # a damaged file of finished rows may lack it
            self.counts[str(answer.get(self.task.counted))] += 1

    def lines(self, rows: int, earlier: int, output: Path) -> Iterator[str]:
        """The lines, given the number of rows and how many of them were finished earlier."""
        seconds = time.perf_counter() - self.began_at
        if self.failed:
            yield f"specbeam: {self.failed} of {rows} rows failed, {self.first}"
        if self.counts:
            yield f"[{self.task.counted}: {shown_counts(self.counts)}]"
        if warning := self.task.check_counts(self.counts):
            yield f"specbeam: {warning}"
        before = f" ({earlier:,} of them earlier)" if earlier else ""
        speed = f"{(rows - earlier) / seconds:,.1f} rows/s"
        if self.task.tokens is not None:
            speed = f"{self.tokens:,} tokens, {self.tokens / seconds:,.1f} tokens/s"
        yield f"[{rows:,} rows{before}, {self.failed:,} failed, {speed}, {seconds:,.1f} s, in {output}]"


def progress_line(progress: Progress) -> str:
    left = ""
    if progress.per_second is not None:
        left = f", {progress.per_second:,.1f} rows/s, about {progress.seconds_left:,.0f} s left"
    return f"specbeam: {progress.done:,} of {progress.total:,} rows{left}"


def notices(source: Path, columns: list[str], reads: Sequence[str], added: dict[str, str]) -> Iterator[str]:
    """Lines about columns that one may expect elsewhere, or to have an effect."""
    for name, new in added.items():
        if new != name:
            yield f"{source} has a column {name}, so the new {name} is in the column {new}"
    for name in columns:
        if name not in reads and name in (*OPTION_NAMES, *ARGUMENTS):
            yield f"the column {name} of {source} is kept as data: options come from the command line, for all rows"


def check_output(source: Path, output: Path) -> None:
    """Raise SpecbeamError unless rows can be written to the output."""
    from specbeam.jobs.formats import FORMATS, pyarrow

    if output.suffix.lower() not in FORMATS:
        raise SpecbeamError(f"{output} has an unknown ending: name it {', '.join(FORMATS)}")
    if output.suffix.lower() == ".parquet" or source.suffix.lower() == ".parquet":
        pyarrow()
    finished_rows = Path(f"{output}.partial.jsonl")
    if source.exists() and finished_rows.exists() and source.samefile(finished_rows):
        raise SpecbeamError(f"{source} is where {output} keeps its finished rows: name another OUT, or rename it")
    if output.exists() and not finished_rows.exists():
        raise SpecbeamError(f"{output} is there already: delete it, or name another")
    check_writable(output, output)


def column_of(rows: Rows, asked: str | None, usual: Sequence[str], what: str) -> str:
    """The column that an option names, or else the only usual one. The first usual name goes before the others."""
    if asked is not None:
        check_column(rows, asked)
        return asked
    names = [name for name in usual if name in rows.columns]
    if names[:1] == [usual[0]] or len(names) == 1:
        return names[0]
    raise SpecbeamError(f"{rows.path} has the columns {', '.join(rows.columns)}: say with --column which one {what}")


def check_column(rows: Rows, name: str) -> None:
    """Raise SpecbeamError if there is no column of that name."""
    with located(str(rows.path)):
        check_names([name], rows.columns, "column")


def added_columns(source: Path, columns: list[str], wanted: Sequence[str]) -> dict[str, str]:
    """The names of added columns, each with its name in the output, where the columns of the input keep theirs."""
    added = {name: f"generated_{name}" if name in columns else name for name in wanted}
    for name, new in added.items():
        if new in columns:
            raise SpecbeamError(f"{source} has the columns {name} and {new}: rename one")
    return added


def fingerprint(digest: str, facts: Sequence[Any], args: argparse.Namespace) -> str:
    """A hash of all that the answers depend on. The number of workers, and their place, is no part of it."""
    from specbeam.version import __version__

    left_out = {*SETTINGS_WITHOUT_EFFECT, *OPTION_NAMES}
    settings = sorted((name, repr(value)) for name, value in vars(args).items() if name not in left_out)
    everything = [args.command, __version__, facts, settings, digest, _contents(args)]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()


def _contents(args: argparse.Namespace) -> list[str]:
    """Digests of all that keeps its name while its contents change.

    They are of the model with its adapter, a draft model, a draft's corpus, and the file of a custom strategy.
    """
    from specbeam.checkpoints import locate, open_checkpoint

    adapter = None if args.adapter is None else locate(args.adapter)
    digests = [open_checkpoint(locate(args.model, args.revision), adapter).fingerprint()]
    strategy = load_strategy(args)
    if strategy is not None and (file := plugins.source_file(strategy)) is not None:
        digests.append(hashlib.sha256(file.read_bytes()).hexdigest())
    draft, corpus = (getattr(args, name, None) for name in ("draft", "draft_corpus"))  # not all commands have them
    if draft is not None and draft_kind(draft) == "model":
        digests.append(open_checkpoint(locate(draft)).fingerprint())
    if corpus is not None:
        texts = [row.prompt for row in read_rows(None, corpus)]
        digests.append(hashlib.sha256(json.dumps(texts).encode()).hexdigest())
    return digests


def failure(columns: Iterable[str], number: int, error: Exception) -> Answer:
    """The answer to a row that failed."""
    return {"row": number, **dict.fromkeys(columns), "error": one_line(error)}


def scored(
    lm: Any,
    items: Iterable[NumberedItem],
    ask: Callable[[Any], tuple[Asked, list[Text]]],
    values_of: Callable[[Asked, list[float]], Answer],
    columns: Iterable[str],
    max_contexts: int,
) -> Iterator[Answer]:
    """The answers that follow from log-probabilities of texts, as soon as these are known.

    Args:
        ask: makes of a row's item the texts to score, and what ``values_of`` needs beside their log-probabilities.
            An item may be a SpecbeamError, which becomes the row's.
        values_of: makes the values of a row's columns, "error" left out.
        max_contexts: as for :func:`specbeam.scoring.score`.
    """
    from specbeam.jobs.formats import chunks

    for job in chunks(items, BATCHES_PER_JOB * max_contexts):
        asked: dict[int, Asked] = {}
        texts: dict[int, list[Text]] = {}
        for number, item in job:
            try:
                if isinstance(item, SpecbeamError):
                    raise item
                asked[number], texts[number] = ask(item)
            except SpecbeamError as error:
                yield failure(columns, number, error)
        for number, log_probs in _log_probs(lm, texts, max_contexts):
            if isinstance(log_probs, Exception):
                yield failure(columns, number, log_probs)
            else:
                yield {"row": number, **values_of(asked[number], log_probs), "error": None}


def _log_probs(
    lm: Any, texts: Mapping[int, list[Text]], max_contexts: int
) -> Iterator[tuple[int, list[float] | Exception]]:
    """The log-probabilities of the texts of each row, as soon as they are known, or the error that they gave.

    All rows are scored together. If that fails, each is scored alone, so that the others go on.
    """
    from specbeam.api.scoring import score_by_owner

    known = set()
    try:
        for row, log_probs in score_by_owner(lm, texts, max_contexts=max_contexts):
            known.add(row)
            yield row, log_probs
    except Exception as error:
        if len(texts) == 1:
            yield next(iter(texts)), error
            return
        for row in [row for row in texts if row not in known]:
            yield from _log_probs(lm, {row: texts[row]}, max_contexts)
