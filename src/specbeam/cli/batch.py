"""``specbeam batch``: a text or a label for each row of a file, here or on a cluster, resumed after interruptions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import (
    add_generation_to,
    add_strategy_to,
    check_sources,
    load_draft,
    load_model,
    load_strategy,
    options_of,
    typed_text,
)
from specbeam.cli.prompts import Template, read_lines, read_text
from specbeam.cli.rows import (
    OPTION_NAMES,
    Answer,
    Answers,
    NumberedItem,
    Task,
    add_files_to,
    add_running_to,
    column_of,
    failure,
    run_rows,
    scored,
)
from specbeam.errors import SpecbeamError, located
from specbeam.options.options import Options

if TYPE_CHECKING:
    from specbeam.api.scoring import Text
    from specbeam.engine.request import Request
    from specbeam.jobs.formats import Rows, Type
    from specbeam.results import Result

OF_EACH: dict[str, Type] = {
    "text": "string",
    "token_ids": ["int64"],
    "log_prob": "float64",
    "score": "float64",
    "finish_reason": "string",
    "is_complete": "bool",
}
COLUMN_TYPES: dict[str, Type] = {
    "text": "string",
    "token_ids": ["int64"],
    "sequences": [OF_EACH],
    "finish_reason": "string",
    "is_complete": "bool",
    "new_tokens": "int64",
    "seconds": "float64",
    "error": "string",
}
"""The columns of texts: token_ids with --tokens, sequences if there are several, is_complete under a constraint."""
USUAL_COLUMNS = ("prompt", "messages", "text")
MAX_NEW_TOKENS = 256


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        help="generate a text, or choose a label, for each row of a file",
        description="Generate a text for each row of IN. OUT holds the columns of IN and text, finish_reason, "
        "new_tokens, seconds and error, in the same order. With several texts per row there is also a column "
        "sequences. With --choices or --labels a row gets a label instead: the new columns are label, probability, "
        "probabilities and error. Finished rows are kept in OUT.partial.jsonl: if the command is interrupted, the same "
        "command goes on from there. Where the lines of IN are requests of OpenAI's batch files, the lines of OUT are "
        "their answers.",
    )
    add_files_to(parser, "a column of prompts")
    parser.add_argument(
        "--column",
        metavar="NAME",
        help='the column of prompts: texts, lists of messages or of token ids (default "prompt", else "messages" or '
        '"text")',
    )
    about = "a file with the text of the prompt, and columns of IN in braces: {review}; {{ and }} are braces"
    parser.add_argument("--template", metavar="FILE", help=about)
    about = "choose one of these labels for each row, with the exact probability of each"
    parser.add_argument("--choices", type=choices, metavar="A,B,...", help=about)
    parser.add_argument("--labels", metavar="FILE", help="the same, with one label on each line of a file")
    about = "divide the probabilities of labels by those that the template gives without a row's content"
    parser.add_argument("--calibrate", action="store_true", help=about)
    parser.add_argument("--tokens", action="store_true", help="add a column token_ids")
    add_generation_to(parser, MAX_NEW_TOKENS, labels=False)
    add_strategy_to(parser)
    add_running_to(parser)
    parser.set_defaults(run=run)


def choices(text: str) -> list[str]:
    """The labels that a typed text has between commas."""
    return [label.strip() for label in typed_text(text).split(",")]


def run(args: argparse.Namespace) -> int:
    options = options_of(args)  # wrong input is refused before a model is loaded
    from specbeam.cli import batch_requests

    if batch_requests.has_requests(Path(args.input)):
        batch_requests.check(args, {"max_new_tokens": MAX_NEW_TOKENS})
        check_sources(args)
        return run_rows(args, partial(batch_requests.task_of, args), batch_requests.RequestRows)
    labels = labels_of(args)
    template = None
    if args.template is not None:
        if args.column is not None:
            raise SpecbeamError("--column names the prompts, and --template makes them of columns: leave one out")
        template = Template(args.template, read_text(args.template))
    if args.calibrate and (labels is None or template is None):
        raise SpecbeamError("--calibrate goes with --choices or --labels, and with --template, which it fills")
    check_sources(args)
    return run_rows(args, partial(task_of, args, options, labels, template))


def labels_of(args: argparse.Namespace) -> list[str] | None:
    """The labels of --choices or --labels; None without them."""
    if args.choices is None and args.labels is None:
        return None
    name = "--choices" if args.labels is None else "--labels"
    if args.choices is not None and args.labels is not None:
        raise SpecbeamError("--choices and --labels both give the labels: leave one out")
    usual = {"max_new_tokens": MAX_NEW_TOKENS, "tokens": False}
    for option in (*OPTION_NAMES, "tokens", "draft", "draft_corpus", "strategy"):
        if getattr(args, option, None) != usual.get(option):
            flag = "a constraint" if option == "constraint" else f"--{option.replace('_', '-')}"
            raise SpecbeamError(f"{flag} is for generated texts, and {name} chooses labels: leave one out")
    from specbeam.api.labels import check_labels

    if args.labels is None:
        labels, where = args.choices, name
    else:
        labels, where = [line.strip() for _, line in read_lines(args.labels)], args.labels
    with located(where):
        check_labels(labels)
    return labels


def task_of(
    args: argparse.Namespace, options: Options, labels: list[str] | None, template: Template | None, rows: Rows
) -> Task:
    """What to do with the rows of a file."""
    if template is None:
        column = column_of(rows, args.column, USUAL_COLUMNS, "has the prompts")
        reads = [column]
        item: Callable[[Mapping[str, Any]], Any] = partial(prompt_of, column)
    else:
        template.check(rows)
        reads, item = template.columns, template.fill
    facts = [reads, None if template is None else template.text, repr(options), labels]
    content_free = content_free_prompts(template) if template is not None and args.calibrate else None
    work = partial(make_work, args, options, labels, content_free)
    if labels is not None:
        from specbeam.api.labels import collapse

        check_counts = partial(collapse, remedy="" if args.calibrate else "--calibrate")
        return Task(reads, item, label_types(labels), facts, work, counted="label", check_counts=check_counts)
    left_out = {"token_ids": not args.tokens, "sequences": options.num_return_sequences == 1}
    left_out["is_complete"] = options.constraint is None
    columns = {name: kind for name, kind in COLUMN_TYPES.items() if not left_out.get(name)}
    if "sequences" in columns and left_out["is_complete"]:
        columns["sequences"] = [{name: kind for name, kind in OF_EACH.items() if name != "is_complete"}]
    return Task(reads, item, columns, facts, work, counted="finish_reason", tokens="new_tokens")


def label_types(labels: Sequence[str]) -> dict[str, Type]:
    """The columns of labels."""
    each: Type = dict.fromkeys(labels, "float64")
    return {"label": "string", "probability": "float64", "probabilities": each, "error": "string"}


def prompt_of(column: str, cells: Mapping[str, Any]) -> Any:
    return SpecbeamError(f"the row has no {column}") if cells[column] is None else cells[column]


def content_free_prompts(template: Template) -> list[Any]:
    """The prompts of rows without content."""
    from specbeam.api.labels import CONTENT_FREE

    filled = [template.fill(dict.fromkeys(template.columns, text)) for text in CONTENT_FREE]
    return [prompt for prompt in filled if prompt]  # a template of nothing but a column may be empty


def make_work(
    args: argparse.Namespace,
    options: Options,
    labels: list[str] | None,
    content_free: list[Any] | None,
) -> Answers:
    """Load the models. Returns the function that makes answers."""
    lm = load_model(args)
    if labels is not None:
        from specbeam.api.labels import prior

        how = {"system": args.system, "raw": args.raw, "max_contexts": args.batch_size}
        without = None if content_free is None else prior(lm, content_free, labels, **how)
        return partial(label, lm, labels, without, args)
    return partial(generate, lm, load_draft(args, lm), load_strategy(args), options, args)


def generate(
    lm: Any, draft: Any, strategy: Any, options: Options, args: argparse.Namespace, items: Iterable[NumberedItem]
) -> Iterator[Answer]:
    """The answers to numbered prompts, in the order in which they finish."""
    from specbeam.engine import Engine

    engine = Engine(lm, max_requests=args.batch_size)
    refused = []

    def submissions() -> Iterator[tuple[int, Request]]:
        for number, prompt in items:
            try:
                if isinstance(prompt, SpecbeamError):
                    raise prompt
                how = {"system": args.system, "raw": args.raw, "draft": draft, "strategy": strategy}
                request = engine.submit(prompt, options, **how)
            except SpecbeamError as error:
                refused.append(failure(COLUMN_TYPES, number, error))
            else:
                yield number, request

    for number, request in engine.as_completed(submissions()):
        try:
            yield answer(number, request.result(), args.tokens)
        except Exception as error:  # the other rows go on after any error
            yield failure(COLUMN_TYPES, number, error)
        yield from refused
        refused.clear()
    yield from refused


def answer(number: int, result: Result, tokens: bool) -> Answer:
    several = len(result.sequences) > 1
    return {
        "row": number,
        "text": result.text,
        "token_ids": result.token_ids if tokens else None,
        "sequences": [s.to_dict() for s in result.sequences] if several else None,
        "finish_reason": result.finish_reason,
        "is_complete": result.sequences[0].is_complete,
        "new_tokens": result.stats.new_tokens,
        "seconds": round(result.stats.seconds, 6),
        "error": None,
    }


def label(
    lm: Any, labels: list[str], without: Any, args: argparse.Namespace, items: Iterable[NumberedItem]
) -> Iterator[Answer]:
    """The labels of numbered prompts, in the order in which they are known.

    Args:
        without: the probabilities of the labels without content, to calibrate with; None: they are not calibrated.
    """
    from specbeam.api.labels import Question, calibrated, question

    def ask(prompt: Any) -> tuple[Question, list[Text]]:
        asked = question(lm, prompt, labels, system=args.system, raw=args.raw)
        return asked, asked.texts

    def choose(asked: Question, log_probs: list[float]) -> Answer:
        probabilities = asked.probabilities(log_probs)
        shares = (probabilities if without is None else calibrated(probabilities, without)).tolist()
        best = max(range(len(labels)), key=shares.__getitem__)  # the first one, where several are equal
        of_each = dict(zip(labels, shares, strict=True))
        return {"label": labels[best], "probability": shares[best], "probabilities": of_each}

    yield from scored(lm, items, ask, choose, label_types(labels), args.batch_size)
