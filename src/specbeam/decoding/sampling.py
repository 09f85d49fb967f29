"""Several samples of one prompt. A single one is drawn by the loop of greedy search."""

from __future__ import annotations

import numpy as np

from specbeam.core.strategy import Evaluate, Hypothesis, Strategy
from specbeam.core.tree import Tree
from specbeam.decoding.greedy import chosen
from specbeam.errors import TooManyNodes
from specbeam.logits.selector import Selector
from specbeam.logits.stopping import Stopping
from specbeam.recording.record import Record


def sample_several(tree: Tree, selector: Selector, stop: Stopping, record: Record, count: int) -> Strategy:
    """Independent samples, each with its own noise. Samples that agree so far share their nodes, first the prompt's.

    Where the memory cannot hold all samples, half of them wait until the others have ended.
    """
    tips = np.full(count, tree.tip)
    growing, waiting = np.arange(count), np.arange(0)
    hypotheses: dict[int, Hypothesis] = {}
    while True:
        growing = growing[np.argsort(tips[growing], kind="stable")]  # in the order in which the logits lie
        before = tips[growing]
        try:
            selection = yield Evaluate(before, selector(tree, before, streams=growing), or_fewer=len(growing) > 1)
        except TooManyNodes:
            half = len(growing) // 2
            growing, waiting = growing[:half], np.concatenate([growing[half:], waiting])
            continue
        drawn = [(tip, *chosen(selection, row)) for row, tip in enumerate(before.tolist())]
        continued = {(tip, token): log_prob for tip, token, log_prob in drawn}
        parents, tokens = np.array([*continued], dtype=np.int64).T
        children = dict(zip(continued, tree.add(parents, tokens, [*continued.values()]).tolist(), strict=True))
        tips[growing] = [children[tip, token] for tip, token, _ in drawn]
        growing.sort()
        record.round(evaluated=before)
        record.step(tips[growing])
        for i in growing.tolist():
            if reason := stop(tree, int(tips[i])):
                hypotheses[i] = Hypothesis(int(tips[i]), float(tree.scores(tips[i])), reason)
        if len(hypotheses) == count:
            return [hypotheses[i] for i in range(count)]
        growing = np.array([i for i in growing.tolist() if i not in hypotheses], dtype=np.int64)
        if not len(growing):
            growing, waiting = waiting, growing
        tree.keep(tips[[*growing, *waiting]], tips[[*hypotheses]])
