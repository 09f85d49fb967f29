"""``specbeam batch``: a text for each row of a file, here or on a cluster, resumed where it was interrupted."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam import plugins
from specbeam.cli.arguments import (
    add_generation_to,
    add_strategy_to,
    check_sources,
    load_draft,
    load_model,
    load_strategy,
    options_of,
    own_drafter,
)
from specbeam.cli.printing import check_writable, one_line, print_lines
from specbeam.cli.prompts import read_rows
from specbeam.errors import FAILED, SpecbeamError, located
from specbeam.option_names import LOOKUPS
from specbeam.options import ARGUMENTS, Options, check_names

if TYPE_CHECKING:
    from specbeam.engine.request import Request
    from specbeam.jobs import Work
    from specbeam.jobs.formats import Type
    from specbeam.results import Result

NumberedPrompt = tuple[int, Any]
"""The number of a row, and its prompt or None."""
Answer = dict[str, Any]
"""The values of COLUMN_TYPES for one row, and the row's number as "row"."""

COLUMN_TYPES: dict[str, Type] = {
    "text": "string",
    "token_ids": ["int64"],
    "sequences": [
        {"text": "string", "token_ids": ["int64"], "log_prob": "float64", "score": "float64", "finish_reason": "string"}
    ],
    "finish_reason": "string",
    "new_tokens": "int64",
    "seconds": "float64",
    "error": "string",
}
"""The columns that are added to the input's columns: token_ids with --tokens, sequences if there are several."""
OPTION_NAMES = [field.name for field in fields(Options)]
SETTINGS_WITHOUT_EFFECT = (
    *("command", "run", "input", "output", "column", "batch_size"),
    *("threads", "launcher", "address", "workers", "cpus", "gpus"),
)
"""Settings on which no answer depends, or which the fingerprint has in another form. All others are part of it."""
BATCHES_PER_JOB = 4
"""The rows of a job are this many batches. With few batches, many passes run half empty for the job's last texts."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        help="generate a text for each row of a file",
        description="Generate a text for each row of IN. OUT holds the columns of IN and text, finish_reason, "
        "new_tokens, seconds and error, in the same order. With several texts per row there is also a column "
        "sequences. Finished rows are kept in OUT.partial.jsonl: if the command is interrupted, the same command goes "
        "on from there.",
    )
    parser.add_argument("input", metavar="IN", help="a .parquet, .jsonl or .csv file with a column of prompts")
    parser.add_argument("output", metavar="OUT", help="a .parquet or .jsonl file that does not exist yet")
    parser.add_argument(
        "--column",
        metavar="NAME",
        help='the column of prompts: texts, lists of messages or of token ids (default "prompt", else "messages" or '
        '"text")',
    )
    parser.add_argument("--tokens", action="store_true", help="add a column token_ids")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="prompts that share a pass (default %(default)s)"
    )
    add_generation_to(parser)
    add_strategy_to(parser)
    add_launcher_to(parser)
    parser.set_defaults(run=run)


def add_launcher_to(parser: argparse.ArgumentParser) -> None:
    """Options for where workers run, and how many."""
    add = parser.add_argument_group("workers").add_argument
    add("--launcher", choices=("local", "ray"), default="local", help="here, or on a Ray cluster (default %(default)s)")
    add("--address", help="the cluster: auto, host:port or ray://host:port (default: one that is started here)")
    add("--workers", type=int, metavar="N", help="the most workers (default: as many as the cluster has room for)")
    add("--cpus", type=float, metavar="N", help="CPUs, and so threads, per worker (default 1)")
    add("--gpus", type=float, metavar="N", help="GPUs per worker; a number below 1 shares one (default 0)")


def launcher_of(given: argparse.Namespace) -> Callable[..., None]:
    """The launcher that the options of add_launcher_to ask for.

    Raises:
        SpecbeamError: options of a cluster without a cluster.
    """
    from specbeam.jobs.launchers import run_here, run_on_ray

    cluster = {name: getattr(given, name) for name in ("address", "workers", "cpus", "gpus")}
    cluster = {name: value for name, value in cluster.items() if value is not None}
    if given.launcher == "ray":
        return partial(run_on_ray, **cluster, warn=lambda line: print_lines(f"specbeam: {line}", file=sys.stderr))
    for name in cluster:
        raise SpecbeamError(f"--{name} goes with --launcher ray")
    return run_here


def run(given: argparse.Namespace) -> int:
    from specbeam.jobs.lock import locked

    options = options_of(given)  # wrong input is refused before a model is loaded
    if given.batch_size < 1:
        raise SpecbeamError(f"--batch-size {given.batch_size} is not allowed: give at least 1")
    check_sources(given)
    launch = launcher_of(given)
    source, output = Path(given.input), Path(given.output)
    check_output(source, output)
    with locked(output.with_name(f".{output.name}.lock"), output, "another OUT"):
        return run_alone(given, options, launch, source, output)


def run_alone(
    given: argparse.Namespace, options: Options, launch: Callable[..., None], source: Path, output: Path
) -> int:
    """Generate a text for each row that is not finished, and write all rows. Returns the exit status."""
    from tqdm import tqdm

    from specbeam.jobs.finished_rows import FinishedRows
    from specbeam.jobs.formats import chunks, open_rows, writer

    with open_rows(source) as rows:
        column = prompt_column(source, rows.columns, given.column)
        for _ in rows.cells(column):  # a cell that cannot be used is reported before a model is loaded
            pass
        added = added_columns(source, rows.columns, given.tokens, options)
        write = writer(output, rows, {new: COLUMN_TYPES[name] for name, new in added.items()})
        for notice in notices(source, rows.columns, column, added):
            print(f"specbeam: {notice}", file=sys.stderr)
        failed, first, begin = 0, "", time.perf_counter()
        tokens = 0  # of the rows that this process generates
        with (
            FinishedRows(output, fingerprint(rows.digest, column, given, options), len(rows)) as finished,
            tqdm(total=len(rows), initial=finished.count, unit="row", disable=None) as bar,
        ):
            if output.exists() and finished.count < len(rows):
                raise SpecbeamError(f"{output} is there already: delete it, or name another")

            before = finished.count

            def keep(job: list[NumberedPrompt], result: Any) -> None:
                nonlocal tokens
                if isinstance(result, Exception):
                    result = [failure(number, result) for number, _ in job]
                finished.add(result)
                tokens += sum(answer["new_tokens"] or 0 for answer in result)
                bar.update(len(result))

            def cells() -> Iterator[Answer]:
                nonlocal failed, first
                for number, answer in enumerate(finished, 1):
                    if answer["error"] is not None:
                        failed += 1
                        first = first or f"first row {number}: {answer['error']}"
                    yield {new: answer.get(name) for name, new in added.items()}

            todo = (prompt for prompt in enumerate(rows.cells(column)) if prompt[0] not in finished)
            try:
                launch(chunks(todo, BATCHES_PER_JOB * given.batch_size), partial(make_work, given, options), keep)
                with finished.reporting_kept_rows():
                    write(cells())
            except KeyboardInterrupt:
                kept = f"{finished.count:,} of {len(rows):,} rows are finished"
                where = f", in {finished.path}. The same command goes on from there" if finished.count else ""
                raise KeyboardInterrupt(kept + where) from None
        finished.path.unlink(missing_ok=True)
    seconds = time.perf_counter() - begin
    if failed:
        print(f"specbeam: {failed} of {len(rows)} rows failed, {first}", file=sys.stderr)
    earlier = f" ({before:,} of them earlier)" if before else ""
    speed = f"{tokens:,} tokens, {tokens / seconds:,.1f} tokens/s, {seconds:,.1f} s"
    print(f"[{len(rows):,} rows{earlier}, {failed:,} failed, {speed}, in {output}]", file=sys.stderr)
    return FAILED if failed else 0


def notices(source: Path, columns: list[str], prompts: str, added: dict[str, str]) -> Iterator[str]:
    """Lines about columns that one may expect elsewhere, or to have an effect."""
    for name, new in added.items():
        if new != name:
            yield f"{source} has a column {name}, so the generated {name} is in the column {new}"
    for name in columns:
        if name != prompts and name in (*OPTION_NAMES, *ARGUMENTS):
            yield f"the column {name} of {source} is kept as data: options come from the command line, for all rows"


def check_output(source: Path, output: Path) -> None:
    """Raise SpecbeamError unless rows can be written to the output."""
    from specbeam.jobs.formats import pyarrow

    if output.suffix.lower() not in (".parquet", ".jsonl"):
        raise SpecbeamError(f"{output} has an unknown ending: name it .parquet or .jsonl")
    if output.suffix.lower() == ".parquet" or source.suffix.lower() == ".parquet":
        pyarrow()
    finished_rows = Path(f"{output}.partial.jsonl")
    if source.exists() and finished_rows.exists() and source.samefile(finished_rows):
        raise SpecbeamError(f"{source} is where {output} keeps its finished rows: name another OUT, or rename it")
    if output.exists() and not finished_rows.exists():
        raise SpecbeamError(f"{output} is there already: delete it, or name another")
    check_writable(output, output)


def prompt_column(source: Path, columns: list[str], asked: str | None) -> str:
    """The column of prompts. Raises SpecbeamError if there is none, or if several may be meant."""
    if asked is not None:
        with located(str(source)):
            check_names([asked], columns, "column")
        return asked
    usual = [name for name in ("prompt", "messages", "text") if name in columns]
    if usual[:1] == ["prompt"] or len(usual) == 1:
        return usual[0]
    raise SpecbeamError(f"{source} has the columns {', '.join(columns)}: say with --column which one has the prompts")


def added_columns(source: Path, columns: list[str], tokens: bool, options: Options) -> dict[str, str]:
    """The names of COLUMN_TYPES, each with its name in the output, where the columns of the input keep theirs."""
    left_out = {"token_ids": not tokens, "sequences": options.num_return_sequences == 1}
    wanted = [name for name in COLUMN_TYPES if not left_out.get(name)]
    added = {name: f"generated_{name}" if name in columns else name for name in wanted}
    for name, new in added.items():
        if new in columns:
            raise SpecbeamError(f"{source} has the columns {name} and {new}: rename one")
    return added


def fingerprint(digest: str, column: str, given: argparse.Namespace, options: Options) -> str:
    """A hash of all that the answers depend on. The number of workers, and their place, is no part of it.

    Raises:
        SpecbeamError: a model is not there, cannot be fetched, or is damaged.
    """
    from specbeam.version import __version__

    left_out = {*SETTINGS_WITHOUT_EFFECT, *OPTION_NAMES}
    settings = sorted((name, repr(value)) for name, value in vars(given).items() if name not in left_out)
    facts = [__version__, column, settings, repr(options), digest, contents(given)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def contents(given: argparse.Namespace) -> list[str]:
    """Digests of all that keeps its name while its contents change.

    They are of the model with its adapter, a draft model, a draft's corpus, and the file of a strategy of one's own.
    """
    from specbeam.checkpoints import locate, open_checkpoint

    adapter = None if given.adapter is None else locate(given.adapter)
    found = [open_checkpoint(locate(given.model, given.revision), adapter).fingerprint()]
    if given.strategy is not None and (file := plugins.source_file(load_strategy(given))) is not None:
        found.append(hashlib.sha256(file.read_bytes()).hexdigest())
    if given.draft not in (None, *LOOKUPS) and own_drafter(given.draft) is None:
        found.append(open_checkpoint(locate(given.draft)).fingerprint())
    if given.draft_corpus is not None:
        corpus = [row.prompt for row in read_rows(None, given.draft_corpus)]
        found.append(hashlib.sha256(json.dumps(corpus).encode()).hexdigest())
    return found


def make_work(given: argparse.Namespace, options: Options) -> Work:
    """Load the models, in a worker. Returns the function that makes answers of jobs."""
    lm = load_model(given)
    return partial(generate, lm, load_draft(given, lm), load_strategy(given), options, given)


def generate(
    lm: Any, draft: Any, strategy: Any, options: Options, given: argparse.Namespace, job: list[NumberedPrompt]
) -> list[Answer]:
    """The answers to numbered prompts, in the order in which they finish."""
    from specbeam.engine import Engine

    engine = Engine(lm, max_requests=given.batch_size)
    answers = []

    def submissions() -> Iterator[tuple[int, Request]]:
        for number, prompt in job:
            try:
                if prompt is None:
                    raise SpecbeamError("the row has no prompt")
                how = {"system": given.system, "raw": given.raw, "draft": draft, "strategy": strategy}
                request = engine.submit(prompt, options, **how)
            except SpecbeamError as error:
                answers.append(failure(number, error))
            else:
                yield number, request

    for number, request in engine.as_completed(submissions()):
        try:
            answers.append(answer(number, request.result(), given.tokens))
        except Exception as error:  # whatever it was, the other rows go on
            answers.append(failure(number, error))
    return answers


def answer(number: int, result: Result, tokens: bool) -> Answer:
    several = len(result.sequences) > 1
    return {
        "row": number,
        "text": result.text,
        "token_ids": result.token_ids if tokens else None,
        "sequences": [s.to_dict() for s in result.sequences] if several else None,
        "finish_reason": result.finish_reason,
        "new_tokens": result.stats.new_tokens,
        "seconds": round(result.stats.seconds, 6),
        "error": None,
    }


def failure(number: int, error: Exception) -> Answer:
    return {"row": number, **dict.fromkeys(COLUMN_TYPES), "error": one_line(error)}
