"""Eager greedy decoding against transformers' eager: same weights, same prompts, same tokens, one run.

    python bench/eager.py MODEL [MODEL ...] [--tokens 48] [--prompts 10] [--seed 0] [--repeats 1] [--dtype float32]
        [--json FILE]

A MODEL is a folder or a .gguf file. The two take turns on every prompt, so that a drifting machine favours neither.
The ratio is the median over such pairs, after a warm-up. Tokens/s count whole generations, prefill included.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from figures import Figures, add_json_option
from machine import describe
from prompts import Ask, add_prompt_options, kinds

import specbeam
from specbeam.prompts import encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    add_prompt_options(parser)
    parser.add_argument("--dtype", default="float32")
    add_json_option(parser)
    given = parser.parse_args()
    peer = f"transformers {transformers.__version__}"
    print(describe(peer))
    figures = Figures.of_this_run(peer)
    asks = [ask for some in kinds(given).values() for ask in some]
    print(f"{given.dtype}, {given.tokens} new tokens, {len(asks)} prompts x {given.repeats}\n")
    print("| model | transformers, tokens/s | specbeam, tokens/s | ratio (min to max) | same tokens |")
    print("| --- | --- | --- | --- | --- |")
    for path in given.models:
        print(compare(path, asks, given.tokens, given.repeats, given.dtype, figures), flush=True)
        figures.write(given.json)


def compare(path: Path, asks: list[Ask], tokens: int, repeats: int, dtype: str, figures: Figures) -> str:
    """The row of a model in the table. Its figures are added, too."""
    lm = specbeam.load(path, dtype=dtype)
    device = lm.backend.device
    theirs = load_with_transformers(path, dtype).to(device)
    prompts = [encode(lm, ask.text, raw=ask.raw) for ask in asks]
    seconds: dict[str, list[float]] = {"transformers": [], "specbeam": []}
    same = 0
    for repeat in range(-1, repeats):
        for prompt in prompts if repeat >= 0 else prompts[:1]:
            ids = torch.tensor([prompt], device=device)
            start = time.perf_counter()
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
            middle = time.perf_counter()
            result = specbeam.generate(lm, prompt, max_new_tokens=tokens)
            end = time.perf_counter()
            expected = out[0, len(prompt) :].tolist()
            if repeat < 0:  # warm-up
                continue
            same += repeat == 0 and result.token_ids == expected
            seconds["transformers"].append((middle - start) / len(expected))
            seconds["specbeam"].append((end - middle) / len(result.token_ids))
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    where = (path.stem, f"greedy, {dtype}")
    rates = [
        figures.add(*where, name, unit="tokens/s", samples=[1 / t for t in times]) for name, times in seconds.items()
    ]
    ratio = figures.add(*where, "specbeam over transformers", unit="times", samples=ratios)
    return (
        f"| {path.stem} | {rates[0].value:.1f} | {rates[1].value:.1f} | {ratio.value:.2f} "
        f"({ratio.min:.2f} to {ratio.max:.2f}) | {same} of {len(prompts)} |"
    )


def load_with_transformers(path: Path, dtype: str) -> Any:
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=False, **where
    )
    return model.eval()


if __name__ == "__main__":
    main()
