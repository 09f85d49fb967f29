"""What a pass of a model's own draft head costs beside a pass of the model, by CPU time.

    python bench/random_gguf.py FILE.gguf --shape qwen3.5-0.8b
    python bench/heads.py FILE.gguf [--threads 1] [--json FILE]

Passes are over one token after 256 others, in turns. The head computes the logits of the vocabulary's first tokens, as
its drafts do. Random weights show what passes cost, and nothing of how many draft tokens are accepted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from figures import Figures, add_json_option

import specbeam
from specbeam.cache.slots import Slots
from specbeam.core.tree import NO_NODES, Tree

CONTEXT, ROUNDS = 256, 40
VOCABULARIES = (32_000, 64_000, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    add_json_option(parser)
    given = parser.parse_args()
    lm = specbeam.load(given.model, backend="cpu", threads=given.threads)
    head = lm.draft_model("mtp")
    tree = Tree(np.random.default_rng(0).integers(2, 30_000, CONTEXT + 1).tolist())
    theirs, own, read, last = (
        Slots(tree, lm.backend),
        Slots(tree, head.backend),
        np.arange(CONTEXT),
        np.array([CONTEXT]),
    )
    for part in np.split(read, 2):
        rest = np.arange(part[-1] + 1, CONTEXT + 1)
        lm.backend.forward([theirs.tree_batch(part, part[:0], rest=rest)])
        theirs.evaluated(rest)
        batch = own.tree_batch(part, part[:0])
        batch.features = theirs.at(np.maximum(part - 1, 0))
        head.backend.forward([batch])
    target = theirs.tree_batch(last, np.array([0]))
    lm.backend.forward([target])  # it makes the states that the passes in turns read
    theirs.evaluated(NO_NODES)
    passes: dict[str, Callable[[], object]] = {"target": lambda: lm.backend.forward([target])}
    for vocab in VOCABULARIES:
        batch = own.tree_batch(last, np.array([0]), vocab)
        batch.features = theirs.at(last - 1)
        passes[f"head, {vocab or 'all'} tokens"] = lambda batch=batch: head.backend.forward([batch])  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(ROUNDS):
        for name, run in passes.items():
            start = time.process_time()
            run()
            times[name].append(1e3 * (time.process_time() - start))
    figures = Figures.of_this_run(f"{given.threads} threads")
    for name, samples in times.items():
        shares = [one / whole for one, whole in zip(samples, times["target"], strict=True)]
        took = figures.add(given.model.stem, "pass", name, unit="ms", samples=samples)
        share = figures.add(given.model.stem, "share of the target's pass", name, unit="", samples=shares)
        print(f"{name:20} {took.value:8.2f} ms of CPU, {share.value:.3f} of the target's")
    figures.write(given.json)


if __name__ == "__main__":
    main()
