"""Speculative decoding: a drafter guesses how the text goes on, one pass of the target checks all guesses.

Greedy search keeps its tokens exactly, sampling its distribution (Leviathan et al. 2023; Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specbeam.decoding import Evaluate, Hypothesis, Strategy
from specbeam.decoding.drafter import Drafter, Guesses
from specbeam.decoding.greedy import log_prob
from specbeam.decoding.processors import Processors, Warpers
from specbeam.decoding.record import Record
from specbeam.decoding.sampling import draw
from specbeam.decoding.stopping import Stopping
from specbeam.tree import Tree

Choose = Callable[[Tensor, int, Guesses], int]


def speculative(
    tree: Tree, process: Processors, stop: Stopping, record: Record, drafter: Drafter, choose: Choose | None = None
) -> Strategy:
    """Extend the tip by guessed tokens as long as they are what would have been chosen, and then by one more.

    Args:
        choose: the next token, from processed scores [vocab], the node they are for, and the guesses; the likeliest one
            if not given.
    """
    tip = tree.tip
    while True:
        guesses = yield from drafter.propose(np.array([tip]), tree.scores([tip]))
        nodes = np.array([tip, *guesses.nodes])
        logits = yield Evaluate(nodes)
        rows = dict(zip(nodes.tolist(), logits, strict=True))
        record.round(guesses.nodes)
        steps = []
        while (row := rows.get(tip)) is not None:
            (scores,) = process(tree, [tip], row[None])
            token = choose(scores, tip, guesses) if choose else int(scores.argmax())
            (tip,) = tree.add(tip, token, log_prob(row, token, scores)).tolist()
            record.step([tip], tree.scores([tip]))
            steps.append(np.array([tip]))
            if reason := stop(tree, tip):
                return [Hypothesis(tip, float(tree.scores(tip)), reason)]
        drafter.pace.learn(guesses, tree, steps)
        tree.keep(tip)


def reject_or_accept(tree: Tree, warp: Warpers, generator: torch.Generator) -> Choose:
    """Speculative sampling's choice of the next token, which follows the target's distribution p whatever was guessed.

    The guesses below a node are tried in the order in which they were drawn, without replacement, from the draft's
    distribution q. One is accepted with probability min(1, p / q); after a rejection p becomes the positive part of
    (p - q), and q loses the token, both normalized; when none is left, p is drawn from (recursive rejection sampling,
    Jeon et al. 2024, 4.1; with a single guess it is Leviathan et al. 2023, 2.3). Of a guess that was not drawn, q is
    certain.
    """

    def choose(scores: Tensor, node: int, guesses: Guesses) -> int:
        p = warp(scores).double().softmax(-1)
        below = guesses.nodes[tree.parents(guesses.nodes) == node]
        q = guesses.drawn_from.get(node)
        for token in tree.tokens(below).tolist():
            if q is None:
                q_token = 1.0
                rest = p.index_fill(0, torch.tensor([token], device=p.device), 0.0)
            else:
                q_token = float(q[token])
                rest = (p - q).clamp(min=0)
                q = q.index_fill(0, torch.tensor([token], device=q.device), 0.0)
                q = q / q.sum()
            if float(torch.rand((), dtype=torch.float64, generator=generator)) * q_token < float(p[token]):
                return token
            p = rest / rest.sum()
        return draw(p.log(), generator)

    return choose
