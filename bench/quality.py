"""What quantization costs: perplexity against float32, and how often the likeliest token stays the same.

    python bench/quality.py MODEL.gguf ... [--tokens 20480] [--modes keep int8 int4]

The text: the first half of the tokens from the sources of Python's own argparse, dataclasses and inspect, the other
half from the licences that Debian's base-files brings (GPL-3, GFDL-1.3, MPL-2.0), in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe
from torch import Tensor
from tqdm import tqdm

import specbeam
from specbeam.engine.slots import Slots
from specbeam.tree import Tree

LICENCES = Path("/usr/share/common-licenses")
WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--modes", nargs="+", default=["keep", "int8", "int4"])
    given = parser.parse_args()
    print(describe())
    print("\n| model | float32 |", " | ".join(f"{mode} | same token" for mode in given.modes), "|")
    print("| --- | --- |" + " --- | --- |" * len(given.modes))
    for path in given.models:
        exact = specbeam.load(path, backend="torch", dtype="float32")
        ids = text(exact.tokenizer, given.tokens)
        reference, tops = perplexity(exact, ids)
        del exact
        cells = [f"{path.stem} | {reference:.3f}"]
        for mode in given.modes:
            found, theirs = perplexity(specbeam.load(path, backend="cpu", quantize=mode), ids)
            same = float((theirs == tops).float().mean())
            cells += [f"{found:.3f} ({found / reference - 1:+.2%})", f"{same:.1%}"]
        print("|", " | ".join(cells), "|", flush=True)


def text(tokenizer: Any, tokens: int) -> list[int]:
    import dataclasses

    code = "".join(inspect.getsource(module) for module in (argparse, dataclasses, inspect))
    prose = "".join((LICENCES / name).read_text() for name in ("GPL-3", "GFDL-1.3", "MPL-2.0"))
    halves = [tokenizer(half, add_special_tokens=False, verbose=False).input_ids for half in (code, prose)]
    halves = [half[: tokens // 2] for half in halves]
    assert all(len(half) == tokens // 2 for half in halves), "the texts are too short"
    return halves[0] + halves[1]


def perplexity(lm: Any, ids: list[int]) -> tuple[float, Tensor]:
    """The perplexity of the text, and the likeliest token at each place, int64 [n]."""
    losses, tops = [], []
    for start in tqdm(range(0, len(ids), WINDOW), leave=False, disable=None):
        tree = Tree(ids[start : start + WINDOW])
        slots = Slots(tree, lm.backend, WINDOW)
        nodes = slots.missing([tree.tip])
        for first in range(0, len(nodes), 128):
            some = nodes[first : first + 128]
            logits = lm.backend.forward([slots.segment(some, np.arange(len(some)))])
            targets = torch.tensor(ids[start + first + 1 : start + min(first + 129, len(nodes))])
            log_probs = logits[: len(targets)].log_softmax(-1)
            losses.append(-log_probs.gather(1, targets[:, None])[:, 0].double())
            tops.append(logits.argmax(-1))
    return math.exp(float(torch.cat(losses).mean())), torch.cat(tops)


if __name__ == "__main__":
    main()
