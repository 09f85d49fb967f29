"""Lazy beams against plain beams: seconds, passes and evaluated beams, and whether the texts are the same.

    python bench/lazy.py TARGET [--num-beams 8 16] [--tokens 64] [--prompts 2] [--json FILE]

TARGET is a .gguf file or a folder. Plain beams are the search that evaluates all beams, and goes ahead of itself. Both
methods take turns on every prompt. Seconds are the best of the repeats, summed over the prompts of a kind. They include
the prompts' reading. Ratios are plain seconds / seconds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from figures import Figures, add_json_option
from machine import describe
from prompts import CODING, PROSE

import specbeam
from specbeam import Engine
from specbeam.decoding import Strategy
from specbeam.decoding.beam import beam_search
from specbeam.decoding.drafter import Drafter
from specbeam.engine.setup import Setup
from specbeam.engine.strategies import make_search, make_strategy

REPEATED = "Repeat this text three times. The early bird catches the worm, but the second mouse gets the cheese.\n" * 4
KINDS = {"code": CODING, "prose": PROSE, "repeated text": [REPEATED]}


def plain_beams(setup: Setup, drafter: Drafter | None) -> Strategy:
    """The search that evaluates all beams of every step."""
    return beam_search(setup.tree, make_search(setup), setup.record)


METHODS = {"plain": plain_beams, "lazy": make_strategy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--num-beams", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ends", action="store_true", help="texts may end by themselves")
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    lm = specbeam.load(given.target)
    length = {"max_new_tokens": given.tokens, "min_new_tokens": 0 if given.ends else given.tokens}
    for num_beams in given.num_beams:
        options = {"num_beams": num_beams, **length}
        for kind, prompts in KINDS.items():
            seconds = dict.fromkeys(METHODS, 0.0)
            passes, nodes = dict.fromkeys(METHODS, 0), dict.fromkeys(METHODS, 0)
            same = True
            for prompt in prompts[: given.prompts]:
                results: dict[str, specbeam.Result] = {}
                times: dict[str, list[float]] = {name: [] for name in METHODS}
                for _ in range(given.repeats):
                    for name, strategy in METHODS.items():
                        engine = Engine(lm)
                        request = engine.submit(prompt, {**options, "share_prefix": False}, strategy=strategy)
                        begin = time.perf_counter()
                        engine.run()
                        times[name].append(time.perf_counter() - begin)
                        results[name] = request.result()
                for name, result in results.items():
                    seconds[name] += min(times[name])
                    passes[name] += result.stats.target_passes
                    nodes[name] += result.stats.nodes_evaluated - result.stats.prompt_tokens
                same &= results["lazy"].sequences == results["plain"].sequences
            for name in METHODS:
                ratio = seconds["plain"] / seconds[name]
                figures.add(kind, f"{num_beams} beams", name, unit="plain seconds / seconds", samples=[ratio])
                print(
                    f"{kind:14} {num_beams:3} beams  {name:12} {seconds[name]:7.2f} s {ratio:5.2f}  "
                    f"{passes[name]:5} passes {nodes[name]:6} nodes  {'same' if same else 'DIFFERENT'}"
                )
    figures.write(given.json)


if __name__ == "__main__":
    main()
