"""Beam search, speculation and both together against transformers: passes, seconds, and whether the texts are the same.

    python bench/beams.py TARGET DRAFT [--num-beams 4] [--tokens 48] [--prompts 2] [--repeats 1] [--json FILE]

TARGET and DRAFT are .gguf files or folders. transformers runs beam search, assisted generation with the draft, and
prompt lookup. The last two run without beams, since transformers ignores the assistant when there are beams. specbeam
runs the same methods, and speculative beam search.

All methods take turns on every prompt. Seconds are the best of the repeats, as the mean over prompts. Ratios are to
transformers' plain method of the same kind.
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
from prompts import CODING, PROSE

import specbeam
from specbeam.prompts import encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    add_json_option(parser)
    given = parser.parse_args()
    peer = f"transformers {transformers.__version__}"
    print(describe(peer))
    figures = Figures.of_this_run(peer)
    print(f"{given.target.stem} with {given.draft.stem}, {given.dtype}, {given.tokens} new tokens, ", end="")
    print(f"{given.prompts} coding and {given.prompts} prose prompts, {given.num_beams} beams\n")

    lm, draft = specbeam.load(given.target, dtype=given.dtype), specbeam.load(given.draft, dtype=given.dtype)
    device = lm.backend.device
    theirs, their_draft = (load_with_transformers(p, given.dtype).to(device) for p in (given.target, given.draft))
    passes = count_passes(theirs)

    def of_transformers(**how: Any) -> Callable[[list[int]], tuple[list[int], float]]:
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

    def of_specbeam(**how: Any) -> Callable[[list[int]], tuple[list[int], float]]:
        def run(prompt: list[int]) -> tuple[list[int], float]:
            result = specbeam.generate(lm, prompt, max_new_tokens=given.tokens, **how)
            return result.token_ids, result.stats.target_passes

        return run

    b = given.num_beams
    fixed = {"num_draft_tokens": 5}
    kinds = {
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
    prompts = [encode(lm, prompt) for prompt in (*CODING[: given.prompts], *PROSE[: given.prompts])]
    for kind, methods in kinds.items():
        print(f"| {kind} | target passes | seconds | times as fast | same text |\n| --- | --- | --- | --- | --- |")
        plain = next(iter(methods))
        best = {name: [float("inf")] * len(prompts) for name in methods}
        count = dict.fromkeys(methods, 0.0)
        texts: dict[str, list[list[int]]] = {name: [] for name in methods}
        for repeat in range(-1, given.repeats):
            for i, prompt in enumerate(prompts if repeat >= 0 else prompts[:1]):
                for name, run in methods.items():
                    start = time.perf_counter()
                    tokens, needed = run(prompt)
                    seconds = time.perf_counter() - start
                    if repeat == 0:
                        texts[name].append(tokens)
                        count[name] += needed
                    if repeat >= 0:
                        best[name][i] = min(best[name][i], seconds)
        for name in methods:
            same = sum(a[: len(t)] == t for a, t in zip(texts[plain], texts[name], strict=True))
            mean = sum(best[name]) / len(prompts)
            ratio = sum(best[plain]) / sum(best[name])
            where = (given.target.stem, kind, name)
            figures.add(*where, unit="s", samples=best[name], value=mean)
            figures.add(*where, "target", unit="passes", samples=[count[name] / len(prompts)])
            row = f"| {name} | {count[name] / len(prompts):.1f} | {mean:.2f} | {ratio:.2f} | {same} of {len(prompts)} |"
            print(row, flush=True)
        print()
        figures.write(given.json)


def count_passes(model: Any) -> list[None]:
    """A list that grows by one with every pass of the model."""
    passes: list[None] = []
    model.register_forward_hook(lambda *_: passes.append(None))
    return passes


if __name__ == "__main__":
    main()
