"""The cost of quantization: perplexity against float32, and how often the likeliest token stays the same.

    python bench/quality.py MODEL.gguf ... [--tokens 20480] [--modes keep int8 int4] [--json FILE]

Half of the text's tokens come from the sources of Python's own argparse, dataclasses and inspect. The other half comes
from the licences in Debian's base-files (GPL-3, GFDL-1.3, MPL-2.0). The text is read in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Figures, add_json_option
from machine import describe
from torch import Tensor
from tqdm import tqdm

import specbeam
from specbeam.cache.slots import Slots
from specbeam.core.tree import Tree

LICENCES = Path("/usr/share/common-licenses")
WINDOW_TOKENS = 512
PASS_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--modes", nargs="+", default=["keep", "int8", "int4"])
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    print("\n| model | float32 |", " | ".join(f"{mode} | same token" for mode in given.modes), "|")
    print("| --- | --- |" + " --- | --- |" * len(given.modes))
    for path in given.models:
        exact = specbeam.load(path, backend="torch", dtype="float32")
        ids = text(exact.tokenizer, given.tokens)
        reference, tops = perplexity(exact, ids)
        del exact
        figures.add(path.stem, "perplexity", "float32", unit="perplexity", samples=[reference])
        cells = [f"{path.stem} | {reference:.3f}"]
        for mode in given.modes:
            found, theirs = perplexity(specbeam.load(path, backend="cpu", quantize=mode), ids)
            same = float((theirs == tops).float().mean())
            figures.add(path.stem, "perplexity", mode, unit="perplexity", samples=[found])
            figures.add(path.stem, "same likeliest token", mode, unit="%", samples=[100 * same])
            cells += [f"{found:.3f} ({found / reference - 1:+.2%})", f"{same:.1%}"]
        print("|", " | ".join(cells), "|", flush=True)
        figures.write(given.json)


def text(tokenizer: Any, tokens: int) -> list[int]:
    """The token ids of the text: code, then prose."""
    code = "".join(inspect.getsource(module) for module in (argparse, dataclasses, inspect))
    prose = "".join((LICENCES / name).read_text() for name in ("GPL-3", "GFDL-1.3", "MPL-2.0"))
    halves = [tokenizer(half, add_special_tokens=False, verbose=False).input_ids for half in (code, prose)]
    halves = [half[: tokens // 2] for half in halves]
    assert all(len(half) == tokens // 2 for half in halves), "the texts are too short"
    return halves[0] + halves[1]


def perplexity(lm: Any, ids: list[int]) -> tuple[float, Tensor]:
    """The perplexity of the text, and the likeliest token after each token, int64 [n]."""
    losses, tops = [], []
    for start in tqdm(range(0, len(ids), WINDOW_TOKENS), leave=False, disable=None):
        tree = Tree(ids[start : start + WINDOW_TOKENS])
        slots = Slots(tree, lm.backend)
        nodes = slots.missing([tree.tip])
        for first in range(0, len(nodes), PASS_TOKENS):
            some = nodes[first : first + PASS_TOKENS]
            logits = torch.from_numpy(
                lm.backend.array(lm.backend.forward([slots.tree_batch(some, np.arange(len(some)))]))
            )
            targets = torch.tensor(ids[start + first + 1 : start + min(first + PASS_TOKENS + 1, len(nodes))])
            log_probs = logits[: len(targets)].log_softmax(-1)
            losses.append(-log_probs.gather(1, targets[:, None])[:, 0].double())
            tops.append(logits.argmax(-1))
    return math.exp(float(torch.cat(losses).mean())), torch.cat(tops)


if __name__ == "__main__":
    main()
