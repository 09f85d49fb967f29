"""The cost of a pass beside its kernels: microseconds of Python per pass and request, on a tiny random model.

    python bench/steps.py [--live 1 8 64] [--tokens 128] [--repeats 15] [--json FILE]

Each request gets one token, or one step of 4 beams, from a pass. Seconds are thread time without native functions, over
the passes from the first text to the last. The model is too small for its caches to count. Other programs only add
time, so figures are the least of the repeats. The prompts of the last column are long. "greedy, beside" are greedy
requests with one more that looks at each token: its time counts, too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from figures import Figures, add_json_option
from machine import describe
from toy import load_toy

import specbeam
from specbeam.backends.cpu.library import Library, choose_isa, library

LONG_PROMPT_TOKENS = 1500
PENALIZED = {"repetition_penalty": 1.1}
"""Such a request looks at each of its tokens."""
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "sampled with top_p": {"temperature": 0.8, "top_p": 0.95, "top_k": 40},
    "4 beams": {"num_beams": 4},
    "greedy, beside": {},
    "penalized": PENALIZED,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    add_json_option(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    print(describe())
    figures = Figures.of_this_run()
    with tempfile.TemporaryDirectory() as folder:
        lm = load_toy(Path(folder), context=LONG_PROMPT_TOKENS + given.tokens)
    clock = Clock(library(choose_isa()))
    cases = [*((live, 4) for live in given.live), (8, LONG_PROMPT_TOKENS)]
    heads = [f"{live} live" if prompt == 4 else f"{live} live, {prompt} tokens" for live, prompt in cases]
    print(f"microseconds per request and step\n\n| method | {' | '.join(heads)} |\n| ---{' | ---' * len(cases)} |")
    for name in given.methods:
        cells = []
        for head, (live, prompt) in zip(heads, cases, strict=True):
            samples = [
                1e6 * step_seconds(lm, clock, live, prompt, given.tokens, name)
                for _ in range(given.repeats + 1)  # the first warms up
            ]
            figure = figures.add("toy", name, head, unit="us", samples=[min(samples[1:])])
            cells.append(f"{figure.value:.0f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    figures.write(given.json)


class Clock:
    """The seconds that this thread has worked outside of a library's functions."""

    def __init__(self, loaded: Library) -> None:
        self._inside = 0.0
        for name in loaded.functions:
            setattr(loaded, f"specbeam_{name}", self._timed(getattr(loaded, f"specbeam_{name}")))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            result = function(*arguments)
            self._inside += time.thread_time() - start
            return result

        return timed

    def now(self) -> float:
        return time.thread_time() - self._inside


def step_seconds(lm: specbeam.LanguageModel, clock: Clock, live: int, prompt: int, tokens: int, method: str) -> float:
    """All requests begin together and make equally many tokens. Prefill does not count."""
    asked = [METHODS[method]] * live + [PENALIZED] * (method == "greedy, beside")
    engine = specbeam.Engine(lm, max_requests=len(asked), max_batch_tokens=8192)
    for i, options in enumerate(asked):
        ids = [1 + (i + k) % 255 for k in range(prompt)]
        engine.submit(ids, {**options, "max_new_tokens": tokens, "eos_token_id": []})
    engine.step()
    start = clock.now()
    engine.run()
    return (clock.now() - start) / (tokens - 1) / live


if __name__ == "__main__":
    main()
