"""Speculative decoding: a drafter guesses how the text goes on, and one pass of the target checks all guesses.

Greedy search keeps its tokens, and sampling keeps its distribution (Leviathan et al. 2023; Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specbeam.decoding import Evaluate, Hypothesis, Strategy, sampling
from specbeam.decoding.drafter import Drafter, Guesses
from specbeam.decoding.greedy import log_prob
from specbeam.decoding.processors import Processors, Warpers
from specbeam.decoding.record import Record
from specbeam.decoding.stopping import Stopping
from specbeam.tree import Tree

Choose = Callable[[Tensor, int, Guesses], int]
Flip = Callable[[float], bool]
"""Returns True with the given probability."""


def speculative(
    tree: Tree, process: Processors, stop: Stopping, record: Record, drafter: Drafter, choose: Choose | None = None
) -> Strategy:
    """Choose tokens as the plain method does, for as long as they were guessed; their logits are all there.

    Args:
        choose: the next token, from processed scores [vocab], their node, and the guesses. The default is the
            likeliest token.
    """
    tip = tree.tip
    while True:
        guesses = yield from drafter.propose(np.array([tip]), tree.scores([tip]))
        nodes = np.array([tip, *guesses.nodes])
        logits = yield Evaluate(nodes)
        rows = dict(zip(nodes.tolist(), logits, strict=True))
        record.round(guesses.nodes, rests=guesses.declined)
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


def speculative_sampling(
    tree: Tree,
    process: Processors,
    stop: Stopping,
    record: Record,
    drafter: Drafter,
    warp: Warpers,
    generator: torch.Generator,
) -> Strategy:
    """Speculative decoding of sampled texts: each token follows the distribution the warpers leave."""
    flip, draw = partial(sampling.flip, generator=generator), partial(sampling.draw, generator=generator)
    choose = reject_or_accept(tree, warp, flip, draw)
    return speculative(tree, process, stop, record, drafter, choose)


def reject_or_accept(tree: Tree, warp: Warpers, flip: Flip, draw: Callable[[Tensor], int]) -> Choose:
    """Speculative sampling's choice of the next token: it follows the target's distribution for any guesses.

    Args:
        warp: shapes the target's distribution.
        draw: draws a token from the softmax of scores [vocab].
    """

    def choose(scores: Tensor, node: int, guesses: Guesses) -> int:
        p = warp(scores).double().softmax(-1)
        children = guesses.nodes[tree.parents(guesses.nodes) == node]
        token, p = accept_one(p, guesses.drawn_from.get(node), tree.tokens(children).tolist(), flip)
        return draw(p.log()) if token is None else token

    return choose


def accept_one(p: Tensor, q: Tensor | None, children: Sequence[int], flip: Flip) -> tuple[int | None, Tensor]:
    """Accept one of the guessed children of a node, or reject all, so that the next token follows p.

    The children were drawn from the draft's distribution q without replacement, and are tried in that order. A child is
    accepted with probability min(1, p / q). After a rejection p becomes the positive part of p - q, normalized, and q
    loses the rejected token. This is recursive rejection sampling (Jeon et al. 2024, "Recursive Speculative Decoding",
    4.1). With a single child it is speculative sampling (Leviathan et al. 2023, 2.3).

    Args:
        p: the target's distribution, float64 [vocab].
        q: the draft's distribution, float64 [vocab]; None if the children were not drawn. Then q is 1 for each in turn.
        children: their token ids, each once.

    Returns:
        The accepted token or None, and what p has become. After None the next token must be drawn from that.
    """
    for token in children:
        at = torch.tensor([token], device=p.device)
        proposal = torch.zeros_like(p).index_fill(0, at, 1.0) if q is None else q
        if flip(float((p[token] / proposal[token]).clamp(max=1.0))):
            return token, p
        residual = (p - proposal).clamp(min=0.0)
        if not residual.any():  # p is q up to rounding, so the chance was 1 but for a rounding error
            return token, p
        p = normalized(residual)
        q = None if q is None else normalized(q.index_fill(0, at, 0.0))
    return None, p


def normalized(weights: Tensor) -> Tensor:
    """The distribution with these weights [vocab]."""
    return weights / weights.sum()
