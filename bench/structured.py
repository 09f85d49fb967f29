"""JSON by a schema: what the constraint costs, and the passes that its forced tokens save.

    python bench/structured.py MODEL SCHEMAS.jsonl.gz [--schemas 30] [--seed 0] [--tokens 96] [--json FILE]

SCHEMAS has a name and a schema in each line. The seed puts them in an order, and the first ones that are taken count.
The share of the constraint is the time of its masks and states over the request's. "Alone" is the same request without
the drafts of forced tokens, which the program turns off, and "free" the same prompt without a constraint, with as many
tokens. All take turns on each schema. Figures are medians over the schemas, with the worst and the best.
"""

from __future__ import annotations

import argparse
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
from specbeam import JsonSchema, SpecbeamError
from specbeam.constraints.grammar import GrammarConstraint
from specbeam.engine import setup

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 1},
    "4 beams": {"num_beams": 4},
    "64 beams": {"num_beams": 64},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("schemas_file", type=Path, metavar="SCHEMAS")
    parser.add_argument("--schemas", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    lm = specbeam.load(given.model)
    drawn = [*taken(lm, given.schemas_file, given.schemas, given.seed)]
    print(f"{given.model.stem}, {len(drawn)} schemas, at most {given.tokens} new tokens\n")
    clock = Clock()
    print("| method | constraint, % of the time | steps per pass | alone | speed over alone | speed over free |")
    print("| --- | --- | --- | --- | --- | --- |")
    for method in given.methods:
        columns: dict[str, list[float]] = {}
        for number, (name, constraint) in enumerate([drawn[0], *drawn]):
            asked = {"max_new_tokens": given.tokens, **METHODS[method]}
            prompt = f"Write a JSON object for {name}."
            clock.seconds = 0.0
            result, seconds = timed(lm, prompt, asked, constraint)
            share = clock.seconds / seconds
            with without_forced_tokens():
                alone, alone_seconds = timed(lm, prompt, asked, constraint)
            if alone.sequences != result.sequences:
                raise SystemExit(f"{name}: forced tokens changed the text of {method}")
            free_asked = {**asked, "max_new_tokens": len(result.token_ids), "eos_token_id": []}
            _, free_seconds = timed(lm, prompt, free_asked, None)
            if number:  # the first one warms up
                columns.setdefault("share", []).append(100 * share)
                for column, one in (("steps per pass", result), ("alone", alone)):
                    columns.setdefault(column, []).append(one.stats.steps_per_target_pass or 1.0)
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


def taken(lm: specbeam.LanguageModel, file: Path, count: int, seed: int) -> Iterator[tuple[str, GrammarConstraint]]:
    """Some schemas that are not refused, and their names."""
    with gzip.open(file) as lines:
        rows = [*map(json.loads, lines)]
    random.Random(seed).shuffle(rows)
    for row in rows:
        try:
            yield row["name"], JsonSchema(row["schema"]).compile(lm)
        except SpecbeamError:
            continue
        count -= 1
        if not count:
            return


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
    own = setup.with_forced_tokens
    setup.with_forced_tokens = lambda setup, drafter: drafter
    try:
        yield
    finally:
        setup.with_forced_tokens = own


def timed(
    lm: specbeam.LanguageModel, prompt: str, options: dict[str, Any], constraint: GrammarConstraint | None
) -> tuple[specbeam.Result, float]:
    start = time.perf_counter()
    result = specbeam.generate(lm, prompt, options, constraint=constraint)
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
