"""Beam steps (or tokens) per target pass, over widths and depths of the draft.

    python bench/acceptance.py TARGET DRAFT [--data FILE ...] [--num-beams 4] [--tokens 48] [--prompts 10] [--seed 0]
        [--shapes 8x5,12x4,auto] [--strict] [--json FILE]

It counts passes, not seconds, so the figures are the same on every machine. Prompts run together in one engine. A
figure is the median over the prompts of a kind, with minimum and maximum. --strict switches the bound rule off.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from figures import Figures, add_json_option
from machine import describe
from prompts import add_prompt_options, kinds

import specbeam


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft", help="a model, ngram or suffix")
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--shapes", default="4x3,8x3,8x5,12x4,16x5", help="widths and depths, or auto")
    add_prompt_options(parser)
    parser.add_argument("--strict", action="store_true", help="without the bound rule")
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    lm = specbeam.load(given.target, dtype="float32")
    draft = given.draft if given.draft in ("ngram", "suffix") else specbeam.load(given.draft, dtype="float32")
    by_kind = kinds(given)
    print(f"{given.num_beams} beams, {given.tokens} tokens, {given.prompts} prompts of each kind\n")
    print(
        "| width x depth | draft tokens per pass | "
        + " | ".join(f"{kind} (min to max)" for kind in by_kind)
        + " | seconds |"
    )
    print("| --- | --- | " + "--- | " * len(by_kind) + "--- |", flush=True)
    for shape in given.shapes.split(","):
        start = time.perf_counter()
        options: dict[str, object] = {
            "num_beams": given.num_beams,
            "max_new_tokens": given.tokens,
            "bound_rule": not given.strict,
        }
        if shape != "auto":
            width, depth = shape.split("x")
            options |= {"draft_width": int(width), "num_draft_tokens": int(depth)}
        engine = specbeam.Engine(lm, max_requests=20)
        requests = {
            kind: [engine.submit(ask.text, options, draft=draft, raw=ask.raw) for ask in asks]
            for kind, asks in by_kind.items()
        }
        engine.run()
        stats = {kind: [request.result().stats for request in some] for kind, some in requests.items()}
        cells = []
        for kind, some in stats.items():
            rates = [s.steps_per_target_pass or 0.0 for s in some]
            names = (Path(given.target).stem, f"{given.num_beams} beams, {kind}", shape)
            rate = figures.add(*names, unit="steps/pass", samples=rates)
            cells.append(f"{rate.value:.2f} ({rate.min:.2f} to {rate.max:.2f})")
        everything = [s for some in stats.values() for s in some]
        draft_tokens = sum(s.drafted for s in everything) / sum(s.target_passes for s in everything)
        seconds = time.perf_counter() - start
        print(f"| {shape} | {draft_tokens:.0f} | " + " | ".join(cells) + f" | {seconds:.0f} |", flush=True)
        figures.write(given.json)


if __name__ == "__main__":
    main()
