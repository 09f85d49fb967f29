"""Beam steps (or tokens) a pass of the target, over widths and depths of the draft.

    python bench/acceptance.py TARGET DRAFT [--num-beams 4] [--tokens 48] [--shapes 8x5,12x4,auto] [--strict]

Counts passes, not seconds, so it says the same on every machine. Prompts run together in one engine. --strict
switches the bound rule off.
"""

from __future__ import annotations

import argparse
import time

import torch
from machine import describe
from prompts import CODING, PROSE

import specbeam
from specbeam.decoding.beam import BeamSearch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft", help="a model, ngram or suffix")
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--shapes", default="4x3,8x3,8x5,12x4,16x5", help="widths and depths, or auto")
    parser.add_argument("--prompts", type=int, default=10, help="of each kind")
    parser.add_argument("--strict", action="store_true")
    given = parser.parse_args()
    print(describe(f"torch {torch.__version__}"))
    lm = specbeam.load(given.target, dtype="float32")
    draft = given.draft if given.draft in ("ngram", "suffix") else specbeam.load(given.draft, dtype="float32")
    if given.strict:
        plain = BeamSearch.__init__
        BeamSearch.__init__ = lambda *a, **k: plain(*a, **{**k, "bounded": False})  # type: ignore[method-assign]
    kinds = {"coding": CODING[: given.prompts], "prose": PROSE[: given.prompts]}
    print(f"{given.num_beams} beams, {given.tokens} tokens, {given.prompts} prompts of each kind\n")
    print("| width x depth | guesses a pass | " + " | ".join(f"{kind} (min to max)" for kind in kinds) + " | seconds |")
    print("| --- | --- | " + "--- | " * len(kinds) + "--- |", flush=True)
    for shape in given.shapes.split(","):
        start = time.perf_counter()
        options: dict[str, object] = {"num_beams": given.num_beams, "max_new_tokens": given.tokens}
        if shape != "auto":
            width, depth = shape.split("x")
            options |= {"draft_width": int(width), "num_draft_tokens": int(depth)}
        engine = specbeam.Engine(lm, max_requests=20)
        requests = {
            kind: [engine.submit(prompt, options, draft=draft) for prompt in prompts] for kind, prompts in kinds.items()
        }
        engine.run()
        stats = {kind: [request.result().stats for request in some] for kind, some in requests.items()}
        cells = []
        for some in stats.values():
            rates = [s.steps_per_target_pass or 0.0 for s in some]
            cells.append(f"{sum(rates) / len(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})")
        everything = [s for some in stats.values() for s in some]
        guesses = sum(s.drafted for s in everything) / sum(s.target_passes for s in everything)
        seconds = time.perf_counter() - start
        print(f"| {shape} | {guesses:.0f} | " + " | ".join(cells) + f" | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
