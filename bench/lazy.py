"""Lazy beams against plain beams: seconds, passes, evaluated beams, and the most that deferring alone could save.

    python bench/lazy.py TARGET [--draft DRAFT ...] [--data FILE ...] [--num-beams 4 16 64] [--tokens 64] [--prompts 2]
        [--repeats 2] [--ends] [--trie] [--json FILE]

TARGET is a .gguf file or a folder. DRAFT is one, too, which gets int4 weights, or ngram or suffix. FILE is a data set
in the format of HumanEval or Spec-Bench; each of its categories is a kind of prompt. Without a file, the prompts come
from ``bench/prompts.py``. With --trie they are questions, each text is one of 2,592 titles of pages, and the likeliest
ten are returned.

Plain beams are the search that evaluates all beams, and goes ahead of itself. All methods take turns on every prompt.
Seconds are the best of the repeats, summed over the prompts of a kind. They include the prompts' reading. Ratios are
plain seconds / seconds. "needed" is the share of the beams that score above the last text that is returned: only these
must be evaluated. "bound" is the ratio without drafts if no other beam were evaluated, at the measured costs of passes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from figures import Figures, add_json_option
from machine import describe
from prompts import CODING, PROSE, RETRIEVAL, TITLES

import specbeam
from specbeam import Engine, TokenTrie
from specbeam.decoding import Strategy
from specbeam.decoding.beam import beam_search
from specbeam.decoding.drafter import Drafter
from specbeam.decoding.record import Record
from specbeam.engine.costs import pass_times
from specbeam.engine.setup import Setup
from specbeam.engine.strategies import make_search
from specbeam.study.config import Data
from specbeam.study.data import read_rows
from specbeam.tree import Tree

REPEATED = "Repeat this text three times. The early bird catches the worm, but the second mouse gets the cheese.\n" * 4

MEASURED_TOKENS = 24
"""Enough for several passes of each size."""


class PlainBeams:
    """The search that evaluates all beams of every step.

    Attributes:
        levels: the scores of the beams after each step of the last request.
    """

    def __call__(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        self.levels: list[list[float]] = []
        return beam_search(setup.tree, make_search(setup), self.Scores(setup.tree, self.levels))

    class Scores(Record):
        """Remembers the scores of the beams."""

        def __init__(self, tree: Tree, levels: list[list[float]]) -> None:
            super().__init__(tree)
            self.levels = levels

        def step(self, nodes: Any, scores: Any = None) -> None:
            super().step(nodes, scores)
            self.levels.append(scores.tolist())

    def needed(self, log_prob: float) -> list[int]:
        """How many beams of each evaluated step score above the text that is returned; at least one."""
        return [max(1, sum(score > log_prob for score in level)) for level in self.levels[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", nargs="+", default=[])
    parser.add_argument("--data", nargs="+", default=[])
    parser.add_argument("--categories", nargs="+", help="of the data sets; default: all")
    parser.add_argument("--num-beams", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ends", action="store_true", help="texts may end by themselves")
    parser.add_argument("--trie", action="store_true", help="find titles of pages")
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    lm = specbeam.load(given.target)
    cost = pass_times(lm.backend, ahead=True).expected
    drafts = {Path(d).stem: d if d in ("ngram", "suffix") else specbeam.load(d, quantize="int4") for d in given.draft}
    length: dict[str, Any] = {"max_new_tokens": given.tokens}
    if given.trie:
        length |= {"constraint": TokenTrie(TITLES, lm), "length_penalty": 0.0}
    elif not given.ends:
        length["min_new_tokens"] = given.tokens
    for num_beams in given.num_beams:
        options = {"num_beams": num_beams, **length, "share_prefix": False}
        if given.trie:
            options["num_return_sequences"] = min(num_beams, 10)
            by_kind = {"titles": RETRIEVAL[: given.prompts]}
        else:
            by_kind = kinds(given.data, given.categories, given.prompts)
        measure_passes(lm, num_beams)
        for kind, prompts in by_kind.items():
            plain = PlainBeams()
            methods: dict[str, dict[str, Any]] = {"plain": {"strategy": plain}, "lazy": {}}
            methods |= {f"with {name}": {"draft": draft} for name, draft in drafts.items()}
            seconds, passes, nodes, slots = (dict.fromkeys(methods, 0.0) for _ in range(4))
            same, needed, possible, costs, least = True, 0, 0, 0.0, 0.0
            for prompt in prompts:
                results: dict[str, specbeam.Result] = {}
                times: dict[str, list[float]] = {name: [] for name in methods}
                for _ in range(given.repeats):
                    for name, how in methods.items():
                        engine = Engine(lm)
                        request = engine.submit(prompt, options, **how)
                        begin = time.perf_counter()
                        engine.run()
                        times[name].append(time.perf_counter() - begin)
                        results[name] = request.result()
                for name, result in results.items():
                    seconds[name] += min(times[name])
                    passes[name] += result.stats.target_passes
                    nodes[name] += result.stats.nodes_evaluated - result.stats.prompt_tokens
                    slots[name] = max(slots[name], result.stats.peak_slots)
                same &= all(result.sequences == results["plain"].sequences for result in results.values())
                of_steps = plain.needed(results["plain"].sequences[-1].log_prob)
                needed, possible = needed + sum(of_steps), possible + len(of_steps) * num_beams
                costs += len(of_steps) * cost(num_beams)
                least += sum(map(cost, of_steps))
            place = kind, f"{num_beams} beams"
            figures.add(*place, "needed", unit="needed beams / beams", samples=[needed / possible])
            figures.add(*place, "bound", unit="plain seconds / seconds", samples=[costs / least])
            print(f"{kind:16} {num_beams:3} beams  needed {needed / possible:.3f}  bound {costs / least:.2f}")
            for name in methods:
                ratio = seconds["plain"] / seconds[name]
                figures.add(*place, name, unit="plain seconds / seconds", samples=[ratio])
                figures.add(*place, name, "slots", unit="most slots of the cache", samples=[slots[name]])
                print(
                    f"    {name:32} {seconds[name]:7.2f} s {ratio:5.2f}  {passes[name]:5.0f} passes "
                    f"{nodes[name]:6.0f} nodes {slots[name]:6.0f} slots  {'same' if same else 'DIFFERENT'}",
                    flush=True,
                )
    figures.write(given.json)


def measure_passes(lm: specbeam.LanguageModel, num_beams: int) -> None:
    """Let the engine measure passes over 1 beam, 2, 4, and so on: the bound is made of their costs."""
    sizes = {*(2**power for power in range(num_beams.bit_length())), num_beams}
    for beams in sorted(sizes, reverse=True):
        engine = Engine(lm)
        options = {"num_beams": beams, "max_new_tokens": MEASURED_TOKENS, "min_new_tokens": MEASURED_TOKENS}
        engine.submit(PROSE[0], options, strategy=PlainBeams() if beams > 1 else None)
        engine.run()


def kinds(files: list[str], categories: list[str] | None, per_kind: int) -> dict[str, list[str]]:
    """The prompts of each kind: the first of the bench's own, or drawn from data sets."""
    if not files:
        return {"code": CODING[:per_kind], "prose": PROSE[:per_kind], "repeated text": [REPEATED]}
    prompts: dict[str, list[str]] = {}
    for file in files:
        for row in read_rows(Data(source=file, per_category=per_kind), [], seed=0):
            if categories is None or row.category in (None, *categories):
                prompts.setdefault(row.category or Path(file).name.split(".")[0], []).append(row.turns[0])
    return prompts


if __name__ == "__main__":
    main()
