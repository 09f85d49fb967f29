"""Drafts under load: new tokens per second of all live requests together, with a draft and without.

    python bench/load.py MODEL [--draft DRAFT] [--live 1 8 16] [--tokens 64] [--repeats 3] [--json FILE]

MODEL and DRAFT are .gguf files or folders. The methods take turns in each repeat. Seconds are the processor's, so that
other programs hardly count: give it one thread (SPECBEAM_THREADS=1, OMP_NUM_THREADS=1). A ratio is the median, over the
repeats, of the ratio to plain greedy search.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from figures import Figures, add_json_option
from machine import describe
from prompts import CODING, PROSE

import specbeam
from specbeam.engine.drafters import Draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--live", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    lm = specbeam.load(given.model)
    methods: dict[str, Draft | None] = {"plain": None, "ngram": "ngram", "suffix": "suffix"}
    if given.draft is not None:
        methods[f"draft {given.draft.stem}"] = specbeam.load(given.draft)
    print(f"{given.model.stem}, {given.tokens} new tokens per request\n")
    print("| live requests | method | tokens/s | of plain |\n| --- | --- | --- | --- |")
    for live in given.live:
        speeds: dict[str, list[float]] = {name: [] for name in methods}
        for repeat in range(-1, given.repeats):
            for name, draft in methods.items():
                speed = tokens_per_second(lm, live, given.tokens, max(repeat, 0), draft)
                if repeat >= 0:  # the first round warms up
                    speeds[name].append(speed)
        for name, samples in speeds.items():
            ratio = statistics.median(a / b for a, b in zip(samples, speeds["plain"], strict=True))
            value = figures.add(given.model.stem, f"{live} live", name, unit="tokens/s", samples=samples).value
            print(f"| {live} | {name} | {value:.0f} | {ratio:.2f} |", flush=True)
    figures.write(given.json)


def tokens_per_second(lm: specbeam.LanguageModel, live: int, tokens: int, repeat: int, draft: Draft | None) -> float:
    """All requests begin together and make equally many tokens. Reading the prompts does not count."""
    prompts = [prompt for pair in zip(CODING, PROSE, strict=True) for prompt in pair]
    engine = specbeam.Engine(lm, max_requests=live)
    for i in range(live):
        prompt = prompts[(i + repeat * live) % len(prompts)]
        engine.submit(prompt, {"max_new_tokens": tokens, "eos_token_id": []}, draft=draft)
    for _ in range(4):
        engine.step()
    start = time.process_time()
    engine.run()
    return live * tokens / (time.process_time() - start)


if __name__ == "__main__":
    main()
