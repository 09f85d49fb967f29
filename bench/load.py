"""Requests under load: new tokens per second of all live ones together, with a draft and without.

    python bench/load.py MODEL [--draft DRAFT] [--live 1 8 16] [--tokens 64] [--prompts 10] [--seed 0] [--repeats 10]
        [--json FILE]

MODEL and DRAFT are .gguf files or folders. The methods take turns in each repeat, which has the next prompts of a draw.
Seconds are the processor's, so that other programs hardly count: give it one thread (SPECBEAM_THREADS=1,
OMP_NUM_THREADS=1). A ratio is the median, over the repeats, of the ratio to plain greedy search, with the worst and the
best. "one more" has a further greedy request beside them, and "one that looks" a further one with a repetition penalty,
which looks at each of its tokens. Its own tokens do not count.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from figures import Figures, add_json_option
from machine import describe
from prompts import Ask, add_prompt_options, kinds

import specbeam
from specbeam.engine.drafts import Draft

ONE_MORE: dict[str, dict[str, float]] = {"one more": {}, "one that looks": {"repetition_penalty": 1.1}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--live", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    add_prompt_options(parser)
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    lm = specbeam.load(given.model)
    methods: dict[str, Draft | None] = {"plain": None, **dict.fromkeys(ONE_MORE), "ngram": "ngram", "suffix": "suffix"}
    if given.draft is not None:
        methods[f"draft {given.draft.stem}"] = specbeam.load(given.draft)
    print(f"{given.model.stem}, {given.tokens} new tokens per request\n")
    asks = [ask for together in zip(*kinds(given).values(), strict=False) for ask in together]
    print("| live requests | method | tokens/s | of plain (min to max) |\n| --- | --- | --- | --- |")
    for live in given.live:
        speeds: dict[str, list[float]] = {name: [] for name in methods}
        for repeat in range(-1, given.repeats):
            for name, draft in methods.items():
                start = max(repeat, 0) * live
                now = [asks[(start + i) % len(asks)] for i in range(live)]
                more = [ONE_MORE[name]] if name in ONE_MORE else []
                speed = tokens_per_second(lm, now, given.tokens, draft, more)
                if repeat >= 0:  # the first repeat warms up
                    speeds[name].append(speed)
        for name, samples in speeds.items():
            ratios = [a / b for a, b in zip(samples, speeds["plain"], strict=True)]
            place = (given.model.stem, f"{live} live", name)
            value = figures.add(*place, unit="tokens/s", samples=samples).value
            ratio = figures.add(*place, "of plain", unit="of plain tokens/s", samples=ratios)
            spread = f"{ratio.value:.2f} ({ratio.min:.2f} to {ratio.max:.2f})"
            print(f"| {live} | {name} | {value:.0f} | {spread} |", flush=True)
    figures.write(given.json)


def tokens_per_second(
    lm: specbeam.LanguageModel, asks: list[Ask], tokens: int, draft: Draft | None, beside: list[dict[str, float]]
) -> float:
    """All requests begin together and make equally many tokens. Prefill does not count.

    Args:
        beside: options of further requests.
    """
    engine = specbeam.Engine(lm, max_requests=len(asks) + len(beside))
    options = {"max_new_tokens": tokens, "eos_token_id": []}
    requests = [engine.submit(ask.text, options, draft=draft, raw=ask.raw) for ask in asks]
    for more in beside:
        engine.submit(asks[0].text, options | more, raw=asks[0].raw)
    while not all(request.pieces for request in requests):
        engine.step()
    before = sum(len(piece.token_ids) for request in requests for piece in request.pieces)  # a step may make several
    start = time.process_time()
    engine.run()
    return (len(asks) * tokens - before) / (time.process_time() - start)


if __name__ == "__main__":
    main()
