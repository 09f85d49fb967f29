"""Speculative decoding: a drafter proposes tokens, and one forward pass of the target verifies all of them.

Greedy search keeps its tokens (Leviathan et al. 2023; Chen et al. 2023). So does sampling: the noise of a draw does not
depend on the draft, and a draft token is accepted if it is the token that is drawn there anyway. See Daliri, Musco and
Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding".
"""

from __future__ import annotations

import numpy as np

from specbeam.core.strategy import Evaluate, Hypothesis, Strategy
from specbeam.core.tree import Tree
from specbeam.decoding.greedy import chosen, greedy, greedy_round
from specbeam.drafting.drafter import Drafter
from specbeam.errors import NotFinite, TooManyNodes
from specbeam.logits.selector import Selector
from specbeam.logits.stopping import Stopping
from specbeam.recording.record import Record


def speculative(tree: Tree, selector: Selector, stop: Stopping, record: Record, drafter: Drafter) -> Strategy:
    """Choose tokens as the plain method does, for as long as they were drafted: their selections are all there.

    Where the memory cannot hold draft tokens, or logits are not finite, decoding goes on without drafts: plain decoding
    may never meet these logits.
    """
    ended: list[Hypothesis] = []
    while not ended:
        try:
            ended = yield from speculative_round(tree, selector, stop, record, drafter)
        except (NotFinite, TooManyNodes):
            tree.keep(tree.tip)
            ended = yield from greedy(tree, selector, stop, record)
    return ended


def speculative_round(tree: Tree, selector: Selector, stop: Stopping, record: Record, drafter: Drafter) -> Strategy:
    """Evaluate the tip and draft tokens below it. Choose every token whose selection is known.

    Returns the hypothesis if it is finished.
    """
    tip = tree.tip
    draft_tokens = yield from drafter.propose(np.array([tip]), tree.scores([tip]))
    if draft_tokens.skipped:  # then the backend can go ahead
        ended = yield from greedy_round(tree, selector, stop, record, skipped=True)
        for _ in range(int(tree.depths(tree.tip) - tree.depths(tip))):
            drafter.controller.learn(draft_tokens, tree, steps=[])
        return ended
    nodes = np.sort(np.array([tip, *draft_tokens.nodes]))
    selection = yield Evaluate(nodes, selector(tree, nodes, draft_tokens.nodes), or_fewer=True)
    rows = {node: row for row, node in enumerate(nodes.tolist())}
    record.round(draft_tokens.nodes, evaluated=nodes)
    steps = []
    while (row := rows.get(tip)) is not None:
        tip = tree.append(tip, *chosen(selection, row))
        record.step([tip])
        steps.append(np.array([tip]))
        if reason := stop(tree, tip):
            return [Hypothesis(tip, float(tree.scores(tip)), reason)]
    drafter.controller.learn(draft_tokens, tree, steps)
    tree.keep(tip)
    return []
