"""``specbeam verify``: whether saved results come again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import add_revision_to
from specbeam.cli.printing import one_line, print_lines
from specbeam.cli.prompts import read_json, read_lines
from specbeam.errors import FAILED, SpecbeamError, located

if TYPE_CHECKING:  # they import PyTorch, which takes a second
    from specbeam.engine import Request
    from specbeam.model import LanguageModel
    from specbeam.receipts import Saved

    Named = tuple[str, Saved]
    """The place of a result, and the result."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="make saved results again, and say whether they are the same",
        description="Make saved results again, and say of each whether its text and its scores are the same. FILE is "
        "what specbeam generate --json printed, on this machine or another one. Drafts are left out, since they change "
        "no text. The status is 1 if a text differs or cannot be made again.",
    )
    parser.add_argument("file", metavar="FILE", help="a file with one result per line; - reads standard input")
    add = parser.add_argument_group("model").add_argument
    add("--model", metavar="SOURCE", help="where the model is here (default: the source that each result names)")
    add_revision_to(parser)
    add("--adapter", metavar="SOURCE", help="the LoRA adapter that was merged into it")
    add("--threads", type=int, metavar="N", help="on a CPU: the number of threads (default: all)")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    results = [*read_results(given.file)]  # wrong input is refused before a model is loaded
    load = lru_cache(maxsize=1)(partial(load_model, given))  # one model after the other
    same = 0
    for key, group in groupby(sorted(results, key=model_of), key=model_of):
        for verdict, is_same in verdicts(partial(load, *key[:-1]), [*group]):
            same += is_same
            print_lines(verdict)
    print(f"[{same:,} of {len(results):,} results are the same]", file=sys.stderr)
    return 0 if same == len(results) else FAILED


def read_results(file: str) -> Iterator[Named]:
    """The results in a file, each with its place. Raises SpecbeamError for a line that is none."""
    from specbeam.receipts import Saved

    found = 0
    for name, line in read_lines(file):
        found += 1
        value = read_json(name, line)
        with located(name):
            yield name, Saved.read(value)
    if not found:
        raise SpecbeamError(f"{file} holds no results: give what specbeam generate --json printed")


def model_of(result: Named) -> tuple[str, str, str, str]:
    """Equal for results that one engine makes again: the model, how it is loaded, and its generation settings."""
    inputs = result[1].inputs
    return (
        inputs["model"],
        inputs["backend"],
        inputs["numbers"],
        json.dumps(inputs["generation_config"], sort_keys=True),
    )


def load_model(given: argparse.Namespace, source: str, backend: str, numbers: str) -> LanguageModel:
    """Load the model of some results as it was loaded for them. Raises SpecbeamError if it cannot be loaded."""
    from specbeam.model import load

    how: dict[str, Any] = {"revision": given.revision, "adapter": given.adapter, "threads": given.threads}
    how["quantize" if backend == "cpu" else "dtype"] = numbers
    with located("" if given.model else "--model says where a model is here"):
        return load(given.model or source, backend=backend, **how)


def verdicts(load: Callable[[], LanguageModel], results: list[Named]) -> Iterator[tuple[str, bool]]:
    """A line for each result of one model, as soon as it is known, and whether the result is the same."""
    from specbeam.engine import Engine

    try:
        lm = load()
    except SpecbeamError as error:
        yield from ((f"{name}: cannot be made again: {one_line(error)}", False) for name, _ in results)
        return
    engine = Engine(results[0][1].prepare(lm))
    refused = []

    def submissions() -> Iterator[tuple[Named, Request]]:
        for name, saved in results:
            try:
                saved.check(lm)
                yield (name, saved), engine.submit(saved.inputs["prompt_ids"], saved.options)
            except SpecbeamError as error:
                refused.append(f"{name}: cannot be made again: {one_line(error)}")

    for (name, saved), request in engine.as_completed(submissions()):
        try:
            verdict, is_same = saved.verdict(request.result())
        except SpecbeamError as error:
            verdict, is_same = f"failed: {one_line(error)}", False
        yield f"{name}: {verdict}", is_same
    yield from ((line, False) for line in refused)
