"""Beam search, speculation and both together against transformers: passes, seconds, and whether the texts are the same.

    python bench/beams.py TARGET DRAFT [--data FILE ...] [--num-beams 4] [--tokens 48] [--prompts 10] [--seed 0]
        [--repeats 1] [--json FILE]

TARGET and DRAFT are .gguf files or folders. transformers runs beam search, assisted generation with the draft, and
prompt lookup. The last two run without beams, since transformers ignores the assistant when there are beams. specbeam
runs the same methods, and speculative beam search.

All methods take turns on every prompt. Seconds are the best of the repeats. A figure is the median over the prompts of
a kind, with the worst and the best. Ratios are to transformers' plain method of the same kind on the same prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from eager import load_with_transformers
from figures import Figures, add_json_option
from machine import describe
from prompts import add_prompt_options, kinds

import specbeam
from specbeam.prompts import encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    add_prompt_options(parser)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    add_json_option(parser)
    given = parser.parse_args()
    peer = f"transformers {transformers.__version__}"
    print(describe(peer))
    figures = Figures.of_this_run(peer)
    print(f"{given.target.stem} with {given.draft.stem}, {given.dtype}, {given.tokens} new tokens, ", end="")
    print(f"{given.prompts} prompts of each kind, {given.num_beams} beams\n")

    lm, draft = specbeam.load(given.target, dtype=given.dtype), specbeam.load(given.draft, dtype=given.dtype)
    device = lm.backend.device
    theirs, their_draft = (load_with_transformers(p, given.dtype).to(device) for p in (given.target, given.draft))
    passes = count_passes(theirs)

    def of_transformers(**how: Any) -> Run:
        def run(prompt: list[int]) -> tuple[list[int], float]:
            ids = torch.tensor([prompt], device=device)
            passes.clear()
            eos = sorted(lm.eos_token_ids)
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=given.tokens,
                eos_token_id=eos, pad_token_id=eos[0], **how,
            )  # fmt: skip
            return out[0, len(prompt) :].tolist(), len(passes)

        return run

    def of_specbeam(**how: Any) -> Run:
        def run(prompt: list[int]) -> tuple[list[int], float]:
            result = specbeam.generate(lm, prompt, max_new_tokens=given.tokens, **how)
            return result.token_ids, result.stats.target_passes

        return run

    b = given.num_beams
    fixed = {"num_draft_tokens": 5}
    searches = {
        "one text": {
            "transformers greedy": of_transformers(),
            "transformers prompt lookup": of_transformers(prompt_lookup_num_tokens=10),
            "transformers assisted": of_transformers(assistant_model=their_draft),
            "specbeam greedy": of_specbeam(),
            "specbeam ngram": of_specbeam(draft="ngram"),
            "specbeam suffix": of_specbeam(draft="suffix"),
            "specbeam draft, auto": of_specbeam(draft=draft),
            "specbeam draft, 5 tokens": of_specbeam(draft=draft, draft_width=1, **fixed),
        },
        f"{b} beams": {
            "transformers beam search": of_transformers(num_beams=b),
            "specbeam beam search": of_specbeam(num_beams=b),
            "specbeam ngram": of_specbeam(num_beams=b, draft="ngram"),
            "specbeam draft, auto": of_specbeam(num_beams=b, draft=draft),
            f"specbeam draft, {2 * b} x 5": of_specbeam(num_beams=b, draft=draft, draft_width=2 * b, **fixed),
        },
    }
    for kind, asks in kinds(given).items():
        prompts = [encode(lm, ask.text, raw=ask.raw) for ask in asks]
        for search, methods in searches.items():
            compare(figures, (given.target.stem, kind, search), prompts, methods, given.repeats)
            figures.write(given.json)


Run = Callable[[list[int]], tuple[list[int], float]]
"""Gives the tokens of a prompt's text, and the passes of the target."""


def compare(
    figures: Figures, place: tuple[str, ...], prompts: list[list[int]], methods: dict[str, Run], repeats: int
) -> None:
    """Print the table of some methods, which take turns on every prompt."""
    first = next(iter(methods))
    for run in methods.values():
        run(prompts[0])  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    passes: dict[str, list[float]] = {name: [] for name in methods}
    same = dict.fromkeys(methods, 0)
    for prompt in prompts:
        best = dict.fromkeys(methods, float("inf"))
        made: dict[str, tuple[list[int], float]] = {}
        for _ in range(repeats):
            for name, run in methods.items():
                start = time.perf_counter()
                made[name] = run(prompt)
                best[name] = min(best[name], time.perf_counter() - start)
        for name, (tokens, needed) in made.items():
            seconds[name].append(best[name])
            passes[name].append(needed)
            same[name] += made[first][0][: len(tokens)] == tokens
    print(f"| {', '.join(place[1:])} | target passes | seconds | times as fast (min to max) | same text |")
    print("| --- | --- | --- | --- | --- |")
    for name in methods:
        ratios = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
        took = figures.add(*place, name, unit="s", samples=seconds[name])
        count = figures.add(*place, name, "target", unit="passes", samples=passes[name])
        ratio = figures.add(*place, name, "ratio", unit="plain seconds / seconds", samples=ratios)
        spread = f"{ratio.value:.2f} ({ratio.min:.2f} to {ratio.max:.2f})"
        print(
            f"| {name} | {count.value:.1f} | {took.value:.2f} | {spread} | {same[name]} of {len(prompts)} |",
            flush=True,
        )
    print()


def count_passes(model: Any) -> list[None]:
    """A list that grows by one with every pass of the model."""
    passes: list[None] = []
    model.register_forward_hook(lambda *_: passes.append(None))
    return passes


if __name__ == "__main__":
    main()
