"""Lazy beams against plain beams: seconds, passes, evaluated beams, and what an oracle gains.

    python bench/lazy.py TARGET [--draft DRAFT ...] [--data FILE ...] [--num-beams 4 16 64] [--tokens 64]
        [--prompts 10] [--skip 0] [--seed 0] [--returned 1] [--repeats 1] [--minutes 25] [--ends] [--trie]
        [--isa avx2] [--precision int8] [--json FILE]

TARGET is a .gguf file or a folder. DRAFT is one, too, which gets int4 weights, or ngram or suffix. FILE is a data set
in the format of HumanEval or Spec-Bench. Each of its categories is a kind of prompt, and HumanEval is two: "asked" with
an instruction and the chat template, "completed" without both. Without a file, the prompts come from
``bench/prompts.py``. With --trie they are questions, each text is one of 2,592 titles of pages, and the likeliest ten
are returned.

Plain beams are the search that evaluates all beams, and goes ahead of itself. All methods take turns on every prompt,
and another one is first on the next prompt. A ratio is plain seconds / seconds on the same prompt, the best of the
repeats each, prefill included. Its figure is the median over the prompts of a kind, with the worst and the best.
"needed" is the share of the beams that score above the last hypothesis that is returned: only these must be evaluated.

Each draft has an "oracle": the same engine and draft, given the score of the last hypothesis that is returned. It knows
which beams are needed, but not which draft tokens will be accepted. The share of its gain is the sum of the ratios'
logarithms over that of the oracle's. It counts the prompts where the oracle gains at least 1.1, and elsewhere only what
is lost. The last lines have the share over all kinds together. With --ends there is no oracle: a longer text may score
higher, so the score does not tell which beams are needed, and "needed" is the least that may be.

A prompt where a method has less than 0.9 is run five times more. Its ratio is then the median of all six.

The bench measures a prompt of each kind after the other, with a line for each. With --minutes it begins no prompt that
would not be done in time, and Ctrl-C ends it early: the figures are of the prompts that are done. Another run goes on
after them with --skip. The exit status is 1 if a text differs from the text of plain beams.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures, add_json_option
from isa import add_isa_option, kernels, load
from machine import describe
from numpy.typing import NDArray
from prompts import CODING, PROSE, RETRIEVAL, TITLES, Ask, add_prompt_options, kinds

import specbeam
from specbeam import Engine, TokenTrie
from specbeam.core.strategy import Strategy
from specbeam.core.tree import Tree
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.beam_search import beam_search
from specbeam.decoding.candidates import Mask, Scores
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.decoding.setup import Setup
from specbeam.decoding.strategies import make_copies
from specbeam.drafting.drafter import Drafter
from specbeam.drafting.policy.deferring import LikelyNeeded
from specbeam.recording.record import Record

REPEATED = "Repeat this text three times. The early bird catches the worm, but the second mouse gets the cheese.\n" * 4

MEASURED_TOKENS = 24
"""Enough for several passes of each size."""
SLOW, MORE_RUNS = 0.9, 5
"""A prompt with a ratio below this is run more often: this number of times."""
ORACLE_GAIN = 1.1
"""The share of the oracle's gain counts the prompts with at least this gain."""


class PlainBeams:
    """The search that evaluates all beams of every step.

    Attributes:
        levels: the scores of the beams after each step of the last request.
    """

    def __call__(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        self.levels: list[list[float]] = []
        return beam_search(BeamSearch.of(setup), self.Scores(setup.tree, self.levels))

    class Scores(Record):
        """Keeps the scores of the beams."""

        def __init__(self, tree: Tree, levels: list[list[float]]) -> None:
            super().__init__(tree)
            self.levels = levels

        def step(self, nodes: Any, scores: Any = None) -> None:
            super().step(nodes, scores)
            self.levels.append(scores.tolist())

    def needed(self, log_prob: float) -> float:
        """The share of the beams that score above the hypothesis returned. Each step needs at least one."""
        counts = [max(1, sum(score > log_prob for score in level)) for level in self.levels[:-1]]
        return sum(counts) / sum(map(len, self.levels[:-1]))


class Oracle:
    """Lazy beam search that was given the score of the last hypothesis that is returned.

    Attributes:
        log_prob: this score.
    """

    log_prob = 0.0

    def __call__(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        search = LazyBeamSearch.of(setup)
        drafts = None if drafter is None else drafter.controller
        copies = make_copies(setup, drafter)
        later = None if copies is None else copies.rounds
        policy = KnownScore(search.max_new_tokens, search.num_beams, setup.cost, setup.plain_cost, drafts, later=later)
        policy.log_prob = self.log_prob
        return beam_search(search, setup.record, drafter, policy, copies)


class KnownScore(LikelyNeeded):
    """Knows which beams are needed."""

    log_prob: float

    def _probabilities(self, scores: Scores, leading: Mask, best: int, length: int) -> NDArray[np.float64]:
        probabilities = (scores > self.log_prob).astype(np.float64)
        probabilities[best] = 1.0
        return probabilities


class Case:
    """A kind of prompt with a number of beams: one measurement per prompt.

    Attributes:
        needed: of the beams, as the module's documentation has it.
        measured: by method and quantity.
        same: how many prompts had equal texts with all methods.
    """

    def __init__(self) -> None:
        self.needed: list[float] = []
        self.measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.same = 0

    def add(self, needed: float, seconds: dict[str, list[float]], results: dict[str, specbeam.Result]) -> None:
        """Add a prompt, measured with each method."""
        self.needed.append(needed)
        for name, result in results.items():
            of_method = self.measured[name]
            ratios = [plain / own for plain, own in zip(seconds["plain"], seconds[name], strict=False)]
            of_method["ratio"].append(statistics.median(ratios))
            of_method["seconds"].append(statistics.median(seconds[name]))
            of_method["passes"].append(result.stats.target_passes)
            of_method["nodes"].append(result.stats.nodes_evaluated - result.stats.prompt_tokens)
            of_method["slots"].append(result.stats.peak_slots)
        self.same += all(result.sequences == results["plain"].sequences for result in results.values())

    def progress(self, *place: str) -> None:
        """Print the ratios of the latest prompt."""
        ratios = ", ".join(f"{name} {of['ratio'][-1]:.2f}" for name, of in self.measured.items() if name != "plain")
        print(f"  prompt {len(self.needed)} of {', '.join(place)}: needed {self.needed[-1]:.3f}, {ratios}", flush=True)

    def report(self, figures: Figures, *place: str) -> None:
        """Print a line per method, and add its figures."""
        count = len(self.needed)
        needed = figures.add(*place, "needed", unit="needed beams / beams", samples=self.needed)
        equal = "same texts" if self.same == count else f"DIFFERENT texts of {count - self.same} prompts"
        print(f"{', '.join(place)}, {count} prompts, {equal}:  needed {needed.value:.3f}")
        for name, of_method in self.measured.items():
            ratio = figures.add(*place, name, unit="plain seconds / seconds", samples=of_method["ratio"])
            costs = [
                figures.add(*place, name, quantity, unit=f"{quantity} per prompt", samples=of_method[quantity])
                for quantity in ("seconds", "passes", "nodes", "slots")
            ]
            print(f"    {name:32} {ratio.value:5.2f} ({ratio.min:.2f} to {ratio.max:.2f})", end="")
            print("".join(f"  {cost.value:8.2f} {cost.unit.split()[0]}" for cost in costs), end="")
            share = share_of_gain(self.gains(name))
            if share is not None:
                figures.add(*place, name, "share", unit="of the oracle's gain", samples=[share])
                print(f"  share {share:.2f}", end="")
            print(flush=True)

    def gains(self, name: str) -> list[tuple[float, float]]:
        """The ratios of a draft's method and of its oracle."""
        oracle = name.replace("with ", "oracle with ")
        if oracle == name or oracle not in self.measured:
            return []
        return [*zip(self.measured[name]["ratio"], self.measured[oracle]["ratio"], strict=True)]


def share_of_gain(gains: list[tuple[float, float]]) -> float | None:
    """The share of the oracles' gain, as the module's documentation has it; None if they have none."""
    possible = sum(math.log(oracle) for _, oracle in gains if oracle >= ORACLE_GAIN)
    found = sum(math.log(own if oracle >= ORACLE_GAIN else min(own, 1.0)) for own, oracle in gains)
    return found / possible if possible else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", nargs="+", default=[])
    add_prompt_options(parser)
    parser.add_argument("--num-beams", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="begin no prompt that would not be done after them")
    parser.add_argument("--skip", type=int, default=0, help="leave out this many prompts of each kind, the first ones")
    parser.add_argument("--ends", action="store_true", help="texts may end by themselves")
    parser.add_argument("--trie", action="store_true", help="find titles of pages")
    parser.add_argument("--returned", type=int, default=1, help="texts to return")
    parser.add_argument("--precision", default="auto", help="of the target's weights")
    add_isa_option(parser)
    add_json_option(parser)
    given = parser.parse_args()
    print(describe(kernels(given.isa)))
    figures = Figures.of_this_run(kernels(given.isa))
    lm = load(given.target, given.isa, given.precision)
    drafts = {Path(d).stem: d if d in ("ngram", "suffix") else load(Path(d), given.isa, "int4") for d in given.draft}
    plain = PlainBeams()
    methods: dict[str, dict[str, Any]] = {"plain": {"strategy": plain}, "lazy": {}}
    methods |= {f"with {name}": {"draft": draft} for name, draft in drafts.items()}
    if not given.ends:
        oracle = Oracle()
        methods |= {f"oracle with {name}": {"draft": draft, "strategy": oracle} for name, draft in drafts.items()}
    length: dict[str, Any] = {"max_new_tokens": given.tokens}
    if given.trie:
        length |= {"constraint": TokenTrie(TITLES, lm), "length_penalty": 0.0}
        by_kind = kinds(given, {"titles": RETRIEVAL})
    else:
        length |= {} if given.ends else {"min_new_tokens": given.tokens}
        by_kind = kinds(given, {"code": CODING, "prose": PROSE, "repeated text": [REPEATED]})
    for num_beams in given.num_beams:
        measure_passes(lm, num_beams)
        few = {"num_beams": num_beams, "max_new_tokens": MEASURED_TOKENS}
        take_turns(lm, Ask(PROSE[0]), few, methods, repeats=1, first=0)  # warms up
    cases: dict[tuple[str, str], Case] = {}
    try:
        for number, num_beams, kind, ask in in_turns(by_kind, given.num_beams, given.minutes, given.skip):
            options: dict[str, Any] = {"num_beams": num_beams, **length, "share_prefix": False}
            options["num_return_sequences"] = min(num_beams, 10 if given.trie else given.returned)
            seconds, results = take_turns(lm, ask, options, methods, given.repeats, number)
            needed = plain.needed(results["plain"].sequences[-1].log_prob)
            slow = [name for name in methods if seconds["plain"][0] < SLOW * seconds[name][0]]
            again = {name: methods[name] for name in ["plain", *slow]} if slow else {}
            for turn in range(MORE_RUNS if again else 0):
                more, _ = take_turns(lm, ask, options, again, 1, turn)
                for name in again:
                    seconds[name] += more[name]
            place = kind, f"{num_beams} beams"
            case = cases.setdefault(place, Case())
            case.add(needed, seconds, results)
            case.progress(*place)
    except KeyboardInterrupt:
        print("interrupted: the figures are of the prompts that are done")
    for place, case in cases.items():
        case.report(figures, *place)
    for beams in dict.fromkeys(beams for _, beams in cases):
        for name in methods:
            gains = [gain for (_, own), case in cases.items() if own == beams for gain in case.gains(name)]
            if (share := share_of_gain(gains)) is not None:
                figures.add("all kinds", beams, name, "share", unit="of the oracle's gain", samples=[share])
                print(f"all kinds, {beams}, {name}: share {share:.2f} of {len(gains)} prompts")
    figures.write(given.json)
    return int(any(case.same < len(case.needed) for case in cases.values()))


def in_turns(
    by_kind: dict[str, list[Ask]], num_beams: list[int], minutes: float | None, skip: int
) -> Iterator[tuple[int, int, str, Ask]]:
    """A prompt of each kind after the other: its number, the number of beams, the kind and the prompt.

    Args:
        minutes: begin no prompts that would not be done after them, as long as prompts took so far.
        skip: leave out this many prompts of each kind.
    """
    begun = time.perf_counter()
    for number in range(skip, max(map(len, by_kind.values()))):
        passed, done = time.perf_counter() - begun, number - skip
        if minutes and done and passed + passed / done > 60 * minutes:
            print(f"--minutes {minutes:g}: {done} prompts of each kind were measured, no more")
            return
        for beams in num_beams:
            for kind, asks in by_kind.items():
                if number < len(asks):
                    yield number, beams, kind, asks[number]


def take_turns(
    lm: specbeam.LanguageModel, ask: Ask, options: dict[str, Any], methods: dict[str, Any], repeats: int, first: int
) -> tuple[dict[str, list[float]], dict[str, specbeam.Result]]:
    """The best seconds and the result of each method on a prompt. The methods take turns, and this one is first.

    An oracle comes after the others, since plain beams tell it the score.
    """
    names = [name for name in methods if "oracle" not in name]
    oracles = [name for name in methods if name not in names]
    first %= len(names)
    seconds: dict[str, float] = dict.fromkeys(methods, float("inf"))
    results: dict[str, specbeam.Result] = {}
    for _ in range(repeats):
        for name in [*names[first:], *names[:first], *oracles]:
            if name in oracles:
                methods[name]["strategy"].log_prob = results["plain"].sequences[-1].log_prob
            engine = Engine(lm)
            request = engine.submit(ask.text, options, raw=ask.raw, **methods[name])
            begin = time.perf_counter()
            engine.run()
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
            results[name] = request.result()
    return {name: [best] for name, best in seconds.items()}, {name: results[name] for name in methods}


def measure_passes(lm: specbeam.LanguageModel, num_beams: int) -> None:
    """Let the engine measure passes over 1 beam, 2, 4, and so on: the bound is made of their costs."""
    sizes = {*(2**power for power in range(num_beams.bit_length())), num_beams}
    for beams in sorted(sizes, reverse=True):
        engine = Engine(lm)
        options = {"num_beams": beams, "max_new_tokens": MEASURED_TOKENS, "min_new_tokens": MEASURED_TOKENS}
        engine.submit(PROSE[0], options, strategy=PlainBeams() if beams > 1 else None)
        engine.run()


if __name__ == "__main__":
    raise SystemExit(main())
