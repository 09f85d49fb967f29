"""How many beams best-first beam search evaluates, by width, beside all beams and beside our choice by costs.

    python bench/best_first.py MODEL [--num-beams 5 10 100 500] [--length-penalty 0] [--sentences 10] [--seed 0]
        [--json FILE]

MODEL is a .gguf file or a folder. It translates English sentences into French, after examples, up to a line break.
Meister, Vieira and Cotterell 2020, "Best-First Beam Search", count the calls to the scoring function per text. So does
this: each beam whose next tokens the model is asked for counts once, the prompt included. Figures are medians over
sentences that the seed draws, with minimum and maximum. All methods return the same text, and all end as soon as no
unfinished hypothesis can score above it.

- plain evaluates all beams of each step.
- best-first evaluates one beam at a time: the best one that may decide the next step.
- by costs evaluates the beams that LikelyNeeded chooses, because one pass over many beams costs less than many passes.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures, add_json_option
from machine import describe

import specbeam
from specbeam import Engine, LanguageModel, Result
from specbeam.core.strategy import Strategy
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.beam_search import beam_search
from specbeam.decoding.candidates import Mask, Scores
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.decoding.setup import MakeStrategy, Setup
from specbeam.drafting.drafter import Drafter
from specbeam.drafting.policy.deferring import Deferred, LikelyNeeded

MAX_TOKENS = 48
"""Of a translation."""
EXAMPLES = """English: Good morning.
French: Bonjour.
English: Where is the station?
French: Où est la gare ?
English: My brother bought a red car last week.
French: Mon frère a acheté une voiture rouge la semaine dernière.
English: It was raining when we left the house.
French: Il pleuvait quand nous avons quitté la maison.
"""

SENTENCES = [
    "Thank you for your help.",
    "The children are playing in the garden.",
    "I would like a cup of coffee, please.",
    "She has lived in Paris for three years.",
    "The train to Lyon leaves at eight o'clock.",
    "We could not find the book that you told us about.",
    "The museum is closed on Monday.",
    "He reads the newspaper every morning before work.",
    "My grandmother makes the best apple pie in the village.",
    "They decided to sell the house and move to the country.",
    "Do you know how to open this door?",
    "The doctor said that I should drink more water.",
    "The weather will be better tomorrow.",
    "After the meeting, the director answered all our questions.",
    "Nobody knew why the old man had left the city.",
    "This is the first time that I have seen the sea.",
]


class BestFirst(LikelyNeeded):
    """Go on with the best beam; else evaluate the best of the beams that decide whether that may be done."""

    def __init__(self) -> None:
        """It needs no costs."""

    def should_defer(self, scores: Scores, length: int) -> bool:
        return True

    def choose(self, deferred: Deferred) -> Mask:
        return np.arange(len(deferred.nodes)) == deferred.best

    def should_draft(self, deferred: Deferred, count: int) -> bool:
        return False


def plain_beams(setup: Setup, drafter: Drafter | None) -> Strategy:
    return beam_search(BeamSearch.of(setup), setup.record)


def best_first(setup: Setup, drafter: Drafter | None) -> Strategy:
    return lazily(setup, BestFirst())


def by_costs(setup: Setup, drafter: Drafter | None) -> Strategy:
    length = setup.stop.max_length - setup.tree.prompt_length
    return lazily(setup, LikelyNeeded(length, setup.options.num_beams, setup.cost, setup.plain_cost))


def lazily(setup: Setup, policy: LikelyNeeded) -> Strategy:
    search = LazyBeamSearch.of(setup)
    return beam_search(search, setup.record, policy=policy)


METHODS = {"plain": plain_beams, "best-first": best_first, "by costs": by_costs}


def translate(lm: LanguageModel, sentence: str, options: dict[str, Any], how: MakeStrategy) -> Result:
    engine = Engine(lm)
    prompt = f"{EXAMPLES}English: {sentence}\nFrench:"
    request = engine.submit(prompt, {"max_new_tokens": MAX_TOKENS, "share_prefix": False, **options}, strategy=how)
    engine.run()
    return request.result()


def evaluations(result: Result) -> int:
    """Of beams, the prompt included."""
    return result.stats.nodes_evaluated - result.stats.prompt_tokens + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--num-beams", type=int, nargs="+", default=[5, 10, 100, 500])
    parser.add_argument("--length-penalty", type=float, default=0.0)
    parser.add_argument("--sentences", type=int, default=10, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="draws the sentences")
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    lm = specbeam.load(given.model)
    sentences = random.Random(given.seed).sample(SENTENCES, min(given.sentences, len(SENTENCES)))
    print(f"{'beams':>5} {'method':10} {'evaluations per text':>20} {'saved (min to max)':>20} {'passes':>7}")
    for num_beams in given.num_beams:
        options = {"num_beams": num_beams, "length_penalty": given.length_penalty, "stop_strings": "\n"}
        results = {
            name: [translate(lm, sentence, options, how) for sentence in sentences] for name, how in METHODS.items()
        }
        plain = results["plain"]
        for name, found in results.items():
            same = all(one.sequences == other.sequences for one, other in zip(found, plain, strict=True))
            counts, passes = [*map(evaluations, found)], [result.stats.target_passes for result in found]
            shares, place = (
                [1 - count / evaluations(b) for count, b in zip(counts, plain, strict=True)],
                (f"{num_beams} beams", name),
            )
            made = figures.add(*place, unit="evaluations per text", samples=counts)
            saved = figures.add(*place, "saved", unit="of plain's evaluations", samples=shares)
            took = figures.add(*place, "passes", unit="passes per text", samples=passes)
            print(
                f"{num_beams:5} {name:10} {made.value:20.0f} {saved.value:6.0%} ({saved.min:.0%} to {saved.max:.0%}) "
                f"{took.value:7.0f}{'' if same else '  DIFFERENT'}",
                flush=True,
            )
    figures.write(given.json)


if __name__ == "__main__":
    main()
