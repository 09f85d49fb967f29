"""``specbeam verify``: whether saved results come again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import add_revision_to
from specbeam.cli.printing import one_line, print_lines
from specbeam.cli.prompts import read_json, read_lines
from specbeam.errors import FAILED, SpecbeamError, located

if TYPE_CHECKING:  # they import PyTorch, which takes a second
    from specbeam.engine import Request
    from specbeam.models.model import LanguageModel
    from specbeam.recording.receipts import Saved

    Named = tuple[str, Saved]
    """The place of a result, and the result."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="make saved results again, and say whether they are the same",
        description="Make saved results again, and say of each whether its text and its scores are the same. FILE is "
        "what specbeam generate --json printed, on this machine or another one. Drafts are left out, since they change "
        "no text. The status is 1 if a result differs or cannot be made again.",
    )
    parser.add_argument("file", metavar="FILE", help="a file with a result on each line; - reads standard input")
    add = parser.add_argument_group("model").add_argument
    add("--model", metavar="SOURCE", help="where the model is here (default: the source that each result names)")
    add_revision_to(parser)
    add("--adapter", metavar="SOURCE", help="the LoRA adapter that was merged into it")
    add("--threads", type=int, metavar="N", help="on a CPU: the number of threads (default: all)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    results = [*enumerate(read_results(args.file))]  # wrong input is refused before a model is loaded
    load = lru_cache(maxsize=1)(partial(load_model, args))  # one model after the other
    known: dict[int, tuple[str, bool]] = {}
    printed = 0
    try:
        for key, group in groupby(sorted(results, key=model_of), key=model_of):
            for number, verdict, is_same in verdicts(partial(load, *key[:-1]), [*group]):
                known[number] = verdict, is_same
                while printed in known:  # in the order of the file
                    print_lines(known[printed][0])
                    printed += 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(known):,} of {len(results):,} results were made again") from None
    same = sum(is_same for _, is_same in known.values())
    print(f"[{same:,} of {len(results):,} results are the same]", file=sys.stderr)
    return 0 if same == len(results) else FAILED


def read_results(file: str) -> Iterator[Named]:
    """The results in a file, each with its place: a line for each, or one JSON value over several lines."""
    from specbeam.recording.receipts import Saved

    lines = [*read_lines(file)]
    if len(lines) > 1:
        with suppress(ValueError, RecursionError):
            value = json.loads("\n".join(line for _, line in lines))
            values = value if isinstance(value, list) else [value]
            file = lines[0][0].rpartition(" line ")[0]
            lines = [(f"{file} result {number}", json.dumps(value)) for number, value in enumerate(values, 1)]
    for name, line in lines:
        value = read_json(name, line)
        with located(name):
            yield name, Saved.read(value)
    if not lines:
        raise SpecbeamError(f"{file} holds no results: give what specbeam generate --json printed")


def model_of(numbered: tuple[int, Named]) -> tuple[str, str, str, str]:
    """Equal for results that one engine makes again: the model, how it is loaded, and its generation settings."""
    inputs = numbered[1][1].inputs
    return (
        inputs["model"],
        inputs["backend"],
        inputs["numbers"],
        json.dumps(inputs["generation_config"], sort_keys=True),
    )


def load_model(args: argparse.Namespace, source: str, backend: str, precision: str) -> LanguageModel:
    """Load the model of some results as it was loaded for them. Raises SpecbeamError if it cannot be loaded."""
    from specbeam.models.model import load

    how: dict[str, Any] = {"revision": args.revision, "adapter": args.adapter, "threads": args.threads}
    how["quantize" if backend == "cpu" else "dtype"] = precision
    with located("" if args.model else "--model says where a model is here"):
        return load(args.model or source, backend=backend, **how)


def verdicts(load: Callable[[], LanguageModel], results: list[tuple[int, Named]]) -> Iterator[tuple[int, str, bool]]:
    """The number of each result of one model, a line about it, and whether it is the same, as soon as that is known."""
    from specbeam.engine import Engine

    try:
        lm = load()
    except SpecbeamError as error:
        yield from ((n, f"{name}: cannot be made again: {one_line(error)}", False) for n, (name, _) in results)
        return
    engine = Engine(results[0][1][1].prepare(lm))
    refused = []

    def submissions() -> Iterator[tuple[tuple[int, Named], Request]]:
        for number, (name, saved) in results:
            try:
                saved.check(lm)
                yield (number, (name, saved)), engine.submit(saved.inputs["prompt_ids"], saved.options)
            except SpecbeamError as error:
                refused.append((number, f"{name}: cannot be made again: {one_line(error)}", False))

    for (number, (name, saved)), request in engine.as_completed(submissions()):
        try:
            verdict, is_same = saved.verdict(request.result())
        except SpecbeamError as error:
            verdict, is_same = f"failed: {one_line(error)}", False
        yield number, f"{name}: {verdict}", is_same
    yield from refused
