"""JSON by a schema: what the constraint costs, and the passes that its forced tokens save.

    python bench/structured.py MODEL SCHEMAS.jsonl.gz [--schemas 30] [--seed 0] [--tokens 96] [--json FILE]
    python bench/structured.py MODEL SCHEMAS.jsonl.gz --states 1000

SCHEMAS has a name and a schema in each line. The seed puts them in an order, and the first ones that are taken count.
The share of the constraint is the time of its masks and states over the request's. "Alone" is the same request without
the drafts of forced tokens, which the program turns off, and "free" the same prompt without a constraint, with as many
tokens. All take turns on each schema. Figures are medians over the schemas, with the worst and the best. In the last
row 32 requests run at once, each with a schema of its own: the figures are of 5 such runs.

``--states N`` measures the memory that the states of 32 such requests hold after N tokens: what is freed if they are
dropped. Their texts are lists of a hundred values of each schema, sampled. It needs glibc.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import gzip
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures, add_json_option
from machine import describe

import specbeam
from specbeam import Engine, JsonSchema, SpecbeamError
from specbeam.decoding import strategies
from specbeam.structured.grammar import GrammarConstraint

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 1},
    "4 beams": {"num_beams": 4},
    "4 beams, ngram": {"num_beams": 4, "draft": "ngram"},
    "16 beams": {"num_beams": 16},
    "64 beams": {"num_beams": 64},
    "32 requests": {},
}
AT_ONCE, RUNS = 32, 5
MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
LONG = {"type": "array", "minItems": 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("schemas_file", type=Path, metavar="SCHEMAS")
    parser.add_argument("--schemas", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--states", type=int, metavar="N", help="measure the states of requests of N tokens instead")
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    lm = specbeam.load(given.model)
    if given.states is not None:
        print(states(lm, [*taken(lm, given.schemas_file, AT_ONCE, given.seed, LONG)], given.states))
        return
    compiled = [*taken(lm, given.schemas_file, max(given.schemas, AT_ONCE), given.seed)]
    each, together = [[one] for one in compiled[: given.schemas]], [compiled[:AT_ONCE]] * RUNS
    print(f"{given.model.stem}, {given.schemas} schemas, at most {given.tokens} new tokens\n")
    clock = Clock()
    print("| method | constraint, % of the time | steps per pass | alone | speed over alone | speed over free |")
    print("| --- | --- | --- | --- | --- | --- |")
    for method in given.methods:
        columns: dict[str, list[float]] = {}
        cases = together if method == "32 requests" else each
        for number, case in enumerate([cases[0], *cases]):
            asked = [{"max_new_tokens": given.tokens, **METHODS[method], "constraint": one} for _, one in case]
            prompts = [f"Write a JSON object for {name}." for name, _ in case]
            clock.seconds = 0.0
            results, seconds = timed(lm, prompts, asked)
            share = clock.seconds / seconds
            with without_forced_tokens():
                alone, alone_seconds = timed(lm, prompts, asked)
            for (name, _), one, other in zip(case, results, alone, strict=True):
                if one.sequences != other.sequences:
                    raise SystemExit(f"{name}: forced tokens changed the text of {method}")
            free = [{"max_new_tokens": len(one.token_ids), **METHODS[method], "eos_token_id": []} for one in results]
            _, free_seconds = timed(lm, prompts, free)
            if number:  # the first one warms up
                columns.setdefault("share", []).append(100 * share)
                for column, some in (("steps per pass", results), ("alone", alone)):
                    steps = [one.stats.steps_per_target_pass or 1.0 for one in some]
                    columns.setdefault(column, []).append(float(np.mean(steps)))
                columns.setdefault("over alone", []).append(alone_seconds / seconds)
                columns.setdefault("over free", []).append(free_seconds / seconds)
        units = ("%", "steps/pass", "steps/pass", "times", "times")
        cells = []
        for unit, (column, samples) in zip(units, columns.items(), strict=True):
            figure = figures.add(given.model.stem, method, column, unit=unit, samples=samples)
            cells.append(f"{figure.value:.2f} ({figure.min:.2f} to {figure.max:.2f})")
        print(f"| {method} | {' | '.join(cells)} |", flush=True)
    masks = 1e3 * np.array(clock.masks)
    print(f"\n{len(masks)} masks: {np.median(masks):.3f} ms, 99 of 100 within {np.quantile(masks, 0.99):.2f} ms")
    figures.write(given.json)


def drawn(file: Path, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and schemas of a file, in the order of a seed."""
    with gzip.open(file) as lines:
        rows = [*map(json.loads, lines)]
    random.Random(seed).shuffle(rows)
    for row in rows:
        yield row["name"], row["schema"]


def taken(
    lm: specbeam.LanguageModel, file: Path, count: int, seed: int, around: dict[str, Any] | None = None
) -> Iterator[tuple[str, GrammarConstraint]]:
    """Some schemas that are not refused, and their names.

    Args:
        around: take them as the items of this schema.
    """
    for name, own in drawn(file, seed):
        schema = own if around is None else {**around, "items": own}
        try:
            yield name, JsonSchema(schema).compile(lm)
        except SpecbeamError:
            continue
        count -= 1
        if not count:
            return


def states(lm: specbeam.LanguageModel, some: list[tuple[str, GrammarConstraint]], tokens: int) -> str:
    """The memory that the states of requests hold once each has this many tokens, or has ended."""
    engine = Engine(lm, max_requests=len(some))
    options = {"max_new_tokens": 2 * tokens, "temperature": 1.0, "seed": 1}
    requests = [engine.submit(f"Write a JSON list of {name}.", options | {"constraint": one}) for name, one in some]
    live: list[Any] = [request._state for request in requests]
    while any(one._setup.tree.prefix_length < len(one.request.prompt_ids) + tokens for one in live):
        engine.step()
        live = [one for one in live if not one.done]
    kept = [one._setup.selector.process.constraint._states._states for one in live]
    count, before = sum(map(len, kept)), allocated()
    for one in kept:
        one.clear()
    gc.collect()
    held = (before - allocated()) / 1e6
    return f"{len(live)} of {len(requests)} requests after {tokens} tokens: {count} states, {held:.1f} MB"


def allocated() -> int:
    """Bytes that the process has from glibc."""

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Info
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class Clock:
    """The seconds of constraints' masks and states.

    Attributes:
        seconds: since it was set to 0.
        masks: of each mask.
    """

    def __init__(self) -> None:
        self.seconds, self.masks = 0.0, list[float]()
        for name in ("mask", "advance", "complete"):
            setattr(GrammarConstraint, name, self._timed(getattr(GrammarConstraint, name), name))
        self._inside = False

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._inside:
                return method(*arguments)
            self._inside, start = True, time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self._inside, spent = False, time.perf_counter() - start
                self.seconds += spent
                if name == "mask":
                    self.masks.append(spent)

        return timed


@contextmanager
def without_forced_tokens() -> Iterator[None]:
    own = strategies.with_forced_tokens
    strategies.with_forced_tokens = lambda setup, drafter: drafter
    try:
        yield
    finally:
        strategies.with_forced_tokens = own


def timed(
    lm: specbeam.LanguageModel, prompts: list[str], options: list[dict[str, Any]]
) -> tuple[list[specbeam.Result], float]:
    """The results of requests that run at once, and the seconds that they take."""
    start = time.perf_counter()
    engine = Engine(lm, max_requests=len(prompts))
    requests = []
    for prompt, one in zip(prompts, options, strict=True):
        own = {name: value for name, value in one.items() if name != "draft"}
        requests.append(engine.submit(prompt, own, draft=one.get("draft")))
    engine.run()
    return [request.result() for request in requests], time.perf_counter() - start


if __name__ == "__main__":
    main()
