"""``specbeam score``: how likely the texts of a file are, row by row, and lists of candidates put in that order."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import add_model_to, check_source, load_model
from specbeam.cli.rows import (
    Answer,
    Answers,
    NumberedItem,
    Task,
    add_files_to,
    add_running_to,
    check_column,
    column_of,
    run_rows,
    scored,
)
from specbeam.errors import SpecbeamError

if TYPE_CHECKING:
    from specbeam.api.scoring import Text
    from specbeam.jobs.formats import Rows, Type

MEASURES: dict[str, Type] = {"log_prob": "float64", "perplexity": "float64", "tokens": "int64"}
"""The columns for a text, and the fields of a candidate beside its text."""
COLUMN_TYPES: dict[str, Type] = {**MEASURES, "error": "string"}
RANKED_TYPES: dict[str, Type] = {"best": "string", "ranked": [{"text": "string", **MEASURES}], "error": "string"}
"""The columns with --candidates."""
Question = tuple[Any, list[str]]
"""The text or the messages before some texts, None if there are none, and these texts."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "score",
        help="measure how likely the texts of a file are, or rerank candidates",
        description="Measure the text of each row of IN. OUT holds the columns of IN and log_prob, perplexity, tokens "
        "and error, in the same order. With --candidates a row has a list of texts: the new columns are best, ranked "
        "and error. Finished rows are kept in OUT.partial.jsonl: if the command is interrupted, the same command goes "
        "on from there.",
    )
    add_files_to(parser, "a column of texts")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--column", metavar="NAME", help='the column of texts (default "text", else "answer")')
    about = "a column with a list of texts in each row, which are put in order, the one of least perplexity first"
    what.add_argument("--candidates", metavar="NAME", help=about)
    about = "the column of prompts, after which the texts are measured: texts or lists of messages"
    parser.add_argument("--given", metavar="NAME", help=about)
    add_model_to(parser)
    add_running_to(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.given is None and args.system is not None:
        raise SpecbeamError("--system goes with --given, the column of prompts")
    check_source(args.model)
    return run_rows(args, partial(task_of, args))


def task_of(args: argparse.Namespace, rows: Rows) -> Task:
    """What to do with the rows of a file. Raises SpecbeamError if it does not have the columns."""
    if args.candidates is None:
        column = column_of(rows, args.column, ("text", "answer"), "has the texts")
    else:
        check_column(rows, column := args.candidates)
    if args.given is not None:
        check_column(rows, args.given)
    ranks = args.candidates is not None
    columns = RANKED_TYPES if ranks else COLUMN_TYPES
    reads = [*dict.fromkeys(name for name in (column, args.given) if name is not None)]
    item = partial(question_of, column, args.given, ranks)
    work = partial(make_work, args, ranks)
    return Task(reads, item, columns, [column, args.given, ranks], work, tokens=None if ranks else "tokens")


def question_of(column: str, prompts: str | None, ranks: bool, cells: Mapping[str, Any]) -> Question | SpecbeamError:
    """The texts of a row, with its prompt, or why it has none."""
    if prompts is not None and cells[prompts] is None:
        return SpecbeamError(f"the row has no {prompts}")
    texts = candidates_of(cells[column]) if ranks else [cells[column]]
    if not texts or not all(isinstance(text, str) for text in texts):
        what = "a list of texts" if ranks else "a text"
        return SpecbeamError(f"the row's {column} is not {what}")
    return None if prompts is None else cells[prompts], texts


def candidates_of(cell: Any) -> list[Any]:
    """The texts of a cell: a list, the same as JSON (as in a .csv file), or the objects of a column ``sequences``."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return []
    parts = cell if isinstance(cell, list) else []
    return [part.get("text") if isinstance(part, dict) else part for part in parts]


def make_work(args: argparse.Namespace, ranks: bool) -> Answers:
    """Load the model. Returns the function that makes answers."""
    return partial(measure, load_model(args), args, ranks)


def measure(lm: Any, args: argparse.Namespace, ranks: bool, items: Iterable[NumberedItem]) -> Iterator[Answer]:
    """The measures of numbered texts, in the order in which they are known."""
    from specbeam.api.scoring import check_length
    from specbeam.models.prompts import encode_answers

    def ask(question: Question) -> tuple[list[tuple[str, int]], list[Text]]:
        prompt, texts = question
        context, tokens = encode_answers(lm, prompt, texts, system=args.system, raw=args.raw)
        check_length(lm, context, tokens)
        if not all(tokens):
            raise SpecbeamError("a text has no tokens of its own: the tokenizer makes none of it")
        return [*zip(texts, map(len, tokens), strict=True)], [(context, ids) for ids in tokens]

    def values(texts: list[tuple[str, int]], log_probs: list[float]) -> Answer:
        both = zip(texts, log_probs, strict=True)
        ranked = sorted(both, key=lambda pair: pair[1] / pair[0][1], reverse=True)  # per token; a tie stays in order
        measured = [
            {"text": text, "log_prob": log_prob, "perplexity": perplexity(log_prob, count), "tokens": count}
            for (text, count), log_prob in ranked
        ]
        if ranks:
            return {"best": measured[0]["text"], "ranked": measured}
        return {name: measured[0][name] for name in MEASURES}

    yield from scored(lm, items, ask, values, RANKED_TYPES if ranks else COLUMN_TYPES, args.batch_size)


def perplexity(log_prob: float, tokens: int) -> float:
    """e to the power of the mean negative log-probability per token, as far as floats go."""
    return math.exp(min(-log_prob / tokens, 709.0))
